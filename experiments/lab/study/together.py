"""Trains several runs as one program, on a device that one does not fill.

The runs differ in `NUMBERS` alone. Each is a lane of a `jax.vmap` over the
whole step, so a GPU starts as many kernels as for one run. Counters of steps
are the same in all lanes and are not mapped: what happens every so many steps
remains a branch that other steps do not compute. So a run that skips a step
still closes its windows with the others.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from ml_collections import ConfigDict

from edgc_jax.state.state import LocalStepsState, ReducerState
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.parallel.backend import Backend
from experiments.trainer.runs.run_folder import RunFolder
from experiments.trainer.training import checks
from experiments.trainer.training.optimizer import make_optimizer
from experiments.trainer.training.progress_check import (
  ProgressCheck,
  TrainingStopped,
)
from experiments.trainer.training.run_log import RunLog
from experiments.trainer.training.trainer import Trainer

# Keys by which runs of one program may differ.
NUMBERS = ("seed", "optimizer.lr", "local.lr", "local.momentum")
_FREE = ("name", "run_dir")
_LANES = "lanes"
_COUNTER = {ReducerState: "count", LocalStepsState: "step"}


def prepare(configs: Sequence[ConfigDict]) -> Callable[[], None]:
  """Returns a function that trains runs from their first to their last step.

  Nothing is saved in between: runs that are killed begin again, and finished
  ones are kept. A finished run has a summary in its folder, and one that could
  not continue has the reason.

  Args:
    configs: Of the runs, whose folders are `run_dir`. `mesh.backend` is vmap.

  Raises:
    ValueError: if an option is out of range, or if the runs differ in other
      keys than `NUMBERS`.
  """
  for config in configs:
    checks.task_of(config)
  left = [
    config
    for config in configs
    if RunFolder(config.run_dir, config.to_dict()).summary() is None
  ]
  return _Together(left).train_and_close if left else lambda: None


def can_share(config: ConfigDict) -> bool:
  """Returns whether a run can be one of several of a program."""
  return config.mesh.backend == "vmap" and not config.init_from


def program_of(config: ConfigDict) -> Mapping[str, Any]:
  """Returns the keys by which runs of one program must be equal."""
  flat = traverse_util.flatten_dict(config.to_dict(), sep=".")
  return {k: v for k, v in flat.items() if k not in (*NUMBERS, *_FREE)}


class _Together:
  """Runs of one program."""

  def __init__(self, configs: Sequence[ConfigDict]):
    programs = [program_of(config) for config in configs]
    differing = {
      key for each in programs for key in each if each[key] != programs[0][key]
    }
    if differing or not can_share(configs[0]):
      raise ValueError(
        "Runs of one program must have mesh.backend=vmap, no init_from, and"
        f" differ only in {', '.join(NUMBERS)}, got {configs[0].mesh.backend},"
        f" {configs[0].init_from!r} and runs that differ in"
        f" {', '.join(sorted(differing)) or 'these alone'}; start the others"
        " apart."
      )
    self.trainer = Trainer(configs[0])
    config, task = self.trainer.config, self.trainer.task
    self.folders = [RunFolder(c.run_dir, c.to_dict()) for c in configs]
    self.logs = [
      RunLog(folder, own, task)
      for folder, own in zip(self.folders, configs, strict=True)
    ]
    self.checks = [ProgressCheck(config) for _ in configs]
    self.is_stopped = [False] * len(configs)
    values = {key: np.array([c[key] for c in configs]) for key in NUMBERS}
    # A number that is the same in all runs remains a constant.
    self.numbers = {k: v for k, v in values.items() if len(np.unique(v)) > 1}
    self.seeds = [c.seed for c in configs]
    self.batches = {
      seed: task.train_batches(
        config.batch_size, seed, slice(0, config.batch_size)
      )
      for seed in self.seeds
    }
    lanes = len(configs)

    def init(numbers: Mapping[str, jax.Array]) -> tuple[Any, Any]:
      seed = numbers.get("seed", config.seed)
      return self._backend(numbers).init(jax.random.key(seed))

    of_first_lane = jax.tree.map(lambda x: x[0], self.numbers)
    axes = _lane_axes(jax.eval_shape(init, of_first_lane)[1])

    def step(numbers: Mapping[str, jax.Array], *operands: Any) -> Any:
      params, opt_state, metrics, own = self._backend(numbers)._step(*operands)
      metrics = metrics | jax.tree.map(jnp.mean, own)
      return params, _with_equal_counters(opt_state, axes), metrics

    size = {"axis_size": lanes, "axis_name": _LANES}
    self._init = jax.jit(jax.vmap(init, out_axes=(0, axes), **size))
    self._step = jax.jit(
      jax.vmap(
        step,
        in_axes=(0, 0, axes, 0, None),
        out_axes=(0, axes, 0),
        **size,
      ),
      donate_argnums=(1, 2),
    )
    self._evaluate = jax.jit(jax.vmap(task.evaluate, (0, None), **size))

  def _backend(self, numbers: Mapping[str, jax.Array]) -> Backend:
    """Returns the backend of a lane, made while JAX traces."""
    trainer = self.trainer
    config = trainer.config.copy_and_resolve_references()
    with config.ignore_type():
      config.update_from_flattened_dict(dict(numbers))
    mesh = meshes.of_config(config)
    tx = make_optimizer(config, trainer.task, trainer.times, mesh=mesh)
    return backends.make(config, trainer.task, tx, mesh)

  def train(self) -> None:
    config = self.trainer.config
    for folder in self.folders:
      folder.lock()
      folder.start()
    params, opt_state = self._init(self.numbers)
    pending: list[Any] = []
    for step in range(1, config.steps + 1):
      if all(self.is_stopped):
        return
      for log in self.logs:
        log.begin_step()
      of_seed = {seed: next(own) for seed, own in self.batches.items()}
      parts = (of_seed[seed] for seed in self.seeds)
      batch = jax.tree.map(lambda *each: np.stack(each), *parts)
      params, opt_state, numbers = self._step(
        self.numbers, params, opt_state, batch, np.int32(step)
      )
      pending.append(numbers)
      log = self.logs[0]  # all have the same lines
      if log.has_line(step):
        measured = self._measured(params) if log.has_evaluation(step) else {}
        self._log(jax.device_get(pending), measured)
        pending = []

  def _measured(self, params: Any) -> Mapping[str, np.ndarray]:
    """Returns each metric of held-out data, of all lanes."""
    config, task = self.trainer.config, self.trainer.task
    found = jax.device_get([
      self._evaluate(params, batch)
      for batch in task.held_out_batches(
        config.batch_size, config.evaluation.batches
      )
    ])  # fmt: skip
    return {
      name: np.mean([numbers[name] for numbers in found], 0)
      for name in task.metrics
    }

  def _log(
    self, steps: Sequence[Any], measured: Mapping[str, np.ndarray]
  ) -> None:
    """Logs the numbers of some steps, and ends runs that are over.

    Args:
      steps: Metrics of each step, with a first axis of lanes.
      measured: Metrics of held-out data, or nothing.
    """
    for lane, log in enumerate(self.logs):
      if self.is_stopped[lane]:
        continue
      for numbers in steps:
        log.add(jax.tree.map(lambda x, lane=lane: x[lane], numbers))
      line = log.fetch()
      line |= {f"val_{name}": float(x[lane]) for name, x in measured.items()}
      log.write(line)
      try:
        self.checks[lane].check(line)
      except TrainingStopped as stop:
        self.is_stopped[lane] = True
        self.folders[lane].stop(str(stop))
        continue
      if line["step"] == self.trainer.config.steps:
        summary = self.trainer.summary(log, line)
        # The seconds are those of all runs.
        self.folders[lane].finish({**summary, "together": len(self.logs)})

  def train_and_close(self) -> None:
    """Trains, and closes all files."""
    try:
      self.train()
    finally:
      for log, folder in zip(self.logs, self.folders, strict=True):
        log.close()
        folder.close()


def _lane_axes(state: Any) -> Any:
  """Returns the axis of the lanes in a state: 0, or None for its counters."""

  def is_counted(x: Any) -> bool:
    return isinstance(x, (ReducerState, LocalStepsState))

  def axes(x: Any) -> Any:
    if not is_counted(x):
      return 0
    own = {name: _lane_axes(part) for name, part in x._asdict().items()}
    return x._replace(**{**own, _COUNTER[type(x)]: None})

  return jax.tree.map(axes, state, is_leaf=is_counted)


def _with_equal_counters(state: Any, axes: Any) -> Any:
  """Sets the counters of a lane to the furthest lane's."""

  def equal(axis: int | None, part: Any) -> Any:
    return part if axis == 0 else jax.lax.pmax(part, _LANES)

  return jax.tree.map(equal, axes, state, is_leaf=lambda x: x is None)
