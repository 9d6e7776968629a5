"""A study: arms to compare, whose learning rates are tuned on other seeds.

A study is a Python file with

  CONFIG   the configuration that all runs share
  TABLES   {table: {arm: settings}}; the first arm of all is dense
  SEEDS    the seeds that are judged
  MORE     (optional) further judged seeds, for the dense arm, for the best
           arms of each table after the first, of which `BEST` says how many,
           and for the pairs of MATCHED
  TUNING   (optional) {"key", "start", "factor", "seed", "settings",
           "tolerance"}: tunes a key for every arm, from its values `start`, by
           factors, until the best value lies between two others. The judged
           runs take the lowest value whose loss is within the tolerance of the
           best one's. `settings` are of the tuning's runs alone; "arms"
           (optional) has further ones, {arm: settings}
  ALTERNATIVES  (optional) {arm: [settings, ...]}: further settings of an arm,
           tried at the value that its own take. If one of them is best, the arm
           takes it, and the key is tuned again for it
  MATCHED  (optional) {arm of edgc: arm of powersgd}: adds an arm that is
           powersgd at the rank whose bytes equal those of edgc, as a mean over
           SEEDS

What is to run next follows from what is recorded.
"""

import bisect
import dataclasses
import functools
import json
import math
import pathlib
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import traverse_util
from ml_collections import ConfigDict

import edgc_jax
import experiments
from experiments.lab.study import forms
from experiments.lab.study.records import Record, Records
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.runtime.refusals import nearest, one_line
from experiments.trainer.training import reducers

Settings = Mapping[str, Any]
_RANKS = range(1, 1 << 12)  # of a matched arm
MATCHED = ": its fixed rank"


@dataclasses.dataclass(frozen=True)
class Tuning:
  """How a key is tuned; see the file's beginning."""

  key: str
  start: Sequence[float]
  factor: float
  seed: int
  settings: Settings
  tolerance: float = 0.0
  arms: Mapping[str, Settings] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
  """One run: an arm, its configuration, and whether it is judged."""

  arm: str
  config: ConfigDict
  is_judged: bool


@dataclasses.dataclass(frozen=True)
class Study:
  """The contents of a study's file."""

  name: str
  config: str
  tables: Mapping[str, Mapping[str, Settings]]
  seeds: Sequence[int]
  more: Sequence[int] = ()
  best: int = 2
  tuning: Tuning | None = None
  alternatives: Mapping[str, Sequence[Settings]] = dataclasses.field(
    default_factory=dict
  )
  matched: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def arms(self) -> Mapping[str, Settings]:
    """The settings of each arm, without those of matched arms."""
    return {
      arm: own for table in self.tables.values() for arm, own in table.items()
    }

  @property
  def all_arms(self) -> list[str]:
    """The arms of all tables, with matched ones."""
    return [arm for table in self.tables for arm in self.table_of(table)]

  @property
  def dense(self) -> str:
    """The first arm, with which all others are compared."""
    return next(iter(self.arms))

  def table_of(self, table: str) -> list[str]:
    """Returns the arms of a table, each followed by its matched one."""
    return [
      name
      for arm in self.tables[table]
      for name in (arm, arm + MATCHED)[: 1 + (arm in self.matched)]
    ]

  def configuration(self, settings: Settings) -> ConfigDict:
    """Returns the configuration of a run with these settings.

    Raises:
      ValueError: if the file of the configuration does not run, or a setting is
        no key of it, or of another type.
    """
    if settings.get("reducer") not in reducers.by_name():
      raise ValueError(
        f"`reducer` must be a setting of each arm, one of"
        f" {', '.join(reducers.by_name())}, got {dict(settings)}; add it."
      )
    config = _make_config(self.config)(settings["reducer"])
    known = list(traverse_util.flatten_dict(config.to_dict(), sep="."))
    for key in settings:
      if key not in known:
        raise ValueError(
          f"An arm must have settings that are keys of {self.config}, got"
          f" {key!r}; the nearest is {nearest(key, known)}."
        )
    try:
      config.update_from_flattened_dict(dict(settings))
    except (KeyError, AttributeError, TypeError) as error:
      raise ValueError(
        f"An arm must have settings of the types in {self.config}, got"
        f" {dict(settings)} ({one_line(error)}); correct it."
      ) from error
    return config

  def require_settings(self) -> None:
    """Raises unless all arms have configurations; reads no records."""
    for arm in self.arms:
      for settings in self.choices(arm):
        self.configuration(settings)
      if self.tuning is not None:
        self._tuning_run(arm, 0, self.tuning.start[0])
    for arm in self.matched.values():
      config = self.configuration(self.arms[arm])
      wanted = {
        "reducer": "powersgd", "powersgd.warmup_steps": 0,
        "powersgd.final_rank": 0, "mesh.stage": 1,
      }  # fmt: skip
      flat = traverse_util.flatten_dict(config.to_dict(), sep=".")
      if wrong := {k: flat[k] for k, v in wanted.items() if flat[k] != v}:
        raise ValueError(
          f"`MATCHED` must have arms with {wanted}, got {arm!r} with {wrong};"
          " set these in TABLES, or name another arm."
        )

  def choices(self, arm: str) -> Sequence[Settings]:
    """Returns the arm's own settings, and its alternatives."""
    own = self.arms[arm]
    return [own, *({**own, **each} for each in self.alternatives.get(arm, ()))]

  def tuned(self, arm: str, records: Records) -> list[dict[float, Record]]:
    """Returns the recorded runs of an arm's tuning: of each choice, by value.

    A run that diverged counts as infinitely bad.
    """
    return self._tuning_of(arm, records)[0]

  def taken(self, arm: str, records: Records) -> tuple[int, float] | None:
    """Returns the choice and the value that judged runs of an arm take.

    Returns:
      The number of the choice and the value, or None while others may be
      better.
    """
    for choice, found in enumerate(tuned := self.tuned(arm, records)):
      value = self._best_value(found)
      if value is not None and choice == self._best_choice(tuned):
        return choice, value
    return None

  def _best_value(self, found: Mapping[float, Record]) -> float | None:
    """Returns the best value of a choice; None while others may be better.

    Of values that are as good as the best within the tolerance it is the
    lowest: high learning rates make runs of one arm differ more.
    """
    losses = {value: loss_of(record) for value, record in found.items()}
    if not losses:
      return None
    best = min(losses, key=lambda value: losses[value])
    is_inside = min(losses) < best < max(losses)
    if not is_inside or not math.isfinite(losses[best]):
      return None
    limit = losses[best] + self.tuning.tolerance
    return min(value for value, loss in losses.items() if loss <= limit)

  def _best_choice(self, tuned: Sequence[Mapping[float, Record]]) -> int | None:
    """Returns the best choice at the best value of the first one."""
    value = self._best_value(tuned[0])
    if value is None or not all(value in found for found in tuned):
      return None
    losses = [loss_of(found[value]) for found in tuned]
    return losses.index(min(losses))

  def judged(
    self, arm: str, seed: int, records: Records
  ) -> tuple[Run | None, Record | None]:
    """Returns a judged run of an arm and its record.

    Returns:
      The run, or None if what it depends on is not recorded or diverged; its
      record, or None if it is not recorded.
    """
    return self.all_judged(arm, [seed], records)[0]

  def all_judged(
    self, arm: str, seeds: Sequence[int], records: Records
  ) -> list[tuple[Run | None, Record | None]]:
    """Returns `judged` of each seed."""
    settings = self._judged_settings(arm, records)
    if settings is None:
      return [(None, None)] * len(seeds)
    found = []
    for seed in seeds:
      config = self.configuration({**settings, "seed": seed})
      run = Run(arm, config, is_judged=True)
      found.append((run, records.find(run.config)))
    return found

  def _judged_settings(self, arm: str, records: Records) -> Settings | None:
    """Returns the settings of an arm's judged runs, without the seed."""
    settings: dict[str, Any] = {}
    arm_of = arm
    if arm.endswith(MATCHED):
      own = arm.removesuffix(MATCHED)
      found = [each for _, each in self.all_judged(own, self.seeds, records)]
      finished = [each for each in found if each and each.is_finished]
      if not found or len(finished) < len(found):
        return None
      arm_of = self.matched[own]
      try:
        settings["powersgd.rank"] = self._equal_rank(arm_of, finished)
      except ValueError:  # no rank sends as many bytes
        return None
    settings = {**self.arms[arm_of], **settings}
    if self.tuning is not None:
      best = self.taken(arm_of, records)
      if best is None:
        return None
      choice, value = best
      if arm_of == arm:
        settings |= self.choices(arm)[choice]
      settings[self.tuning.key] = value
    return settings

  def plan(self, records: Records, renew: bool = False) -> Iterator[Run]:
    """Yields the runs that can start now, the most useful ones first.

    Args:
      records: What is recorded.
      renew: Whether judged runs of an older version are missing; what their
        tuning took stays.
    """
    missing = functools.partial(self._missing, records=records, renew=renew)
    first = [r for arm in self.arms for r in self._tuning_of(arm, records)[1]]
    first += missing(self.all_arms, self.seeds)
    yield from first or missing(self.leaders(records), self.more)

  def ahead(self, records: Records) -> Iterator[Run]:
    """Yields runs that may be asked for later, beside those of `plan`.

    All seeds of each arm, and of arms that are not tuned yet every choice at
    the starting values and one factor around them: for devices on which many
    runs take as long as one.
    """
    yield from self._missing(self.all_arms, self.more, records)
    if self.tuning is None:
      return
    start, factor = self.tuning.start, self.tuning.factor
    values = [start[0] / factor, *start, start[-1] * factor]
    for arm in self.arms:
      if self.taken(arm, records) is None:
        for choice in range(len(self.choices(arm))):
          runs = [self._tuning_run(arm, choice, value) for value in values]
          yield from (r for r in runs if records.find(r.config) is None)

  def stuck(self, records: Records) -> list[str]:
    """Returns the arms that no run can judge, once nothing else is to run."""
    return [
      arm
      for arm in self.all_arms
      if self._judged_settings(arm, records) is None
    ]

  def leaders(self, records: Records) -> list[str]:
    """Returns the arms that get more seeds, once all have their first ones."""
    sums: dict[str, float] = {}
    for arm in self.all_arms:
      found = [each for _, each in self.all_judged(arm, self.seeds, records)]
      sums[arm] = sum(loss_of(each) if each else math.inf for each in found)
    tables = [self.table_of(table) for table in self.tables]
    best = [
      arm
      for arms in tables[1:]
      for arm in sorted(arms, key=lambda arm: sums[arm])[: self.best]
    ]
    pairs = [name for arm in self.matched for name in (arm, arm + MATCHED)]
    return list(dict.fromkeys([self.dense, *pairs, *best]))

  def _missing(
    self,
    arms: Sequence[str],
    seeds: Sequence[int],
    records: Records,
    renew: bool = False,
  ) -> Iterator[Run]:
    """Yields the judged runs that are not recorded, seed by seed."""
    found = {arm: self.all_judged(arm, seeds, records) for arm in arms}

    def is_old(record: Record | None) -> bool:
      return renew and record is not None and not record.is_current

    for i in range(len(seeds)):
      for arm, runs in found.items():
        run, record = runs[i]
        partner = found.get(arm.removesuffix(MATCHED), ())
        if arm.endswith(MATCHED) and any(is_old(own) for _, own in partner):
          continue  # whose bytes, and with them this arm's rank, may change
        if run is not None and (record is None or is_old(record)):
          yield run

  def _tuning_of(
    self, arm: str, records: Records
  ) -> tuple[list[dict[float, Record]], list[Run]]:
    """Returns what is recorded of an arm's tuning, as `tuned`, and what is not.

    Runs that depend on others, which are not recorded, are not known yet.
    """
    tuned: list[dict[float, Record]] = [{} for _ in self.choices(arm)]
    left: list[Run] = []
    if self.tuning is None:
      return tuned, left

    def note(choice: int, value: float) -> None:
      run = self._tuning_run(arm, choice, value)
      if (record := records.find(run.config)) is None:
        left.append(run)
      else:
        tuned[choice][value] = record

    def search(choice: int, values: Sequence[float]) -> None:
      """Notes values until the best one lies between two others."""
      while values:
        for value in values:
          note(choice, value)
        if left:
          return  # what follows depends on all losses so far
        losses = {v: loss_of(record) for v, record in tuned[choice].items()}
        best, values = min(losses, key=losses.get), []
        if best == min(losses):
          values = [best / self.tuning.factor]
        elif best == max(losses):
          values = [best * self.tuning.factor]

    search(0, self.tuning.start)
    if (value := self._best_value(tuned[0])) is not None:
      for choice in range(1, len(tuned)):
        note(choice, value)
      if best := self._best_choice(tuned):
        search(best, [value])
    return tuned, left

  def _tuning_run(self, arm: str, choice: int, value: float) -> Run:
    settings = {
      **self.tuning.settings, **self.choices(arm)[choice],
      **self.tuning.arms.get(arm, {}),
      "seed": self.tuning.seed, self.tuning.key: value,
    }  # fmt: skip
    others = reducers.by_name().keys() - {settings["reducer"]}
    own = {k: v for k, v in settings.items() if k.split(".")[0] not in others}
    return Run(arm, self.configuration(own), is_judged=False)

  def _equal_rank(self, arm: str, records: Sequence[Record]) -> float:
    """Returns the rank at which an arm sends the mean bytes of some runs."""
    config = self.configuration(self.arms[arm])
    sent = [sum(r["summary"]["wire_bytes_per_step"]) for r in records]
    return equal_rank(_bytes_of_step(config.to_json()), sum(sent) / len(sent))


def load(path: str) -> Study:
  """Loads a study from its file.

  Raises:
    ValueError: if a name in capitals is not one that a study sets, one that it
      has to set is missing, arms of one name have different settings, or
      `MATCHED` names others.
  """
  values = _run(path, "study")
  public = {k: v for k, v in values.items() if k.isupper() and k[0] != "_"}
  names = {field.name.upper() for field in dataclasses.fields(Study)} - {"NAME"}
  unknown = public.keys() - names
  if unknown:
    raise ValueError(
      f"A study must set no other names than {', '.join(sorted(names))}, got"
      f" {', '.join(sorted(unknown))} in {path}; rename or remove them."
    )
  missing = {"CONFIG", "TABLES", "SEEDS"} - public.keys()
  if missing:
    raise ValueError(
      f"A study must set CONFIG, TABLES and SEEDS, got no"
      f" {' and no '.join(sorted(missing))} in {path}; add what is missing."
    )
  for name, value in public.items():
    forms.require_form(name, value, path)
  seen: dict[str, Settings] = {}
  for table in public["TABLES"].values():
    for arm, settings in table.items():
      if seen.setdefault(arm, settings) != settings:
        raise ValueError(
          f"`TABLES` must have one arm of each name, got {arm!r} with different"
          " settings; rename one of them."
        )
  matched = public.get("MATCHED", {})
  for name, arms in (
    ("MATCHED", {*matched, *matched.values()}),
    ("ALTERNATIVES", public.get("ALTERNATIVES", {})),
    ("TUNING", public.get("TUNING", {}).get("arms", {})),
  ):
    strangers = set(arms) - seen.keys()
    if strangers:
      raise ValueError(
        f"`{name}` must name arms of TABLES, got"
        f" {', '.join(sorted(strangers))} in {path}; rename or remove them."
      )
  if "TUNING" in public:
    public["TUNING"] = Tuning(**public["TUNING"])
  parts = pathlib.Path(path).with_suffix("").parts
  start = parts.index("configs") + 1 if "configs" in parts else -1
  name = "-".join(parts[start:])
  return Study(name, **{key.lower(): v for key, v in public.items()})


@functools.cache
def _make_config(path: str) -> Callable[[str], ConfigDict]:
  """Returns the function of a configuration's file."""
  function = _run(path, "CONFIG").get("get_config")
  if not callable(function):
    raise ValueError(
      f"`CONFIG` must name a file with a function get_config, got {path!r};"
      " name one of configs/."
    )
  return function


def _run(path: str, name: str) -> dict[str, Any]:
  """Runs a Python file, and returns its names.

  Raises:
    ValueError: if it does not run.
    OSError: if it cannot be read.
  """
  path = experiments.from_root(path)
  try:
    pathlib.Path(path).read_bytes()  # other errors are the file's own
  except OSError as error:
    raise FileNotFoundError(
      f"`{name}` must name a file, got {path!r} ({error.strerror}); the"
      " project's are in configs/."
    ) from error
  try:
    return runpy.run_path(path)
  except Exception as error:
    raise ValueError(
      f"`{name}` must name a Python file that runs, got {path!r}"
      f" ({type(error).__name__}: {one_line(error)}); correct it."
    ) from error


def loss_of(record: Record) -> float:
  """Returns the held-out loss of a run; infinite if it diverged."""
  return record["summary"]["val_loss"] if record.is_finished else math.inf


def equal_rank(bytes_of_step: Callable[..., float], target: float) -> float:
  """Returns the rank, a mean over steps, that sends `target` bytes a step.

  Args:
    bytes_of_step: From `_bytes_of_step`.
    target: Bytes a step.

  Returns:
    The rank to three digits. It sends within 0.5 % of the target, unless the
    rank above is the first at which some matrix is dense: a run whose rank
    falls from there never sends that matrix dense.

  Raises:
    ValueError: if rank 1 sends more than the target, dense no more, or no rank
      as much.
  """
  least, dense = bytes_of_step(1), bytes_of_step(0)
  fits = least <= target < dense
  if fits:
    below = bisect.bisect_right(_RANKS, target, key=bytes_of_step)
    low, high = bytes_of_step(below), bytes_of_step(below + 1, below)
    fits = low == target or low < high  # equal where all matrices have most
  if not fits:
    raise ValueError(
      f"bytes must be from {least:,} (rank 1) to {dense:,} (dense) a step, and"
      " no more than those of the largest ranks, for a fixed rank to send the"
      f" same, got {target:,.0f}; set other ranks, or leave the arm out of"
      " MATCHED."
    )
  share = min(1.0, (target - low) / (high - low)) if low < high else 0.0
  return float(f"{below + share:.3g}")


@functools.cache
def _bytes_of_step(config: str) -> Callable[..., int]:
  """Returns a function for powersgd's bytes a step.

  Args:
    config: The configuration as JSON, so that it can be hashed.

  Returns:
    A function of a rank, 0 for dense, and of the least rank of the run, if that
    is another one: it decides which matrices are never compressed.
  """
  values = ConfigDict(json.loads(config))
  mesh = values.mesh
  if mesh.stage > 1:
    raise ValueError(
      f"`mesh.stage` must be 1 for a fixed rank of equal bytes, got"
      f" {mesh.stage}; leave the arm out of MATCHED."
    )
  shape = meshes.shape_of(mesh.data, shards=mesh.fsdp)
  shapes = tasks.make(values).layout(shape).of_one_device(shape)
  same = {name: values.powersgd[name] for name in ("wire_dtype", "min_ratio")}
  return functools.cache(
    lambda rank, least=None: (
      mesh.fsdp
      * edgc_jax.wire_bytes(
        shapes, rank, rank_min=least, replicas=mesh.data, **same
      )
    )
  )
