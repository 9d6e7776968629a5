"""Exchanges every H steps: replicas train alone, then average what they moved.

`local_params` returns the parameters at which a replica differentiates.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from edgc_jax import validation
from edgc_jax.leaves import checks as leaf_checks
from edgc_jax.leaves.leaf import (
  NOT_LIKE_PARAMS,
  arrays_of,
  is_placeholder,
  leaves_in,
  masked_paths,
  without_variables,
)
from edgc_jax.leaves.review import Reviewed, reducers_seen, require_over
from edgc_jax.mesh.sharding import (
  mesh_here,
  require_mesh,
  specs_of,
  start_on_mesh,
  state_specs,
)
from edgc_jax.reducer.transformation import promoting, transformation
from edgc_jax.state.metrics import find, has_links_before
from edgc_jax.state.state import LocalStepsState, PerReplica, ReducerState
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  every: int,
  axis_name: AxisName = "data",
  *,
  overlap: int = 0,
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
        optax.sgd(1.0))
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

  A replica whose gradient or step is not finite skips that inner step alone. A
  round in which a difference is not finite is skipped by the reducer, and all
  replicas start again from the common parameters.

  A reducer in `outer` counts exchanges, not steps: divide its
  `total_steps`, `window`, `check_every` and the steps of schedules by `every`.

  With `overlap`, tau, an exchange may take tau steps. It begins at the end of a
  step; what was moved by then is set aside as s_i, and d_i goes on from zero:

    s_i <- d_i,    d_i <- 0                         at the beginning
    x <- x + outer(mean_i -s_i),    s_i <- 0        tau steps later

  Replicas differentiate at x + s_i + d_i, so what they move meanwhile is kept,
  and nothing is sent twice. The exchange depends on no gradient of these steps.
  One program runs it in the last of them, beside the forward and backward pass
  if the backend has asynchronous collectives. CPUs have none;
  `split_local_steps` takes the same steps with two programs.

  Wire: 0 bytes in most steps; at an exchange, what the reducer sends. Memory:
  an inner state and one float32 copy of the parameters for each replica; with
  `overlap` two copies.

  Args:
    inner: The optimiser of a replica, with its learning rate and the clipping
      of gradients, without collectives over `axis_name`.
    outer: A chain whose first link is a reducer over `axis_name`, and that ends
      in an outer rule.
    every: Inner steps of a round, H.
    axis_name: The axis of the replicas, or a tuple of axes.
    overlap: Inner steps from the beginning of an exchange until its result is
      applied, tau: 0 to `every`, so that one is in flight at most.
    mesh, param_specs: As for `on_mesh`, for plain `jax.jit`.

  Returns:
    A gradient transformation. `update` takes local gradients, the common
    parameters and, by name, `local_params`; its updates are zero between the
    exchanges.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number, or an
      optimiser no transformation.
    ValueError: if an argument is out of range; in `init`, if `outer` is no
      chain that a reducer begins, over the same axis, or `inner` holds one; in
      `update`, without parameters.

  References:
    DiLoCo, Douillard et al. 2023, arXiv:2311.08105; overlap, Streaming DiLoCo,
    Douillard et al. 2025, arXiv:2501.18512. Departures: all leaves are
    exchanged at once, and not by fragment; after an overlap the own parameters
    are the common ones and the moves made meanwhile, without mixing.

  >>> outer = optax.chain(optax.sgd(1.0))  # after a reducer
  >>> tx = local_steps(optax.adam(1e-3), outer, every=10)
  """
  steps = LocalSteps(inner, outer, every, axis_name, overlap, mesh, param_specs)
  return transformation(steps.init, steps.update)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
  """The parts of `local_steps`, with its arguments."""

  inner: optax.GradientTransformation
  outer: optax.GradientTransformation
  every: int
  axis_name: AxisName
  overlap: int
  mesh: Mesh | None
  param_specs: Any = None

  def __post_init__(self) -> None:
    validation.require_transformation("inner", self.inner)
    validation.require_transformation("outer", self.outer)
    validation.require_int("every", self.every, 1)
    validation.require_int("overlap", self.overlap, 0)
    order.require_names("axis_name", self.axis_name)
    validation.require(
      self.overlap <= self.every,
      "overlap",
      self.overlap,
      f"at most every={self.every}, since the next exchange begins then",
      "choose fewer steps",
    )
    require_mesh(self.mesh, self.axis_name, self.param_specs)

  def is_stacked(self) -> bool:
    """Whether arrays have an axis of all replicas, in plain `jax.jit`."""
    here = mesh_here(self.mesh, self.axis_name, self.param_specs)
    return here is not None

  def init(self, params: optax.Params) -> Any:
    """Returns the state before the first step."""
    if is_placeholder(params):
      return NOT_LIKE_PARAMS
    leaves_in(params)  # raises if a leaf is not real floating
    _require_no_reducer(jax.eval_shape(self.inner.init, params))
    start = self._start_all if self.is_stacked() else self._start
    skipped, offset, sent, inner_state = start(params)
    with reducers_seen() as reducers:
      outer_state = self.outer.init(wide(params))
    _require_reducer_first(outer_state)
    require_over(reducers, self.axis_name, "the reducer in `outer`")
    _require_no_stages(reducers)
    # Reviews the leaves; as a new function, because JAX does not trace one a
    # second time.
    jax.eval_shape(lambda p: self.outer.init(p), wide(params))
    return LocalStepsState(
      jnp.zeros((), jnp.int32),
      jnp.array(self.every, jnp.int32),
      jnp.array(False),
      jnp.array(False),
      *map(PerReplica, (skipped, offset, sent, inner_state)),
      outer_state,
    )

  def update(
    self,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    local_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Takes an inner step, and exchanges if it is time."""
    _, new = self.update_alone(
      updates, state, params, local_params=local_params, **extra_args
    )
    offset = new.offset.values
    # With an overlap, what does not depend on this step's gradient.
    moved = offset
    if self.overlap:  # on CPUs, where nothing overlaps, collectives keep order
      wait = jax.vmap(order.after_all) if self.is_stacked() else order.in_turn
      moved = wait(state.sent.values, offset)
    ends = (new.step > 0) & (new.step % self.every == 0)
    exchanged = self._is_due(new) if self.overlap else ends
    found, outer_state = self._exchange_if(
      exchanged, moved, params, state.outer_state, extra_args
    )
    left = _zeros_if(exchanged, moved)
    if self.overlap:
      # s_i <- d_i,  d_i <- 0
      sent = jax.tree.map(lambda d, s: jnp.where(ends, d, s), offset, left)
      offset = _zeros_if(ends, offset)
      in_flight = ends | (new.in_flight & ~exchanged)
    else:
      offset, sent, in_flight = left, (), new.in_flight
    return found, new._replace(
      exchanged=exchanged,
      in_flight=in_flight,
      offset=PerReplica(offset),
      sent=PerReplica(sent),
      outer_state=outer_state,
    )

  def update_alone(
    self,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    local_params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Takes an inner step without an exchange; the updates are zero."""
    _require_arguments(params, local_params, extra_args)
    leaf_checks.require_state(state, LocalStepsState)
    leaf_checks.require_same_leaves(updates, state.offset.values)
    self._require_own(state)
    stacked = self.is_stacked()
    inner = optax.with_extra_args_support(self.inner)

    def own(gradient: Any, inner_state: Any, local: Any) -> tuple:
      """One inner step of one replica."""
      found, new = inner.update(gradient, inner_state, local, **extra_args)
      ok = order.all_finite((gradient, found))  # Adafactor's step may overflow
      parts = set(order.varying_axes(ok)) - set(order.names(self.axis_name))
      if parts:  # the shards of a replica skip together
        ok = collectives.all_true(ok, tuple(sorted(parts)))
      move = jax.tree.map(
        lambda u: jnp.where(ok, u.astype(jnp.float32), 0.0), found
      )
      kept = jax.tree.map(
        lambda new, old: jnp.where(ok, new, old), new, inner_state
      )
      return move, kept, (~ok).astype(jnp.int32)

    def lift(tree: Any) -> Any:
      return tree if stacked else jax.tree.map(lambda x: x[None], tree)

    step_all = jax.vmap(
      own,
      axis_size=len(state.skipped.values),
      spmd_axis_name=self.axis_name if stacked else None,
    )
    move, inner_state, skipped = step_all(
      lift(updates), state.inner_state.values, lift(local_params)
    )
    # d_i <- d_i + inner(gradient_i)
    offset = jax.tree.map(jnp.add, state.offset.values, move)
    return jax.tree.map(jnp.zeros_like, arrays_of(params)), state._replace(
      step=state.step + 1,
      every=jnp.full_like(state.every, self.every),  # of this run
      exchanged=jnp.zeros_like(state.exchanged),
      skipped=PerReplica(state.skipped.values + skipped),
      offset=PerReplica(offset),
      inner_state=PerReplica(inner_state),
    )

  def exchange(
    self, sent: Any, outer_state: Any, params: Any, **extra_args: Any
  ) -> tuple[Any, Any]:
    """Returns outer(mean_i -s_i) and the new outer state.

    Args:
      sent: s_i.
      outer_state: The state of `outer`.
      params: The common parameters, in float32.
      **extra_args: For the outer chain.
    """
    outer = optax.with_extra_args_support(self.outer)
    stacked = self.is_stacked()
    gradient = jax.tree.map(lambda d: -d if stacked else -d[0], sent)
    return outer.update(gradient, outer_state, params, **extra_args)

  def _require_own(self, state: LocalStepsState) -> None:
    """Raises if a state lacks or has s_i."""
    offset, sent = state.offset.values, state.sent.values
    has_sent = bool(jax.tree.leaves(sent))
    validation.require(
      has_sent == bool(self.overlap) or not jax.tree.leaves(offset),
      "overlap",
      self.overlap,
      f"{'above 0' if has_sent else '0'}, as in the run that made this state",
      "pass that, or begin again with the common parameters",
    )

  def begun(self, step: Any) -> Any:
    """Returns the step at whose end the exchange in flight began."""
    return (step - 1) // self.every * self.every

  def _is_due(self, state: LocalStepsState) -> jax.Array:
    """Returns whether the exchange in flight ends with this step."""
    waited = state.step - self.begun(state.step)
    return state.in_flight & (waited >= self.overlap)

  def _exchange_if(
    self,
    is_due: jax.Array,
    sent: Any,
    params: Any,
    outer_state: Any,
    extra: Any,
  ) -> tuple[Any, Any]:
    """Exchanges if it is time; otherwise returns zeros and the old state."""
    common = wide(params)

    def exchange(outer_state: Any) -> tuple[Any, Any]:
      return self.exchange(sent, outer_state, common, **extra)

    shapes, _ = jax.eval_shape(exchange, outer_state)

    def nothing(outer_state: Any) -> tuple[Any, Any]:
      return jax.tree.map(collectives.zeros_like_type, shapes), outer_state

    index = order.branch_index(is_due.astype(jnp.int32))
    return jax.lax.switch(index, [nothing, exchange], outer_state)

  def _start(self, params: optax.Params, count: int = 1) -> tuple:
    """Returns skipped steps, d_i, s_i and inner states of some replicas."""
    offset = jax.tree.map(
      lambda p: jnp.zeros((count, *jnp.shape(p)), jnp.float32), params
    )
    inner_state = jax.tree.map(
      lambda x: jnp.repeat(jnp.asarray(x)[None], count, axis=0),
      self.inner.init(params),
    )
    sent = jax.tree.map(jnp.zeros_like, offset) if self.overlap else ()
    return jnp.zeros((count,), jnp.int32), offset, sent, inner_state

  def _start_all(self, params: optax.Params) -> tuple:
    """Returns the same of all replicas, each on its devices."""
    mesh = mesh_here(self.mesh, self.axis_name)
    own = specs_of(self.param_specs, params, mesh)
    of_inner = state_specs(
      self.inner,
      params,
      self.axis_name,
      mesh=mesh,
      param_specs=own,
    )
    specs = PartitionSpec(), own, own if self.overlap else (), of_inner
    return start_on_mesh(self._start, params, specs, mesh, self.axis_name)


@promoting
def local_params(
  params: Any,
  opt_state: optax.OptState,
  mesh: Mesh | None = None,
  axis_name: AxisName = "data",
) -> Any:
  """Returns the parameters at which a replica differentiates, x + s_i + d_i.

  Args:
    params: The common parameters, x.
    opt_state: A state with the state of `local_steps` in it.
    mesh: The mesh in plain `jax.jit`; None takes the one of `jax.set_mesh`. Not
      read where an axis is bound.
    axis_name: The axis of the replicas, in the mesh of `jax.set_mesh`.

  Returns:
    The replica's own parameters, like `params`; with a mesh those of all N
    replicas, [N, *shape], for
    `edgc_jax.value_and_grad(loss_fn, mesh, is_local=True)`.

  Raises:
    ValueError: if the state holds no state of `local_steps`, or several, or
      one of several replicas without a mesh, or one of some parameters alone.
  """
  state = only_state(opt_state)
  replicas = len(state.skipped.values)
  here = None if order.bound_axes() else mesh_here(mesh, axis_name)
  validation.require(
    here is not None or replicas == 1,
    "mesh",
    mesh,
    f"the mesh of the training for a state of {replicas} replicas",
    "in plain jax.jit call jax.set_mesh(mesh), or pass mesh=",
  )
  moved, sent = state.offset.values, state.sent.values
  hidden = masked_paths(moved)
  validation.require(
    not hidden,
    "opt_state",
    f"local_steps inside of a mask that hides {len(hidden)} leaves",
    "a state of local_steps of all parameters",
    "put optax.masked or optax.partition inside of its `inner`",
  )
  if jax.tree.leaves(sent):  # s_i + d_i
    moved = jax.tree.map(jnp.add, sent, moved)
  is_stacked = here is not None
  arrays = arrays_of(params)
  own = jax.tree.map(
    lambda p, d: (p + (d if is_stacked else d[0])).astype(jnp.result_type(p)),
    without_variables(arrays),
    moved,
  )
  return jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(own))


def only_state(opt_state: Any) -> LocalStepsState:
  """Returns the state of local steps in an optimiser state.

  Raises:
    ValueError: if there is none, or if there are several.
  """
  found = find(opt_state, LocalStepsState)
  validation.require(
    len(found) == 1,
    "opt_state",
    type(opt_state),
    f"a state with one state of local_steps in it ({len(found)} are)",
    "pass the state that `init` or `update` of local_steps returned",
  )
  return found[0]


def wide(params: Any) -> Any:
  """Returns parameters in the dtype of their differences."""
  return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), arrays_of(params))


def _zeros_if(condition: jax.Array, tree: Any) -> Any:
  return jax.tree.map(
    lambda x: jnp.where(condition, jnp.zeros_like(x), x), tree
  )


def _require_no_stages(reducers: Sequence[Reviewed]) -> None:
  """Raises if a reducer in the outer chain is of pipeline stages."""
  for own in reducers:
    validation.require(
      own.axes.stage is None,
      "stages",
      own.axes.stage,
      "None for the reducer in `outer`",
      "pipeline stages exchange at every step, without local_steps",
    )


def _require_no_reducer(inner_state: Any) -> None:
  """Raises if the inner chain averages."""
  validation.require(
    not find(inner_state, ReducerState),
    "inner",
    "a chain with a reducer",
    "the optimiser of one replica, which sends nothing",
    "move the reducer to the beginning of `outer`",
  )


def _require_reducer_first(outer_state: Any) -> None:
  """Raises unless the outer chain averages, and then takes a step."""
  got = ""
  if not find(outer_state, ReducerState):
    got = "a chain without a reducer"
  elif has_links_before(outer_state):
    got = "a chain with another link before the reducer"
  elif isinstance(outer_state, ReducerState):
    got = "a reducer alone, whose mean points back to the common parameters"
  validation.require(
    not got,
    "outer",
    got,
    "a chain whose first link averages over the replicas, before an outer rule",
    "pass optax.chain(reducer, optax.sgd(1.0)); its reducer may be"
    " edgc_jax.allreduce(), which sends all",
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
