"""Exchanges every H steps: replicas train alone, then average what they moved.

`local_params` returns the parameters at which a replica differentiates.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from edgc_jax import validation
from edgc_jax.leaves.review import reducers_seen
from edgc_jax.mesh.sharding import (
  require_mesh,
  specs_like,
  start_on_mesh,
  state_specs,
)
from edgc_jax.state.metrics import find
from edgc_jax.state.state import LocalStepsState, PerReplica, ReducerState
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  every: int,
  axis_name: AxisName = "data",
  *,
  fragments: int = 1,
  overlap: bool = False,
  mesh: Mesh | None = None,
  param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Trains every replica alone for H = `every` steps, then averages.

  The parameters x stay common to all replicas. Replica i differentiates at its
  own parameters x + d_i, from `local_params`, and its own inner optimiser moves
  them:

    d_i <- d_i + inner(gradient_i)                  each step, sends nothing
    x <- x + outer(mean_i -d_i),    d_i <- 0        every H steps

  `outer` gets the difference of parameters -d_i as its gradient, and its first
  link, any reducer of this package, averages it, in as few bits as it likes:

    outer = optax.chain(
        edgc_jax.quantize(4, error_feedback=True),
        optax.sgd(0.7, momentum=0.9, nesterov=True))
    tx = edgc_jax.local_steps(optax.adamw(1e-3), outer, every=30)

    local = edgc_jax.local_params(params, opt_state)    # inside pmap
    grads = jax.grad(loss_fn)(local, batch)
    updates, opt_state = tx.update(
        grads, opt_state, params, local_params=local)
    params = optax.apply_updates(params, updates)

  In plain `jax.jit`, with `mesh`, the own parameters are stacked:

    local = edgc_jax.local_params(params, opt_state, mesh)  # [N, ...]
    loss, grads = edgc_jax.value_and_grad(
        loss_fn, mesh, is_local=True)(local, batch)

  Evaluate and save `params`. `optax.sgd(1.0)` as the outer rule is plain
  averaging; with few steps in a round, or high inner rates, momentum of the
  outer rule diverges.

  A replica whose gradient is not finite skips that inner step alone. A round in
  which a difference is not finite is skipped by the reducer, and all replicas
  start again from the common parameters.

  Wire: 0 bytes in most steps; at an exchange, what the reducer sends, of the
  leaves of one fragment. Memory: an inner state and one float32 copy of the
  parameters for each replica.

  Args:
    inner: The optimiser of a replica, without collectives over `axis_name`.
    outer: A chain whose first link is a reducer over `axis_name`.
    every: Inner steps of a round, H.
    axis_name: The axis of the replicas, or a tuple of axes.
    fragments: Parts of about equal size into which leaves are divided, F. One
      part is exchanged every H / F steps, so the most bytes of a step fall by
      up to F: a leaf is not divided. It divides `every`.
    overlap: Whether an exchange takes place one step later, at the same time
      as that step: it does not depend on the step's gradient, which a backend
      with asynchronous collectives uses. The step's own move is kept:

        x <- x + outer(mean_i -d_i),    d_i <- inner(gradient_i)
    mesh: The mesh of the training in plain `jax.jit`, as for the reducer.
    param_specs: As for the reducer.

  Returns:
    A gradient transformation. `update` takes local gradients, the common
    parameters and, by name, `local_params`; its updates are zero between the
    exchanges.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range; in `init`, if `outer` holds no
      reducer, or `inner` holds one; in `update`, without parameters.

  References:
    DiLoCo, Douillard et al. 2023, arXiv:2311.08105; fragments, Streaming
    DiLoCo, Douillard et al. 2025, arXiv:2501.18512. Departures: fragments are
    leaves, not layers; after an overlap the own parameters are the common ones
    and the step's move, without mixing.

  >>> outer = optax.chain(optax.sgd(1.0))  # after a reducer
  >>> tx = local_steps(optax.adam(1e-3), outer, every=10)
  """
  validation.require_int("every", every, 1)
  validation.require_int("fragments", fragments, 1)
  validation.require_flag("overlap", overlap)
  order.require_names("axis_name", axis_name)
  validation.require(
    every % fragments == 0,
    "fragments",
    fragments,
    f"a divisor of every={every}",
    "choose one",
  )
  require_mesh(mesh, axis_name, param_specs)
  inner = optax.with_extra_args_support(inner)
  outer = optax.with_extra_args_support(outer)
  period = every // fragments

  def is_stacked() -> bool:
    """Whether arrays have an axis of all replicas, in plain `jax.jit`."""
    return mesh is not None and not order.is_bound(axis_name)

  def start(params: optax.Params, count: int) -> tuple[Any, Any, Any]:
    """Returns skipped steps, offsets and inner states of some replicas."""
    offset = jax.tree.map(
      lambda p: jnp.zeros((count, *jnp.shape(p)), jnp.float32), params
    )
    inner_state = jax.tree.map(
      lambda x: jnp.repeat(jnp.asarray(x)[None], count, axis=0),
      inner.init(params),
    )
    return jnp.zeros((count,), jnp.int32), offset, inner_state

  def start_all(params: optax.Params) -> tuple[Any, Any, Any]:
    """Returns the same of all replicas, each on its devices."""
    assert mesh is not None
    of_inner = state_specs(
      inner, params, axis_name, mesh=mesh, param_specs=param_specs
    )
    specs = PartitionSpec(), specs_like(param_specs, params), of_inner
    return start_on_mesh(start, params, specs, mesh, axis_name)

  def init_fn(params: optax.Params) -> LocalStepsState:
    own = start_all(params) if is_stacked() else start(params, 1)
    params = _wide(params)
    parts = _parts(params, fragments)
    if fragments > 1:  # reviews all leaves once, and not those of a fragment
      # As a new function, because JAX does not trace one a second time.
      jax.eval_shape(lambda p: outer.init(p), params)
    with reducers_seen() if fragments > 1 else contextlib.nullcontext():
      outer_state = tuple(outer.init(part) for part in parts)
    _require_reducers(own[2], outer_state)
    return LocalStepsState(
      jnp.zeros((), jnp.int32),
      jnp.array(every, jnp.int32),
      jnp.array(-1, jnp.int32),
      *map(PerReplica, own),
      outer_state,
    )

  def update_fn(
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    local_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    _require_arguments(params, local_params, extra_args)
    stacked = is_stacked()

    def own(gradient: Any, inner_state: Any, local: Any) -> tuple:
      """One inner step of one replica."""
      found, new = inner.update(gradient, inner_state, local, **extra_args)
      ok = order.all_finite(gradient)
      move = jax.tree.map(
        lambda u: jnp.where(ok, u.astype(jnp.float32), 0.0), found
      )
      kept = jax.tree.map(
        lambda new, old: jnp.where(ok, new, old), new, inner_state
      )
      return move, kept, (~ok).astype(jnp.int32)

    def lift(tree: Any) -> Any:
      return tree if stacked else jax.tree.map(lambda x: x[None], tree)

    step_all = jax.vmap(own, spmd_axis_name=axis_name if stacked else None)
    move, inner_state, skipped = step_all(
      lift(updates), state.inner_state.values, lift(local_params)
    )
    before = state.offset.values
    # d_i <- d_i + inner(gradient_i)
    after = jax.tree.map(jnp.add, before, move)
    done = state.step + (0 if overlap else 1)
    is_due = (done > 0) & (done % period == 0)
    # The gradient of the outer chain: -d_i.
    sent = jax.tree.map(
      lambda d: -d if stacked else -d[0], before if overlap else after
    )
    own_parts = _parts(_wide(params), fragments)
    sent_parts = _parts(sent, fragments)

    def exchange(k: int, outer_state: Any) -> tuple[Any, Any]:
      found, new = outer.update(
        sent_parts[k], outer_state[k], own_parts[k], **extra_args
      )
      return found, (*outer_state[:k], new, *outer_state[k + 1 :])

    shapes = [
      jax.eval_shape(lambda s, k=k: exchange(k, s)[0], state.outer_state)
      for k in range(fragments)
    ]

    def branch(k: int | None, outer_state: Any) -> tuple[Any, Any]:
      """Exchanges fragment k, or nothing."""
      found = [jax.tree.map(collectives.zeros_like_type, s) for s in shapes]
      if k is not None:
        found[k], outer_state = exchange(k, outer_state)
      return _joined(found), outer_state

    exchanged = jnp.where(is_due, (done // period - 1) % fragments, -1)
    found, outer_state = jax.lax.switch(
      exchanged + 1,
      [
        lambda s, k=k: branch(k, s)
        for k in (None, *range(fragments))
      ],
      state.outer_state,
    )  # fmt: skip
    number = _joined(
      [
        jax.tree.map(lambda _, k=k: k, part)
        for k, part in enumerate(own_parts)
      ]
    )  # fmt: skip
    # d_i <- 0, or the move of a step that the exchange did not wait for
    offset = jax.tree.map(
      lambda k, moved, d: jnp.where(
        exchanged == k, moved if overlap else 0.0, d
      ),
      number,
      move,
      after,
    )
    return found, LocalStepsState(
      state.step + 1,
      jnp.array(every, jnp.int32),
      exchanged,
      PerReplica(state.skipped.values + skipped),
      PerReplica(offset),
      PerReplica(inner_state),
      outer_state,
    )

  return optax.GradientTransformationExtraArgs(
    init_fn,
    update_fn,  # ty: ignore[invalid-argument-type] takes its own state alone
  )


def local_params(
  params: Any, opt_state: optax.OptState, mesh: Mesh | None = None
) -> Any:
  """Returns the parameters at which a replica differentiates, x + d_i.

  Args:
    params: The common parameters, x.
    opt_state: A state with the state of `local_steps` in it.
    mesh: The mesh in plain `jax.jit`; None where the axis of the replicas is
      bound.

  Returns:
    The replica's own parameters, like `params`; with a mesh those of all N
    replicas, [N, *shape], for
    `edgc_jax.value_and_grad(loss_fn, mesh, is_local=True)`.

  Raises:
    ValueError: if the state holds no state of `local_steps`, or several, or
      one of several replicas without a mesh.
  """
  found = find(opt_state, LocalStepsState)
  validation.require(
    len(found) == 1,
    "opt_state",
    type(opt_state),
    f"a state with one state of local_steps in it ({len(found)} are)",
    "pass the state that `init` or `update` of local_steps returned",
  )
  replicas = len(found[0].skipped.values)
  validation.require(
    mesh is not None or replicas == 1,
    "mesh",
    mesh,
    f"the mesh of the training for a state of {replicas} replicas",
    "pass mesh= in plain jax.jit",
  )
  # x + d_i
  return jax.tree.map(
    lambda p, d: (p + (d if mesh else d[0])).astype(jnp.result_type(p)),
    params,
    found[0].offset.values,
  )


def _wide(params: Any) -> Any:
  """Returns parameters in the dtype of their differences."""
  return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)


def _parts(tree: Any, count: int) -> list[Any]:
  """Divides a tree into parts of about equal size.

  Returns:
    Trees like it, with None in place of the leaves of other parts.

  Raises:
    ValueError: if a part would be empty.
  """
  leaves, structure = jax.tree.flatten(tree)
  validation.require(
    count <= max(len(leaves), 1),
    "fragments",
    count,
    f"at most {len(leaves)}, the number of leaves",
    "choose fewer",
  )
  sizes = [0] * count
  parts: list[list[Any]] = [[None] * len(leaves) for _ in range(count)]
  # The largest leaves first, each to the smallest part.
  for i in sorted(range(len(leaves)), key=lambda i: (-jnp.size(leaves[i]), i)):
    k = min(range(count), key=lambda k: (sizes[k], k))
    parts[k][i] = leaves[i]
    sizes[k] += jnp.size(leaves[i])
  return [jax.tree.unflatten(structure, part) for part in parts]


def _joined(parts: Sequence[Any]) -> Any:
  """Reverses `_parts`."""
  is_none = lambda x: x is None  # noqa: E731
  return jax.tree.map(
    lambda *found: next((x for x in found if x is not None), None),
    *parts,
    is_leaf=is_none,
  )


def _require_reducers(inner_state: Any, outer_state: Any) -> None:
  """Raises unless the outer chain alone averages."""
  validation.require(
    not find(inner_state, ReducerState),
    "inner",
    "a chain with a reducer",
    "the optimiser of one replica, which sends nothing",
    "move the reducer to the beginning of `outer`",
  )
  validation.require(
    all(find(state, ReducerState) for state in outer_state),
    "outer",
    "a chain without a reducer",
    "a chain whose first link averages over the replicas",
    "put edgc_jax.allreduce(), or a reducer that compresses, first",
  )


def _require_arguments(params: Any, local: Any, extra_args: Any) -> None:
  """Raises unless `update` got what it needs."""
  validation.require(
    params is not None,
    "params",
    params,
    "the common parameters",
    "pass them to `update`",
  )
  validation.require(
    local is not None,
    "local_params",
    local,
    "the own parameters of a replica, at which it differentiates",
    "pass local_params=edgc_jax.local_params(params, opt_state), and compute"
    " the gradients there",
  )
  validation.require(
    extra_args.get("late_updates") is None,
    "late_updates",
    extra_args.get("late_updates"),
    "None under `local_steps`",
    "pipeline stages exchange at every step",
  )
