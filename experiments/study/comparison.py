"""Compares the rows of a study, from its records."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.study.records import Record, Records
from experiments.study.study import Study


@dataclasses.dataclass(frozen=True)
class Row:
  """The finished runs of one method.

  Attributes:
    name: As in tables.
    reducer: Its name in configurations.
    runs: {seed: record} of the finished runs.
    matched: For a row of edgc, the fixed rank that sends the same bytes.
  """

  name: str
  reducer: str
  runs: Mapping[str, Record]
  matched: "Row | None" = None

  def mean(self, *keys: str) -> float | None:
    """Returns the mean over runs of the first key that all runs have."""
    return self._over_runs(statistics.mean, keys)

  def least(self, *keys: str) -> float | None:
    """Returns the minimum over runs of the first key that all runs have."""
    return self._over_runs(min, keys)

  def most(self, *keys: str) -> float | None:
    """Returns the maximum over runs of the first key that all runs have."""
    return self._over_runs(max, keys)

  def _over_runs(
    self, fn: Callable[[Sequence[float]], float], keys: Sequence[str]
  ) -> float | None:
    for key in keys:
      values = [_number(run, key) for run in self.runs.values()]
      if values and None not in values:
        return fn(values)
    return None


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The rows of a study, as far as its runs are finished.

  Attributes:
    study: The study.
    seeds: The seeds of each row.
    tables: {table: rows}, without rows that have no finished run.
    dense: The first row of all, the reference of the gaps.
    failures: (row, seed, error) of each failed run.
    planned: Number of runs of the complete study.
  """

  study: Study
  seeds: Sequence[str]
  tables: Mapping[str, Sequence[Row]]
  dense: Row
  failures: Sequence[tuple[str, str, str]]
  planned: int

  @property
  def rows(self) -> Sequence[Row]:
    """The rows of all tables, each once and followed by its matched row."""
    own = itertools.chain.from_iterable(self.tables.values())
    pairs = itertools.chain.from_iterable((row, row.matched) for row in own)
    return list({id(row): row for row in pairs if row}.values())

  @property
  def finished(self) -> int:
    """Number of finished runs; a run that rows share counts for each row."""
    return sum(len(row.runs) for row in self.rows)


def collect(study: Study, records: Records, seeds: Sequence[str]) -> Comparison:
  """Reads the records that agree with the study, and ignores others."""
  rows: dict[str, Row] = {}
  failures = []
  for name, settings in study.rows.items():
    runs, others = {}, {}
    for seed in seeds:
      run = study.run(name, seed)
      record = records.find(run)
      if record is None:
        continue
      if "error" in record:
        failures.append((name, seed, record["error"]))
        continue
      runs[seed] = record
      if not study.has_match(name):
        continue
      try:
        other = study.matched_run(run, record)
      except ValueError as error:
        failures.append((f"{name}: fixed rank", seed, str(error)))
        continue
      found = records.find(other)
      if found and "error" in found:
        failures.append((other.row, seed, found["error"]))
      elif found:
        others[seed] = found
    matched = None
    if others:
      ranks = [r["settings"]["powersgd.rank"] for r in others.values()]
      same = "about the same bytes" if study.grid else "same bytes"
      title = f"fixed rank {statistics.mean(ranks):.3g}, {same}"
      matched = Row(title, "powersgd", others)
    rows[name] = Row(name, settings["reducer"], runs, matched)
  tables = {
    table: [rows[name] for name in own if rows[name].runs]
    for table, own in study.tables.items()
  }
  return Comparison(
    study,
    seeds,
    {table: own for table, own in tables.items() if own},
    next(iter(rows.values())),
    failures,
    planned=len(seeds) * sum(1 + study.has_match(row) for row in study.rows),
  )


def difference(row: Row, other: Row) -> tuple[float, float | None] | None:
  """Returns the mean difference of held-out losses, paired by seed.

  Returns:
    The mean over the seeds of both rows, and its standard error (None for one
    seed); None without common seeds.
  """
  seeds = [seed for seed in row.runs if seed in other.runs]
  found = [
    row.runs[seed]["val_loss"] - other.runs[seed]["val_loss"] for seed in seeds
  ]
  if not found:
    return None
  spread = statistics.stdev(found) if len(found) > 1 else None
  error = None if spread is None else spread / len(found) ** 0.5
  return statistics.mean(found), error


def gap(row: Row, dense: Row) -> tuple[float, float | None] | None:
  """Returns `difference` as a fraction of the dense loss of the same seeds."""
  found = difference(row, dense)
  if found is None or row.runs == dense.runs:
    return None
  level = statistics.mean(
    dense.runs[seed]["val_loss"] for seed in row.runs if seed in dense.runs
  )
  mean, error = found
  return mean / level, None if error is None else error / level


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
  """Returns the points on the Pareto frontier.

  Args:
    points: (ratio, gap); a higher ratio and a lower gap are better.

  Returns:
    Indices by increasing ratio; of equal points only the first.
  """
  order = sorted(
    range(len(points)), key=lambda i: (-points[i][0], points[i][1])
  )
  kept: list[int] = []
  for i in order:
    if not kept or points[i][1] < points[kept[-1]][1]:
      kept.append(i)
  return kept[::-1]


def _number(run: Record, key: str) -> float | None:
  value = run.get(key)
  return sum(value) if isinstance(value, list) else value
