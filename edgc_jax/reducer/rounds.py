"""Runs the methods of all leaves in step, round by round.

A method is a generator. It computes, yields what has to be averaged (`Send`),
gets the mean (`Reply`), and goes on; it returns an `Outcome`. All methods of an
exchange run in step: the wire joins what they send in one round.

    def plain_mean(leaf, gradient, state, ranks, draws):
      m = added(gradient, state.residual)
      reply = yield Send(m)
      return Outcome(reply.mean, m - reply.sent)

Error feedback keeps what was not sent, and adds it to the next gradient:

  M_i = gradient_i + residual_i,    residual_i' = M_i - sent_i

Over time every gradient is sent in full (Stich et al. 2018, arXiv:1809.07599;
Karimireddy et al. 2019, arXiv:1901.09847).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.leaves.leaf import Leaf, LeafState, joined
from edgc_jax.state import growth
from edgc_jax.wire import averages, order
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Code
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import CountingWire, Send, Wire


class Energies(NamedTuple):
  """Energies of the k matrices of a leaf, equal on all replicas.

  In units of `unit` squared, so that gradients of 1e-30 or 1e+30 stay in range.
  """

  lost: jax.Array  # float32 [k], |mean_i residual_i|^2
  total: jax.Array  # float32 [k], |mean_i M_i|^2
  residual: jax.Array  # float32 [k], mean_i |residual_i|^2
  unit: jax.Array  # float32 [], positive


class Outcome(NamedTuple):
  """What a method returns.

  Attributes:
    update: The mean, float32, in the shape of the leaf or of its view.
    residual: M - sent, float32, local; None if all of M was sent.
    factor_q: Q for the next step; None keeps the old one.
    energies: Energies of the error; None if nothing was lost, or measured.
  """

  update: Any
  residual: Any = None
  factor_q: jax.Array | None = None
  energies: Energies | None = None


class Exchanged(NamedTuple):
  """What an exchange returns."""

  outcomes: list[Outcome]  # of the leaves in order
  is_finite: jax.Array  # bool [], all numbers were; equal on all replicas
  # float32 [2], means of `growth.norms`, if any leaf has a residual
  norms: jax.Array | None


class Draws(NamedTuple):
  """Random numbers of one leaf in one step, equal on all replicas.

  For the k matrices of a leaf with sides m <= n.
  """

  key: jax.Array
  short: jax.Array  # signs, float32 [k, 1, m]
  long: jax.Array  # signs, float32 [k, n]
  fresh: jax.Array  # signs, float32 [k, n]


class Each(NamedTuple):
  """A function of single matrices, to be mapped over those of all leaves.

  A method yields it between two rounds, and gets what the function returns for
  each of its k matrices, stacked. Leaves whose arrays have about equal sizes
  share one loop, so that time to compile does not grow with their number. For
  that their arrays are padded with zeros at the end of each axis. Padding may
  not change what the function returns for the other entries: it may take no
  mean, and flatten nothing.

  Attributes:
    function: Of one entry of each stack; the same object for all leaves.
    stacks: Arrays [k, ...].
  """

  function: Callable[..., Any]
  stacks: tuple


# Entries; smaller leaves that are sent dense are joined to one array, since
# each array takes time to compile.
_SMALL = 2**16
Rounds = Generator[Send | Each | None, Any, Outcome]


@dataclasses.dataclass(frozen=True)
class Method:
  """A method of averaging one leaf.

  Attributes:
    rounds: From a leaf, its gradient and state, the ranks of its matrices
      (int32 [k]; 0 without factors) and its `Draws` (None if it does not
      compress), to the rounds of its exchange.
    name: How it sends matrices, for `describe`.
    compresses: Whether it sends less than the whole matrices.
    measures: Whether its outcomes have energies; if not, `metrics` has no
      errors.
    feeds_back: Whether its leaves keep a residual.
    joins: Whether leaves with matrices of equal shape come as one stack, so
      that time to compile hardly grows with their number. Then `gradient` is a
      list over the leaves of the arrays [k, m, n] whose sum is M, the state has
      no residual, and `update` and `residual` of the outcome are lists, too.
  """

  rounds: Callable[[Leaf, Any, LeafState, Any, Any], Rounds]
  name: str = "compressed"
  compresses: bool = True
  measures: bool = False
  feeds_back: bool = True
  joins: bool = False


def added(gradient: jax.Array, residual: jax.Array | None = None) -> jax.Array:
  """Returns M = gradient + residual, float32."""
  m = gradient.astype(jnp.float32)
  return m if residual is None else m + residual.reshape(m.shape)


def dense(
  leaf: Leaf, gradient: jax.Array, state: LeafState, ranks: Any, draws: Any
) -> Rounds:
  """Sends all of M in the second round, encoded if the leaf is."""
  yield None
  return (yield from at_once(leaf, gradient, state, ranks, draws))


def at_once(
  leaf: Leaf, gradient: jax.Array, state: LeafState, ranks: Any, draws: Any
) -> Rounds:
  """Sends all of M in the first round, encoded if the leaf is."""
  del ranks, draws
  m = added(gradient, state.residual)
  if not leaf.is_encoded:
    reply = yield Send(exact=m)
    return Outcome(reply.exact)
  reply = yield Send(m)
  return Outcome(reply.mean, m - reply.sent)


DENSE = Method(dense, "dense", compresses=False)
# With methods whose second round has no encoded values.
DENSE_AT_ONCE = Method(at_once, "dense", compresses=False)


def is_encoded(leaf: Leaf, code: Code | None, has_ranks: bool) -> bool:
  """Returns whether a leaf is encoded when it is sent dense.

  If the code needs error feedback, all that get smaller are: they have a
  residual. Otherwise vectors are not, and if there are ranks, only leaves that
  are factors at them are, which have a residual anyway.
  """
  if code is None or leaf.is_shared:
    return False
  if code.needs_feedback:
    sent = averages.average_bytes([leaf.shape], [code])
    return bool(leaf.cap) or sent < 4 * leaf.size
  return leaf.view is not None and (bool(leaf.cap) or not has_ranks)


class Input(NamedTuple):
  """A leaf, as it goes into an exchange; it comes out as an `Outcome`."""

  leaf: Leaf
  gradient: Any  # local; of a stack as `Method` says
  state: LeafState
  ranks: jax.Array | None  # int32 [k], columns in use; None without matrices


def run(
  inputs: Sequence[Input],
  wire: Wire,
  key: jax.Array,
  norms: jax.Array | None = None,
) -> tuple[list[Outcome], jax.Array | None]:
  """Runs the methods of all leaves over one wire.

  Args:
    inputs: The leaves that are exchanged together.
    wire: Carries the rounds.
    key: Source of the draws; equal on all replicas, new at each step.
    norms: Numbers to average beside them, local.

  Returns:
    What each leaf receives, with updates in its dtype; nothing of it may be
    kept if a number was not finite (`wire.is_finite`). And the mean of `norms`.

  Raises:
    TypeError: if a method is no generator, or returns no `Outcome`.
    ValueError: if a method returns no residual for a leaf that has one.
  """
  draws = _draws([own.leaf for own in inputs], key)
  stacks: dict[Any, list[int]] = {}
  for i, (leaf, *_) in enumerate(inputs):
    stacks.setdefault(_kind(leaf) or i, []).append(i)
  leaves, generators = [], []
  for members in stacks.values():
    stack, drawn = _joined(
      [inputs[i] for i in members], [draws[i] for i in members]
    )
    leaves.append(stack.leaf)
    generators.append(_started(stack, drawn))
  outcomes, norms = _in_step(leaves, generators, wire, norms)
  for leaf, outcome in zip(leaves, outcomes, strict=True):
    _require_outcome(leaf, outcome)
  outputs: dict[int, Outcome] = {}
  for members, outcome in zip(stacks.values(), outcomes, strict=True):
    parts = _apart([inputs[i].leaf for i in members], outcome)
    for i, part in zip(members, parts, strict=True):
      outputs[i] = _fed_back(inputs[i], part)
  return [outputs[i] for i in range(len(inputs))], norms


def exchange(
  inputs: Sequence[Input],
  channel: Channel,
  ladder: Sequence[int],
  level: jax.Array,
  key: jax.Array,
  code: Code | None,
  due: jax.Array,
) -> Exchanged:
  """Averages leaves over replicas at a rank chosen in the graph.

  If the ladder has dense (0) and ranks, each is one branch of a conditional.

  Args:
    inputs: The leaves that are exchanged together.
    channel: To the other replicas.
    ladder: The ranks that may be used; 0, dense, first.
    level: int32 [], index into the ladder, equal on all replicas.
    key: As for `run`.
    code: Encoding of values; None is float32.
    due: bool [], whether residuals and gradients are compared.
  """
  leaves = [own.leaf for own in inputs]
  fed_back = [
    (own.gradient, own.state.residual)
    for own in inputs
    if own.state.residual is not None
  ]
  norms = growth.norms(fed_back, due, channel) if fed_back else None

  def branch(
    ladder: Sequence[int], level: jax.Array, methods: Sequence[Method]
  ) -> Callable[..., Exchanged]:
    def run_all(operands: list[tuple], norms: Any) -> Exchanged:
      wire = Wire(channel, ladder, level, key, code)
      own = [
        Input(dataclasses.replace(leaf, method=method), *arrays)
        for leaf, method, arrays in zip(leaves, methods, operands, strict=True)
      ]
      found, norms = run(own, wire, key, norms)
      _require_common(own, found, channel.axis_name)
      found = list(map(_with_energies, leaves, found))
      return Exchanged(found, wire.is_finite, norms)

    return run_all

  # Without barriers the compiler moves the last operations of the branches
  # behind the conditional.
  def held(run_all: Callable) -> Callable:
    barrier = jax.lax.optimization_barrier
    return lambda *operands: jax.tree.map(barrier, run_all(*operands))

  operands = [tuple(own[1:]) for own in inputs]
  methods = [leaf.method for leaf in leaves]
  is_compressed = any(leaf.is_compressed for leaf in leaves)
  if ladder[0] > 0 or len(ladder) == 1 or not is_compressed:
    return branch(ladder, level, methods)(operands, norms)
  branches = [
    held(branch(ladder[:1], level, [DENSE] * len(leaves))),
    held(branch(ladder[1:], jnp.maximum(level - 1, 0), methods)),
  ]
  index = (level > 0).astype(jnp.int32)
  return channel.switch(index, branches, operands, norms)


def count_bytes(
  leaves: Sequence[Leaf],
  ladder: Sequence[int],
  code: Code | None,
  replicas: int = 1,
) -> np.ndarray:
  """Counts the bytes that an exchange sends at each rank, and sends nothing.

  Runs the methods themselves, without computing; remembers the results. Leaves
  out what is sent for a whole exchange (`exchange_bytes`).

  Args:
    leaves: The leaves that are exchanged together.
    ladder: The ranks, in any order; 0 is dense.
    code: Encoding of values; None is float32.
    replicas: Number of replicas.

  Returns:
    int64 [ranks], counted as for an all-reduce.
  """
  # What else a trace depends on; integers may have 64 bits.
  around = bool(order.axes_left()), jnp.result_type(int)
  key: Any = tuple(leaves), tuple(ladder), code, replicas, around
  try:
    hash(key)
  except TypeError:  # a method whose `rounds` cannot be hashed
    return np.array(_counted.__wrapped__(*key), np.int64)
  return np.array(_counted(*key), np.int64)


def exchange_bytes(
  leaves: Sequence[Leaf],
  ladder: Sequence[int],
  code: Code | None,
  replicas: int = 1,
) -> np.ndarray:
  """Counts as `count_bytes`, with the norms that are sent beside the leaves."""
  has_norms = any(leaf.has_residual for leaf in leaves)
  found = count_bytes(leaves, ladder, code, replicas)
  return found + growth.WIRE_BYTES * has_norms


# A trace takes as long as that of a step, and `describe`, `advise` and every
# reducer with a link ask for the same bytes of low rank again and again.
@functools.lru_cache(maxsize=512)
def _counted(
  leaves: tuple[Leaf, ...],
  ladder: tuple[int, ...],
  code: Code | None,
  replicas: int,
  around: Any,
) -> tuple[int, ...]:
  """Counts the bytes of an exchange; `around` only tells keys apart."""
  del around

  def trace(leaves: Sequence[Leaf], ladder: Sequence[int]) -> np.ndarray:
    wire = CountingWire(replicas, ladder, code)

    def zeros(leaf: Leaf) -> Input:
      ranks = jnp.zeros(leaf.view.count if leaf.view else 0, jnp.int32)
      gradient = jnp.zeros(leaf.shape, jnp.float32)
      return Input(leaf, gradient, *first_states([leaf]), ranks)

    def all_rounds() -> None:
      run([zeros(leaf) for leaf in leaves], wire, jax.random.key(0))

    jax.eval_shape(all_rounds)
    return wire.num_bytes

  ranks = [rank for rank in ladder if rank]
  if not ranks and not any(leaf.cap for leaf in leaves):
    return tuple(trace(leaves, ladder))  # the only way to send these leaves
  plain = [dataclasses.replace(leaf, method=DENSE) for leaf in leaves]
  found = {0: trace(plain, (0,))[0]} if 0 in ladder else {}
  if ranks:
    found |= dict(zip(ranks, trace(leaves, ranks), strict=True))
  return tuple(found[rank] for rank in ladder)


def first_states(
  leaves: Sequence[Leaf], key: jax.Array | None = None
) -> list[LeafState]:
  """Returns the states of leaves before the first step, without statistics.

  Q of every leaf begins with the same Gaussian numbers, scaled to columns of
  expected length one: leaves are compressed apart, and a compiler makes one
  generator in place of one for each leaf.

  Args:
    leaves: The leaves.
    key: A key for Q, equal on all replicas and stages; None gives zeros.
  """
  shapes = [leaf.shape_of_q or (0, 0, 0) for leaf in leaves]
  most = max((math.prod(shape) for shape in shapes), default=0)
  numbers = jnp.zeros(most, jnp.float32)
  if key is not None and most:
    numbers = jax.random.normal(key, (most,), jnp.float32)
    # Or the compiler makes a generator for each shape.
    numbers = jax.lax.optimization_barrier(numbers)
  states = []
  for leaf, shape in zip(leaves, shapes, strict=True):
    factor_q = residual = None
    if leaf.shape_of_q:
      factor_q = numbers[: math.prod(shape)].reshape(shape) * shape[2] ** -0.5
    if leaf.has_residual:
      residual = jnp.zeros(leaf.shape, jnp.float32)
    states.append(LeafState(factor_q, residual))
  return states


def _kind(leaf: Leaf) -> Any:
  """Returns what leaves of one stack have in common; None for a leaf alone."""
  if order.axes_left():
    return None
  if leaf.method.joins:
    return (
      leaf.method, leaf.matrices[1:], leaf.cap, leaf.width,
      leaf.is_fixed, leaf.has_residual, leaf.shards,
    )  # fmt: skip
  is_plain = leaf.method is DENSE and not leaf.is_encoded
  if is_plain and not leaf.has_residual and leaf.size <= _SMALL:
    return leaf.method, leaf.placement, leaf.shards
  return None


def _joined(
  inputs: Sequence[Input], draws: Sequence[Draws | None]
) -> tuple[Input, Draws | None]:
  """Joins equal leaves to a stack, or small dense ones end to end."""
  first = inputs[0]
  if not first.leaf.method.joins:
    if len(inputs) == 1:
      return first, draws[0]
    flat = [added(own.gradient).ravel() for own in inputs]
    leaf = joined([own.leaf for own in inputs])
    return Input(leaf, jnp.concatenate(flat), LeafState(), None), None
  # Gradients are not copied: they are most of what is read.
  terms = [
    tuple(
      x.reshape(own.leaf.view)
      for x in (own.gradient, own.state.residual)
      if x is not None
    )
    for own in inputs
  ]
  drawn = [own for own in draws if own is not None]  # of all: they compress
  rest = [
    (own.ranks, own.state.factor_q, signs[1:])
    for own, signs in zip(inputs, drawn, strict=True)
  ]
  ranks, q, signs = jax.tree.map(lambda *xs: jnp.concatenate(xs), *rest)
  leaf = joined([own.leaf for own in inputs])
  return (Input(leaf, terms, LeafState(q), ranks), Draws(drawn[0].key, *signs))


def _apart(leaves: Sequence[Leaf], outcome: Outcome) -> list[Outcome]:
  """Returns the outcomes of the leaves of a stack."""
  if not leaves[0].method.joins:
    if len(leaves) == 1:
      return [outcome]
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    return [Outcome(update) for update in jnp.split(outcome.update, ends)]
  found, start = [], 0
  for i, leaf in enumerate(leaves):
    own = slice(start, start + leaf.matrices.count)
    cut = lambda x, own=own: x[own] if x.ndim else x  # noqa: E731
    rest = jax.tree.map(cut, (outcome.factor_q, outcome.energies))
    residual = outcome.residual and outcome.residual[i]
    found.append(Outcome(outcome.update[i], residual, *rest))
    start = own.stop
  return found


def each(function: Callable[..., Any], stacks: tuple) -> Any:
  """Maps a function over the matrices of stacks [k, ...].

  On CPUs one after the other: a batched factorisation splits its work and waits
  for threads, and several at once may occupy all threads of XLA's pool.
  """
  if jax.default_backend() != "cpu":
    return jax.vmap(function)(*stacks)
  if len(jax.tree.leaves(stacks)[0]) > 1:
    return jax.lax.map(lambda x: function(*x), stacks)
  # XLA's CPU backend has more threads outside of loops.
  one = function(*jax.tree.map(lambda x: x[0], stacks))
  return jax.tree.map(lambda x: x[None], one)


def _all_mapped(
  leaves: Sequence[Leaf], asked: Mapping[int, Each]
) -> dict[int, Any]:
  """Maps what the methods of some leaves ask for, of equal kinds together."""
  kinds: dict[Any, list[int]] = {}
  for i, own in asked.items():
    like = [(x.dtype, _powers(x.shape[1:])) for x in own.stacks]
    kind = own.function, leaves[i].shards, tuple(like)
    # The compiler may gather arrays to join them.
    kinds.setdefault(i if order.axes_left() else kind, []).append(i)
  found = {}
  for members in kinds.values():
    function, all_stacks = asked[members[0]].function, []
    for stacks in zip(*(asked[i].stacks for i in members), strict=True):
      shape = np.max([x.shape[1:] for x in stacks], axis=0, initial=0)
      all_stacks.append(jnp.concatenate([_padded(x, shape) for x in stacks]))
    whole, start = each(function, tuple(all_stacks)), 0
    for i in members:
      shapes = jax.eval_shape(jax.vmap(function), *asked[i].stacks)
      end = start + len(asked[i].stacks[0])
      found[i] = jax.tree.map(
        lambda x, like, own=slice(start, end): x[
          (own, *map(slice, like.shape[1:]))
        ],
        whole,
        shapes,
      )
      start = end
  return found


def _powers(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the exponents of the least powers of two that hold the axes."""
  return tuple((length - 1).bit_length() for length in shape)


def _padded(stack: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Pads the axes after the first one with zeros."""
  missing = np.subtract(shape, stack.shape[1:])
  return jnp.pad(stack, [(0, 0), *((0, more) for more in missing)])


def _started(own: Input, draws: Draws | None) -> Rounds:
  """Starts the method of a leaf; raises unless it is a generator."""
  method = own.leaf.method
  rounds = method.rounds(*own, draws)
  if not isinstance(rounds, Generator):
    raise TypeError(
      f"`rounds` of the method {method.name!r} must be a generator, got"
      f" {type(rounds).__name__}; yield a `Send` for each round, or None for a"
      " round in which it sends nothing."
    )
  return rounds


def _require_common(
  inputs: Sequence[Input], outcomes: Sequence[Outcome], axis_name: AxisName
) -> None:
  """Raises if an update is a replica's own, as far as JAX tracks that."""
  for own, outcome in zip(inputs, outcomes, strict=True):
    varying = order.varying_axes(outcome.update)
    validation.require(
      not set(varying) & set(order.names(axis_name)),
      "update",
      f"one that varies over {varying}",
      f"equal on all replicas, by the method {own.leaf.method.name!r} for"
      f" {own.leaf.path or 'the root'}",
      "compute it from replies, draws and constants alone: make zeros with"
      " jnp.zeros(m.shape), since jnp.zeros_like(m) is this replica's own",
    )


def _require_outcome(leaf: Leaf, outcome: Any) -> None:
  """Raises unless a method returned what its leaf needs."""
  name = leaf.method.name
  if not isinstance(outcome, Outcome):
    raise TypeError(
      f"`rounds` of the method {name!r} must return an `Outcome`, got"
      f" {type(outcome).__name__}; end it with `return Outcome(...)`."
    )
  is_list = isinstance(outcome.update, list)
  if leaf.method.joins != is_list:
    raise TypeError(
      f"`update` of the method {name!r} must be"
      f" {'a list over leaves' if leaf.method.joins else 'an array'}, got"
      f" {type(outcome.update).__name__}; return Outcome of such."
    )
  has_residual = outcome.residual is not None or not leaf.has_residual
  validation.require(
    has_residual or not leaf.is_compressed,
    "residual",
    None,
    f"returned by the method {name!r} for {leaf.path or 'the root'}, whose leaf"
    " has one",
    "return Outcome(update, m - sent), or declare feeds_back=False",
  )
  validation.require(
    not leaf.method.measures or outcome.energies is not None,
    "energies",
    None,
    f"returned by the method {name!r}, which measures",
    "return Outcome(..., energies=Energies(...)), or declare measures=False",
  )


def _in_step(
  leaves: Sequence[Leaf],
  methods: Sequence[Rounds],
  wire: Wire,
  norms: jax.Array | None,
) -> tuple[list[Outcome], jax.Array | None]:
  """Advances all methods by one round at a time, until all have returned.

  Sends `norms` beside the first exact numbers, in whose all-reduce they cost no
  time; alone if no method sends any. Returns their mean, too.
  """
  outcomes: dict[int, Outcome] = {}

  def advance(replies: Mapping[int, Any]) -> dict[int, Send | Each | None]:
    """Replies to some methods; returns what those yield that go on."""
    yielded = {}
    for i, reply in replies.items():
      try:
        yielded[i] = methods[i].send(reply)
      except StopIteration as done:
        outcomes[i] = done.value
        continue
      _require_request(leaves[i], yielded[i])
    return yielded

  replies: dict[int, Any] = dict.fromkeys(range(len(methods)))
  mean_norms = None
  while replies or norms is not None:
    yielded = advance(replies)
    while asked := {i: x for i, x in yielded.items() if isinstance(x, Each)}:
      others = {i: x for i, x in yielded.items() if i not in asked}
      yielded = others | advance(_all_mapped(leaves, asked))
    members = sorted(yielded)
    own: list[Any] = [leaves[i] for i in members]
    sends: list[Any] = [yielded[i] for i in members]
    has_norms = norms is not None and (not members or _any_exact(sends))
    if has_norms:
      own, sends = [*own, None], [*sends, Send(measured=norms)]
      norms = None
    received: list[Any] = wire.send(own, sends)
    if has_norms:
      mean_norms = received.pop().measured
    replies = dict(zip(members, received, strict=True))
  return [outcomes[i] for i in range(len(methods))], mean_norms


def _any_exact(sends: Sequence[Send | None]) -> bool:
  """Returns whether any method sends numbers in float32."""
  exact = [(own.exact, own.measured) for own in sends if own is not None]
  return bool(jax.tree.leaves(exact))


def _require_request(leaf: Leaf, request: Any) -> None:
  """Raises unless a method has yielded what the driver understands."""
  if not isinstance(request, Send | Each | None):
    raise TypeError(
      f"`rounds` of the method {leaf.method.name!r} must yield a `Send`, an"
      f" `Each` or None, got {type(request).__name__}; wrap arrays,"
      " `yield Send(values)`."
    )


def _draws(leaves: Sequence[Leaf], key: jax.Array) -> list[Draws | None]:
  """Draws the signs of all compressed leaves.

  One draw for all leaves: one generator for each compiles slowly.
  """
  own = [i for i, leaf in enumerate(leaves) if leaf.method.compresses]
  if not own:
    return [None] * len(leaves)
  shapes = {}
  for i in own:
    (short, long), count = leaves[i].sides, leaves[i].matrices.count
    shapes[i] = (count, 1, short), (count, long)
  sketched = _signs(
    jax.random.fold_in(key, 1), [s for both in shapes.values() for s in both]
  )
  fresh = _signs(key, [long for _, long in shapes.values()])
  own_key = jax.random.fold_in(key, 2)
  draws: list[Draws | None] = [None] * len(leaves)
  for j, i in enumerate(own):
    draws[i] = Draws(
      jax.random.fold_in(own_key, i), *sketched[2 * j : 2 * j + 2], fresh[j]
    )
  return draws


def _signs(key: jax.Array, shapes: Sequence[tuple]) -> list[jax.Array]:
  """Draws random signs of several shapes."""
  sizes = [int(np.prod(shape)) for shape in shapes]
  drawn = jax.random.rademacher(key, (sum(sizes),), jnp.float32)
  pieces = jnp.split(drawn, np.cumsum(sizes)[:-1])
  return [x.reshape(shape) for x, shape in zip(pieces, shapes, strict=True)]


def _fed_back(own: Input, outcome: Outcome) -> Outcome:
  """Rounds an update to its dtype, and keeps what was not applied.

  residual' = (M - sent) + (update - round(update))
  """
  mean = outcome.update.reshape(own.gradient.shape)
  rounded = _round(mean, own.gradient.dtype)
  factor_q, residual, _ = own.state
  if residual is not None:
    left = jnp.zeros_like(residual)
    if outcome.residual is not None:
      left = outcome.residual.reshape(residual.shape)
    residual = left if rounded is mean else left + mean - rounded
  if outcome.factor_q is not None:
    factor_q = outcome.factor_q
  update = rounded.astype(own.gradient.dtype)
  return Outcome(update, residual, factor_q, outcome.energies)


def _with_energies(leaf: Leaf, outcome: Outcome) -> Outcome:
  """Gives a leaf that is measured at some rank energies of zero in dense ones.

  Drops those of a method that does not measure.
  """
  if not leaf.method.measures:
    return outcome._replace(energies=None)
  if outcome.energies is not None:
    return outcome
  like = outcome.update if outcome.factor_q is None else outcome.factor_q
  zeros = [jnp.zeros_like(like, jnp.float32, (leaf.matrices.count,))] * 3
  unit = jnp.ones_like(like, jnp.float32, ())
  return outcome._replace(energies=Energies(*zeros, unit))


def _round(mean: jax.Array, dtype: Any) -> jax.Array:
  """Rounds float32 to values of a narrower dtype, clipped to its range.

  The compiler may remove a cast to the dtype and back, but not this.
  """
  if jnp.dtype(dtype).itemsize >= 4:
    return mean
  info = jnp.finfo(dtype)
  limit = float(info.max)
  mean = jnp.clip(mean, -limit, limit)
  rounded = jax.lax.reduce_precision(mean, info.nexp, info.nmant)
  if info.nexp >= jnp.finfo(jnp.float32).nexp:
    return rounded
  # It takes subnormal numbers for 0: below 6e-5 in float16, as gradients are.
  step = float(info.smallest_subnormal)
  subnormal = step * jnp.round(mean / step)
  return jnp.where(jnp.abs(mean) < float(info.tiny), subnormal, rounded)
