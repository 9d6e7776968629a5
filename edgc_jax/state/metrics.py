"""Numbers of the newest step, read out of any optimiser state."""

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
  """Scalars that a reducer keeps in its state; None where it measures none.

  On pipeline stages each stage has its own, with an axis of one for the stage
  in front.
  """

  entropy: jax.Array | None  # float32 [], newest sample, nats
  rank: jax.Array  # int32 [], 0 is dense
  rung: jax.Array  # int32 [], index into the ladder
  wire_bytes: jax.Array  # float32 [], sent in this step over the replicas
  mean_wire_bytes: jax.Array  # float32 [], over all steps
  dense_bytes: jax.Array  # float32 [], of a float32 all-reduce
  relative_error: jax.Array  # float32 [], lost share of the energy
  predicted_error: jax.Array | None  # float32 [], the model's expectation
  scale_jumps: jax.Array | None  # int32 [], windows with one
  residual_norm: jax.Array  # float32 [], root mean square over replicas
  matrices: "MatrixStats"


class MatrixStats(NamedTuple):
  """The same numbers for each matrix: trees like the parameters, leaves [k].

  `optax.MaskedNode` stands where a leaf is always dense, or, for entropies
  and predictions, is not a stage's own. None where nothing is measured.
  """

  entropy: Any  # float32
  rank: Any  # int32, 0 is dense
  error: Any  # float32, lost share of the energy
  predicted_error: Any  # float32


class Checks(NamedTuple):
  """Counters that all replicas, and all stages, agree on."""

  skipped_steps: jax.Array  # int32 [], with non-finite gradients
  identical_steps: jax.Array  # int32 [], of the first, equal on all replicas
  # int32 [], checks that found replicas apart (`sentinel`)
  parted_steps: jax.Array
  left_out: jax.Array  # int32 [], leaves that a mask keeps from the reducer


class SkipStats(NamedTuple):
  """Scalars that `skip_nonfinite` keeps."""

  skipped_steps: jax.Array  # int32 []
  consecutive_skips: jax.Array  # int32 []
  max_consecutive: jax.Array  # int32 []


def first_stats(
  dense_bytes: int, report: Report, matrices: MatrixStats
) -> Stats:
  """The numbers before the first step."""
  # A new array for every field: one that served twice cannot be donated.
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
  """What one step measured; energies in units of `unit` squared."""

  rank: jax.Array  # int32 []
  rung: jax.Array  # int32 []
  wire_bytes: jax.Array  # float32 []
  lost: jax.Array  # float32 [], energy that was not sent, of all matrices
  energy: jax.Array  # float32 [], of the mean of gradients and residuals
  residual_energy: jax.Array  # float32 [], of a replica's residual, on average
  unit: jax.Array  # float32 [], positive
  is_finite: jax.Array  # bool []
  report: Report
  matrices: MatrixStats


def next_stats(old: Stats, account: Account, count: jax.Array) -> Stats:
  """Returns the numbers of step `count`.

  Errors stay as they were if they are not finite in this step.
  """
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
  """The newest step's numbers, from wherever the reducer's state lies.

  Looks inside `optax.chain`, `named_chain`, `masked`, `partition`,
  `MultiSteps`, `inject_hyperparams`, `accumulate` and `skip_nonfinite`. A
  state stacked by `pmap` gives its first replica's numbers; they are equal on
  all. One transfer from the device.

  On pipeline stages `entropy`, `rank` and the other numbers that differ by
  stage are lists with one entry a stage.

  Args:
    opt_state: Any optimiser state that holds one reducer of this package.

  Returns:
    Scalars by name: `rank` (0 is dense, or there are no ranks), `rung`,
    `wire_bytes` and `dense_bytes` (per replica and step), `compression_ratio`
    (total dense over total wire bytes since the first step), `relative_error`
    (share of |M|^2, M the mean of gradient and residual, that was not sent;
    estimated, for factors of one matrix with a standard deviation of a third),
    `residual_norm` (of a replica), `skipped_steps`, `parted_steps` (checks, one
    every `check_every` steps, that found replicas with different parameters or
    updates), `identical_gradients` (1 if all replicas had the same
    gradients in the first steps), for `edgc` also `entropy` (nats),
    `predicted_error` and `scale_jumps` (windows in which the gradients of all
    matrices changed their scale at once), under `skip_nonfinite` also
    `consecutive_skips`.
    And by matrix, as {path: list over the matrices of this leaf}, on stages
    with a list of stages in front: `matrix_rank`, `matrix_error`, for `edgc`
    also `matrix_entropy` and `matrix_predicted_error`.

  Raises:
    ValueError: if there is no reducer in the state, or more than one.

  Warns:
    RuntimeWarning: if the gradients were the same on all replicas, if replicas
      have parted, and if `skip_nonfinite` has skipped `max_consecutive` steps
      in a row.
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
  # Nothing measured is None, or for matrices an empty dictionary.
  values = {n: v for n, v in values.items() if jax.tree.leaves(v)}
  return jax.tree.map(to_list, values)


def _by_path(tree: Any) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): value
    for path, value in leaves
  }


def _of_one_replica(stats: Stats) -> Stats:
  """The first replica's numbers, where pmap stacked those of all."""
  if np.ndim(stats.rank):
    stats = jax.tree.map(lambda x: x[0], stats)
  return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), stats)


def find(tree: Any, kind: type) -> list:
  """All parts of a state that are of one type, in order."""
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
  return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _ratio(dense: Any, sent: Any) -> Any:
  """Dense over sent, elementwise; 1 where nothing was sent."""
  if isinstance(sent, float):
    return dense / sent if sent > 0 else 1.0
  np_like = jnp if isinstance(sent, jax.core.Tracer) else np
  safe = np_like.where(sent > 0, sent, 1.0)
  return np_like.where(sent > 0, dense / safe, 1.0)


def _warn_of_masks(opt_state: Any, checks: Checks) -> None:
  """Warns of leaves that a mask keeps from the only reducer."""
  masked = find(opt_state, optax.MaskedState)
  is_masked = any(find(state.inner_state, Checks) for state in masked)
  # There every leaf has a label, and with it somebody who takes it.
  parts = find(opt_state, optax.transforms.PartitionState)
  is_part = any(find(part.inner_states, Checks) for part in parts)
  if is_masked and not is_part and checks.left_out:
    warnings.warn(
      f"optax.masked keeps {checks.left_out} leaves from the reducer, so their"
      " gradients are not averaged, and unless they are frozen replicas part."
      " Send leaves dense with"
      " matrix_view=lambda path, shape: None for them in place of the mask, or"
      " give them to edgc_jax.allreduce() under the opposite mask.",
      RuntimeWarning,
      stacklevel=3,
    )


def _warn_of_scale(stats: Stats) -> None:
  """Warns where it is the scale of gradients that moved the rank."""
  if stats.scale_jumps is not None and np.max(stats.scale_jumps):
    warnings.warn(
      f"In {np.max(stats.scale_jumps)} windows the gradients of all matrices"
      " became larger or smaller at once, by one factor, which moves the rank"
      " as a change of entropy does. Undo loss scaling before the reducer, and"
      " tell it of another weight of the loss with edgc_jax.rescale_gradients.",
      RuntimeWarning,
      stacklevel=3,
    )


def _warn(checks: Checks, skips: list[SkipStats]) -> None:
  if checks.identical_steps >= CHECKED_STEPS:
    warnings.warn(
      "All replicas had the same gradients in the first steps: they were"
      " averaged before they came here, so compression saves nothing, or all"
      " replicas read the same data. Drop the pmean of the gradients, or give"
      " every replica its own part of the batch.",
      RuntimeWarning,
      stacklevel=3,
    )
  if checks.parted_steps:
    warnings.warn(
      f"Replicas held different parameters, or applied different updates, at"
      f" {checks.parted_steps} of the steps at which they were compared: from"
      " there on they train different models. Start them from equal parameters"
      " and average every leaf; after a fault of the hardware go on from a"
      " checkpoint, or take the first replica's state with"
      " edgc_jax.follow_first_replica.",
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
