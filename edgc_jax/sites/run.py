"""What all sites of a run have in common, computed from its objects alone.

Every site computes it by itself, in NumPy, entry by entry in one order, so it
is equal at all sites to the last bit.
"""

import hashlib
import itertools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from edgc_jax import validation
from edgc_jax.sites import payload
from edgc_jax.sites.bucket import Patient
from edgc_jax.sites.payload import Layout, Refused

_LOG = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

TOO_LARGE = "a norm above {:g} medians"

Arrays = list[np.ndarray]


class SiteError(RuntimeError):
  """Raised if a site cannot go on with the run in the bucket."""


class _OtherCommon(Refused):
  """Raised for a change from other common parameters than these."""


class Rule(NamedTuple):
  """How changes become common parameters.

  Attributes:
    lr, momentum: Of the outer SGD, Nesterov's.
    most_norm: Medians of norm and of weight above which a change is refused.
  """

  lr: float
  momentum: float
  most_norm: float


class Applied(NamedTuple):
  """A round that has become part of the common parameters.

  Attributes:
    members: The sites whose changes were averaged, in the order of names.
    refused: Why a change was refused, by site.
    received: Bytes of each change.
  """

  members: tuple[str, ...]
  refused: Mapping[str, str]
  received: Mapping[str, int]


def number_of(text: str) -> int:
  """Returns the number that a name is; -1 if it is none."""
  return int(text) if text.isascii() and text.isdecimal() else -1


class Run:
  """The common parameters, and the rounds that lead to them.

  Attributes:
    round: The next round.
    members: The sites of the last round.
    counted: By site the hash of the last of its changes that was averaged.
    common: The parameters before the next round, float32.
    hash: Of them.
    is_doubted: Whether a site has other common parameters: one of the two
      computes wrongly, and `replay` tells whether it is this one.
  """

  def __init__(
    self,
    bucket: Patient,
    url: str,
    layout: Layout,
    rule: Rule,
    key: bytes | None,
    own: Arrays,
  ):
    """Reads the run, or begins it with these parameters."""
    self._bucket, self._url, self._key = bucket, url, key
    self._layout, self._rule = layout, rule
    self._about = {**layout.about, **rule._asdict()}
    text = json.dumps(self._about, sort_keys=True).encode()
    self._id = hashlib.sha256(text).hexdigest()[:16]
    self.round, self.members, self.is_doubted = 0, (), False
    self.counted: Mapping[str, str] = {}
    self._damaged: set[int] = set()  # checkpoints
    self._read: dict[str, bytes] = {}  # changes of the next round, by site
    # Of changes that were checked: the bytes, weight and norm, by site.
    self._checked: dict[str, tuple[bytes, float, float]] = {}
    self._set(own, [np.zeros_like(x) for x in own] if rule.momentum else [])
    # If another site is sooner, its own counts.
    if bucket.sizes("checkpoints") or not self.save():
      self._load()
    self.catch_up()

  def catch_up(self) -> None:
    """Applies all rounds that are over.

    Raises:
      SiteError: if what leads to the newest one is damaged.
    """
    while self.is_over():
      t = self.round
      if self._has_manifest() and self.apply() is not None:
        continue
      self._load()
      if self.round <= t and self.is_over():
        raise SiteError(
          f"{self._url} must have the manifest of round {t} or a later"
          " checkpoint that is whole; restore one, or begin another run."
        )

  def is_over(self) -> bool:
    """Returns whether the next round has ended, perhaps long ago."""
    return self._has_manifest() or max(self._saved(), default=0) > self.round

  def _has_manifest(self) -> bool:
    return "manifest" in self._bucket.sizes(f"rounds/{self.round}")

  def framed_change(
    self, name: str, process: str, weight: float, body: bytes
  ) -> bytes:
    """Returns the object of a site's change in the next round."""
    header = self._header("change") | {
      "name": name, "process": process, "weight": weight, "common": self.hash,
    }  # fmt: skip
    return payload.framed(header, body, self._key)

  def add(self, name: str, data: bytes) -> bool:
    """Writes a change for the next round; False if the site has one there."""
    path = f"rounds/{self.round}/sites/{name}"
    try:
      self._bucket.create(path, data)
    except FileExistsError:  # perhaps ours: the store's answer was lost
      try:
        if self._bucket.read(path) != data:
          return False
      except FileNotFoundError:  # removed just now
        return False
    self._read[name] = data
    return True

  def changes(self) -> Mapping[str, int]:
    """Returns the bytes of each site's change in the next round."""
    return self._bucket.sizes(f"rounds/{self.round}/sites")

  def read_change(self, name: str, size: int) -> bytes | None:
    """Reads a change; None if no manifest should name it."""
    try:
      if not NAME.fullmatch(name):
        raise Refused("no name of a site")
      if size > self._layout.num_bytes + payload.MOST_HEADER:
        raise Refused(f"an object of {size:,} bytes")
      data = self._bucket.read(f"rounds/{self.round}/sites/{name}")
      self._checked[name] = data, *self._weight_and_norm(name, data)
      self._read[name] = data
    except (Refused, FileNotFoundError) as error:
      _LOG.warning("round %d refuses site %r: %s", self.round, name, error)
      self.is_doubted |= isinstance(error, _OtherCommon)
      return None
    return data

  def replay(self) -> bool:
    """Computes the common parameters again, from the newest checkpoint.

    Returns:
      Whether they were right, and are those before the same round.
    """
    t, before, self.is_doubted = self.round, self.hash, False
    self._load()
    while self.round < t and self.apply(is_replay=True):
      pass
    is_right = self.round == t and self.hash == before
    if not is_right:
      _LOG.warning(
        "the common parameters of round %d were wrong here, or old, and are"
        " computed again", t,
      )  # fmt: skip
    return is_right

  def decide(self, changes: Mapping[str, bytes]) -> bool:
    """Ends the next round with these changes; False if a site was sooner."""
    header = self._header("manifest") | {
      "common": self.hash,
      "sites": {n: hashlib.sha256(x).hexdigest() for n, x in changes.items()},
    }  # fmt: skip
    data = payload.framed(header, b"", self._key)
    try:
      self._bucket.create(f"rounds/{self.round}/manifest", data)
    except FileExistsError:
      return False
    return True

  def apply(self, is_replay: bool = False) -> Applied | None:
    """Applies the next round, as its manifest says.

    Args:
      is_replay: Whether the common parameters come from a checkpoint, so that a
        manifest with others is wrong: all its changes are refused.

    Returns:
      The round; None if it has been removed since, and `catch_up` goes on.

    Raises:
      SiteError: if the manifest, or a change that it names, is damaged.
    """
    t = self.round
    if self._oldest_kept() > t:  # is removed, or should be
      return None
    try:
      manifest = self._manifest()
      if manifest["common"] != self.hash and not is_replay:
        self.replay()
        if self.round != t:
          return None
      found = {
        name: self._named_change(name, digest)
        for name, digest in sorted(manifest["sites"].items())
      }
    except FileNotFoundError as error:
      if max(self._saved(), default=0) > t:
        return None
      raise SiteError(
        f"{self._url}/rounds/{t} must have what its manifest names, and lacks"
        f" {error}; restore it, or begin another run."
      ) from error
    weights, norms, refused = {}, {}, {}
    for name, data in found.items():
      try:
        checked, *known = self._checked.get(name, (b"",))
        if checked is not data:
          known = self._weight_and_norm(name, data)
        weights[name], norms[name] = known
      except Refused as error:
        refused[name] = str(error)
    most = self._rule.most_norm * _median(norms.values())
    for name in norms:
      if norms[name] > most > 0:
        refused[name] = TOO_LARGE.format(self._rule.most_norm)
        del weights[name]
    most = self._rule.most_norm * _median(weights.values())
    weights = {name: min(weight, most) for name, weight in weights.items()}
    self._step({name: (found[name], w) for name, w in weights.items()})
    self.round, self.members = t + 1, tuple(weights)
    self._read, self._checked = {}, {}
    digests = {name: manifest["sites"][name] for name in weights}
    self.counted = {**self.counted, **digests}
    sizes = {name: len(data) for name, data in found.items()}
    return Applied(self.members, refused, sizes)

  def save(self) -> bool:
    """Writes a checkpoint; False if another site has."""
    header = self._header("checkpoint") | {
      "about": self._about, "members": self.members, "counted": self.counted,
    }  # fmt: skip
    body = b"".join(x.tobytes() for x in (*self.common, *self._trace))
    data = payload.framed(header, body, self._key)
    try:
      self._bucket.create(f"checkpoints/{self.round}", data)
    except FileExistsError:
      return False
    return True

  def remove_old(self) -> None:
    """Removes what is older than the newest checkpoint but one."""
    keep = self._oldest_kept()
    self._bucket.remove(f"checkpoints/{t}" for t in self._saved() if t < keep)
    rounds = map(number_of, self._bucket.folders("rounds"))
    self._bucket.remove(f"rounds/{t}" for t in rounds if 0 <= t < keep)

  def _header(self, kind: str) -> dict[str, Any]:
    return {"kind": kind, "run": self._id, "round": self.round}

  def _set(self, common: Arrays, trace: Arrays) -> None:
    self.common, self._trace = common, trace
    digest = hashlib.sha256()
    for x in common:
      digest.update(x.tobytes())
    self.hash = digest.hexdigest()

  def _step(self, changes: Mapping[str, tuple[bytes, float]]) -> None:
    """Takes the mean of changes, and the step of the outer SGD."""
    if not changes:
      return
    total = sum(weight for _, weight in changes.values())
    lr, momentum = np.float32(self._rule.lr), np.float32(self._rule.momentum)
    means = [np.zeros_like(x) for x in self.common]
    # m = sum_i w_i sent_i / sum_i w_i; one change at a time is decoded.
    for name, (data, weight) in changes.items():
      _, values = self._change_in(name, data)
      for mean, each in zip(means, values, strict=True):
        mean += np.float32(weight / total) * each
    common, trace = [], []
    for i, (x, mean) in enumerate(zip(self.common, means, strict=True)):
      if self._trace:
        # t <- m + momentum t,  m + momentum t
        trace.append(mean + momentum * self._trace[i])
        mean = mean + momentum * trace[i]
      common.append(x - lr * mean)
    self._set(common, trace)

  def _weight_and_norm(self, name: str, data: bytes) -> tuple[float, float]:
    """Returns weight and norm of a change; raises as `_change_in`."""
    weight, values = self._change_in(name, data)
    return weight, payload.norm(values)

  def _change_in(self, name: str, data: bytes) -> tuple[float, Arrays]:
    """Returns the weight and the change in an object.

    Raises:
      Refused: if it is none of the next round.
    """
    header, body = payload.unframed(data, self._key)
    wanted = self._header("change") | {"name": name, "common": self.hash}
    for key, value in wanted.items():
      if header.get(key) != value:
        kind = _OtherCommon if key == "common" else Refused
        raise kind(f"its {key} is {header.get(key)!r:.80}, not {value!r}")
    try:
      weight = float(header.get("weight", math.nan))
    except (TypeError, ValueError, OverflowError) as error:
      raise Refused("its weight is no number") from error
    if not 0 < weight < math.inf:
      raise Refused(f"its weight is {weight}")
    return weight, self._layout.decode(body)

  def _named_change(self, name: str, digest: str) -> bytes:
    """Returns a change that the manifest of the next round names."""
    data = self._read.get(name)
    if data is not None and hashlib.sha256(data).hexdigest() == digest:
      return data
    path = f"rounds/{self.round}/sites/{name}"
    data = self._bucket.read(path)
    if hashlib.sha256(data).hexdigest() != digest:
      raise SiteError(
        f"{self._url}/{path} must be the object that the manifest names, and"
        " has changed since; restore it, or begin another run."
      )
    return data

  def _manifest(self) -> dict[str, Any]:
    """Reads the manifest of the next round."""
    path = f"rounds/{self.round}/manifest"
    try:
      size = self._bucket.sizes(f"rounds/{self.round}").get("manifest", 0)
      if size > payload.MOST_HEADER:
        raise Refused(f"it has {size:,} bytes")
      header, _ = payload.unframed(self._bucket.read(path), self._key)
      is_ours = self._header("manifest").items() <= header.items()
      is_ours &= all(map(NAME.fullmatch, dict(header["sites"])))
      is_ours &= all(isinstance(x, str) for x in header["sites"].values())
      is_ours &= isinstance(header["common"], str)
      reason = "it is of another run"
    except (Refused, KeyError, TypeError, ValueError, AttributeError) as error:
      is_ours, reason = False, str(error)
    if not is_ours:
      raise SiteError(
        f"{self._url}/{path} must be the manifest of a round of this run"
        f" ({reason}); remove it, and the sites write another."
      )
    return header

  def _saved(self) -> list[int]:
    """Returns the rounds before which the parameters were saved."""
    found = set(map(number_of, self._bucket.sizes("checkpoints")))
    return sorted(found - self._damaged - {-1})

  def _oldest_kept(self) -> int:
    """Returns the round of the newest checkpoint but one."""
    return [0, *self._saved()[-2:]][-2:][0]

  def _load(self) -> None:
    """Loads the newest checkpoint that is whole."""
    damage = "none"
    for t in sorted(self._saved(), reverse=True):
      try:
        data = self._bucket.read(f"checkpoints/{t}")
        header, body = payload.unframed(data, self._key)
        if header.get("kind") != "checkpoint" or header.get("round") != t:
          raise Refused("no checkpoint of this round")
        self._require_options(header)
        if len(body) != sum(x.nbytes for x in (*self.common, *self._trace)):
          raise Refused("a body of another length")
        parts, start = [], 0
        for like in (*self.common, *self._trace):
          x = np.frombuffer(body, np.float32, like.size, start)
          parts.append(x.reshape(like.shape))
          start += like.nbytes
        members, counted = tuple(header["members"]), dict(header["counted"])
      except FileNotFoundError:  # removed just now
        continue
      except (Refused, KeyError, TypeError, AttributeError) as error:
        damage = f"the one of round {t} ({error})"
        self._damaged.add(t)
        _LOG.warning("checkpoint %s of %s is left out", damage, self._url)
        continue
      self.round, self.members, self.counted = t, members, counted
      self._read, self._checked = {}, {}
      self._set(parts[: len(self.common)], parts[len(self.common) :])
      return
    raise SiteError(
      f"{self._url}/checkpoints must have one that this site can read, got"
      f" {damage}; give the `key` of the run, or another url."
    )

  def _require_options(self, header: Mapping[str, Any]) -> None:
    """Raises a ValueError unless a run has this site's options."""
    theirs = dict(header["about"])
    leaves: Any = self._layout.about["leaves"]
    for mine, found in itertools.zip_longest(leaves, list(theirs["leaves"])):
      validation.require(
        mine == found,
        "params",
        mine,
        f"those of the run in {self._url}, where this leaf is {found}",
        "train its model, or give another url",
      )
    for option, own in self._about.items():
      validation.require(
        theirs.get(option) == own,
        option,
        own,
        f"that of the run in {self._url}, {theirs.get(option)!r:.200}",
        "take it, or give another url",
      )


def _median(values: Iterable[float]) -> float:
  """Returns the lower median; of two values the larger one."""
  found = sorted(values)
  return found[(len(found) - (len(found) != 2)) // 2] if found else 0.0
