"""Runs a microbatched pipeline over a mesh axis, inside `jax.shard_map`.

Each device along the axis is a stage. Microbatch m reaches stage s at tick
m + s; with S = 3 stages and M = 5 microbatches (F forward, B backward):

  stage 0   F0 F1 F2 F3 F4  .  .   .  . B4 B3 B2 B1 B0
  stage 1    . F0 F1 F2 F3 F4  .   . B4 B3 B2 B1 B0 --  one tick of slack
  stage 2    .  . F0 F1 F2 F3 F4  B4 B3 B2 B1 B0 -- --  two ticks of slack
           | ramp |  scan  |drain| drain|  scan  | ramp|

In each direction every stage is idle in S - 1 of the M + S - 1 ticks: the
bubble is (S - 1) / (M + S - 1) of the time. Idle ticks compute nothing. JAX
derives the backward half from the forward half.

Slack is the time that a later stage has left between the end of its own
backward pass and the end of stage 0: stage s ends s microbatches before stage
0. A finished stage can use it only if nothing makes it wait. So ramp and drain
are unrolled, and their permutes name only pairs of live stages; a permute over
all stages would synchronise them at every tick. (Unrolling compiles the stage
2 (S - 1) times more.)

The backward pass recomputes activations: only the input of the stage is kept
for each microbatch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

StageFn = Callable[[Any, Any], Any]


def apply_stages(
  stage_fn: StageFn,
  params: Any,
  microbatches: Any,
  axis_name: str = "stage",
) -> Any:
  """Applies all stages to each microbatch, as a pipeline.

    y[m] = stage_fn(params_(S-1), ... stage_fn(params_0, x[m]))

  Only reverse-mode differentiation (`jax.grad`) is defined.

  Wire, per tick and pair of live neighbours: one microbatch, and as much
  again in the backward pass.

  Args:
    stage_fn: Maps a stage's parameters and one microbatch to a microbatch of
      the same shapes and dtypes, without collectives over `axis_name`.
    params: The parameters of this device's stage, and all other traced values
      that `stage_fn` uses; floating.
    microbatches: Floating arrays [M, ...]; only stage 0's values are read. Pass
      masks and integers as floats.
    axis_name: The bound mesh axis of the stages.

  Returns:
    Arrays [M, ...], varying over the axis: the results on the last stage,
    zeros on the others. Sum them over the axis if all stages need them.

  Raises:
    TypeError: if a leaf is not floating.
    ValueError: if the leading sizes of microbatches
      differ or are zero, or `stage_fn` changes the shape of a microbatch or
      closes over traced values.

  >>> import functools
  >>> from jax.sharding import PartitionSpec as P
  >>> mesh = jax.make_mesh((4,), ("stage",), devices=jax.devices()[:4],
  ...                      axis_types=(jax.sharding.AxisType.Auto,))
  >>> @jax.jit
  ... @functools.partial(
  ...     jax.shard_map, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P())
  ... def run(factors, x):
  ...   y = apply_stages(lambda factor, x: factor * x, factors[0], x)
  ...   return jax.lax.psum(y, "stage")
  >>> print(run(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([1.0, 10.0])))
  [ 24. 240.]
  """
  num_stages = lax.axis_size(axis_name)
  num_microbatches = _num_microbatches(microbatches)
  stage = lax.axis_index(axis_name)
  # JAX would lose track of unvarying values in a conditional whose predicate
  # varies.
  params = _varying(params, [axis_name])
  # Activations vary over the stages, and over what a stage's results vary over:
  # not over devices that share a stage, and sum their results.
  microbatches = _varying(microbatches, [axis_name])
  first = _take(microbatches, 0)
  _require_pure(stage_fn, params, first)
  results = jax.eval_shape(stage_fn, params, first)
  axes = [_axes_of(x) for x in jax.tree.leaves(results)]
  microbatches = _varying(microbatches, sorted(set().union(*axes)))
  first = _take(microbatches, 0)
  work = _rematerialized(stage_fn)

  def enter(inputs: Any, received: Any) -> Any:
    return _select(stage == 0, inputs, received)

  def is_live(tick: int, of_stage: Any) -> Any:
    return (of_stage <= tick) & (of_stage > tick - num_microbatches)

  def send(outputs: Any, tick: int) -> Any:
    live = range(num_stages - 1)
    pairs = [(s, s + 1) for s in live if is_live(tick, s)]
    return lax.ppermute(outputs, axis_name, pairs) if pairs else outputs

  def unrolled(tick: int, received: Any) -> Any:
    x = received
    if tick < num_microbatches:
      x = enter(_take(microbatches, tick), received)
    return work(is_live(tick, stage), params, x)

  def full(received: Any, inputs: Any) -> tuple[Any, Any]:
    y = work(None, params, enter(inputs, received))
    return send(y, num_stages - 1), y

  received = jax.tree.map(jnp.zeros_like, first)
  results = []
  tick, num_ticks = 0, num_microbatches + num_stages - 1
  while tick < num_ticks:
    if tick == num_stages - 1 < num_microbatches:
      # From here until the last microbatch enters, all stages are live.
      rest = jax.tree.map(lambda x: x[num_stages - 1 :], microbatches)
      received, ys = jax.lax.scan(full, received, rest)
      results.append(ys)
      tick = num_microbatches
      continue
    y = unrolled(tick, received)
    if tick >= num_stages - 1:
      results.append(jax.tree.map(lambda leaf: leaf[None], y))
    received = send(y, tick)
    tick += 1
  y = jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)
  is_last = stage == num_stages - 1
  return _select(is_last, y, jax.tree.map(jnp.zeros_like, y))


def _rematerialized(stage_fn: StageFn) -> Callable[..., Any]:
  """Returns the stage with recomputation; zeros, uncomputed, if it is idle.

  Only the inputs of the forward pass are kept, and one conditional holds both
  the recomputation and the backward pass. With `jax.checkpoint` around the
  conditional, XLA may recompute early and keep the result; with it inside,
  every unrolled tick keeps a copy of the parameters.
  """

  def when(
    is_live: jax.Array | None, run: Callable, idle: Callable, *operands: Any
  ) -> Any:
    if is_live is None:
      return run(*operands)
    return jax.lax.cond(is_live, run, idle, *operands)

  @jax.custom_vjp
  def work(is_live: jax.Array | None, params: Any, x: Any) -> Any:
    return when(is_live, stage_fn, lambda params, x: _zeros(x), params, x)

  def forward(is_live: jax.Array | None, params: Any, x: Any) -> tuple:
    return work(is_live, params, x), (is_live, params, x)

  def backward(kept: tuple, cotangent: Any) -> tuple[None, Any, Any]:
    is_live, params, x = kept

    def pull(params: Any, x: Any, cotangent: Any) -> tuple[Any, Any]:
      return jax.vjp(stage_fn, params, x)[1](cotangent)

    idle = lambda params, x, _: (_zeros(params), _zeros(x))  # noqa: E731
    return None, *when(is_live, pull, idle, params, x, cotangent)

  work.defvjp(forward, backward)
  return work


def _axes_of(x: Any) -> frozenset[str]:
  """Returns the bound axes over which an array varies, by its type."""
  return frozenset(jax.typeof(x).manual_axis_type.varying)


def _varying(tree: Any, axes: Sequence[str]) -> Any:
  """Types every leaf as varying over the axes; sends nothing."""

  def cast(x: jax.Array) -> jax.Array:
    missing = tuple(axis for axis in axes if axis not in _axes_of(x))
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def _zeros(tree: Any) -> Any:
  return jax.tree.map(jnp.zeros_like, tree)


def _take(microbatches: Any, index: int) -> Any:
  return jax.tree.map(lambda x: x[index], microbatches)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
  return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _num_microbatches(microbatches: Any) -> int:
  counts = {x.shape[0] if x.ndim else 0 for x in jax.tree.leaves(microbatches)}
  if len(counts) != 1 or 0 in counts:
    raise ValueError(
      "`microbatches` must be arrays with one leading axis of at least 1, got"
      f" leading sizes {sorted(counts)}; reshape the batch to [M, batch / M,"
      " ...]."
    )
  return counts.pop()


def _require_pure(stage_fn: StageFn, params: Any, x: Any) -> None:
  """Raises unless `stage_fn` preserves shapes and closes over no tracer."""
  for name, tree in (("params", params), ("microbatches", x)):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
          f"`{name}` must have floating leaves, since they are differentiated,"
          f" got {leaf.dtype} at {jax.tree_util.keystr(path) or 'the root'};"
          " pass it as floats and convert it inside `stage_fn`."
        )
  jaxpr, after = jax.make_jaxpr(stage_fn, return_shape=True)(params, x)
  form = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)  # noqa: E731
  if form(x) != form(after):
    raise ValueError(
      "`stage_fn` must return a microbatch of the same shapes and dtypes,"
      f" got {form(after)} for {form(x)}; move embeddings before the pipeline"
      " and the output projection after it."
    )
  around = [c for c in jaxpr.consts if isinstance(c, Tracer)]
  if around:
    raise ValueError(
      "`stage_fn` must depend only on its arguments and on constants, got one"
      f" that closes over traced values {around}; pass them in `params`."
    )
