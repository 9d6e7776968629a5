"""Estimates entropies of gradients alone, and times functions in turn."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.budget import entropy
from edgc_jax.budget.entropy import Sampling
from edgc_jax.measure.description import reviewed

ENTRY_RATES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
PERIODS = (1, 2, 4, 10)  # steps from one sample to the next
FULL_PASS = "forward and backward"  # the reference of an estimate's time


def make_estimate(
  config: ConfigDict,
  axis_name: str,
  entry_rate: float,
  estimator: str,
) -> Callable[[Any, jax.Array], entropy.EntropySample]:
  """Returns the entropy estimate of a sampled step of `edgc` as a function.

  Args:
    config: The whole configuration.
    axis_name: The axis of the replicas; bound where the result is called.
    entry_rate: Fraction of the entries to read, in (0, 1].
    estimator: "gaussian" or "histogram".

  Returns:
    A function of local gradients and the index of the sample, int32 [], that
    returns the estimate.
  """

  def estimate(gradients: Any, index: jax.Array) -> entropy.EntropySample:
    tx = edgc_jax.powersgd(
      config.edgc.rank_min, min_ratio=config.edgc.min_ratio
    )
    (found,) = reviewed(tx, gradients)
    leaves = zip(found.leaves, jax.tree.leaves(gradients), strict=True)
    return entropy.estimate(
      [g.reshape(leaf.view) for leaf, g in leaves if leaf.is_compressed],
      index,
      axis_name,
      Sampling(
        entry_rate=entry_rate,
        estimator=estimator,
        bins=config.edgc.sampling.bins,
      ),
    )

  return estimate


def alternate(
  timed: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Times functions in turn, so that other load on the machine hits them all.

  Args:
    timed: Functions by name; each is called once before, to compile.
    rounds: Number of timed calls of each.

  Returns:
    Seconds of each call by name, in the order of the rounds. Calls of one
    round are close in time, so their ratios are more reliable than the times.
  """
  seconds = {name: [] for name in timed}
  for call in timed.values():
    jax.block_until_ready(call())
  for _ in range(rounds):
    for name, call in timed.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      seconds[name].append(time.perf_counter() - start)
  return seconds
