"""What all sites of a run have in common, computed from its objects alone.

Every site computes it by itself, in NumPy, entry by entry in one order, so it
is equal at all sites to the last bit.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from edgc_jax import validation
from edgc_jax.sites import payload
from edgc_jax.sites.bucket import Patient
from edgc_jax.sites.payload import Layout, Refused

_LOG = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

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


class Run:
  """The common parameters, and the rounds that lead to them.

  Attributes:
    round: The next round.
    members: The sites of the last round.
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
    self._set(own, [np.zeros_like(x) for x in own] if rule.momentum else [])
    if not bucket.sizes("checkpoints"):
      self.save()  # if another site is sooner, its own counts
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
      if self.round <= t:
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
      return self._bucket.read(path) == data
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
      self._change_in(name, data)
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
    except FileNotFoundError:
      if max(self._saved(), default=0) > t:
        return None
      raise
    changes, refused = {}, {}
    for name, data in found.items():
      try:
        weight, values = self._change_in(name, data)
        changes[name] = weight, payload.norm(values), values
      except Refused as error:
        refused[name] = str(error)
    for place, what in enumerate(("weight", "norm")):
      sizes = sorted(each[place] for each in changes.values())
      median = sizes[len(sizes) // 2] if sizes else 0.0
      for name, each in changes.items():
        if median and each[place] > self._rule.most_norm * median:
          refused[name] = f"a {what} above {self._rule.most_norm:g} medians"
    changes = {name: x for name, x in changes.items() if name not in refused}
    self._step([(weight, values) for weight, _, values in changes.values()])
    self.round, self.members = t + 1, tuple(changes)
    sizes = {name: len(data) for name, data in found.items()}
    return Applied(self.members, refused, sizes)

  def save(self) -> None:
    """Writes a checkpoint, if no other site has."""
    header = self._header("checkpoint") | {
      "about": self._about, "members": self.members,
    }  # fmt: skip
    body = b"".join(x.tobytes() for x in (*self.common, *self._trace))
    data = payload.framed(header, body, self._key)
    try:
      self._bucket.create(f"checkpoints/{self.round}", data)
    except FileExistsError:
      return

  def remove_old(self) -> None:
    """Removes what is older than the newest checkpoint but one."""
    saved = self._saved()
    keep = sorted(saved)[-2:][0]
    self._bucket.remove(f"checkpoints/{t}" for t in saved if t < keep)
    rounds = (int(x) for x in self._bucket.folders("rounds") if x.isdigit())
    self._bucket.remove(f"rounds/{t}" for t in rounds if t < keep)

  def _header(self, kind: str) -> dict[str, Any]:
    return {"kind": kind, "run": self._id, "round": self.round}

  def _set(self, common: Arrays, trace: Arrays) -> None:
    self.common, self._trace = common, trace
    digest = hashlib.sha256()
    for x in common:
      digest.update(x.tobytes())
    self.hash = digest.hexdigest()

  def _step(self, changes: Sequence[tuple[float, Arrays]]) -> None:
    """Takes the mean of changes, and the step of the outer SGD."""
    if not changes:
      return
    total = sum(weight for weight, _ in changes)
    lr, momentum = np.float32(self._rule.lr), np.float32(self._rule.momentum)
    common, trace = [], []
    for i, x in enumerate(self.common):
      # m = sum_i w_i sent_i / sum_i w_i
      mean = np.zeros_like(x)
      for weight, values in changes:
        mean += np.float32(weight / total) * values[i]
      if self._trace:
        # t <- m + momentum t,  m + momentum t
        trace.append(mean + momentum * self._trace[i])
        mean = mean + momentum * trace[i]
      common.append(x - lr * mean)
    self._set(common, trace)

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
    weight = header.get("weight")
    if not isinstance(weight, int | float) or not 0 < weight < math.inf:
      raise Refused(f"its weight is {weight!r:.80}")
    return float(weight), self._layout.decode(body)

  def _named_change(self, name: str, digest: str) -> bytes:
    """Reads a change that the manifest of the next round names."""
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
    data = self._bucket.read(path)
    try:
      header, _ = payload.unframed(data, self._key)
      is_ours = self._header("manifest").items() <= header.items()
      is_ours &= all(map(NAME.fullmatch, header["sites"]))
      reason = "it is of another run"
    except (Refused, KeyError, TypeError) as error:
      is_ours, reason = False, str(error)
    if not is_ours:
      raise SiteError(
        f"{self._url}/{path} must be the manifest of a round of this run"
        f" ({reason}); remove it, and the sites write another."
      )
    return header

  def _saved(self) -> list[int]:
    """Returns the rounds before which the parameters were saved."""
    return [int(x) for x in self._bucket.sizes("checkpoints") if x.isdigit()]

  def _load(self) -> None:
    """Loads the newest checkpoint that is whole."""
    damage = "none"
    for t in sorted(self._saved(), reverse=True):
      try:
        data = self._bucket.read(f"checkpoints/{t}")
        header, body = payload.unframed(data, self._key)
        self._require_options(header)
        self.round = t
        if not self._header("checkpoint").items() <= header.items():
          raise Refused("no checkpoint of this round")
      except (Refused, FileNotFoundError) as error:
        damage = f"{t} ({error})"
        _LOG.warning("checkpoint %s of %s is left out", damage, self._url)
        continue
      self.members = tuple(header["members"])
      parts, start = [], 0
      for like in (*self.common, *self._trace):
        x = np.frombuffer(body, np.float32, like.size, start)
        parts.append(x.reshape(like.shape))
        start += x.nbytes
      self._set(parts[: len(self.common)], parts[len(self.common) :])
      return
    raise SiteError(
      f"{self._url}/checkpoints must have one that is whole, got {damage}; give"
      " the key of the run, restore a checkpoint, or begin another run."
    )

  def _require_options(self, header: Mapping[str, Any]) -> None:
    """Raises a ValueError unless a run has this site's options."""
    theirs = header.get("about", {})
    for option, own in self._about.items():
      validation.require(
        theirs.get(option) == own,
        option,
        own,
        f"that of the run in {self._url}, {theirs.get(option)!r:.200}",
        "take it, or give another url",
      )
