"""Measures what sampling the entropy costs and misses on large gradients.

  python -m experiments.lab.benchmarks.estimate

Takes some AdamW steps with GPT-2 of 124M and of 355M parameters, on one device
and one sequence of 1,024 tokens each, and estimates the entropy of each step's
gradient from all entries and from samples of them. Times are medians of rounds
in which the estimates take turns. Needs 12 GiB. The result is
results/data/estimate.json.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app
from ml_collections import ConfigDict

import edgc_jax
from configs import gpt2_124m
from configs.paper import gpt2_345m
from edgc_jax.budget import entropy
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.measure import timing
from edgc_jax.wire.channel import Channel
from experiments import ROOT
from experiments.lab import benchmarks
from experiments.trainer import tasks
from experiments.trainer.runs.run_folder import environment

_STEPS, _ROUNDS = 4, 5
_MODELS = {"124M": gpt2_124m, "355M": gpt2_345m}
# Of the entries; the first reads all. Every fifth one (0.2) is of all columns;
# the others are of a quarter of them, since widths are multiples of 4.
_SHARES = (1.0, 0.25, 0.2, 0.05, 0.01)
_AXIS, _LEAST = "data", 2**16  # entries of a leaf that is read


def main(argv: Sequence[str]) -> None:
  """Measures both models and writes the file."""
  del argv
  lines = []
  for name, module in _MODELS.items():
    config = module.get_config("allreduce")
    for line in measure(config, _STEPS, _ROUNDS):
      lines.append({"model": name, **line})
      print(lines[-1], flush=True)
  benchmarks.write(
    ROOT / "results/data/estimate.json", "benchmarks.estimate", lines,
    device=environment()["device"],
    steps=_STEPS, rounds=_ROUNDS,
  )  # fmt: skip


def measure(
  config: ConfigDict, steps: int, rounds: int
) -> list[dict[str, Any]]:
  """Returns a line for each estimator and share of the entries.

  Args:
    config: Of the task; trained on one device in float32.
    steps: Training steps, whose gradients are sampled.
    rounds: Timed rounds.
  """
  config.model.dtype = "float32"
  task, tx = tasks.make(config), optax.adamw(1e-4)
  differentiate = jax.jit(
    lambda p, rows: jax.grad(
      lambda p: task.loss(p, rows, jax.random.key(0))[0]
    )(p)
  )
  apply = jax.jit(lambda p, s, g: _applied(tx, p, s, g), donate_argnums=(0, 1))
  params = jax.jit(task.init)(jax.random.key(0))
  state = tx.init(params)
  batches = task.train_batches(1, 0, slice(0, 1))
  estimates = {
    (estimator, share): estimate_of(
      entropy.Sampling(1.0, share, estimator=estimator)
    )
    for estimator in entropy.ESTIMATORS
    for share in _SHARES
  }
  found: dict[tuple[str, float], list[float]] = {key: [] for key in estimates}
  for step in range(steps):
    gradient = differentiate(params, next(batches))
    matrices = matrices_of(gradient, _LEAST)
    for key, estimate in estimates.items():
      found[key].append(float(estimate(matrices, step)))
    params, state = apply(params, state, gradient)
  rows = next(batches)
  calls: dict[Any, Callable[[], Any]] = {
    key: functools.partial(estimate, matrices, 0)
    for key, estimate in estimates.items()
  }
  calls["step"] = lambda: differentiate(params, rows)
  medians = timing.medians(list(calls.values()), rounds)
  seconds = dict(zip(calls, map(float, medians), strict=True))
  entries = sum(x.size for x in matrices)
  return [
    {
      "estimator": estimator,
      "share": share,
      "entries": int(entries * share),
      "seconds": seconds[estimator, share],
      "of_step": seconds[estimator, share] / seconds["step"],
      "of_all": seconds[estimator, share] / seconds[estimator, 1.0],
      "error": max(
        abs(a - b)
        for a, b in zip(
          found[estimator, share], found[estimator, 1.0], strict=True
        )
      ),
      "entropies": found[estimator, share],
    }
    for estimator, share in estimates
  ]


def _applied(
  tx: optax.GradientTransformation, params: Any, state: Any, gradient: Any
) -> tuple[Any, Any]:
  updates, state = tx.update(gradient, state, params)
  return optax.apply_updates(params, updates), state


def matrices_of(gradient: Any, least: int) -> list[jax.Array]:
  """Returns the leaves that `edgc` would compress, as stacks of matrices.

  Args:
    gradient: A tree.
    least: Smaller leaves are left out.
  """
  leaves = zip(
    leaves_in(gradient, edgc_jax.layer_matrix), jax.tree.leaves(gradient),
    strict=True,
  )  # fmt: skip
  return [
    x.reshape(leaf.view) for leaf, x in leaves if leaf.view and x.size > least
  ]


def estimate_of(sampling: entropy.Sampling) -> Callable[..., jax.Array]:
  """Returns a compiled estimate of one replica's matrices, at an index."""

  def one(matrices: list[jax.Array], index: jax.Array) -> jax.Array:
    return entropy.estimate(matrices, index, Channel(_AXIS), sampling).entropy

  # An axis of one replica.
  bound = jax.vmap(one, (0, None), axis_name=_AXIS)
  return jax.jit(lambda m, i: bound([x[None] for x in m], jnp.asarray(i))[0])


if __name__ == "__main__":
  app.run(main)
