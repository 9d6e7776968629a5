r"""Trains, and records gradients and entropy estimates of the run.

  python -m experiments.figures.record_run --config=configs/gpt2_tiny.py \
      --config.run_dir=runs/recorded --gradient_steps=1,400 --sampled_steps=50

The run equals a run of `train_gpt2.py`, bit for bit. It also writes to its
folder:

  gradients-STEP.npz  the gradients that the reducer got at that step, of every
                      matrix: "local PATH" of the first replica, and "mean PATH"
                      over all replicas
  entropies.json      by step, the estimates of every estimator and sampling
                      rate, if it samples this step, and from all entries
  costs.json          seconds of an estimate, and of forward and backward
"""

import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from edgc_jax import layer_matrix
from edgc_jax.budget.entropy import ESTIMATORS
from experiments.benchmarks import measurements
from experiments.benchmarks.measurements import ENTRY_RATES, FULL_PASS, PERIODS
from experiments.models import gpt2
from experiments.parallel.backends import Parallel
from experiments.parallel.meshes import DATA
from experiments.reporting import run_page
from experiments.runtime import command_line
from experiments.training.trainer import Trainer

_GRADIENTS = flags.DEFINE_list(
  "gradient_steps", [], "Steps whose gradients to keep."
)
_SAMPLED = flags.DEFINE_integer(
  "sampled_steps", 0, "Number of last steps with all estimates, then timed."
)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Timed rounds of the estimates.")


class Recorder:
  """A wrapper of the trainer's backend that records gradients."""

  def __init__(self, parallel: Parallel, config: ConfigDict, done: int):
    """Writes nothing yet.

    Args:
      parallel: The backend.
      config: The whole configuration.
      done: Number of steps done before.
    """
    self._parallel, self._config = parallel, config
    self._folder = pathlib.Path(config.run_dir)
    self._step = done
    self._kept = {int(step) for step in _GRADIENTS.value}
    model = gpt2.GPT2Config(**config.model.to_dict())
    gradient = jax.grad(functools.partial(gpt2.loss_fn, model))
    self._gradient = self._pmap(gradient)
    self._of_all = self._pmap(self._estimates(is_full=True))
    self._of_some = self._pmap(self._estimates(is_full=False))

  def __getattr__(self, name: str) -> Any:
    return getattr(self._parallel, name)

  def step(self, params: Any, opt_state: Any, batch: np.ndarray) -> tuple:
    """Records gradients and estimates if due, then runs the backend's step."""
    self._step += 1
    replicas = self._config.mesh.data
    parts = batch.reshape(replicas, -1, batch.shape[-1])
    first_sampled = self._config.steps - _SAMPLED.value + 1
    if self._step in self._kept or self._step >= first_sampled:
      gradients = self._gradient(params, parts)
      if self._step in self._kept:
        self._keep(gradients)
      if self._step >= first_sampled:
        self._estimate(gradients)
        if self._step == self._config.steps:
          self._time(params, parts, gradients)
    return self._parallel.step(params, opt_state, batch)

  def _keep(self, gradients: Any) -> None:
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
      name = jax.tree_util.keystr(path, simple=True, separator=".")
      if layer_matrix(jax.tree_util.keystr(path), leaf.shape[1:]):
        leaf = np.asarray(leaf)
        arrays[f"local {name}"] = leaf[0]
        arrays[f"mean {name}"] = leaf.mean(axis=0)
    np.savez(self._folder / f"gradients-{self._step}.npz", **arrays)

  def _estimate(self, gradients: Any) -> None:
    """Adds this step's estimates to the file, which a resumed run keeps."""
    found = dict(self._of_all(gradients, self._index(0)))
    for period in PERIODS:
      # The index of a sample determines the entries that it reads.
      number = self._index((self._step - 1) // period)
      some = self._of_some(gradients, number)
      found |= {f"{name} every {period}": x for name, x in some.items()}
    file = self._folder / "entropies.json"
    steps = json.loads(file.read_text()) if file.exists() else {}
    steps[str(self._step)] = {
      name: float(value[0]) for name, value in jax.device_get(found).items()
    }
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(steps))
    scratch.replace(file)

  def _time(self, params: Any, parts: np.ndarray, gradients: Any) -> None:
    timed = {FULL_PASS: functools.partial(self._gradient, params, parts)}
    for name, fn in self._each():
      index = self._index(0)
      timed[name] = functools.partial(self._pmap(fn), gradients, index)
    seconds = measurements.alternate(timed, _ROUNDS.value)
    (self._folder / "costs.json").write_text(json.dumps(seconds))

  def _estimates(self, is_full: bool) -> Callable:
    """Returns all estimates with all entries, or all others, as one program."""
    fns = {n: fn for n, fn in self._each() if n.endswith(" 1.0") == is_full}
    return lambda *args: {name: fn(*args).entropy for name, fn in fns.items()}

  def _each(self) -> list[tuple[str, Callable]]:
    """Returns all estimates, with names such as "gaussian 0.25"."""
    return [
      (
        f"{estimator} {rate}",
        measurements.make_estimate(self._config, DATA, rate, estimator),
      )
      for estimator in ESTIMATORS
      for rate in ENTRY_RATES
    ]

  def _index(self, number: int) -> jax.Array:
    return jnp.full(self._config.mesh.data, number, jnp.int32)

  def _pmap(self, fn: Callable) -> Callable:
    devices = jax.devices()[: self._config.mesh.data]
    return jax.pmap(fn, axis_name=DATA, devices=devices)


def main(config: ConfigDict) -> None:
  """Trains and records, unless the run is already finished."""
  if config.mesh.backend != "pmap" or not config.run_dir:
    sys.exit(
      "error: `mesh.backend` must be pmap and `run_dir` be given, got"
      f" {config.mesh.backend!r} and {config.run_dir!r}; the gradients of"
      " replicas in one process are recorded in the run's folder."
    )
  trainer = Trainer(config)
  if trainer.folder.summary() is None:
    newest = trainer.checkpoints.newest()
    done = newest[0] if newest else 0
    trainer.parallel = Recorder(trainer.parallel, config, done)
    trainer.run()
    run_page.write_report([trainer.folder.path])


if __name__ == "__main__":
  command_line.run(main)
