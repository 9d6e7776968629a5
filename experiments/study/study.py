"""A study: rows of settings to run, and fixed ranks that send the same bytes.

A study is a Python file with

  CONFIG         the configuration that all runs share
  TABLES         {table: {row: settings}}; the first row of all is dense
  SETTINGS       settings of all rows (optional)
  MATCHED_RANKS  whether to run a matched fixed rank for each row of edgc
                 (optional, default True)
  GRID           matched ranks are multiples of this number, so that rows can
                 share them (optional)

Each row of edgc is compared with a matched run: a fixed rank with the same seed
that sends the same total bytes. Its rank follows from the bytes that the run of
edgc has sent.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
import runpy
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

import edgc_jax
from experiments.models import gpt2
from experiments.parallel import layout, meshes
from experiments.training.optimizer import REDUCERS

Settings = Mapping[str, Any]
# Private names of a study begin with an underscore.
_NAMES = ("CONFIG", "TABLES", "SETTINGS", "MATCHED_RANKS", "GRID")
# Options that a matched run takes over from edgc.
_SHARED = ("wire_dtype", "min_ratio")
_RANKS = range(1, 1 << 12)  # of a matched run


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a study.

  Attributes:
    row: The name of its row.
    seed: As on the command line.
    settings: All settings of the study for this run, including the reducer.
  """

  row: str
  seed: str
  settings: Settings

  @property
  def name(self) -> str:
    """The name of the run's files."""
    return f"{slug(self.row)}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
  """The contents of a study's file.

  Attributes:
    name: Name of the file.
    config: Path of the configuration.
    tables: {table: {row: the row's own settings}}.
    settings: Settings of all rows.
    matched_ranks: Whether each run of edgc is matched with a fixed rank.
    grid: Matched ranks are multiples of this number; 0 for equal bytes.
  """

  name: str
  config: str
  tables: Mapping[str, Mapping[str, Settings]]
  settings: Settings = dataclasses.field(default_factory=dict)
  matched_ranks: bool = True
  grid: float = 0.0

  @property
  def rows(self) -> Mapping[str, Settings]:
    """The rows of all tables, each once, with all of their settings."""
    return {
      row: {**self.settings, **own}
      for table in self.tables.values()
      for row, own in table.items()
    }

  def has_match(self, row: str) -> bool:
    """Returns whether the row's runs are matched with a fixed rank."""
    return self.matched_ranks and self.rows[row]["reducer"] == "edgc"

  def run(self, row: str, seed: str) -> Run:
    """Returns a row's run with this seed."""
    return Run(row, seed, self.rows[row])

  def digest(self, run: Run) -> str:
    """Returns a hash of a run's configuration.

    It covers all values except the sections of other reducers, because the
    contents of a configuration file may change under the same name.
    """
    reducer = run.settings["reducer"]
    values = _configuration(self.config, reducer, run.settings)
    for other in set(REDUCERS) & set(values) - {reducer}:
      del values[other]
    text = json.dumps(values.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def matched_run(self, run: Run, summary: Mapping[str, Any]) -> Run:
    """Returns the run of a fixed rank that sends the same total as a run.

    With a grid it is the nearest rank on the grid; the page shows the bytes of
    both.

    Args:
      run: A run of edgc.
      summary: Its summary.

    Returns:
      A run, which several rows may share. Its name has all settings that
      differ from the study's.

    Raises:
      ValueError: if no fixed rank sends the same.
    """
    settings = {
      key: value
      for key, value in run.settings.items()
      if key != "reducer" and not key.startswith(("edgc.", "powersgd."))
    }
    own = {
      f"powersgd.{key}": run.settings[f"edgc.{key}"]
      for key in _SHARED
      if f"edgc.{key}" in run.settings
    }
    options = json.dumps({**settings, **own}, sort_keys=True)
    bytes_of_step = _bytes_of_step(self.config, options)
    rank = equal_rank(bytes_of_step, sum(summary["wire_bytes_per_step"]))
    if self.grid:
      rank = max(1.0, round(rank / self.grid) * self.grid)
    differing = [
      f"{key} {value}"
      for key, value in sorted({**settings, **own}.items())
      if self.settings.get(key) != value
    ]
    return Run(
      ", ".join([f"fixed rank {rank:g}", *differing]),
      run.seed,
      {
        **settings, **own, "reducer": "powersgd", "powersgd.rank": rank,
        "powersgd.warmup_steps": 0, "powersgd.final_rank": 0,
      },
    )  # fmt: skip


def load(path: str) -> Study:
  """Loads a study from its file.

  Raises:
    ValueError: if rows with different settings would share their files, or a
      name in capitals is not one that a study sets.
  """
  values = runpy.run_path(path)
  public = {name for name in values if not name.startswith("_")}
  unknown = {name for name in public - set(_NAMES) if name.isupper()}
  if unknown:
    raise ValueError(
      f"A study must set no other names than {', '.join(_NAMES)}, got"
      f" {', '.join(sorted(unknown))} in {path}; MATCHED_RANKS was BESIDE."
    )
  tables = values["TABLES"]
  seen: dict[str, tuple[str, Settings]] = {}
  for row, settings in itertools.chain(*(t.items() for t in tables.values())):
    if seen.setdefault(slug(row), (row, settings)) != (row, settings):
      raise ValueError(
        f"`TABLES` must have one row of each name, got {row!r} and"
        f" {seen[slug(row)][0]!r} with different settings; rename one of them."
      )
  name = pathlib.Path(path).stem
  return Study(
    name,
    values["CONFIG"],
    tables,
    values.get("SETTINGS", {}),
    values.get("MATCHED_RANKS", True),
    values.get("GRID", 0.0),
  )


def slug(text: str) -> str:
  """Converts a row's name to a file name."""
  return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def equal_rank(bytes_of_step: Callable[..., float], target: float) -> float:
  """Returns the rank, a mean over steps, that sends `target` bytes per step.

  Args:
    bytes_of_step: From `_bytes_of_step`.
    target: Bytes per step.

  Returns:
    The rank to three digits. It sends within 0.5 % of the target, unless the
    rank above is the first at which some matrix is dense: a run whose rank
    falls from there never sends that matrix dense.

  Raises:
    ValueError: if rank 1 sends more than the target, or dense no more.
  """
  least, dense = bytes_of_step(1), bytes_of_step(0)
  if not least <= target < dense:
    raise ValueError(
      f"bytes must be from {least:,} (rank 1) to {dense:,} (dense) a step for a"
      f" fixed rank to send the same, got {target:,.0f}; set other ranks, or"
      " MATCHED_RANKS = False."
    )
  below = bisect.bisect_right(_RANKS, target, key=bytes_of_step)
  low, high = bytes_of_step(below), bytes_of_step(below + 1, below)
  share = min(1.0, (target - low) / (high - low))
  return float(f"{below + share:.3g}")


def _configuration(config: str, reducer: str, settings: Settings) -> ConfigDict:
  """Returns the configuration of a run."""
  values = runpy.run_path(config)["get_config"](reducer)
  values.update_from_flattened_dict(dict(settings))
  return values


@functools.cache
def _bytes_of_step(config: str, options: str) -> Callable[..., int]:
  """Returns a function for powersgd's bytes per step.

  Args:
    config: Path of the configuration.
    options: Settings as JSON, so that they can be hashed.

  Returns:
    A function of a rank, 0 for dense, and of the least rank of the run, if that
    is another one: it decides which matrices are never compressed.
  """
  values = _configuration(config, "powersgd", json.loads(options))
  if values.mesh.stage > 1:
    raise ValueError(
      f"`mesh.stage` must be 1 for a fixed rank of equal bytes, got"
      f" {values.mesh.stage}; set MATCHED_RANKS = False in the study."
    )
  model = gpt2.GPT2Config(**values.model.to_dict())
  shards = values.mesh.fsdp
  mesh_shape = meshes.shape_of(values.mesh.data, shards=shards)
  shapes = layout.of_one_device(model, mesh_shape)
  same = {name: values.powersgd[name] for name in _SHARED}
  return functools.cache(
    lambda rank, least=None: (
      shards
      * edgc_jax.wire_bytes(
        shapes, rank, rank_min=least, replicas=values.mesh.data, **same
      )
    )
  )
