"""A script: kills runs at random times and compares their results.

  python tests/helpers/soak.py --kills=20 --reducers=edgc,powersgd,allreduce

Each reducer trains once undisturbed, and once with the command repeated after
each SIGKILL. Parameters, optimiser state and lines of metrics must be equal bit
for bit, without times. --stages=2 trains on a pipeline.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import orbax.checkpoint as ocp
from etils import epath

from experiments.trainer.runs.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
_KILLS = flags.DEFINE_integer("kills", 20, "Of each run.")
_REDUCERS = flags.DEFINE_list("reducers", "edgc,powersgd,allreduce", "Which.")
_STAGES = flags.DEFINE_integer("stages", 1, "Pipeline stages.")
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the times of the kills.")

SETTINGS = {
  "batch_size": 8, "log_every": 5, "checkpoint.every": 7,
  "evaluation.every": 50, "evaluation.batches": 1, "model.context": 16,
  "model.width": 32, "model.num_layers": 1, "model.num_heads": 2,
  "edgc.rank_max": 8, "edgc.rank_min": 4, "edgc.rank_multiple": 2,
  "edgc.min_ratio": 1.5, "edgc.warmup_steps": 40,
  "edgc.max_warmup_steps": 80,
  "powersgd.rank": 4,
}  # fmt: skip
_CLOCK = ("seconds", "tokens_per_second")


def main(argv: list[str]) -> None:
  """Soaks each reducer in turn; exits with 1 if one differs."""
  del argv
  logging.set_verbosity(logging.ERROR)  # orbax logs each file
  chance = random.Random(_SEED.value)
  with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    verdicts = [_soak(name, folder, chance) for name in _REDUCERS.value]
  sys.exit(0 if all(verdicts) else 1)


def _soak(reducer: str, folder: pathlib.Path, chance: random.Random) -> bool:
  whole, killed = (folder / f"{reducer}-{name}" for name in ("whole", "killed"))
  _start(reducer, whole).wait()
  kills = []
  while len(kills) < _KILLS.value:
    process = _start(reducer, killed)
    _wait(process, killed, chance)
    if process.poll() is not None:
      break
    process.kill()  # SIGKILL
    process.wait()
    kills.append(max(Checkpoints(killed / "checkpoints", 2).steps() or [0]))
  code = _start(reducer, killed).wait()
  found = f"exit code {code}" if code else difference(whole, killed)
  if len(kills) < _KILLS.value:
    found = f"ended before the other kills, give more --steps; {found}"
  print(
    f"{reducer}: {len(kills)} kills, after checkpoints of steps {kills};"
    f" {found or 'bit-equal'}",
    flush=True,
  )
  if found:
    print((folder / "output.txt").read_text()[-2000:])
  return not found


def _wait(
  process: subprocess.Popen, folder: pathlib.Path, chance: random.Random
) -> None:
  """Waits for some more steps; one time in six it ends during start-up."""
  share = _STEPS.value / (_KILLS.value + 1)
  until = _last_step(folder) + chance.uniform(0.0, 1.6) * share
  is_early = chance.random() < 1 / 6
  deadline = time.monotonic() + (chance.uniform(0.0, 8.0) if is_early else 600)
  while process.poll() is None and time.monotonic() < deadline:
    if not is_early and _last_step(folder) > until:
      break
    time.sleep(0.01)
  time.sleep(chance.uniform(0.0, 0.2))


def _last_step(folder: pathlib.Path) -> int:
  file = folder / "metrics.jsonl"
  whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
  return json.loads(whole.splitlines()[-1])["step"] if whole else 0


def command_of(
  config: str, reducer: str, settings: dict[str, Any]
) -> list[str]:
  """Returns the training command."""
  return [
    sys.executable, f"{ROOT}/experiments/train_gpt2.py",
    f"--config={ROOT}/configs/{config}.py:{reducer}",
    *(f"--config.{key}={value}" for key, value in settings.items()),
  ]  # fmt: skip


def _start(reducer: str, folder: pathlib.Path) -> subprocess.Popen:
  stages, config = _STAGES.value, "gpt2_tiny"
  settings = {"steps": _STEPS.value, "run_dir": folder, **SETTINGS}
  if stages > 1:
    config = "gpt2_tiny_pipeline"
    settings |= {
      "mesh.stage": stages, "pipeline.microbatches": 2,
      "model.num_layers": stages,
    }  # fmt: skip
  # Compiled once, so that kills hit training and not compilation.
  cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
  with open(folder.parent / "output.txt", "a") as output:
    return subprocess.Popen(
      command_of(config, reducer, settings), stdout=output, stderr=output,
      env=os.environ | cache,
    )  # fmt: skip


def difference(one: pathlib.Path, other: pathlib.Path) -> str:
  """Returns the differences of two runs in their state and metrics."""
  (step, arrays), (last, others) = map(_newest, (one, other))
  found = [f"last step {step} and {last}"] if step != last else []
  found += [
    name
    for name in sorted(arrays.keys() | others.keys())
    if not np.array_equal(arrays.get(name), others.get(name))
  ]
  for mine, its in zip(lines_of(one), lines_of(other), strict=False):
    if mine != its:
      keys = [key for key in mine if mine[key] != its.get(key)]
      found.append(f"{', '.join(keys)} of step {mine['step']}")
      break
  if len(lines_of(one)) != len(lines_of(other)):
    found.append("number of lines")
  return "; ".join(found)


def _newest(folder: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
  """Returns step and arrays of the newest checkpoint, of any structure."""
  checkpoints = Checkpoints(folder / "checkpoints", 2)
  step, arrays = checkpoints.steps()[0], {}
  for name in ("params", "opt_state"):
    found = arrays_of(checkpoints.path / str(step) / name)
    arrays |= {f"{name}.{path}": x for path, x in found.items()}
  return step, arrays


def arrays_of(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns all arrays of a checkpoint of orbax by name."""
  # On the host: this process does not have the run's devices.
  as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
  with ocp.PyTreeCheckpointer() as reader:
    tree = ocp.PyTreeCheckpointHandler().metadata(epath.Path(path)).tree
    args = jax.tree.map(lambda _: as_numpy, tree)
    found = reader.restore(path, restore_args=args)
  leaves = jax.tree_util.tree_leaves_with_path(found)
  return {jax.tree_util.keystr(p): np.asarray(x) for p, x in leaves}


def lines_of(folder: pathlib.Path) -> list[dict]:
  """Returns a run's lines of metrics without times."""
  text = (folder / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  return [{k: v for k, v in x.items() if k not in _CLOCK} for x in lines]


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  app.run(main)
