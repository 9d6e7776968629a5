"""A short run of every method gives the losses that are on record.

`make golden` writes `golden.json` again, after the version of a method was
raised.
"""

import json
import pathlib
import tempfile

import jax
import pytest

import edgc_jax
from configs import gpt2_tiny
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.training import optimizer

FILE = pathlib.Path(__file__).with_name("golden.json")
STEPS, MOST = 20, 1e-3  # nats


def config_of(name, folder):
  """Returns a tiny run of a method, whose text this test makes."""
  text = pathlib.Path(folder, "text.txt")
  numbers = (7 * i % 91 for i in range(999))
  text.write_text("".join(f"{i} squared is {i**2}.\n" for i in numbers))
  config = gpt2_tiny.get_config("quantize" if name == "local_steps" else name)
  if name == "local_steps":
    config.local.update(every=4, momentum=0.5)
  config.data.path = str(text)
  config.steps, config.batch_size = STEPS, 8
  config.mesh.backend = "vmap"
  config.model.update(context=32, width=64, num_layers=2, num_heads=2)
  config.optimizer.update(lr=3e-3, warmup_steps=4)
  # Entropy falls so fast here that a larger exponent ends at the least rank,
  # where the run would not see its rule. Exponents from 0.45 to 0.52 give the
  # same ranks, so rounding does.
  config.edgc.update(
    rank_max=12, rank_min=4, rank_multiple=1, max_rank_step=12, exponent=0.48,
    window=4, warmup_steps=4, max_warmup_steps=4, wire_dtype="int8",
  )  # fmt: skip
  # In float32: with "int8" and "int4" other optimisations of the compiler, or
  # another number of cores, move losses by 0.002 and 0.003.
  config.powersgd.update(
    rank=6, allocation="error", window=5, wire_dtype="float32"
  )
  config.quantize.update(bits=4, error_feedback=True)
  return config


def run(name):
  """Returns versions, the losses of all steps, and the ranks."""
  with tempfile.TemporaryDirectory() as folder:
    config = config_of(name, folder)
    task, mesh = tasks.make(config), meshes.of_config(config)
    tx = optimizer.make_optimizer(config, task, {}, mesh=mesh)
    backend = backends.make(config, task, tx, mesh)
    batches = task.train_batches(8, 0, slice(0, 8))

    state, losses, ranks = backend.init(jax.random.key(0)), [], []
    for step in range(1, STEPS + 1):
      *state, numbers = backend.step(*state, next(batches), step)
      (numbers,) = backend.fetch([numbers])
      losses.append(round(float(numbers["loss"]), 5))
      ranks.append(float(numbers["rank"].ravel()[0]))
  versions = {"task": task.version, "method": edgc_jax.METHOD_VERSIONS[name]}
  return {"versions": versions, "losses": losses, "ranks": ranks}


NAMES = [
  # One compiles in seconds.
  pytest.param(name, marks=() if name == "allreduce" else pytest.mark.slow)
  for name in edgc_jax.METHOD_VERSIONS
]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_on_record(name):
  expected, found = json.loads(FILE.read_text())[name], run(name)
  assert found["versions"] == expected["versions"], (
    f"The version of {name!r} has changed: write {FILE.name} again with"
    " `make golden`."
  )
  pairs = zip(found["losses"], expected["losses"], strict=True)
  moved = max(abs(a - b) for a, b in pairs)
  remedy = (
    f"raise METHOD_VERSIONS[{name!r}] in edgc_jax/methods/__init__.py, or the"
    " `version` of the task if those of all reducers have moved, and write"
    f" {FILE.name} again with `make golden`."
  )
  assert moved <= MOST, (
    f"The losses of {name!r} have moved by {moved:.2g}, more than {MOST}:"
    f" {remedy}"
  )
  assert found["ranks"] == expected["ranks"], (
    f"The ranks of {name!r} have changed: {remedy}"
  )


def test_edgc_changes_its_rank():
  """Otherwise the run would not see its rule."""
  ranks = set(json.loads(FILE.read_text())["edgc"]["ranks"])
  assert len(ranks) > 2 and min(ranks) > 4, "the least rank hides the rule"


def test_every_method_has_a_version():
  methods = edgc_jax.REDUCERS.keys() | {"local_steps"}
  assert edgc_jax.METHOD_VERSIONS.keys() == methods


if __name__ == "__main__":
  found = {name: run(name) for name in edgc_jax.METHOD_VERSIONS}
  lines = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
  FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
