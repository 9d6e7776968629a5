"""Reads the statistics of a reducer from any optimiser state.

`metrics` also warns of common mistakes, which the statistics show.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from edgc_jax import validation
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.leaves.leaf import LeafStats, is_leaf_state, without_variables
from edgc_jax.state.growth import DIVERGING, WINDOW
from edgc_jax.state.state import (
  Checks,
  LocalStepsState,
  Parts,
  ReducerState,
  SkipStats,
  Stats,
  parts_of,
)
from edgc_jax.wire import collectives
from edgc_jax.wire.agreement import CHECKED_STEPS
from edgc_jax.wire.order import varying_axes

_LARGE_CHANGE = 0.5  # nats from one window to the next: a factor of 1.6


def metrics(opt_state: Any) -> dict[str, Any]:
  """Returns the statistics of the newest step from any optimiser state.

  Finds the reducer inside `optax.chain`, `named_chain`, `masked`, `partition`,
  `MultiSteps`, `inject_hyperparams`, `accumulate` and `skip_nonfinite`. Of a
  state stacked by `pmap` it reads the first replica; statistics are equal on
  all. It takes one transfer from the device.

  On pipeline stages `entropy`, `rank` and the other statistics that differ by
  stage are lists with one entry per stage. On shards bytes are the sum over all
  shards (of a stage) of a replica, and errors and entropies are means; inside
  `shard_map` the shards gather their statistics, some values for each matrix.

  Args:
    opt_state: Any optimiser state that holds one reducer of this package, or
      an optimiser of Flax NNX.

  Returns:
    Scalars by name:

    - `rank`: 0 if dense, or if the reducer has no ranks.
    - `wire_bytes`: sent per replica in this step; under `accumulate` and
      `optax.MultiSteps` at the newest update.
    - `dense_bytes`: of a dense float32 all-reduce.
    - `compression_ratio`: total dense over total wire bytes since the first
      step.
    - `relative_error`: share of |M|^2 that was not sent, M the mean of gradient
      and residual; estimated, for factors of one matrix with a standard
      deviation of a third; not of methods that do not measure it.
    - `residual_norm`: of one replica, root mean square over replicas. Both are
      0 in dense steps, whose rounding in a code is not measured.
    - `diverging_windows`: windows of 50 steps in a row in which the residual
      has grown, and is larger than all gradients so far together; from 2 on
      error feedback diverges (`state.growth`). The most of all shards.
    - `skipped_steps`: steps skipped because of non-finite gradients.
    - `diverged_steps`: comparisons, one every `check_every` steps, that found
      replicas with different parameters or updates.
    - `identical_gradients`: 1 if all replicas had the same gradients in the
      first steps.
    - `entropy`: in nats; `edgc` only.
    - `predicted_error`: `relative_error` as the model predicts it, for `edgc`
      and with `allocation="error"`.
    - `consecutive_skips`: under `skip_nonfinite` only.
    - `skipped_inner_steps`: under `local_steps` only, outside of `jit` and in
      one process, since nothing is sent for it: steps that single replicas
      skipped, of all replicas.

    Under `local_steps` no bytes are sent between exchanges, compression
    compares a whole round with a dense all-reduce at each of its steps, and the
    other statistics are of the newest exchange.

    And for each matrix, as {path: list over the matrices of the leaf}, on
    stages or shards a list of such lists, and on both a list by stage of lists
    by shard: `matrix_rank`, `matrix_error`, and where they are known
    `matrix_entropy` and `matrix_predicted_error`.

  Raises:
    ValueError: if the state holds no reducer, or more than one.

  Warns:
    RuntimeWarning: if the gradients were the same on all replicas, if replicas
      have diverged, if a mask keeps leaves from the reducer, if another link
      comes before it, if `skip_nonfinite` has skipped `max_consecutive` steps
      in a row, or if residuals outgrow the gradients. Of `edgc`: if the run is
      past `total_steps`, or the entropy has jumped by more than 0.5 nats from
      one window to the next after the warm-up, as with another batch size.
  """
  rounds = find(opt_state, LocalStepsState)
  if len(rounds) == 1:
    _warn_of_order(opt_state)
    return _of_rounds(rounds[0])
  found = find(opt_state, ReducerState)
  if len(found) != 1:
    raise ValueError(
      "`opt_state` must hold the state of exactly one reducer (such as edgc or"
      f" powersgd), got {len(found)}; pass the part of it that holds one, such"
      ' as opt_state.inner_states["matrix"].inner_state of optax.partition, or'
      " the optimiser itself if it is one of Flax NNX."
    )
  stats, checks, leaves = found[0].stats, found[0].checks, _by_path(found[0])
  skips = find(opt_state, SkipStats)
  windows = [
    (found[0].count, budget.total_steps, budget.last_change)
    for budget in find(found[0].budget, EntropyState)
  ]
  parts = parts_of(found[0])
  if parts.shards:
    stats, leaves = _of_all_shards(stats, leaves, parts)
  tree = (stats, checks, skips, leaves, windows)
  if not any(isinstance(x, Tracer) for x in jax.tree.leaves(tree)):
    stats, checks, skips, leaves, windows = jax.device_get(tree)
    first = lambda x: np.ravel(x)[0].item()  # noqa: E731
    is_stacked = np.ndim(checks.skipped_steps) > 0
    checks, skips = jax.tree.map(first, (checks, skips))
    if not parts.stages:
      stats, leaves = _of_one_replica(stats, leaves, is_stacked)
    _warn(checks, skips)
    _warn_of_growth(stats)
    for window in windows:
      _warn_of_windows(*map(np.ravel, window))
    _warn_of_masks(opt_state, checks)
    _warn_of_order(opt_state)
  values = stats._asdict()
  del values["mean_wire_bytes"]
  for name in LeafStats._fields:
    values[f"matrix_{name}"] = {
      path: getattr(own, name)
      for path, own in leaves.items()
      if getattr(own, name) is not None
    }
  values |= {
    "compression_ratio": _ratio(stats.dense_bytes, stats.mean_wire_bytes),
    "skipped_steps": checks.skipped_steps
    + sum(skip.skipped_steps for skip in skips),
    "diverged_steps": checks.diverged_steps,
    "identical_gradients": (checks.identical_steps >= CHECKED_STEPS) * 1,
  }
  if skips:
    values["consecutive_skips"] = skips[0].consecutive_skips
  to_list = lambda x: x.tolist() if isinstance(x, np.ndarray) else x  # noqa: E731
  # Statistics that are not measured are None, or for matrices empty.
  values = {n: v for n, v in values.items() if jax.tree.leaves(v)}
  return jax.tree.map(to_list, values)


def _of_rounds(state: LocalStepsState) -> dict[str, Any]:
  """Returns the statistics of the reducer of local steps, by step."""
  values = metrics(state.outer_state)
  is_traced = isinstance(state.every, Tracer)
  every, exchanged = (
    x if is_traced else np.ravel(x)[0].item()
    for x in (state.every, state.exchanged)
  )
  values["wire_bytes"] = exchanged * values["wire_bytes"]
  if is_traced or values["dense_bytes"]:  # of H steps over those of a round
    values["compression_ratio"] = every * values["compression_ratio"]
  skipped = state.skipped.values
  if not is_traced and getattr(skipped, "is_fully_addressable", True):
    values["skipped_inner_steps"] = np.sum(jax.device_get(skipped)).item()
  return values


def _by_path(state: ReducerState) -> dict[str, LeafStats]:
  """Returns the statistics of leaves by path, as in "blocks/kernel"."""
  leaves = jax.tree_util.tree_leaves_with_path(
    state.leaves, is_leaf=is_leaf_state
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf.stats
    for path, leaf in leaves
    if leaf.stats is not None
  }


def _of_all_shards(
  stats: Stats, leaves: dict[str, LeafStats], parts: Parts
) -> tuple[Stats, dict[str, LeafStats]]:
  """Joins the statistics of all shards of a replica, [S, F, ...].

  Bytes and energies add up, shares are averaged, and the rank is common.
  Statistics of matrices keep the axis of shards. Inside `shard_map` the shards
  are gathered first.
  """
  own = (stats._asdict(), leaves)
  rank = own[0].pop("rank")  # the same on all shards
  axes = set(varying_axes(stats.wire_bytes)) - set(varying_axes(rank))
  if axes:
    own = jax.tree.map(
      lambda x: x.reshape(1, -1, *x.shape[3:]),
      collectives.gather(own, tuple(sorted(axes))),
    )
  if not parts.stages:
    own = jax.tree.map(lambda x: x[0], own)

  def join(name: str, x: Any) -> Any:
    if x is None:
      return None
    axis = int(parts.stages)  # of the shards
    if name.endswith("bytes"):
      return x.sum(axis)
    if name == "residual_norm":
      return (x**2).sum(axis) ** 0.5
    if name == "diverging_windows":
      return x.max(axis)
    return x.mean(axis)

  joined = {name: join(name, x) for name, x in own[0].items()}
  return Stats(rank, **joined), own[1]


def _of_one_replica(
  stats: Stats, leaves: dict[str, LeafStats], is_stacked: bool
) -> tuple[Stats, dict[str, LeafStats]]:
  """Returns the first replica's statistics if `pmap` stacked them."""
  if is_stacked:
    stats, leaves = jax.tree.map(lambda x: x[0], (stats, leaves))
  return jax.tree.map(lambda x: x if np.ndim(x) else x.item(), stats), leaves


def find(tree: Any, kind: type) -> list:
  """Returns all subtrees of a state that are of one type, in order.

  They have plain arrays, also in an optimiser of Flax NNX.
  """
  leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
  return [without_variables(leaf) for leaf in leaves if isinstance(leaf, kind)]


def _ratio(dense: Any, sent: Any) -> Any:
  """Returns dense over sent bytes, elementwise; 1 where nothing was sent."""
  if isinstance(sent, float):
    return dense / sent if sent > 0 else 1.0
  np_like = jnp if isinstance(sent, Tracer) else np
  safe = np_like.where(sent > 0, sent, 1.0)
  return np_like.where(sent > 0, dense / safe, 1.0)


def _warn_of_windows(
  count: np.ndarray, total: np.ndarray, change: np.ndarray
) -> None:
  """Warns of a run past its length, and of another batch size."""
  if 0 < total[0] < count[0]:
    validation.warn(
      f"The run is past total_steps={total[0]}, from which edgc chose window"
      " and warm-up. It goes on with the same window; pass the length of the"
      " whole run to have others."
    )
  if np.abs(change).max() > _LARGE_CHANGE:
    validation.warn(
      "The entropy of the gradients changed by more than"
      f" {_LARGE_CHANGE} nats from one window to the next. If replicas get"
      " batches several times as large or as small, or the loss has another"
      " scale, edgc takes that for a change of the gradients: call"
      " opt_state = edgc_jax.restart_reference(opt_state) when you change it."
    )


def _warn_of_growth(stats: Stats) -> None:
  """Warns of residuals that outgrow the gradients."""
  windows = 0 if stats.diverging_windows is None else stats.diverging_windows
  if np.any(np.asarray(windows) >= DIVERGING):
    validation.warn(
      f"For {DIVERGING} windows of {WINDOW} steps or more the residual has"
      " grown, and is larger than all gradients so far together: error feedback"
      " diverges, and the updates are wrong. Stop the run, and go back to a"
      " checkpoint from before with more bits, a larger rank or density, or a"
      " residual_decay below 1."
    )


def _warn_of_masks(opt_state: Any, checks: Checks) -> None:
  """Warns of leaves that a mask keeps from the only reducer."""
  masked = find(opt_state, optax.MaskedState)
  is_masked = any(find(state.inner_state, Checks) for state in masked)
  # Under optax.partition another transformation takes the other leaves.
  parts = find(opt_state, optax.transforms.PartitionState)
  is_part = any(find(part.inner_states, Checks) for part in parts)
  if is_masked and not is_part and checks.left_out:
    validation.warn(
      f"optax.masked keeps {checks.left_out} leaves from the reducer, so their"
      " gradients are not averaged, and replicas diverge, unless they are"
      " frozen. Remove the mask and send these leaves dense, with"
      " matrix_view=lambda path, shape: None for them."
    )


def has_links_before(state: Any) -> bool:
  """Returns whether a chain in a state has another link before the reducer."""
  is_chain = lambda x: type(x) is tuple  # noqa: E731
  for chain in filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain)):
    holds = [bool(find(link, ReducerState)) for link in chain]
    before = chain[: holds.index(True)] if any(holds) else ()
    # `mean_over` has a state that is neither.
    if find(before, optax.EmptyState) or jax.tree.leaves(before):
      return True
    if has_links_before(list(chain)):
      return True
  return False


def _warn_of_order(opt_state: Any) -> None:
  """Warns of other links before the reducer, which see local gradients."""
  if has_links_before(opt_state):
    validation.warn(
      "A link such as optax.clip_by_global_norm or optax.adam comes before the"
      " reducer in the chain. It sees the gradient of one replica, which is"
      " longer than the mean: it clips more, or learns the moments of one"
      " replica alone. Put the reducer first, and into `inner` of local_steps"
      " what replicas do alone; only edgc_jax.mean_over belongs before it."
    )


def _warn(checks: Checks, skips: list[SkipStats]) -> None:
  """Warns of equal gradients, diverged replicas and repeated skips."""
  if checks.identical_steps >= CHECKED_STEPS:
    validation.warn(
      "All replicas had the same gradients in the first steps. Either they were"
      " averaged before the reducer, so that compression saves nothing, or all"
      " replicas read the same data. Remove the pmean of the gradients, or give"
      " every replica its own part of the batch."
    )
  if checks.diverged_steps:
    validation.warn(
      "Replicas held different parameters, or applied different updates, at"
      f" {checks.diverged_steps} of the steps at which they were compared:"
      " since then they train different models. Start all replicas from equal"
      " parameters and average every leaf; after a hardware fault resume from a"
      " checkpoint, or copy the first replica's state with"
      " edgc_jax.follow_first_replica."
    )
  for skip in skips:
    if skip.consecutive_skips >= skip.max_consecutive:
      validation.warn(
        f"{skip.consecutive_skips} steps in a row had non-finite gradients and"
        " were skipped: training makes no progress. Lower the learning rate,"
        " or check the data of these steps."
      )
