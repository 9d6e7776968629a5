"""Defines `Site`: training together through a bucket.

What is in the bucket:

  sites/<name>.<round>.<process>   a site, and the first round that it is in
  rounds/<t>/sites/<name>          a site's change in round t
  rounds/<t>/manifest              the sites whose changes make round t
  checkpoints/<t>                  the common parameters before round t

No object changes once it is written, and the first manifest of a round decides,
whoever has written it. So no site leads.
"""

import contextlib
import hashlib
import itertools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from edgc_jax import validation
from edgc_jax.sites.bucket import open_bucket
from edgc_jax.sites.payload import Layout
from edgc_jax.sites.run import (
  NAME,
  TOO_LARGE,
  Arrays,
  Rule,
  Run,
  SiteError,
  number_of,
)

_LOG = logging.getLogger(__name__)
_BITS = (2, 4, 8, 32)
_QUIET = 10.0  # seconds of waiting without a word
_LONGEST = 10  # times its patience that a site waits longer that came late


class Round(NamedTuple):
  """What happened in a round, as one site saw it.

  Attributes:
    number: The round, from 0 on.
    members: The sites whose changes were averaged, in the order of names.
    late: The sites that this one has waited for in vain.
    refused: Why a change was refused, by site.
    sent, received: Bytes of this site's change, and of the others'.
    waited: Seconds from the end of the own upload to the end of the round.
    seconds: Of the whole exchange.
  """

  number: int
  members: tuple[str, ...] = ()
  late: tuple[str, ...] = ()
  refused: Mapping[str, str] = {}
  sent: int = 0
  received: int = 0
  waited: float = 0.0
  seconds: float = 0.0

  def __str__(self) -> str:
    """Says it in a line."""
    parts = [
      f"round {self.number} of {', '.join(self.members) or 'no site'}:"
      f" {self.sent / 1e3:,.1f} kB up, {self.received / 1e3:,.1f} kB down,"
      f" {self.seconds:.1f} s ({self.waited:.1f} s waiting)"
    ]
    parts += [f"late: {', '.join(self.late)}"] if self.late else []
    parts += [f"refused: {name}, {why}" for name, why in self.refused.items()]
    return "; ".join(parts)


class Site:
  """One of several programs that train together through a bucket.

  A site trains alone on its own devices, in any way. Every round it uploads the
  change of its parameters, waits for the others, and goes on from the common
  parameters x, which are equal at all sites, bit for bit:

    M_i = x - own_i + residual_i
    sent_i = decode(encode(M_i)),    residual_i = residual_decay (M_i - sent_i)
    x <- x - lr m,    m = sum_i w_i sent_i / sum_i w_i,    w_i the weights

  and with momentum, Nesterov's: t <- m + momentum t, x <- x - lr (m + momentum
  t). A site that comes too late for a round keeps all of M_i as its residual,
  joins the round that is open then, and waits for the others. A site that was
  away loads the newest checkpoint, and applies the rounds after it.

  Nothing listens and no site leads: an object store, or a folder that all
  mount, is all that sites share.

  Wire: every site uploads its change once a round and downloads those of the
  others. With a density of 1/64 they take 0.16 bits a parameter, and all their
  entries take `bits` a parameter. Leaves of fewer than two axes, or of fewer
  than 1,000 entries, take 8 bits an entry (32 with bits=32).

  Memory on the host: 12 bytes a parameter, 16 with momentum, and 16 more during
  an exchange. Leaves are encoded one after the other, on the default device.

  Args:
    url: The run's own folder in a bucket, such as s3://bucket/run or
      gs://bucket/run, or the path of a folder that all sites mount.
    name: The site's name, of letters, digits, - and _; one process at a time
      has it.
    every: Steps of a round; or
    seconds: the time of a round, in which each site does what it can. Pass the
      tokens as `weight` then.
    density: Share of the entries that is sent: the largest of each chunk of
      4,096; None for all entries.
    bits: Of a value: 2 with a density; without one 2, 4, 8 or 32.
    residual_decay: Multiplies what was not sent, in (0, 1].
    lr, momentum: Of the outer SGD; 1 without momentum averages.
    patience: Seconds for which a site waits for others after its own upload:
      more than the rounds of the sites differ. A site that comes late waits
      longer, by its own last round, up to ten times this.
    least: Sites of a round, at least; a site waits until so many have come.
    most_norm: A change whose norm is so many times the median of the round's
      is refused, and halved for the next; so large a weight is lowered to that.
      With two sites neither happens.
    checkpoint_every: Rounds between two checkpoints; older rounds are removed.
    key: Shared by all sites; objects that were not signed with it are refused.

  Raises:
    TypeError: if an argument has another type.
    ValueError: if an argument is out of range.

  References:
    Local steps with an outer optimiser: DiLoCo, arXiv:2311.08105. The sparse
    code: SparseLoCo, arXiv:2508.15706, with the departures of `topk`. Training
    through object storage: Covenant-72B, arXiv:2603.08163.

  >>> import tempfile
  >>> import jax.numpy as jnp
  >>> folder = tempfile.mkdtemp()
  >>> site = Site(folder, "alone", every=10, density=None, bits=32)
  >>> params = site.join({"w": jnp.zeros((2, 2))})
  >>> params = site.exchange({"w": params["w"] + 1})
  >>> float(params["w"].sum()), site.last.members
  (4.0, ('alone',))
  """

  def __init__(
    self,
    url: str | os.PathLike,
    name: str,
    *,
    every: int | None = None,
    seconds: float | None = None,
    density: float | None = 1 / 64,
    bits: int = 2,
    residual_decay: float = 0.95,
    lr: float = 1.0,
    momentum: float = 0.0,
    patience: float = 60.0,
    least: int = 1,
    most_norm: float = 10.0,
    checkpoint_every: int = 10,
    key: bytes | None = None,
  ):
    """Reads and writes nothing yet."""
    is_name = isinstance(name, str) and NAME.fullmatch(name)
    validation.require(
      bool(is_name), "name", name, "1 to 64 letters, digits, - and _",
      "give the place's name",
    )  # fmt: skip
    validation.require(
      (every is None) != (seconds is None), "every", every,
      f"given, or `seconds`, and not both; seconds is {seconds}",
      "give the steps of a round, or its time",
    )  # fmt: skip
    if every is not None:
      validation.require_int("every", every, 1)
    if density is not None:
      validation.require_share("density", density)
    validation.require(
      bits == 2 or (density is None and bits in _BITS), "bits", bits,
      f"2 with a density, or one of {_BITS} with density=None",
      "use 2, or send all entries by density=None",
    )  # fmt: skip
    validation.require_share("residual_decay", residual_decay)
    validation.require_int("least", least, 1)
    validation.require_int("checkpoint_every", checkpoint_every, 1)
    for option, value in (
      ("seconds", seconds or 0), ("lr", lr), ("momentum", momentum),
      ("patience", patience), ("most_norm", most_norm),
    ):  # fmt: skip
      validation.require_finite(option, value, "see the docstring of Site")
    validation.require(momentum < 1, "momentum", momentum, "below 1", "use 0.9")
    validation.require(
      most_norm > 1, "most_norm", most_norm, "above 1", "use 10"
    )
    if key is not None and not isinstance(key, bytes):
      raise TypeError(
        f"`key` must be bytes, got {type(key).__name__}; pass text.encode()."
      )
    self.name = name
    self.last: Round | None = None
    self._every, self._seconds = every, seconds or 0.0
    self._code = density, bits
    self._decay, self._rule = residual_decay, Rule(lr, momentum, most_norm)
    self._patience, self._least = patience, least
    self._checkpoint_every, self._key = checkpoint_every, key
    self._url, self._process = os.fspath(url), uuid.uuid4().hex[:12]
    self._bucket = open_bucket(url)
    self._ended = time.monotonic()  # of the last exchange
    self._run: Run | None = None
    self._base: Arrays = []  # parameters of which a change is measured
    self._residual: Arrays = []
    # Hash and body of a change of which it is unknown whether it was counted.
    self._uploaded: tuple[str, bytes] | None = None
    self._round, self._is_there = 0, False
    self._began: Arrays | None = None  # own parameters when `begin` was called
    self._flight = _Flight(lambda: None)
    self._due: float | None = None  # since the first step was compiled
    self._shapes: Mapping[str, tuple[int, ...]] = {}

  @property
  def round(self) -> int:
    """The next round of this site, from 0 on."""
    return self._round

  def join(self, params: Any) -> Any:
    """Joins the run, and returns its newest common parameters.

    The first site of a run gives them. Another process that has this site's
    name cannot go on.

    Args:
      params: Own parameters, with the shapes, dtypes and shardings to return.

    Raises:
      TypeError: if a leaf is not of floating point.
      ValueError: if leaves are not finite, or the run is of another model or
        has other options.
      SiteError: if the run cannot be read.
    """
    own = _on_host(params)
    self._shapes = _shapes_of(params)
    self._layout = Layout(self._shapes, *self._code)
    self._residual = [np.zeros_like(x) for x in own]

    def join() -> None:
      try:
        self._bucket.require_exclusive()
      except OSError as error:
        raise SiteError(
          "`url` must be of a folder or a bucket that can be written, got"
          f" {self._url} ({type(error).__name__}: {error}); check the name, the"
          " credentials and the network."
        ) from error
      self._run = Run(
        self._bucket, self._url, self._layout, self._rule, self._key, own
      )
      self._announce()

    _in_first(join)
    self._is_there = True
    return self._hand_out(params, own, own)

  def is_due(self, step: int) -> bool:
    """Returns whether a round of this site ends after a step.

    Args:
      step: The step that is done, from 0 on.
    """
    if self._every is not None:
      return (step + 1) % self._every == 0
    now = time.monotonic()
    self._due = now + self._seconds if self._due is None else self._due
    is_due = np.bool_(now >= self._due)
    if jax.process_count() > 1:
      is_due = multihost_utils.broadcast_one_to_all(is_due)
    return bool(is_due)

  def exchange(self, params: Any, weight: float = 1.0) -> Any:
    """Exchanges the change of the parameters, and waits for the round.

    Args:
      params: Own parameters.
      weight: Of this site in the mean, such as its tokens in this round.

    Returns:
      The common parameters.

    Raises:
      As `begin` and `finish`.
    """
    self.begin(params, weight)
    params = self.finish(params)
    self._due = time.monotonic() + self._seconds
    return params

  def begin(self, params: Any, weight: float = 1.0) -> None:
    """Begins an exchange, which goes on beside the next steps.

    Args:
      params: Own parameters; they may be donated afterwards.
      weight: As for `exchange`.

    Raises:
      ValueError: if the parameters are not finite, or of another model, or the
        weight is not positive.
      SiteError: if the site has not joined, or an exchange is in flight.
    """
    if not self._is_there:
      raise SiteError(
        "`begin` and `exchange` are for sites that have joined; call"
        " params = site.join(params) first."
      )
    if self._began is not None:
      raise SiteError(
        "`begin` must wait for the exchange in flight; call"
        " params = site.finish(params) first."
      )
    is_number = isinstance(weight, int | float | np.number)
    validation.require(
      is_number and 0 < weight < math.inf, "weight", weight,
      "positive and finite", "pass the tokens of the round, or leave it out",
    )  # fmt: skip
    self._require_same(params)
    own = _on_host(params)
    self._began, self._due = own, time.monotonic() + self._seconds
    if _is_first():
      # M_i = x - own_i + residual_i
      terms = zip(self._base, own, self._residual, strict=True)
      change = [base - x + kept for base, x, kept in terms]
      body = self._layout.encode(change)
      self._flight = _Flight(
        lambda: self._exchange(change, body, float(weight))
      )

  def is_ready(self) -> bool:
    """Returns whether an exchange in flight has ended."""
    is_ready = np.bool_(not self._flight.is_alive())
    if jax.process_count() > 1:
      is_ready = multihost_utils.broadcast_one_to_all(is_ready)
    return self._began is not None and bool(is_ready)

  def finish(self, params: Any) -> Any:
    """Waits for the exchange that has begun.

    Args:
      params: Own parameters, which may have moved since `begin`.

    Returns:
      The common parameters, and what the own ones have moved since `begin`;
      `params` themselves if no exchange has begun.

    Raises:
      SiteError: if another process has taken the site's name, or what the
        bucket holds is damaged.
    """
    if self._began is None:
      return params
    self._require_same(params)
    began = self._began
    try:
      _in_first(self._flight.result)
    finally:  # a signal may end the wait, and not the exchange
      if not self._flight.is_alive():
        self._began = None
    return self._hand_out(params, began, _on_host(params))

  def leave(self) -> None:
    """Tells the other sites that they need not wait for this one."""
    self._is_there = False
    if _is_first():
      entries = self._bucket.sizes("sites")
      own = (x for x in entries if _entry(x)[::2] == (self.name, self._process))
      self._bucket.remove(f"sites/{x}" for x in own)

  def _exchange(self, change: Arrays, body: bytes, weight: float) -> None:
    """Takes part in the round that is open, or opens next."""
    run = self._run
    assert run is not None
    began = time.monotonic()
    if not self._is_alone():
      raise SiteError(
        f"`name` must be of one process at a time, got {self.name!r}: a newer"
        f" process with this name has joined {self._url}, and goes on; this one"
        " stops. Give each site a name of its own."
      )
    patience = self._patience
    if run.is_over():
      # Others are within their steps, and need as long as this site does.
      patience += min(began - self._ended, _LONGEST * self._patience)
      run.catch_up()
      self._announce()  # the upload takes time
    # An exchange that failed may have left its change there.
    left = self._without_counted(run, change)
    if left is not change:
      change, body = left, self._layout.encode(left)
    t = run.round
    data = run.framed_change(self.name, self._process, weight, body)
    is_sent = run.add(self.name, data)
    if is_sent:
      self._uploaded = hashlib.sha256(data).hexdigest(), body
    else:
      _LOG.warning(
        "site %s has a change in round %d from before, and keeps this one for"
        " the next", self.name, t,
      )  # fmt: skip
    sent = time.monotonic()
    late = self._wait(run, {self.name: data} if is_sent else {}, patience)
    waited = time.monotonic() - sent
    found = run.apply() if run.round == t and run.is_over() else None
    run.catch_up()
    left = self._without_counted(run, change)
    self._uploaded = None
    reason = found.refused.get(self.name, "") if found and is_sent else ""
    if reason:
      _LOG.warning(
        "the change of site %s is refused by all sites (%s)", self.name, reason
      )
    share = 1.0
    if left is not change:
      share = self._decay
    elif reason == TOO_LARGE.format(self._rule.most_norm):
      share = 0.5  # until it is small enough
    self._residual = [np.float32(share) * x for x in left]
    is_first = found is not None and found.members[:1] == (self.name,)
    if is_first and run.round % self._checkpoint_every == 0:
      run.save()
      run.remove_old()
    self._ended = time.monotonic()
    received = found.received if found else {}
    self.last = Round(
      t,
      found.members if found else (),
      late,
      found.refused if found else {},
      len(data) * is_sent,
      sum(received.values()) - received.get(self.name, 0),
      waited,
      time.monotonic() - began,
    )

  def _require_same(self, params: Any) -> None:
    """Raises unless parameters have the leaves of those that have joined."""
    found, own = _shapes_of(params).items(), self._shapes.items()
    for leaf, wanted in itertools.zip_longest(found, own):
      validation.require(
        leaf == wanted,
        "params",
        leaf,
        f"those of `join`, where this leaf is {wanted}",
        "pass the parameters that it returned, trained",
      )

  def _without_counted(self, run: Run, change: Arrays) -> Arrays:
    """Returns what is left of a change if the newest upload has counted."""
    if (
      self._uploaded is None or run.counted.get(self.name) != self._uploaded[0]
    ):
      return change
    terms = zip(change, self._layout.decode(self._uploaded[1]), strict=True)
    return [x - counted for x, counted in terms]

  def _wait(
    self, run: Run, good: dict[str, bytes], patience: float
  ) -> tuple[str, ...]:
    """Waits until the round is over, and ends it if no other site does.

    Args:
      run: The run.
      good: Changes by site that need not be read.
      patience: Seconds after which other sites are left behind.

    Returns:
      The sites that this one has waited for in vain.
    """
    began, seen, has_warned = time.monotonic(), set(good), False
    while not run.is_over():
      for name, size in run.changes().items():
        if name not in seen:
          seen.add(name)
          data = run.read_change(name, size)
          good |= {name: data} if data is not None else {}
      if run.is_doubted and not run.replay():
        return ()
      missing = self._expected(run) - seen
      is_over = time.monotonic() - began >= patience
      # Of a round with refused changes all have come, too.
      if len(seen) >= self._least and (is_over or not missing):
        return tuple(sorted(missing)) if run.decide(good) else ()
      if time.monotonic() - began > _QUIET and not has_warned:
        has_warned = True
        names = ", ".join(sorted(missing)) or f"{self._least} sites"
        _LOG.warning(
          "site %s waits in round %d for %s, %s", self.name, run.round, names,
          "as long as it takes" if len(seen) < self._least
          else f"for {patience:.0f} s at most",
        )  # fmt: skip
      time.sleep(self._bucket.poll)
    return ()

  def _expected(self, run: Run) -> set[str]:
    """Returns the sites that the next round waits for.

    They are those of the last round and those who begin with this one, unless
    they have left.
    """
    entries = [_entry(x) for x in self._bucket.sizes("sites")]
    there = {name for name, *_ in entries}
    new = {name for name, first, _ in entries if first == run.round}
    return (set(run.members) & there) | new

  def _announce(self) -> None:
    """Says that this site takes part from the next round on."""
    assert self._run is not None
    mine = f"{self.name}.{self._run.round}.{self._process}"
    with contextlib.suppress(FileExistsError):
      self._bucket.create(f"sites/{mine}", b"-")
    entries = set(self._bucket.sizes("sites")) - {mine}
    others = (x for x in entries if _entry(x)[0] == self.name)
    self._bucket.remove(f"sites/{x}" for x in others)

  def _is_alone(self) -> bool:
    """Returns whether no other process has taken this site's name."""
    found = map(_entry, self._bucket.sizes("sites"))
    return (self.name, self._process) in (x[::2] for x in found)

  def _hand_out(self, params: Any, began: Arrays, own: Arrays) -> Any:
    """Returns the common parameters, and what own ones moved since."""
    common, t = (self._run.common, self._run.round) if self._run else (own, 0)
    if jax.process_count() > 1:
      common, t = multihost_utils.broadcast_one_to_all((common, t))
    self._round = int(t)
    leaves, tree = jax.tree.flatten(params)
    self._base, placed = [], []
    for leaf, x, then, now in zip(leaves, common, began, own, strict=True):
      value = (x + (now - then)).astype(leaf.dtype)
      placed.append(_like(leaf, value))
      # What the dtype rounds away is no change of this site.
      self._base.append(value.astype(np.float32) - (now - then))
    return jax.tree.unflatten(tree, placed)


class _Flight(threading.Thread):
  """A function that runs in a thread, and whose errors are raised later."""

  def __init__(self, act: Callable[[], None]):
    """Starts."""
    super().__init__(daemon=True)
    self._act, self._error = act, None
    self.start()

  def run(self) -> None:
    """Runs in the thread."""
    try:
      self._act()
    except BaseException as error:
      self._error = error

  def result(self) -> None:
    """Waits, and raises what the function has raised."""
    self.join()
    if self._error is not None:
      raise self._error


def _is_first() -> bool:
  """Returns whether this is the process that talks to the bucket."""
  return jax.process_index() == 0


def _in_first(act: Callable[[], None]) -> None:
  """Runs a function in the first process; all raise if it fails."""
  error: BaseException | None = None
  if _is_first():
    try:
      act()
    except BaseException as caught:
      error = caught
  if jax.process_count() > 1:
    has_failed = np.bool_(error is not None)
    if multihost_utils.broadcast_one_to_all(has_failed) and error is None:
      error = SiteError("the first process of this site has failed; see there")
  if error is not None:
    raise error


def _entry(name: str) -> tuple[str, int, str]:
  """Returns name, round and process of an object in sites/."""
  name, _, rest = name.partition(".")
  first, _, process = rest.partition(".")
  return (name, number_of(first), process) if process else ("", -1, "")


def _shapes_of(params: Any) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of leaves by path."""
  found = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(path): np.shape(x) for path, x in found}


def _on_host(params: Any) -> Arrays:
  """Returns whole leaves as float32 on the host.

  Raises:
    TypeError: if a leaf is no array of floating point.
    ValueError: if one is not finite.
  """
  leaves = jax.tree.leaves(params)
  for leaf in leaves:
    if not jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.floating):
      raise TypeError(
        "`params` must have arrays of floating point, got"
        f" {validation.shown(leaf)}; leave counters and keys out."
      )
  is_here = [getattr(x, "is_fully_addressable", True) for x in leaves]
  whole = [
    x if here else multihost_utils.process_allgather(x, tiled=True)
    for x, here in zip(leaves, is_here, strict=True)
  ]
  own = [np.array(x, np.float32) for x in jax.device_get(whole)]
  if not all(np.isfinite(x).all() for x in own):
    raise ValueError(
      "`params` must be finite, got some that are not; skip steps whose"
      " gradients are not finite, as edgc_jax.skip_nonfinite does."
    )
  return own


def _like(leaf: Any, value: np.ndarray) -> Any:
  """Returns an array that lies where another one does."""
  if not isinstance(leaf, jax.Array):
    return value
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: value[index]
  )
