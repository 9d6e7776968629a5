"""Local steps as two programs: exchanges run in a thread of the host."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.mesh.sharding import num_replicas
from edgc_jax.reducer.local_steps import LocalSteps, only_state, wide
from edgc_jax.reducer.transformation import transformation
from edgc_jax.state.state import LocalStepsState, PerReplica
from edgc_jax.wire import cpu_backend
from edgc_jax.wire.order import AxisName


def split_local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  every: int,
  axis_name: AxisName = "data",
  *,
  overlap: int = 1,
  mesh: Mesh | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, "Exchange"]:
  """Splits `local_steps` into inner steps and an exchange beside them.

  For backends whose collectives are not asynchronous, such as CPUs: the host
  runs the exchange as a second program, in a thread of its own, while the next
  `overlap` inner steps compute. The training loop has one line more:

    tx, exchange = edgc_jax.split_local_steps(
        optax.adamw(1e-3), outer, every=30, overlap=3, mesh=mesh)

    for batch in batches:
      params, opt_state, loss = train_step(params, opt_state, batch)
      params, opt_state = exchange(params, opt_state)                # new

  `train_step` is the step of `local_steps`, but must have no collective over
  `axis_name`, since its program runs at the same time as that of the exchange:
  two programs that both send would take each other's messages. So it returns
  the loss of each replica. In plain `jax.jit`:

    losses, grads = edgc_jax.value_and_grad(
        loss_fn, mesh, is_local=True, averages=False)(local, batch)

  After each step the parameters and the state are those of
  `local_steps(..., overlap=overlap)`, up to rounding: exchanges begin and end
  at fixed steps, whatever they take, and a late one is waited for. So the state
  holds all that a checkpoint needs, at every step. A run that continues in
  the middle of an exchange starts it again from the state.

  Before any other program with collectives between processes, such as an
  evaluation or a barrier, call `exchange.wait()`. It changes nothing.

  Wire and memory: as `local_steps`; and while an exchange runs, copies of the
  differences, parameters and outer state.

  Args:
    inner: As for `local_steps`.
    outer: As for `local_steps`.
    every: As for `local_steps`.
    axis_name: As for `local_steps`.
    overlap: As for `local_steps`, at least 1.
    mesh: The mesh of the training in plain `jax.jit`; None for `jax.pmap` over
      all devices, or the first ones of a single process.

  Returns:
    The gradient transformation of the inner steps, and a function from common
    parameters and optimiser state to new ones. It takes the arrays of the loop,
    outside of `jax.jit`. Call it once after each step, in all processes. It has
    `compile`, which sends nothing, and `wait`.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: as `local_steps`; if `overlap` is 0, or the mesh has further
      axes of several devices.

  References:
    Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512, which overlaps
    exchanges inside one program. Departures: as `local_steps`.

  >>> outer = optax.chain(optax.sgd(1.0))  # after a reducer
  >>> tx, exchange = split_local_steps(optax.adam(1e-3), outer, 10, overlap=2)
  """
  validation.require_int("overlap", overlap, 1)
  if mesh is not None:
    validation.require(
      mesh.size == num_replicas(mesh, axis_name),
      "mesh",
      dict(mesh.shape),
      f"one with no axis of several devices but {axis_name!r}, since inner"
      " steps on shards have collectives, too",
      "use local_steps, which exchanges in the program of the step",
    )
  steps = LocalSteps(inner, outer, every, axis_name, overlap, mesh)
  tx = transformation(steps.init, steps.update_alone)
  return tx, Exchange(steps)


class Exchange:
  """Runs the exchanges of `split_local_steps`; at most one is in flight."""

  def __init__(self, steps: LocalSteps):
    """Compiles nothing yet."""
    self._steps = steps
    self._programs: dict[Any, Callable[..., Any]] = {}
    self._flight: _Flight | None = None
    self._step = 0  # of the last call

  def __call__(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
    """Ends the exchange that is due after a step, and begins the next.

    Args:
      params: The common parameters, after the step.
      opt_state: The optimiser state, after the step.

    Returns:
      New ones. They share arrays with the old ones, which are not to be used
      any more.

    Raises:
      ValueError: if the state holds no state of local steps, or several, or
        lies on the devices in another way than `mesh` says.
      RuntimeError: if XLA's thread pool is too small, or the exchange failed,
        as when another process has ended.
    """
    steps, state = self._steps, only_state(opt_state)
    _require_layout(state, steps.mesh)
    # The number decides, and no time, so that all processes do the same.
    step = int(np.ravel(state.step.addressable_data(0))[0])
    if step != self._step + 1:  # of another run, which has left a flight
      self.wait()
      self._flight = None
    self._step = step
    begun = steps.begun(step)
    if np.ravel(state.in_flight.addressable_data(0))[0]:
      if self._flight is None or self._flight.begun != begun:
        self._begin(begun, params, state)  # of a run that continues here
      if step - begun >= steps.overlap:
        params, state = self._end(params, state)
    if step > 0 and step % steps.every == 0:
      # s_i <- d_i, d_i <- 0: s_i was zero.
      state = state._replace(
        offset=state.sent,
        sent=state.offset,
        in_flight=jnp.ones_like(state.in_flight),
      )
      self._begin(step, params, state)
    return params, _with_state(opt_state, state)

  def compile(self, params: Any, opt_state: Any) -> None:
    """Compiles the exchange for later calls, and sends nothing.

    Between hosts a collective fails if a process is late for it by half a
    minute, as one may be that compiles for longer than the others. So call this
    and compile the step in all processes, and have them wait for each other.

    Args:
      params: The common parameters, on the devices as after a step.
      opt_state: The optimiser state, the same.
    """
    state = only_state(opt_state)
    _require_layout(state, self._steps.mesh)
    self._prepared(params, state)

  def wait(self) -> None:
    """Waits until this process sends nothing; keeps the result for its step."""
    if self._flight is not None:
      self._flight.join()

  def _begin(self, begun: int, params: Any, state: LocalStepsState) -> None:
    """Starts the exchange of step `begun` from a state of then or later."""
    cpu_backend.require_threads(beside=True)
    self.wait()
    program, arguments = self._prepared(params, state)
    self._flight = _Flight(begun, lambda: program(*arguments))
    self._flight.start()

  def _prepared(
    self, params: Any, state: LocalStepsState
  ) -> tuple[Callable[..., Any], tuple]:
    """Returns the compiled exchange, and its arguments."""
    arguments = state.sent.values, state.outer_state, params
    # Of copies, because the next step may consume the arrays of the state.
    arguments = self._program(_copied, arguments, arguments)(*arguments)
    like = params, state.outer_state
    return self._program(self._exchange, arguments, like), arguments

  def _end(
    self, params: Any, state: LocalStepsState
  ) -> tuple[Any, LocalStepsState]:
    """Waits for the exchange in flight, and applies its result."""
    flight, self._flight = self._flight, None  # if it failed, too
    assert flight is not None
    found, outer_state = flight.result()
    like = params, state.sent, state.exchanged
    params, sent, exchanged = self._program(_applied, (*like, found), like)(
      *like, found
    )
    return params, state._replace(
      exchanged=exchanged,
      in_flight=jnp.zeros_like(state.in_flight),
      sent=sent,
      outer_state=outer_state,
    )

  def _exchange(self, sent: Any, outer_state: Any, params: Any) -> tuple:
    return self._steps.exchange(sent, outer_state, wide(params))

  def _program(
    self, function: Callable[..., Any], args: tuple, like: Any
  ) -> Callable[..., Any]:
    """Compiles a function, or returns it as it was compiled before.

    Here, and not in the thread, where contexts of this one do not hold.

    Args:
      function: The function.
      args: Its arguments.
      like: Arrays on the devices on which its results will be, in a tree like
        them.
    """
    steps = self._steps
    shardings = jax.tree.map(lambda x: x.sharding, (args, like))
    key = function, *jax.tree.leaves(shardings)
    if key not in self._programs and steps.mesh is None:
      program = jax.pmap(function, axis_name=steps.axis_name)
      program.lower(*args).compile()
      # Between processes what `compile` returns takes arrays of other shapes.
      self._programs[key] = program
    elif key not in self._programs:
      program = jax.jit(function, out_shardings=shardings[1])
      self._programs[key] = program.lower(*args).compile()
    return self._programs[key]


class _Flight(threading.Thread):
  """An exchange in flight. Not a daemon: Python waits for it at its end."""

  def __init__(self, begun: int, call: Callable[[], Any]):
    super().__init__(name=f"exchange of step {begun}")
    self.begun = begun  # the step at whose end it began
    self._call, self._found, self._error = call, None, None

  def run(self) -> None:
    try:
      self._found = jax.block_until_ready(self._call())
    except Exception as error:  # raised where the result is used
      self._error = error

  def result(self) -> Any:
    """Waits for the result, and returns it."""
    self.join()
    if self._error is not None:
      raise RuntimeError(f"The {self.name} failed.") from self._error
    return self._found


def _copied(*args: Any) -> Any:
  return jax.tree.map(jnp.copy, args)


def _applied(
  params: Any, sent: PerReplica, exchanged: jax.Array, found: Any
) -> tuple[Any, PerReplica, jax.Array]:
  """Applies the result of an exchange: s_i <- 0."""
  sent = jax.tree.map(jnp.zeros_like, sent)
  return optax.apply_updates(params, found), sent, jnp.ones_like(exchanged)


def _with_state(opt_state: Any, state: LocalStepsState) -> Any:
  """Returns an optimiser state with another state of local steps."""
  is_state = lambda x: isinstance(x, LocalStepsState)  # noqa: E731
  return jax.tree.map(
    lambda x: state if is_state(x) else x, opt_state, is_leaf=is_state
  )


def _require_layout(state: LocalStepsState, mesh: Mesh | None) -> None:
  """Raises unless the state lies on the devices as the programs expect."""
  axes = state.skipped.values.ndim
  validation.require(
    axes == (2 if mesh is None else 1),
    "mesh",
    mesh,
    "the mesh of the training in plain jax.jit, and None under jax.pmap",
    "pass it to split_local_steps, and train in one of these ways; shard_map is"
    " not supported",
  )
