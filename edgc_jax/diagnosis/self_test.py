"""Tries the package on the devices that there are, in seconds.

  collectives   every collective gives what its definition says
  a reducer     a few steps of a small model leave equal parameters on all
                replicas, bit for bit (between hosts up to rounding), and lower
                the loss; the compiled program sends the bytes that `describe`
                predicts

On a single device `vmap` simulates replicas. No bytes are counted there, nor
between CPU hosts, where parts are exchanged by other collectives.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from edgc_jax.measure import hlo
from edgc_jax.measure.description import describe
from edgc_jax.mesh.sharding import state_axes, state_specs
from edgc_jax.methods import edgc, quantize
from edgc_jax.wire import collectives, cpu_backend

_AXIS = "data"
_SIMULATED = 4  # replicas on a single device
_STEPS, _RATE = 3, 0.1
_ROUNDING = 1e-5  # between hosts of different makes; parameters are below 1
_SHAPES = {"bias": (32,), "weight": (64, 32)}
# The methods that send ranks in branches, and codes in parts.
_REDUCERS: Mapping[str, optax.GradientTransformation] = {
  "edgc": edgc(rank_min=4, rank_max=8, total_steps=100),
  "quantize": quantize(4, min_size=1),
}


class SelfTestError(AssertionError):
  """Raised if the package does not work on these devices."""


def checks(
  devices: Sequence[jax.Device],
) -> Mapping[str, Callable[[], str]]:
  """Returns the checks by name; each raises, or says what it has found.

  Args:
    devices: The devices to use, of all processes; all processes run the same
      checks in the same order.

  Returns:
    Functions that return what was found in a few words.
  """
  mesh = None
  if len(devices) > 1:
    axis_types = (AxisType.Auto,)
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=axis_types)
  return {
    "collectives": functools.partial(_check_collectives, mesh),
    **{
      name: functools.partial(_check_reducer, mesh, tx)
      for name, tx in _REDUCERS.items()
    },
  }


def _check_collectives(mesh: Mesh | None) -> str:
  """Compares what each collective gives with its definition."""
  cpu_backend.require_threads()  # or it would hang
  count = _count(mesh)
  own = np.arange(count, dtype=np.float32)  # each replica sends its index
  parts = own[:, None] + count * own  # [i, j], the part of replica i for j
  shift = [(i, (i + 1) % count) for i in range(count)]
  expected = {
    "mean": np.full(count, own.mean()),
    "total": np.full(count, own.sum()),
    "all_true": np.zeros(count, bool),
    "exchange_parts": parts.T,
    "gather": np.tile(own, (count, 1)),
    "from_first": np.zeros(count),
    "send": np.roll(own, 1),
    "least": np.zeros(count),
    "difference": np.full(count, count - 1),
    "compare": np.full(count, -1),
  }

  def send_all(_: jax.Array) -> dict[str, jax.Array]:
    index = collectives.device_index(_AXIS)
    x = index.astype(jnp.float32)
    own_parts = x + count * jnp.arange(count, dtype=jnp.float32)
    found = {
      "mean": collectives.mean(x, _AXIS),
      "total": collectives.total(x, _AXIS),
      "all_true": collectives.all_true(index > 0, _AXIS),
      "exchange_parts": collectives.exchange_parts(own_parts, _AXIS),
      "gather": collectives.gather(x, _AXIS),
      "from_first": collectives.from_first(x, _AXIS),
      "send": collectives.send(x, _AXIS, shift),
      "least": collectives.least(x, _AXIS),
      "difference": collectives.difference(x, _AXIS),
      "compare": collectives.compare(1 + x, _AXIS),
    }
    return jax.tree.map(lambda x: collectives.as_varying(x, _AXIS)[None], found)

  rows = 0 if mesh is None else P(_AXIS)
  found = jax.jit(_binding(mesh)(send_all, rows, rows))(own)
  for name, values_of in found.items():
    for replica, values in _by_replica(values_of).items():
      if not np.array_equal(values, expected[name][replica]):
        raise SelfTestError(
          f"`{name}` must give replica {replica} of {count}"
          f" {expected[name][replica].tolist()}, got {values.tolist()}"
        )
  return f"{len(found)} are right"


def _check_reducer(mesh: Mesh | None, tx: optax.GradientTransformation) -> str:
  """Trains, and compares the replicas and the bytes."""
  chain = optax.chain(tx, optax.sgd(_RATE))
  params = {name: jnp.zeros(shape) for name, shape in _SHAPES.items()}

  def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    out = x @ params["weight"] + params["bias"]
    return jnp.mean((out - x[:, : out.shape[1]]) ** 2)

  def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
    key = jax.random.key(collectives.device_index(_AXIS))
    x = jax.random.normal(key, (32, _SHAPES["weight"][0]))
    local = collectives.as_varying(params, _AXIS)
    loss, grads = jax.value_and_grad(loss_fn)(local, x)
    updates, state = chain.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss[None]

  if mesh is None:
    same, rows, of_state = None, 0, state_axes(chain, params)
  else:
    same, rows, of_state = P(), P(_AXIS), state_specs(chain, params)
  bind = _binding(mesh)
  state = jax.jit(bind(chain.init, same, of_state))(params)
  run = jax.jit(bind(step, (same, of_state), (same, of_state, rows)))
  run = run.lower(params, state).compile()
  losses = []
  for _ in range(_STEPS):
    params, state, loss = run(params, state)
    losses.append(_by_replica(loss))
  for replica, start in losses[0].items():
    if not losses[-1][replica] < start:
      raise SelfTestError(
        f"the loss of replica {replica} must fall, got"
        f" {[float(loss[replica]) for loss in losses]}"
      )
  found = _compared(mesh, params)
  if mesh is not None and not cpu_backend.spans_hosts():
    found += f", {_checked_bytes(tx, str(run.as_text()), mesh.size)}"
  return found


def _compared(mesh: Mesh | None, params: Mapping[str, jax.Array]) -> str:
  """Compares the replicas, of this process by their bits, of others to 1e-5."""
  for name, param in params.items():
    copies = [np.asarray(shard.data) for shard in param.addressable_shards]
    for copy in copies:
      if copy.tobytes() != copies[0].tobytes():
        raise SelfTestError(
          f"replicas must have equal parameters after {_STEPS} steps, got"
          f" {name} apart by {np.max(np.abs(copy - copies[0])):.3g}"
        )
  if mesh is None or jax.process_count() == 1:
    return "equal on all replicas"

  def difference(params: Any) -> jax.Array:
    flat, _ = ravel_pytree(params)
    return collectives.difference(flat, _AXIS)

  apart = float(jax.jit(_binding(mesh)(difference, P(), P()))(params))
  if not apart <= _ROUNDING:
    raise SelfTestError(
      f"hosts must have parameters that are equal up to {_ROUNDING:g} after"
      f" {_STEPS} steps, got parameters apart by {apart:.3g}"
    )
  return f"equal on all hosts up to {apart:.1g}"


def _checked_bytes(
  tx: optax.GradientTransformation, program: str, replicas: int
) -> str:
  """Compares the bytes of a compiled step with those predicted."""
  shapes = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in _SHAPES.items()}
  (part,) = describe(tx, shapes, replicas=replicas).parts
  sent = hlo.wire_bytes_of_step(program, len(part.ladder))
  if sent != list(part.wire_bytes):
    raise SelfTestError(
      f"the compiled step must send {list(part.wire_bytes)} bytes, as"
      f" predicted, got {sent}"
    )
  return f"{' or '.join(map(str, sent))} bytes a step as predicted"


def _count(mesh: Mesh | None) -> int:
  return mesh.size if mesh is not None else _SIMULATED


def _binding(mesh: Mesh | None) -> Callable[..., Any]:
  """Returns a function with the arguments of `vmap` that binds the axis.

  On a mesh, `in_axes` and `out_axes` are specs.
  """
  if mesh is None:
    return functools.partial(jax.vmap, axis_name=_AXIS, axis_size=_SIMULATED)
  return lambda function, in_axes, out_axes: jax.shard_map(
    function, mesh=mesh, in_specs=in_axes, out_specs=out_axes
  )


def _by_replica(x: jax.Array) -> dict[int, np.ndarray]:
  """Returns the rows of this process's replicas, by their index."""
  rows = {}
  for shard in x.addressable_shards:
    start = shard.index[0].start or 0
    for i, row in enumerate(np.asarray(shard.data)):
      rows[start + i] = np.squeeze(row)  # the axis of one replica
  return rows
