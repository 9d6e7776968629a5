"""Tasks by name, on all backends."""

import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import cut_runs
from helpers.small_runs import small_task
from jax.sharding import PartitionSpec as P

from configs import (
  coattention_digits,
  conv_digits,
  diffusion_digits,
  gpt2_tiny,
  vit_digits,
)
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import optimizer, reducers

DIGITS = ("coattention", "conv", "diffusion", "vit")


def test_names_are_the_files():
  assert tasks.names() == sorted(["bert", "gpt2", *DIGITS])


def test_a_file_that_is_no_task_yet(monkeypatch):
  """What a new file lacks is one clear error, not a traceback."""
  config = gpt2_tiny.get_config()
  file = types.ModuleType("experiments.trainer.tasks.gpt2")
  monkeypatch.setitem(sys.modules, file.__name__, file)
  with pytest.raises(ValueError, match=r"`TASK` must be .*gpt2\.py, got None"):
    tasks.make(config)
  methods = dict.fromkeys(Task.__abstractmethods__)
  file.TASK = type("Half", (Task,), methods | {"__init__": lambda *_: None})
  with pytest.raises(ValueError, match=r"`row` must be .* task 'gpt2'"):
    tasks.make(config)
  file.TASK.row = ()
  with pytest.raises(ValueError, match=r"`source` must be .* task 'gpt2'"):
    tasks.make(config)


@pytest.mark.parametrize("name", tasks.names())
def test_the_parts_of_a_task_fit_together(name, tmp_path):
  """Rows, shapes and metrics are those that a task names."""
  task = tasks.make(small_task(tmp_path, name))
  batch = next(task.train_batches(4, 0, slice(0, 4)))
  assert all(np.any(x) for x in jax.tree.leaves(batch))
  held_out = next(iter(task.held_out_batches(4, 2)))
  for each in (batch, held_out):
    chex.assert_trees_all_equal_shapes_and_dtypes(each, task.blank(4))
  layout = task.layout({"data": 4})
  assert all(spec == P() for spec in jax.tree.leaves(layout.specs))
  chex.assert_trees_all_equal(layout.of_one_device({"data": 4}), layout.shapes)
  chex.assert_type(jax.tree.leaves(layout.shapes), jnp.float32)
  key = jax.random.key(0)
  loss, others = jax.eval_shape(task.loss, layout.shapes, batch, key)
  found = jax.eval_shape(task.evaluate, layout.shapes, batch)
  assert set(found) == set(task.metrics) == {"loss", *others}
  assert loss.shape == () and loss.dtype == jnp.float32
  assert task.source.name and len(task.source.sha256) == 64


@pytest.mark.parametrize("name", DIGITS)
def test_digits_are_split_into_two_parts(name, tmp_path):
  task = tasks.make(small_task(tmp_path, name))
  train, held_out = (task._rows[is_held_out] for is_held_out in (False, True))
  assert len(train["label"]) == 1437 and len(held_out["label"]) == 360
  assert set(train["label"]) == set(held_out["label"]) == set(range(10))
  assert train["image"].min() >= 0 and train["image"].max() == 1
  # Evaluation visits distinct images, evenly spread, the same in each run.
  batches = list(task.held_out_batches(60, 6))
  labels = np.concatenate([batch["label"] for batch in batches])
  np.testing.assert_array_equal(labels, held_out["label"])
  (few,) = task.held_out_batches(4, 1)
  np.testing.assert_array_equal(few["label"], held_out["label"][::90])
  # An epoch visits every image once; each process reads its own rows.
  own = task.train_batches(1437, 1, slice(0, 1437))
  images = next(own)["image"]
  assert len(np.unique(images.reshape(1437, -1), axis=0)) == len(
    np.unique(train["image"].reshape(1437, -1), axis=0)
  )
  part = next(task.train_batches(1437, 1, slice(100, 200)))["image"]
  np.testing.assert_array_equal(part, images[100:200])


def test_configurations_have_valid_sizes():
  """The networks are as small as their files in configs/ say."""
  for file, most in (
    (vit_digits, 2e5), (conv_digits, 1e5), (coattention_digits, 3e5),
    (diffusion_digits, 3e5),
  ):  # fmt: skip
    config = file.get_config()
    task = tasks.make(config)
    shapes = task.layout({"data": 4}).shapes
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) < most
    optimizer.make_reducer(config, task, {})


# Randomness.


@pytest.mark.parametrize("name", DIGITS)
@pytest.mark.slow
def test_noise_is_drawn_from_the_key(name, tmp_path):
  task = tasks.make(small_task(tmp_path, name))
  params = jax.jit(task.init)(jax.random.key(0))
  batch = next(task.train_batches(16, 0, slice(0, 16)))
  loss = jax.jit(lambda seed: task.loss(params, batch, jax.random.key(seed))[0])
  assert loss(0) == loss(0) != loss(1)
  evaluate = jax.jit(task.evaluate)
  numbers = [evaluate(params, batch)["loss"] for _ in range(2)]
  assert numbers[0] == numbers[1] != loss(0)


class Draws(Task):
  """Moves entry r of its parameters by what replica r draws in a step.

  Rows are one-hot, a row for each replica.
  """

  row = jax.ShapeDtypeStruct((4,), np.float32)

  def init(self, key):
    del key
    return {"drawn": jnp.zeros(4)}

  def loss(self, params, batch, key):
    drawn, own = jax.random.uniform(key), params["drawn"] * batch.mean(0)
    # A carry that starts with a constant needs no cast on any backend.
    total, _ = jax.lax.scan(lambda x, y: (x + y, None), jnp.zeros(()), own)
    return total * drawn, {}

  def evaluate(self, params, batch):
    return {"loss": jnp.zeros(())}

  def train_batches(self, batch_size, seed, rows):
    raise NotImplementedError

  def held_out_batches(self, batch_size, num_batches):
    raise NotImplementedError


def drawn(backend, seed):
  """Returns what each replica draws in each of three steps, [3, 4]."""
  config = gpt2_tiny.get_config("allreduce")
  config.seed, config.mesh.backend = seed, backend
  task, mesh = Draws(), meshes.of_config(config)
  reducer = optimizer.make_reducer(config, task, {}, mesh)
  tx = optax.chain(reducer, optax.scale(4.0))  # sums over the replicas
  run = backends.make(config, task, tx, mesh)
  state, sums = run.init(jax.random.key(0)), [np.zeros(4)]
  for step in (1, 2, 3):
    *state, _ = run.step(*state, np.eye(4, dtype=np.float32), step)
    sums.append(np.asarray(state[0]["drawn"]).reshape(-1, 4)[0])
  return np.diff(sums, axis=0)


@pytest.mark.slow
def test_keys_differ_between_replicas_steps_and_seeds():
  found = [drawn("vmap", seed) for seed in (0, 1)]
  assert len(np.unique(np.round(found, 4))) == 2 * 3 * 4
  assert np.min(found) > 0
  for backend in ("pmap", "jit"):
    np.testing.assert_allclose(drawn(backend, 0), found[0], atol=1e-6)


# Whole runs.


# Each of these methods resumes here at least once.
METHODS = {
  "bert": "quantize", "coattention": "topk", "conv": "edgc",
  "diffusion": "powersgd", "gpt2": "quantize", "vit": "powersgd",
}  # fmt: skip


# Its model compiles for a minute.
LONG = pytest.param(
  "diffusion",
  marks=pytest.mark.soak("experiments/trainer/tasks", "configs/vision.py"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name", [LONG, *(x for x in tasks.names() if x != "diffusion")]
)
def test_every_task_trains_and_resumes_bit_for_bit(name, tmp_path):
  """A run that was cut off continues as if it had not been."""

  def config_of(folder):
    config = small_task(tmp_path / folder, name, METHODS[name])
    config.steps, config.optimizer.lr = 24, 1e-2
    config.checkpoint.update(every=4, keep=100)
    return config

  whole = cut_runs.run(config_of("whole"))
  losses = [line["loss"] for line in cut_runs.lines_of(whole)]
  assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.1, "nothing is learned"
  summary, task = whole.folder.summary(), whole.task
  for metric in task.metrics:
    assert np.isfinite(summary[f"val_{metric}"])
  assert summary[f"{task.unit}_per_second"] > 0
  assert summary["compression_ratio"] > 1 and summary["traces"] == 1
  assert summary["versions"] == {
    "task": task.version, **reducers.versions_of(whole.config.reducer, {}),
  }  # fmt: skip
  assert summary["corpus"] == task.source._asdict()
  if "accuracy" in task.metrics:
    scores = {
      line["step"]: line["val_accuracy"]
      for line in cut_runs.lines_of(whole)
      if "val_accuracy" in line
    }
    assert whole._score({"accuracy": 0.75, "loss": 9.0}) == -0.75
    assert list(scores) == [4, 8, 12, 16, 20, 24]

  for step in (6, 13):
    cut_runs.run(config_of("cut"), cut_after=step)
  resumed = cut_runs.run(config_of("cut"), compiles=False)
  assert cut_runs.lines_of(resumed) == cut_runs.lines_of(whole)
  (step, arrays), (_, expected) = map(cut_runs.newest, (resumed, whole))
  assert step == 24
  chex.assert_trees_all_equal(arrays, expected)


def losses_of(config, cut_after=None):
  """Returns the losses of all steps, and the last held-out loss."""
  lines = cut_runs.lines_of(cut_runs.run(config, cut_after, compiles=False))
  return [line["loss"] for line in lines] + [lines[-1].get("val_loss")]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, reducer, backend",
  [  # every pair: tests/runs/parallel_test.py has gpt2 with edgc on all
    ("vit", "edgc", "jit"),
    ("vit", "powersgd", "pmap"),
    ("gpt2", "powersgd", "jit"),
  ],
)
def test_simulated_replicas_train_as_real_ones(
  name, reducer, backend, tmp_path
):
  """Also with dropout, whose keys are the same, and after a change to them."""
  expected = losses_of(small_task(tmp_path / "simulated", name, reducer))
  config = small_task(tmp_path / "run", name, reducer, backend)
  if backend == "pmap":
    whole = small_task(tmp_path / "whole", name, reducer, backend)
    np.testing.assert_allclose(losses_of(whole), expected, rtol=1e-4)
    config.checkpoint.update(every=2, keep=100)
    losses_of(config, cut_after=5)
    config.mesh.backend = "vmap"
  found = losses_of(config)
  assert len(found) == 9
  np.testing.assert_allclose(found, expected, rtol=1e-4)
