"""Tells which method reaches a loss soonest on a link.

  time = steps seconds,
  seconds = step + (k latency + bytes / bandwidth + computing) / H

with k collectives in sequence, an exchange every H steps, and as many times the
steps of dense as the protocol has measured (`measure.evidence`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.leaves.leaf import arrays_of, leaves_in, require_arrays
from edgc_jax.leaves.views import ViewFn, layer_matrix
from edgc_jax.measure import timing
from edgc_jax.measure.description import (
  bytes_of_step,
  factor_bytes,
  reviewed,
)
from edgc_jax.measure.evidence import Evidence, of_protocol
from edgc_jax.mesh.sharding import require_is_mesh
from edgc_jax.methods import REDUCERS
from edgc_jax.wire.link_model import LinkModel, ring_bytes

TOLERANCE = 0.1  # of the least time, accepted for fewer steps
_CLOSE = 1.02  # of the protocol's bits, up to which a rank sends as many
_EDGC_RANKS = 6  # of a ladder of edgc, beyond the first
_EVERY = ", every "  # ends the name of an exchange
# All-reduces in sequence; others have one. Sparse entries are gathered, vectors
# exchanged in 4 bits, and sketches of the error reduced.
_TRIPS = {"powersgd": 2, "edgc": 2, "quantize": 2, "topk": 3, "randomk": 2}


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method for the user's parameters, with predicted bytes and times.

  Attributes:
    name: A name to print.
    reducer: Name of the function of this package.
    options: Its arguments. (`edgc` takes the length of the run, too.)
    every: Steps between two exchanges; above 1, those of `local_steps`.
    outer: Arguments of the outer `optax.sgd` of `local_steps`.
    wire_bytes: Payload of one exchange of a device.
    bits: Bits a parameter and step.
    seconds: Of a step, the mean over a round.
    steps: Steps to a loss, as a multiple of dense's.
    time: seconds * steps, which is proportional to the time to a loss.
    break_even: Bandwidth, in bytes of payload per second of an all-reduce,
      above which dense float32 reaches a loss sooner; inf if dense never does,
      0 for dense itself and for methods that are never sooner.
  """

  name: str
  reducer: str
  options: Mapping[str, Any]
  every: int
  outer: Mapping[str, float]
  wire_bytes: int
  bits: float
  seconds: float
  steps: float
  break_even: float

  @property
  def time(self) -> float:
    return self.seconds * self.steps

  @property
  def exchanged_by(self) -> str:
    """Name of the reducer and its options, without the steps of a round."""
    return self.name.partition(_EVERY)[0]

  @property
  def code(self) -> str:
    """The transformation as code, with the user's OPTIMISER.

    In plain `jit` it is for the mesh of `jax.set_mesh`; its reducer needs the
    `matrix_view` that `advise` was given, too.
    """
    link = f"edgc_jax.{self.reducer}({_arguments(self.options)})"
    if self.every == 1:
      return f"optax.chain({link}, OPTIMISER)"
    outer = f"optax.chain({link}, optax.sgd({_arguments(self.outer)}))"
    return f"edgc_jax.local_steps(OPTIMISER, {outer}, every={self.every})"

  def make(
    self, matrix_view: ViewFn | None = None, **more: Any
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the reducer, with further arguments of it."""
    if matrix_view is not None:
      more["matrix_view"] = matrix_view
    return REDUCERS[self.reducer](**self.options, **more)


@dataclasses.dataclass(frozen=True)
class Advice:
  """All methods, fewest steps first, and the best one; prints as a table.

  Attributes:
    methods: The candidates.
    choice: Of those that need at most `tolerance` more time than the soonest,
      the one with the fewest steps.
    assumptions: What was assumed and not measured, in sentences.
    link: Of one device.
    step_seconds: Of a step without any exchange.
    replicas: Number of replicas.
    shards: Devices of a replica.
  """

  methods: tuple[Candidate, ...]
  choice: Candidate
  assumptions: tuple[str, ...]
  link: LinkModel
  step_seconds: float
  replicas: int
  shards: int = 1

  def __str__(self) -> str:
    """Returns the link, the table, the choice, and what was assumed."""
    width = max(len(method.name) for method in self.methods)
    link = (
      f"{self.replicas} replicas, uplinks of"
      f" {self._speed(self.link.bandwidth)},"
      f" {1e3 * self.link.latency:.3g} ms an all-reduce,"
      f" {self.step_seconds:.3g} s a step without exchange"
    )
    head = f"{'method':{width}}{'bits':>8}{'MB':>10}{'s a step':>10}"
    lines = [link, f"{head}{'steps':>7}{'time':>8}   dense sooner above"]
    dense = self.methods[0].time
    for method in self.methods:
      lines.append(
        f"{method.name:{width}}{method.bits:8.2f}"
        f"{self.shards * method.wire_bytes / 1e6:10.2f}{method.seconds:10.3f}"
        f"{method.steps:7.2f}{method.time / dense:8.3f}   {self._bound(method)}"
      )
    lines += [
      f"choice: {self.choice.name}",
      self.choice.code,
      *(f"- {text}" for text in self.assumptions),
    ]
    return "\n".join(lines)

  def _bound(self, method: Candidate) -> str:
    """Returns the speed of a replica's uplink at which dense takes over."""
    if method is self.methods[0]:
      return ""
    if not method.break_even:
      return "any speed"
    if method.break_even == float("inf"):
      return "no speed"
    return self._speed(method.break_even)

  def _speed(self, bandwidth: float) -> str:
    """Returns a device's payload a second as the speed of a replica's uplink.

    In Mbit/s below 10 Gbit/s.
    """
    megabits = 8e-6 * self.shards * ring_bytes(bandwidth, self.replicas)
    if megabits < 9999.5:
      return f"{megabits:.4g} Mbit/s"
    return f"{megabits / 1e3:.4g} Gbit/s"


def _arguments(options: Mapping[str, Any]) -> str:
  return ", ".join(f"{name}={value!r}" for name, value in options.items())


def advise(
  params: Any,
  link: LinkModel,
  step_seconds: float,
  replicas: int,
  *,
  computing: Mapping[str, float] | None = None,
  most_steps: int | None = None,
  optimizer: str = "adamw",
  tolerance: float = TOLERANCE,
  matrix_view: ViewFn | None = None,
  shards: int = 1,
) -> Advice:
  """Predicts how soon each method reaches a loss, and chooses one.

    time = steps (step + (k latency + bytes / bandwidth + computing) / H)

  The candidates are the methods that the protocol has judged, with the ranks
  that send as many bits a parameter of these parameters, without those that
  another one beats in steps, bits and collectives alike. Print the result:

    print(edgc_jax.advise(params, link, step_seconds=0.3, replicas=4))

  Communication and computation do not overlap in this model.

  Args:
    params: Parameters or their `jax.ShapeDtypeStruct`s; of one device, if
      devices shard them.
    link: Time of an all-reduce over the replicas: from `measure_link`, or
      `LinkModel.of_uplink` for a link that is not at hand.
    step_seconds: Seconds of a training step without any exchange.
    replicas: Number of replicas, at least 2.
    computing: Seconds to compute an exchange, by the names of the candidates,
      from `measure_computing`; None assumes none.
    most_steps: Leaves out exchanges that are rarer than every so many steps:
      1 leaves out local steps. None keeps all.
    optimizer: Of the judged runs, and of yours: "adamw", or "muon", which is
      Muon for kernels and Adam for the rest, as in docs/recipes.md. Steps are
      multiples of those of dense with it.
    tolerance: Extra time accepted for fewer steps, as a share of the least
      time; at least 0.
    matrix_view: As for the reducers; None for their own.
    shards: Devices of a replica that share its link, to print its bytes.

  Returns:
    All methods, and the chosen one.

  Raises:
    TypeError: if an argument has another type.
    ValueError: if an argument is out of range, `computing` lacks a name, or
      `params` has no array.

  >>> import jax
  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> fast = LinkModel(latency=1e-5, bandwidth=1e11)
  >>> advise(weights, fast, step_seconds=0.1, replicas=2).choice.name
  'dense'
  """
  validation.require_finite("step_seconds", step_seconds, "measure it")
  validation.require_finite("tolerance", tolerance, "0.1 is a tenth")
  validation.require_int("shards", shards, 1)
  validation.require_kind(
    "link", link, LinkModel, "create one, or measure it", optional=False
  )
  if computing is not None:
    _require_seconds(computing)
  found = _candidates(params, replicas, matrix_view, most_steps, optimizer)
  if computing is not None:
    missing = [m.name for m in found if m.exchanged_by not in computing]
    validation.require(
      not missing,
      "computing",
      sorted(computing),
      f"seconds of all candidates, {', '.join(missing)} among them",
      "pass the result of measure_computing for the same arguments",
    )

  def exchange(method: Candidate) -> tuple[float, float]:
    """Returns what takes no part in bytes / bandwidth, and the bytes."""
    own = 0.0 if computing is None else computing[method.exchanged_by]
    return _trips(method) * link.latency + own, method.wire_bytes

  dense = exchange(found[0])
  methods = []
  for method in found:
    fixed, sent = exchange(method)
    seconds = step_seconds + (fixed + sent / link.bandwidth) / method.every
    # Both take equally long if saved bytes / bandwidth = added seconds.
    saved = dense[1] - method.steps * sent / method.every
    added = method.steps * (step_seconds + fixed / method.every)
    added -= step_seconds + dense[0]
    even = 0.0 if saved <= 0 else saved / added if added > 0 else float("inf")
    methods.append(
      dataclasses.replace(method, seconds=seconds, break_even=even)
    )
  methods.sort(key=lambda method: method.steps)
  chosen = first_fast([method.time for method in methods], tolerance)
  assumed = [
    "Steps are those of the protocol's model of 0.45 million parameters on 4"
    " replicas (docs/results.md), and assumed to be those of yours; steps that"
    " differ by less than 0.02 do not differ surely.",
    f"Methods were judged with {optimizer}, and yours is assumed to be the"
    " same. Each had a learning rate of its own: tune yours again.",
    "Ranks are those that send the protocol's bits a parameter.",
    "No exchange overlaps with computation.",
  ]
  if not all(one.is_current for one in of_protocol()[optimizer]):
    assumed.append(
      "Steps of some methods are of an older version of their code; bytes are"
      " those of the present one."
    )
  if matrix_view is not None:
    assumed.append("The code needs your matrix_view, too.")
  if computing is None:
    assumed.append(
      "Computing an exchange takes no time; measure_computing measures it."
    )
  return Advice(
    tuple(methods),
    methods[chosen],
    tuple(assumed),
    link,
    step_seconds,
    replicas,
    shards,
  )


def measure_computing(
  params: Any,
  replicas: int,
  *,
  repeats: int = 10,
  most_steps: int | None = None,
  optimizer: str = "adamw",
  matrix_view: ViewFn | None = None,
  mesh: Any = None,
) -> Mapping[str, float]:
  """Times the computation of the exchanges of all candidates.

    reducer.update - an update that only scales gradients

  Each device is alone on its axis, so updates send nothing. They compute
  everything but what grows with replicas: `topk` sums the entries of all of
  them. Compiles every candidate, which takes seconds to minutes.

  Args:
    params: As for `advise`. Only shapes and dtypes are read.
    replicas: As for `advise`.
    repeats: Number of timed calls.
    most_steps, optimizer, matrix_view: As for `advise`.
    mesh: With several processes, the mesh of the training. All of them must
      call this at the same point, and get the same times.

  Returns:
    Seconds by the name of a candidate.

  Raises:
    TypeError: if `repeats` is not an integer, or `mesh` no mesh.
    ValueError: if `repeats` is below 1, or an argument of `advise` is out of
      range.
  """
  validation.require_int("repeats", repeats, 1)
  require_is_mesh(mesh, optional=True, kinds=Mesh)
  reducers = {
    method.exchanged_by: method.make(matrix_view)
    for method in _candidates(
      params, replicas, matrix_view, most_steps, optimizer
    )
  }
  seconds = timing.extra_seconds(
    optax.scale(0.5),  # the compiler would remove an identity
    list(reducers.values()),
    arrays_of(params),
    repeats,
    mesh,
  )
  return {
    name: max(0.0, float(s)) for name, s in zip(reducers, seconds, strict=True)
  }


def _require_seconds(computing: Any) -> None:
  """Raises unless this is a mapping from names to seconds."""
  if not isinstance(computing, Mapping):
    raise TypeError(
      "`computing` must be a mapping from names to seconds, got"
      f" {validation.shown(computing)}; pass the result of measure_computing."
    )
  for name, seconds in computing.items():
    validation.require_finite(f"computing[{name!r}]", seconds, "measure it")


def first_fast(seconds: Sequence[float], tolerance: float = TOLERANCE) -> int:
  """Returns the first index at most `tolerance` slower than the fastest.

  >>> first_fast([1.5, 1.05, 1.0])
  1
  """
  enough = (1 + tolerance) * min(seconds)
  return next(i for i, value in enumerate(seconds) if value <= enough)


def _candidates(
  params: Any,
  replicas: int,
  matrix_view: ViewFn | None,
  most_steps: int | None,
  optimizer: str,
) -> list[Candidate]:
  """Returns the methods to choose from for these parameters, dense first."""
  validation.require_int("replicas", replicas, 2)
  if most_steps is not None:
    validation.require_int("most_steps", most_steps, 1)
  validation.require_function(
    "matrix_view", matrix_view, "a leaf's path and shape"
  )
  validation.require_one_of("optimizer", optimizer, tuple(of_protocol()))
  require_arrays(params)
  judged = _judged(params, replicas, matrix_view, optimizer)
  dense, *others = (
    one for one in judged if one.every <= (most_steps or one.every)
  )
  return [dense, *(one for one in others if not _is_beaten(one, others))]


def _is_beaten(method: Candidate, others: Sequence[Candidate]) -> bool:
  """Returns whether another one needs no more of anything, and less of some."""

  def cost(one: Candidate) -> tuple[float, float, float]:
    return one.steps, one.bits, _trips(one) / one.every

  own = cost(method)
  return any(
    cost(one) != own
    and all(a <= b for a, b in zip(cost(one), own, strict=True))
    for one in others
  )


def _judged(
  params: Any, replicas: int, matrix_view: ViewFn | None, optimizer: str
) -> list[Candidate]:
  """Returns the protocol's methods for these parameters, dense first."""
  params = arrays_of(params)
  found: dict[str, Candidate] = {}
  for one in of_protocol()[optimizer]:
    own = _for_params(one, params, replicas, matrix_view)
    if own is not None:
      found.setdefault(own.name, own)
  return list(found.values())


def _for_params(
  one: Evidence,
  params: Any,
  replicas: int,
  matrix_view: ViewFn | None,
) -> Candidate | None:
  """Returns a method with the ranks that send the protocol's bits.

  Args:
    one: The method as it was judged.
    params: The parameters.
    replicas: Number of replicas.
    matrix_view: The view of each leaf.

  Returns:
    None if even rank 1 sends more.
  """
  sizes = [leaf.size for leaf in leaves_in(params)]
  size = max(1, sum(sizes))
  name, options = one.name, one.options
  if one.reducer in _RESIZED:
    resized = _RESIZED[one.reducer]

    def bytes_at(rank: int) -> float:
      own = resized(options, rank)
      sent = factor_bytes(
        params,
        _ranks_of(own),
        own["min_ratio"],
        own["wire_dtype"],
        matrix_view or layer_matrix,
        replicas,
      )
      return sum(sent) / len(sent)  # mean over the ranks of the ladder

    rank = _largest_rank(
      bytes_at,
      _CLOSE * one.predicted_bits * one.every * size / 8,
      max(sizes),
    )
    if not rank:
      return None
    options = resized(options, rank)
    every = f"{_EVERY}{one.every}" if one.every > 1 else ""
    own = [f"rank {rank}", options["wire_dtype"], options.get("allocation")]
    name = ", ".join([one.reducer, *filter(None, own)]) + every
  method = Candidate(
    name, one.reducer, options, one.every, one.outer, 0, 0.0, 0.0, one.steps,
    0.0,
  )  # fmt: skip
  (found, *_) = reviewed(method.make(matrix_view), params)
  by_rank = bytes_of_step(found, replicas)
  # A mean over the ranks, of which edgc uses several.
  sent = sum(by_rank) / len(by_rank)
  if len(by_rank) > 1:  # the judged runs used some of them more than others
    sent *= one.bits / one.predicted_bits
  bits = 8 * sent / size / one.every
  return dataclasses.replace(method, wire_bytes=round(sent), bits=bits)


def _largest_rank(
  bytes_of: Callable[[int], float], limit: float, most: int
) -> int:
  """Returns the largest rank up to `most` that sends at most so many bytes.

  Bytes grow in proportion to the rank until matrices reach their largest one,
  so a straight line finds it in few trials, each of which takes a trace.

  Returns:
    0 if there is none.
  """
  sent, slope = bytes_of(1), bytes_of(2) - bytes_of(1)
  if sent > limit or slope <= 0:
    return 0
  low, high = 1, most + 1
  while high - low > 1:
    guess = low + int((limit - sent) / slope)
    guess = min(max(guess, low + 1), high - 1)
    found = bytes_of(guess)
    if found > limit:
      high, slope = guess, (found - sent) / (guess - low)
    else:
      low, sent = guess, found
  return low


def _ranks_of(options: Mapping[str, Any]) -> tuple[int, ...]:
  """Returns the ladder of ranks of a method's options."""
  if "rank" in options:
    return (options["rank"],)
  least, most = options["rank_min"], options["rank_max"]
  return tuple(range(least, most + 1, options["rank_multiple"]))


def _powersgd_at(options: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
  return {**options, "rank": rank}


def _edgc_at(options: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
  """Scales the range of ranks, of which `rank` is the mean."""
  scale = 2 * rank / (options["rank_max"] + options["rank_min"])
  most, least = (scale * options[name] for name in ("rank_max", "rank_min"))
  step = max(1, round((most - least) / _EDGC_RANKS))
  least = max(1, round(least / step)) * step
  return {
    **options, "rank_max": max(round(most / step) * step, least),
    "rank_min": least, "rank_multiple": step, "max_rank_step": 2 * step,
  }  # fmt: skip


def trips_of(reducer: str, is_encoded: bool) -> int:
  """Returns the all-reduces of an exchange, one after the other.

  If `wire_dtype` encodes what would be reduced with other values, it is
  exchanged in parts, then gathered: one more.
  """
  has_wire_dtype = reducer in ("allreduce", "powersgd", "edgc")
  return _TRIPS.get(reducer, 1) + (is_encoded and has_wire_dtype)


def _trips(method: Candidate) -> int:
  """Returns `trips_of` a candidate, whose code is among its options."""
  wire_dtype = method.options.get("wire_dtype", "float32")
  return trips_of(method.reducer, wire_dtype != "float32")


_RESIZED: Mapping[str, Callable[[Mapping[str, Any], int], Mapping[str, Any]]]
_RESIZED = {"powersgd": _powersgd_at, "edgc": _edgc_at}
