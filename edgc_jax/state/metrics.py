"""Statistics that reducers keep in their state, and `metrics` to read them.

`next_stats` computes the statistics of a step from its `Account`; `metrics`
finds them in any optimiser state, and warns of common mistakes.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax.adaptation.policy import Report
from edgc_jax.comm.agreement import CHECKED_STEPS
from edgc_jax.plan.leaves import share


class Stats(NamedTuple):
  """Statistics of the newest step; a field is None if it is not measured.

  On pipeline stages each stage has its own, with a leading axis of size one.
  """

  entropy: jax.Array | None  # float32 [], newest sample, nats
  rank: jax.Array  # int32 [], 0 is dense
  rung: jax.Array  # int32 [], index into the ladder
  wire_bytes: jax.Array  # float32 [], sent in this step over the replicas
  mean_wire_bytes: jax.Array  # float32 [], over all steps
  dense_bytes: jax.Array  # float32 [], of a dense float32 all-reduce
  relative_error: jax.Array  # float32 [], share of the energy not sent
  predicted_error: jax.Array | None  # float32 [], the same, by the model
  scale_jumps: jax.Array | None  # int32 [], windows with a jump
  residual_norm: jax.Array  # float32 [], root mean square over replicas
  matrices: "MatrixStats"


class MatrixStats(NamedTuple):
  """Statistics of each matrix: trees like the parameters, leaves [k].

  Leaves that are always dense have an `optax.MaskedNode`; so have leaves that
  are not a stage's own, for entropies and predictions. A field is None if it is
  not measured.
  """

  entropy: Any  # float32, nats
  rank: Any  # int32, 0 is dense
  error: Any  # float32, share of the energy not sent
  predicted_error: Any  # float32, the same, by the model


class Checks(NamedTuple):
  """Counters that are equal on all replicas and stages."""

  skipped_steps: jax.Array  # int32 [], steps with non-finite gradients
  # int32 [], first steps with equal gradients on all replicas; -1 once they
  # differed (`comm.agreement.count_identical`)
  identical_steps: jax.Array
  # int32 [], comparisons that found diverged replicas
  # (`comm.agreement.have_parted`)
  parted_steps: jax.Array
  left_out: jax.Array  # int32 [], leaves that a mask keeps from the reducer


class SkipStats(NamedTuple):
  """Counters of `skip_nonfinite`."""

  skipped_steps: jax.Array  # int32 []
  consecutive_skips: jax.Array  # int32 [], skips in a row up to this step
  max_consecutive: jax.Array  # int32 [], constant: skips before a warning


def first_stats(
  dense_bytes: int, report: Report, matrices: MatrixStats
) -> Stats:
  """Returns the statistics before the first step.

  Args:
    dense_bytes: Bytes of a dense float32 all-reduce of all leaves.
    report: From the policy's first state.
    matrices: Zeros for each matrix.
  """
  # A new array for every field: an array used twice cannot be donated.
  zero = functools.partial(jnp.zeros, (), jnp.float32)
  return Stats(
    entropy=report.entropy,
    rank=jnp.zeros((), jnp.int32),
    rung=jnp.zeros((), jnp.int32),
    wire_bytes=zero(),
    mean_wire_bytes=zero(),
    dense_bytes=jnp.array(dense_bytes, jnp.float32),
    relative_error=zero(),
    predicted_error=report.predicted_error,
    scale_jumps=report.scale_jumps,
    residual_norm=zero(),
    matrices=matrices,
  )


class Account(NamedTuple):
  """Measurements of one step; energies in units of `unit` squared."""

  rank: jax.Array  # int32 []
  rung: jax.Array  # int32 []
  wire_bytes: jax.Array  # float32 []
  lost: jax.Array  # float32 [], energy not sent, summed over all matrices
  energy: jax.Array  # float32 [], |mean of gradients and residuals|^2
  residual_energy: jax.Array  # float32 [], mean over replicas of |residual|^2
  unit: jax.Array  # float32 [], positive
  is_finite: jax.Array  # bool []
  report: Report
  matrices: MatrixStats


def next_stats(old: Stats, account: Account, count: jax.Array) -> Stats:
  """Returns the statistics of step `count`.

  Errors keep their old values if this step's are not finite.

  Args:
    old: The statistics of the step before.
    account: Measurements of this step.
    count: int32 [], steps done before.
  """
  # |mean residual|^2 / |mean M|^2
  lost_share = share(account.lost, account.energy)
  norm = account.unit * jnp.sqrt(account.residual_energy)
  is_measured = (
    account.is_finite & jnp.isfinite(lost_share) & jnp.isfinite(norm)
  )
  keep = lambda new, old: jax.tree.map(  # noqa: E731
    lambda n, o: jnp.where(is_measured, n, o), new, old
  )
  # mean' = mean + (bytes - mean) / steps
  more = (account.wire_bytes - old.mean_wire_bytes) / (count + 1)
  return Stats(
    entropy=account.report.entropy,
    rank=account.rank,
    rung=account.rung,
    wire_bytes=account.wire_bytes,
    mean_wire_bytes=old.mean_wire_bytes + more,
    dense_bytes=old.dense_bytes,
    relative_error=keep(lost_share, old.relative_error),
    predicted_error=account.report.predicted_error,
    scale_jumps=account.report.scale_jumps,
    residual_norm=keep(norm, old.residual_norm),
    matrices=account.matrices._replace(
      error=keep(account.matrices.error, old.matrices.error)
    ),
  )


def metrics(opt_state: Any) -> dict[str, Any]:
  """Returns the statistics of the newest step from any optimiser state.

  Finds the reducer inside `optax.chain`, `named_chain`, `masked`, `partition`,
  `MultiSteps`, `inject_hyperparams`, `accumulate` and `skip_nonfinite`. Of a
  state stacked by `pmap` it reads the first replica; statistics are equal on
  all. It takes one transfer from the device.

  On pipeline stages `entropy`, `rank` and the other statistics that differ by
  stage are lists with one entry per stage.

  Args:
    opt_state: Any optimiser state that holds one reducer of this package.

  Returns:
    Scalars by name:

    rank                 0 if dense, or if the reducer has no ranks
    rung                 index into the rank ladder
    wire_bytes           sent per replica in this step
    dense_bytes          of a dense float32 all-reduce
    compression_ratio    total dense over total wire bytes since the first step
    relative_error       share of |M|^2 that was not sent, M the mean of
                         gradient and residual; estimated, for factors of one
                         matrix with a standard deviation of a third
    residual_norm        of one replica, root mean square over replicas
    skipped_steps        steps skipped because of non-finite gradients
    parted_steps         comparisons, one every `check_every` steps, that found
                         replicas with different parameters or updates
    identical_gradients  1 if all replicas had the same gradients in the first
                         steps
    entropy              in nats; `edgc` only
    predicted_error      `relative_error` as the model predicts it; `edgc` only
    scale_jumps          windows in which the gradients of all matrices changed
                         by a common factor; `edgc` only
    consecutive_skips    under `skip_nonfinite` only

    And for each matrix, as {path: list over the matrices of the leaf}, on
    stages a list of stages of such lists: `matrix_rank`, `matrix_error`, and
    for `edgc` `matrix_entropy` and `matrix_predicted_error`.

  Raises:
    ValueError: if the state holds no reducer, or more than one.

  Warns:
    RuntimeWarning: if the gradients were the same on all replicas, if replicas
      have diverged, if gradients changed their scale, if a mask keeps leaves
      from the reducer, or if `skip_nonfinite` has skipped `max_consecutive`
      steps in a row.
  """
  found = find(opt_state, Stats)
  if len(found) != 1:
    raise ValueError(
      "`opt_state` must hold the state of exactly one reducer (such as edgc or"
      f" powersgd), got {len(found)}; pass the part of it that holds one."
    )
  (stats,), (checks,) = found, find(opt_state, Checks)
  skips = find(opt_state, SkipStats)
  by_stage = np.ndim(stats.rank) > np.ndim(checks.skipped_steps)
  if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(stats)):
    stats, checks, skips = jax.device_get((stats, checks, skips))
    first = lambda x: np.ravel(x)[0].item()  # noqa: E731
    checks, skips = jax.tree.map(first, (checks, skips))
    if not by_stage:
      stats = _of_one_replica(stats)
    _warn(checks, skips)
    _warn_of_scale(stats)
    _warn_of_masks(opt_state, checks)
  values = stats._asdict()
  del values["mean_wire_bytes"]
  for name, tree in values.pop("matrices")._asdict().items():
    values[f"matrix_{name}"] = _by_path(tree)
  values |= {
    "compression_ratio": _ratio(stats.dense_bytes, stats.mean_wire_bytes),
    "skipped_steps": checks.skipped_steps
    + sum(skip.skipped_steps for skip in skips),
    "parted_steps": checks.parted_steps,
    "identical_gradients": (checks.identical_steps >= CHECKED_STEPS) * 1,
  }
  if skips:
    values["consecutive_skips"] = skips[0].consecutive_skips
  to_list = lambda x: x.tolist() if isinstance(x, np.ndarray) else x  # noqa: E731
  # Statistics that are not measured are None, or for matrices empty.
  values = {n: v for n, v in values.items() if jax.tree.leaves(v)}
  return jax.tree.map(to_list, values)


def _by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, as in "blocks/kernel"."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): value
    for path, value in leaves
  }


def _of_one_replica(stats: Stats) -> Stats:
  """Returns the first replica's statistics if `pmap` stacked them."""
  if np.ndim(stats.rank):
    stats = jax.tree.map(lambda x: x[0], stats)
  return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), stats)


def find(tree: Any, kind: type) -> list:
  """Returns all subtrees of a state that are of one type, in order."""
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
  return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _ratio(dense: Any, sent: Any) -> Any:
  """Returns dense over sent bytes, elementwise; 1 where nothing was sent."""
  if isinstance(sent, float):
    return dense / sent if sent > 0 else 1.0
  np_like = jnp if isinstance(sent, jax.core.Tracer) else np
  safe = np_like.where(sent > 0, sent, 1.0)
  return np_like.where(sent > 0, dense / safe, 1.0)


def _warn_of_masks(opt_state: Any, checks: Checks) -> None:
  """Warns of leaves that a mask keeps from the only reducer."""
  masked = find(opt_state, optax.MaskedState)
  is_masked = any(find(state.inner_state, Checks) for state in masked)
  # Under optax.partition another transformation takes the other leaves.
  parts = find(opt_state, optax.transforms.PartitionState)
  is_part = any(find(part.inner_states, Checks) for part in parts)
  if is_masked and not is_part and checks.left_out:
    warnings.warn(
      f"optax.masked keeps {checks.left_out} leaves from the reducer, so their"
      " gradients are not averaged, and replicas diverge, unless they are"
      " frozen. Remove the mask and send these leaves dense, with"
      " matrix_view=lambda path, shape: None for them, or pass them to"
      " edgc_jax.allreduce() under the opposite mask.",
      RuntimeWarning,
      stacklevel=3,
    )


def _warn_of_scale(stats: Stats) -> None:
  """Warns if the scale of all gradients changed, which moves the rank."""
  if stats.scale_jumps is not None and np.max(stats.scale_jumps):
    warnings.warn(
      f"In {np.max(stats.scale_jumps)} windows the gradients of all matrices"
      " changed by one common factor, which moves the rank as a change of"
      " entropy does. Undo loss scaling before the reducer; if the weight of"
      " the loss changes, call edgc_jax.rescale_gradients.",
      RuntimeWarning,
      stacklevel=3,
    )


def _warn(checks: Checks, skips: list[SkipStats]) -> None:
  """Warns of equal gradients, diverged replicas and repeated skips."""
  if checks.identical_steps >= CHECKED_STEPS:
    warnings.warn(
      "All replicas had the same gradients in the first steps. Either they were"
      " averaged before the reducer, so that compression saves nothing, or all"
      " replicas read the same data. Remove the pmean of the gradients, or give"
      " every replica its own part of the batch.",
      RuntimeWarning,
      stacklevel=3,
    )
  if checks.parted_steps:
    warnings.warn(
      f"Replicas held different parameters, or applied different updates, at"
      f" {checks.parted_steps} of the steps at which they were compared: since"
      " then they train different models. Start all replicas from equal"
      " parameters and average every leaf; after a hardware fault resume from a"
      " checkpoint, or copy the first replica's state with"
      " edgc_jax.follow_first_replica.",
      RuntimeWarning,
      stacklevel=3,
    )
  for skip in skips:
    if skip.consecutive_skips >= skip.max_consecutive:
      warnings.warn(
        f"{skip.consecutive_skips} steps in a row had non-finite gradients and"
        " were skipped: training makes no progress. Lower the learning rate,"
        " or check the data of these steps.",
        RuntimeWarning,
        stacklevel=3,
      )
