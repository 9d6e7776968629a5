"""Measures gradient noise, and entropy by batch size, of the protocol's model.

  python -m experiments.lab.benchmarks.noise_scale

Trains dense, and at some steps reads the gradients of many small batches at the
same parameters. With g_i of b tokens each, i = 1 ... K, and their mean g,

  |G|^2 = (K |g|^2 - mean |g_i|^2) / (K - 1)         the gradient's energy
  S     = b (mean |g_i|^2 - |g|^2) K / (K - 1)       a token's noise
  B     = S / |G|^2                                  tokens

are unbiased but for the ratio (McCandlish et al. 2018, arXiv:1812.06162). In a
batch of B tokens gradient and noise have equal energy; in a smaller one noise
is most of what is exchanged.

The entropy of means of 1, 4, 32 and 128 of these gradients tells how much of it
is noise: a rule that follows the entropy reads the gradient of one replica. The
result is results/data/noise_scale.json.
"""

import functools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app
from ml_collections import ConfigDict

from configs.protocol import gpt
from edgc_jax.budget import entropy
from experiments import ROOT
from experiments.lab import benchmarks
from experiments.lab.benchmarks.estimate import estimate_of, matrices_of
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.training import optimizer

_BATCHES = 256  # K
_MEANS = (1, 4, 32, 128)  # small batches of a mean whose entropy is read
_GROUPS = 8  # such means, at most
_LEAST = 2**8  # entries of a leaf that is read
_ROWS = 8  # of a small batch: of a replica
_RATE = 8e-3  # as tuned for dense
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the run


def main(argv: Sequence[str]) -> None:
  """Trains, measures and writes the file."""
  del argv
  config = gpt.get_config("allreduce")
  config.optimizer.lr = _RATE
  benchmarks.write(
    ROOT / "results/data/noise_scale.json", "benchmarks.noise_scale",
    list(measure(config, _BATCHES)),
    steps=config.steps, batches=_BATCHES, tokens=_ROWS * config.model.context,
    means=[n * _ROWS * config.model.context for n in _MEANS],
    batch=config.batch_size * config.model.context,
  )  # fmt: skip


def measure(config: ConfigDict, batches: int) -> Iterator[dict[str, Any]]:
  """Yields the noise scale at some shares of the run.

  Args:
    config: Trained with its own batch and learning rate.
    batches: K.
  """
  task, mesh = tasks.make(config), meshes.of_config(config)
  tx = optimizer.make_optimizer(config, task, {}, mesh=mesh)
  backend = backends.make(config, task, tx, mesh)
  params, opt_state = backend.init(jax.random.key(config.seed))
  rows = backend.rows(config.batch_size)
  training = task.train_batches(config.batch_size, config.seed, rows)
  # Other batches than those of the training.
  others = task.train_batches(_ROWS, config.seed + 1, slice(0, _ROWS))
  gradients_of = jax.jit(lambda *x: _gradients(task, *x))
  marks = {max(1, round(share * config.steps)) for share in _SHARES}
  for step in range(1, config.steps + 1):
    params, opt_state, numbers = backend.step(
      params, opt_state, next(training), step
    )
    if step in marks:
      small = jnp.stack([next(others) for _ in range(batches)])
      gradients = gradients_of(params, small)
      each, mean = _energies(gradients)
      line = {
        "step": step,
        "loss": float(backend.fetch([numbers])[0]["loss"]),
        **noise_scale(
          float(each), float(mean), batches, _ROWS * task.units_per_row
        ),
        "entropy": _entropies(gradients),
      }
      print(line, flush=True)
      yield line


def noise_scale(
  each: float, mean: float, batches: int, tokens: int
) -> dict[str, float]:
  """Returns the estimates from energies of gradients.

  Args:
    each: mean |g_i|^2.
    mean: |g|^2.
    batches: K.
    tokens: b.

  Returns:
    |G|^2 as "signal", S as "noise" and B as "noise_scale"; inf if |G|^2 is not
    positive.

  >>> noise_scale(each=5.0, mean=2.0, batches=4, tokens=10)
  {'signal': 1.0, 'noise': 40.0, 'noise_scale': 40.0}
  """
  signal = (batches * mean - each) / (batches - 1)
  noise = tokens * (each - mean) * batches / (batches - 1)
  scale = noise / signal if signal > 0 else float("inf")
  return {"signal": signal, "noise": noise, "noise_scale": scale}


def _gradients(task: Any, params: Any, batches: jax.Array) -> Any:
  """Returns the gradients of small batches [K, rows, ...], [K, ...] a leaf."""
  gradient = jax.grad(lambda p, rows: task.loss(p, rows, jax.random.key(0))[0])
  return jax.lax.map(lambda rows: gradient(params, rows), batches)


@jax.jit
def _energies(gradients: Any) -> tuple[jax.Array, jax.Array]:
  """Returns mean |g_i|^2 and |g|^2 of gradients [K, ...]."""
  mean = jax.tree.map(lambda g: g.mean(0), gradients)
  total = optax.tree.norm(gradients, squared=True)
  count = len(jax.tree.leaves(gradients)[0])
  return total / count, optax.tree.norm(mean, squared=True)


def _entropies(gradients: Any) -> dict[str, list[float]]:
  """Returns the entropy of means of `_MEANS` gradients, by estimator."""
  count = len(jax.tree.leaves(gradients)[0])
  found: dict[str, list[float]] = {}
  for name in entropy.ESTIMATORS:
    estimate = estimate_of(entropy.Sampling(1.0, 1.0, estimator=name))
    found[name] = [
      statistics.mean(
        float(estimate(matrices_of(_mean(gradients, i * n, n), _LEAST), 0))
        for i in range(min(_GROUPS, count // n))
      )
      for n in _MEANS
      if n <= count
    ]
  return found


@functools.partial(jax.jit, static_argnums=2)
def _mean(gradients: Any, start: int, count: int) -> Any:
  """Returns the mean of some of the gradients [K, ...]."""

  def mean(g: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(g, start, count).mean(0)

  return jax.tree.map(mean, gradients)


if __name__ == "__main__":
  app.run(main)
