"""What a study runs: rows of settings, and fixed ranks of equal bytes.

A study is a Python file with

  CONFIG    the configuration that all runs share
  TABLES    {table: {row: settings}}; the first row of all is dense
  SETTINGS  those of all rows (may be left out)
  BESIDE    False: without the runs that are set beside edgc's
  GRID      those are of multiples of this rank, for rows to share them

A row of edgc is judged by what its bytes would have bought without it: with
the same seed, a fixed rank that sends the same total is run, too. Which rank
that is follows from what the run of edgc has sent.
"""

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
from experiments.training.optimizer import REDUCERS

Settings = Mapping[str, Any]
# By edgc and a fixed rank beside it.
_SHARED = ("wire_dtype", "min_ratio")


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a study.

  Attributes:
    row: A name.
    seed: As on the command line.
    settings: All that the study sets, the reducer among them.
  """

  row: str
  seed: str
  settings: Settings

  @property
  def name(self) -> str:
    """That of its files."""
    return f"{slug(self.row)}-seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Study:
  """A study as its file says.

  Attributes:
    name: That of the file.
    config: Path of the configuration.
    tables: {table: {row: settings of its own}}.
    settings: Those of all rows.
    beside: Whether fixed ranks are run beside edgc.
    grid: Their ranks are multiples of it; 0 for those of equal bytes.
  """

  name: str
  config: str
  tables: Mapping[str, Mapping[str, Settings]]
  settings: Settings = dataclasses.field(default_factory=dict)
  beside: bool = True
  grid: float = 0.0

  @property
  def rows(self) -> Mapping[str, Settings]:
    """The rows of all tables, each once, with all that is set."""
    return {
      row: {**self.settings, **own}
      for table in self.tables.values()
      for row, own in table.items()
    }

  def has_beside(self, row: str) -> bool:
    """Whether a fixed rank of equal bytes belongs to the row."""
    return self.beside and self.rows[row]["reducer"] == "edgc"

  def run(self, row: str, seed: str) -> Run:
    """A row's run with this seed."""
    return Run(row, seed, self.rows[row])

  def digest(self, run: Run) -> str:
    """Of all that a run is configured by, sections of other reducers left out.

    A configuration file may change under the same name.
    """
    reducer = run.settings["reducer"]
    values = _configuration(self.config, reducer, run.settings)
    for other in set(REDUCERS) - {reducer}:
      del values[other]
    text = json.dumps(values.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

  def run_beside(self, run: Run, summary: Mapping[str, Any]) -> Run:
    """The fixed rank that sends in all as much as a run of edgc did.

    Or the next on the grid, whose bytes then differ by what the page says.

    Args:
      run: The run of edgc.
      summary: What came out of it.

    Returns:
      A run, which several rows may share: its name says all it differs in.

    Raises:
      ValueError: if no fixed rank sends as much.
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
    told = [
      f"{key} {value}"
      for key, value in sorted({**settings, **own}.items())
      if self.settings.get(key) != value
    ]
    return Run(
      ", ".join([f"fixed rank {rank:g}", *told]),
      run.seed,
      {
        **settings, **own, "reducer": "powersgd", "powersgd.rank": rank,
        "powersgd.warmup_steps": 0, "powersgd.final_rank": 0,
      },
    )  # fmt: skip


def load(path: str) -> Study:
  """A study from its file.

  Raises:
    ValueError: if two different rows would share their files.
  """
  values = runpy.run_path(path)
  tables = values["TABLES"]
  seen: dict[str, tuple[str, Settings]] = {}
  for row, settings in itertools.chain(*(t.items() for t in tables.values())):
    if seen.setdefault(slug(row), (row, settings)) != (row, settings):
      raise ValueError(
        f"`TABLES` must have one row of each name, got {row!r} and"
        f" {seen[slug(row)][0]!r} with different settings; name them apart."
      )
  name = pathlib.Path(path).stem
  return Study(
    name,
    values["CONFIG"],
    tables,
    values.get("SETTINGS", {}),
    values.get("BESIDE", True),
    values.get("GRID", 0.0),
  )


def slug(text: str) -> str:
  """A name for files."""
  return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def equal_rank(bytes_of_step: Callable[[int], float], target: float) -> float:
  """The rank, as a mean over steps, that sends a number of bytes a step.

  Args:
    bytes_of_step: From a rank to its bytes; 0 is dense.
    target: Bytes a step.

  Returns:
    To three digits, which is within 0.5 %.

  Raises:
    ValueError: if no rank sends as much or as little.
  """
  least, dense = bytes_of_step(1), bytes_of_step(0)
  if not least <= target < dense:
    raise ValueError(
      f"bytes must be from {least:,} (rank 1) to {dense:,} (dense) a step for a"
      f" fixed rank to send the same, got {target:,.0f}; set other ranks, or"
      " BESIDE = False."
    )
  below = next(r for r in itertools.count(1) if bytes_of_step(r + 1) > target)
  low, high = bytes_of_step(below), bytes_of_step(below + 1)
  return float(f"{below + (target - low) / (high - low):.3g}")


def _configuration(config: str, reducer: str, settings: Settings) -> ConfigDict:
  """The configuration that a run has."""
  values = runpy.run_path(config)["get_config"](reducer)
  values.update_from_flattened_dict(dict(settings))
  return values


@functools.cache
def _bytes_of_step(config: str, options: str) -> Callable[[int], int]:
  """From a rank to what powersgd sends a step, with settings as JSON."""
  values = _configuration(config, "powersgd", json.loads(options))
  if values.mesh.stage > 1:
    raise ValueError(
      f"`mesh.stage` must be 1 for a fixed rank of equal bytes, got"
      f" {values.mesh.stage}; set BESIDE = False in the study."
    )
  model = gpt2.GPT2Config(**values.model.to_dict())
  shapes = gpt2.param_shapes(model)
  same = {name: values.powersgd[name] for name in _SHARED}
  return functools.cache(
    lambda rank: edgc_jax.wire_bytes(
      shapes,
      rank,
      matrix_view=gpt2.matrix_view,
      replicas=values.mesh.data,
      **same,
    )
  )
