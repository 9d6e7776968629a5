"""Numbers of the newest step, read out of any optimiser state."""

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from edgc_jax.guards import CHECKED_STEPS


class Stats(NamedTuple):
  """Scalars that a reducer keeps in its state; None where it measures none."""

  entropy: jax.Array | None  # float32 [], newest sample, nats
  rank: jax.Array  # int32 [], 0 is dense
  rung: jax.Array  # int32 [], index into the ladder
  wire_bytes: jax.Array  # float32 [], sent in this step, everything included
  mean_wire_bytes: jax.Array  # float32 [], over all steps
  dense_bytes: jax.Array  # float32 [], of a float32 all-reduce
  relative_error: jax.Array  # float32 [], lost share of the energy
  predicted_error: jax.Array | None  # float32 [], the model's expectation
  residual_norm: jax.Array  # float32 [], root mean square over replicas
  skipped_steps: jax.Array  # int32 [], with non-finite gradients
  identical_steps: jax.Array  # int32 [], of the first, equal on all replicas


class SkipStats(NamedTuple):
  """Scalars that `skip_nonfinite` keeps."""

  skipped_steps: jax.Array  # int32 []
  consecutive_skips: jax.Array  # int32 []
  max_consecutive: jax.Array  # int32 []


def metrics(opt_state: Any) -> dict[str, Any]:
  """The newest step's numbers, from wherever the reducer's state lies.

  Looks inside `optax.chain`, `named_chain`, `masked`, `partition`,
  `MultiSteps`, `inject_hyperparams`, `accumulate` and `skip_nonfinite`. A
  state stacked by `pmap` gives its first replica's numbers; they are equal on
  all. One transfer from the device.

  Args:
    opt_state: Any optimiser state that holds one reducer of this package.

  Returns:
    Scalars by name: `rank` (0 is dense), `rung`, `wire_bytes` and
    `dense_bytes` (per replica and step), `compression_ratio` (total dense
    over total wire bytes since the first step), `relative_error` (share of
    the energy |gradient + residual|^2 that was not sent), `residual_norm`,
    `skipped_steps`, `identical_gradients` (1 if all replicas had the same
    gradients in the first steps), for `edgc` also `entropy` (nats) and
    `predicted_error`, under `skip_nonfinite` also `consecutive_skips`.

  Raises:
    ValueError: if there is no reducer in the state, or more than one.

  Warns:
    RuntimeWarning: if the gradients were the same on all replicas, and if
      `skip_nonfinite` has skipped `max_consecutive` steps in a row.
  """
  found = _find(opt_state, Stats)
  if len(found) != 1:
    raise ValueError(
      "`opt_state` must hold the state of exactly one reducer (edgc, powersgd"
      f" or allreduce), got {len(found)}; pass the part of it that holds one."
    )
  skips = _find(opt_state, SkipStats)
  stats = found[0]
  if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(stats)):
    stats, skips = jax.tree.map(
      lambda x: np.ravel(x)[0].item(), jax.device_get((stats, skips))
    )
    _warn(stats, skips)
  values = {
    "entropy": stats.entropy,
    "rank": stats.rank,
    "rung": stats.rung,
    "wire_bytes": stats.wire_bytes,
    "dense_bytes": stats.dense_bytes,
    "compression_ratio": stats.dense_bytes / stats.mean_wire_bytes
    if _is_positive(stats.mean_wire_bytes)
    else 1.0,
    "relative_error": stats.relative_error,
    "predicted_error": stats.predicted_error,
    "residual_norm": stats.residual_norm,
    "skipped_steps": stats.skipped_steps + sum(s.skipped_steps for s in skips),
    "identical_gradients": (stats.identical_steps >= CHECKED_STEPS) * 1,
  }
  if skips:
    values["consecutive_skips"] = skips[0].consecutive_skips
  return {name: value for name, value in values.items() if value is not None}


def _find(tree: Any, kind: type) -> list:
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
  return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _is_positive(value: Any) -> bool:
  return isinstance(value, jax.core.Tracer) or value > 0


def _warn(stats: Stats, skips: list[SkipStats]) -> None:
  if stats.identical_steps >= CHECKED_STEPS:
    warnings.warn(
      "All replicas had the same gradients in the first steps: they were"
      " averaged before they came here, so compression saves nothing, or all"
      " replicas read the same data. Drop the pmean of the gradients, or give"
      " every replica its own part of the batch.",
      RuntimeWarning,
      stacklevel=3,
    )
  for skip in skips:
    if skip.consecutive_skips >= skip.max_consecutive:
      warnings.warn(
        f"{skip.consecutive_skips} steps in a row had non-finite gradients and"
        " were skipped: training stands still. Lower the learning rate or"
        " look at the data of the last steps.",
        RuntimeWarning,
        stacklevel=3,
      )
