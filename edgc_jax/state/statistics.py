"""Statistics that a reducer keeps in its state; trees like the parameters."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax.adaptation.policy import Report
from edgc_jax.compression.base import Exchange
from edgc_jax.plan.leaves import Measurement, share
from edgc_jax.plan.plan import Plan


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
  pick = functools.partial(jnp.where, is_measured)
  keep = functools.partial(jax.tree.map, pick)
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


def measurement_of(result: Exchange) -> Measurement:
  """Joins the energies of all matrices of an exchange, in its own unit."""
  if not result.columns:
    return Measurement(
      jnp.zeros((0,), jnp.float32), jnp.zeros((0, 0), jnp.float32)
    )
  width = max(c.shape[1] for c in result.columns)
  columns = [
    jnp.pad(c, ((0, 0), (0, width - c.shape[1]))) for c in result.columns
  ]
  return Measurement(jnp.concatenate(result.lost), jnp.concatenate(columns))


def total_energies(
  results: Sequence[Exchange], measured: Sequence[Measurement]
) -> dict[str, jax.Array]:
  """Sums energies over all exchanges, in their largest unit squared."""
  unit = jnp.max(jnp.stack([result.unit for result in results]))
  squared = [jnp.square(result.unit / unit) for result in results]
  energies = {
    "lost": [m.lost for m in measured],
    "energy": [m.energy for m in measured],
    "residual_energy": [
      sum([jnp.sum(x) for x in result.residual_energy], 0.0 * unit)
      for result in results
    ],
  }
  totals = {
    name: sum([jnp.sum(x) * s for x, s in zip(own, squared, strict=True)])
    for name, own in energies.items()
  }
  return {**totals, "unit": unit}


def matrix_stats(
  plans: Sequence[Plan],
  tree: Any,
  report: Report,
  ranks: Sequence[jax.Array],
  errors: Sequence[jax.Array],
) -> MatrixStats:
  """Splits arrays over the matrices of each plan into trees like `tree`."""
  values = MatrixStats(
    [report.matrix_entropy], ranks, errors, [report.matrix_predicted_error]
  )
  by_leaf = [
    [p.by_leaf(v) for p, v in zip(plans, own, strict=False) if v is not None]
    for own in values
  ]
  places = [plan.places(plan.compressible) for plan in plans]
  return MatrixStats(
    *[
      as_tree(places[: len(own)], tree, own) if own else None for own in by_leaf
    ]
  )


def masked_leaves(params: Any) -> int:
  """Counts the leaves that `optax.masked` keeps from this transformation."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  leaves = jax.tree.leaves(params, is_leaf=is_masked)
  return sum(map(is_masked, leaves))


def as_tree(
  places: Sequence[Sequence[int]], tree: Any, values: Sequence[Sequence]
) -> Any:
  """Arranges one value per compressible leaf in a tree like `tree`.

  Args:
    places: Indices of the compressible leaves of some or all plans.
    tree: Parameters or gradients.
    values: For each plan, one value per compressible leaf.

  Returns:
    The tree, with `optax.MaskedNode` in place of leaves without a value.
  """
  structure = jax.tree.structure(tree)
  slots: list[Any] = [optax.MaskedNode()] * structure.num_leaves
  for own_places, own in zip(places, values, strict=True):
    for place, value in zip(own_places, own, strict=True):
      slots[place] = value
  return jax.tree.unflatten(structure, slots)


def from_tree(places: Sequence[Sequence[int]], tree: Any) -> list[list[Any]]:
  """Returns the values that `as_tree` arranged; empty lists if there are none.

  Args:
    places: As for `as_tree`.
    tree: Its result, or an empty tree.
  """
  values = jax.tree.leaves(tree)
  if not values:
    return [[] for _ in places]
  in_order = sorted(place for own in places for place in own)
  by_place = dict(zip(in_order, values, strict=True))
  return [[by_place[place] for place in own] for own in places]
