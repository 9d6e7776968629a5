"""What the records of a study say: rows of runs, and how they differ."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.study.records import Record, Records
from experiments.study.study import Study


@dataclasses.dataclass(frozen=True)
class Row:
  """One method.

  Attributes:
    name: As in tables.
    reducer: Its name in configurations.
    runs: {seed: record} of what came to an end.
    beside: The fixed rank that sends the same bytes, of a row of edgc.
  """

  name: str
  reducer: str
  runs: Mapping[str, Record]
  beside: "Row | None" = None

  def mean(self, *keys: str) -> float | None:
    """Mean over runs of the first of the numbers that all runs have."""
    return self._over_runs(statistics.mean, keys)

  def least(self, *keys: str) -> float | None:
    """The least over runs of the first of the numbers that all runs have."""
    return self._over_runs(min, keys)

  def most(self, *keys: str) -> float | None:
    """The most of it."""
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
  """All there is of a study.

  Attributes:
    study: The study.
    seeds: Those asked for.
    tables: {table: rows}, those with no finished run left out.
    dense: The first row of all, which gaps are to.
    failures: (row, seed, error).
    planned: How many runs there will be in all.
  """

  study: Study
  seeds: Sequence[str]
  tables: Mapping[str, Sequence[Row]]
  dense: Row
  failures: Sequence[tuple[str, str, str]]
  planned: int

  @property
  def rows(self) -> Sequence[Row]:
    """Of all tables, each once, the one beside it behind it."""
    own = itertools.chain.from_iterable(self.tables.values())
    pairs = itertools.chain.from_iterable((row, row.beside) for row in own)
    return list({id(row): row for row in pairs if row}.values())

  @property
  def finished(self) -> int:
    """How many runs came to an end, those that rows share counted for each."""
    return sum(len(row.runs) for row in self.rows)


def collect(study: Study, records: Records, seeds: Sequence[str]) -> Comparison:
  """Reads the records that fit the study; others are left out."""
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
      if not study.has_beside(name):
        continue
      try:
        other = study.run_beside(run, record)
      except ValueError as error:
        failures.append((f"{name}: fixed rank", seed, str(error)))
        continue
      found = records.find(other)
      if found and "error" in found:
        failures.append((other.row, seed, found["error"]))
      elif found:
        others[seed] = found
    beside = None
    if others:
      ranks = [r["settings"]["powersgd.rank"] for r in others.values()]
      same = "about the same bytes" if study.grid else "same bytes"
      title = f"fixed rank {statistics.mean(ranks):.3g}, {same}"
      beside = Row(title, "powersgd", others)
    rows[name] = Row(name, settings["reducer"], runs, beside)
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
    planned=len(seeds) * sum(1 + study.has_beside(row) for row in study.rows),
  )


def difference(row: Row, other: Row) -> tuple[float, float | None] | None:
  """Mean difference of held-out losses, seed by seed, of the seeds both have.

  Returns:
    The mean and its standard error (None for one seed); None without seeds.
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
  """`difference` as a fraction of the dense loss of the same seeds."""
  found = difference(row, dense)
  if found is None or row.runs == dense.runs:
    return None
  level = statistics.mean(
    dense.runs[seed]["val_loss"] for seed in row.runs if seed in dense.runs
  )
  mean, error = found
  return mean / level, None if error is None else error / level


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
  """Which points no other beats.

  Args:
    points: (ratio, gap); more of the first is better, less of the second.

  Returns:
    Indices by increasing ratio; of equal points the first.
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
