"""What the network benchmark compares, and what it measured, cell by cell."""

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from edgc_jax.measure.advice import TOLERANCE, first_fast
from edgc_jax.plan.link_model import ring_bytes

NO_EXCHANGE, DENSE, NARROW = "no exchange", "dense", "dense, bf16"


@dataclasses.dataclass(frozen=True)
class Row:
  """A way to train, of one framework."""

  name: str
  framework: str  # jax or torch
  settings: Mapping[str, Any]  # of the configuration, or arguments of `build`
  is_for_stages: bool = True  # where every row compiles for a minute


RANKS = (32, 8)
ROWS = (
  Row("no exchange", "jax", {"reducer": "none"}),
  Row("dense", "jax", {"reducer": "allreduce"}),
  Row(
    "dense, bf16", "jax",
    {"reducer": "allreduce", "allreduce.wire_dtype": "bfloat16"}, False,
  ),
  Row(
    "powersgd, rank 32", "jax",
    {"reducer": "powersgd", "powersgd.rank": 32.0}, False,
  ),
  Row("powersgd, rank 8", "jax", {"reducer": "powersgd", "powersgd.rank": 8.0}),
  Row(
    "edgc, rank 32", "jax",
    {"reducer": "edgc", "edgc.rank_max": 32, "edgc.rank_min": 32}, False,
  ),
  Row(
    "edgc, rank 8", "jax",
    {"reducer": "edgc", "edgc.rank_max": 8, "edgc.rank_min": 8},
  ),
  Row("no exchange", "torch", {"hook": "none"}),
  Row("dense", "torch", {"hook": "dense"}),
  Row("dense, bf16", "torch", {"hook": "bf16"}),
  Row("powersgd, rank 32", "torch", {"hook": "powersgd", "rank": 32}),
  Row("powersgd, rank 8", "torch", {"hook": "powersgd", "rank": 8}),
)  # fmt: skip
# Between which `advise` chooses.
WAYS = {"dense", "dense, bf16", *(f"edgc, rank {rank}" for rank in RANKS)}


@dataclasses.dataclass(frozen=True)
class Layout:
  """Which hosts there are, and what they are for each other."""

  hosts: int
  stages: int = 1

  @property
  def name(self) -> str:
    if self.stages == 1:
      return f"{self.hosts} replicas"
    return f"{self.stages} stages of {self.hosts // self.stages} replicas"


@dataclasses.dataclass(frozen=True)
class Cell:
  """One way to train at one link speed; seconds are medians of a step."""

  layout: str
  replicas: int
  threads: int  # of a host
  rate: float  # Mbit/s of an uplink
  framework: str
  row: str
  step: float
  without: float | None  # the framework's own step without an exchange
  compress: float | None  # None where it is not measured
  communicate: float | None
  wire_bytes: float | None  # payload of an exchange
  sent_bytes: float  # by a host, with the headers of packets
  noise: float  # half the range of steps, and of those without an exchange

  @property
  def exchange(self) -> float | None:
    """What the step takes longer than without one."""
    return None if self.without is None else self.step - self.without

  @property
  def clear_exchange(self) -> float | None:
    """The same where it is more than noise, for ratios."""
    exchange = self.exchange
    is_clear = exchange is not None and exchange > self.noise
    return exchange if is_clear else None

  @property
  def parts(self) -> float | None:
    """Compute, compress and communicate, each measured alone."""
    parts = (self.without, self.compress, self.communicate)
    return None if None in parts else sum(parts)

  @property
  def link_alone(self) -> float | None:
    """What a ring of the replicas takes at the full speed of the links."""
    if self.wire_bytes is None:
      return None
    return ring_bytes(self.wire_bytes, self.replicas) / (self.rate * 1e6 / 8)

  @property
  def limit(self) -> float | None:
    """What a step would take if nothing overlapped and nothing were lost.

    Compute, compress where it is known, and the link alone.
    """
    if self.without is None or self.link_alone is None:
      return None
    return self.without + (self.compress or 0.0) + self.link_alone


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Steps as advice predicted them and as they were; {way: seconds}."""

  layout: str
  rate: float
  choice: str
  predicted: Mapping[str, float]
  measured: Mapping[str, float]

  @property
  def right_choice(self) -> str:
    """By the rule of the advice, from the steps that were measured."""
    return list(self.measured)[first_fast(list(self.measured.values()))]

  @property
  def orders(self) -> Sequence[bool]:
    """Whether two ways that are clearly apart are predicted in their order."""
    return [
      (self.predicted[a] < self.predicted[b])
      == (self.measured[a] < self.measured[b])
      for a, b in itertools.combinations(self.measured, 2)
      if abs(self.measured[a] / self.measured[b] - 1) > TOLERANCE
    ]

  @property
  def loss(self) -> float:
    """What the choice is slower than the fastest, as a share."""
    return self.measured[self.choice] / min(self.measured.values()) - 1


@dataclasses.dataclass(frozen=True)
class Results:
  """All that was measured in one run of the benchmark."""

  cells: tuple[Cell, ...]
  advice: tuple[dict[str, Any], ...]
  failures: tuple[dict[str, str], ...]
  about: dict[str, Any]

  @functools.cached_property
  def layouts(self) -> Sequence[str]:
    """In the order in which they were measured."""
    return tuple(dict.fromkeys(cell.layout for cell in self.cells))

  @functools.cached_property
  def rates(self) -> Sequence[float]:
    return tuple(dict.fromkeys(cell.rate for cell in self.cells))

  def of(self, **wanted: Any) -> list[Cell]:
    """Cells with these attributes."""
    return [
      cell
      for cell in self.cells
      if all(getattr(cell, k) == v for k, v in wanted.items())
    ]

  def beside(self, cell: Cell, row: str) -> Cell | None:
    """The cell of another row of the same framework, hosts and links."""
    found = self.of(
      layout=cell.layout, rate=cell.rate, framework=cell.framework, row=row
    )
    return found[0] if found else None

  @functools.cached_property
  def predictions(self) -> Sequence[Prediction]:
    """What advice said, where all its ways were measured."""
    found = []
    for advice in self.advice:
      cells = self.of(
        layout=advice["layout"], rate=advice["rate"], framework="jax"
      )
      measured = {cell.row: cell.step for cell in cells}
      ways = advice["seconds"]
      if measured.keys() >= ways.keys():
        found.append(
          Prediction(
            advice["layout"], advice["rate"], advice["choice"], ways,
            {way: measured[way] for way in ways},
          )
        )  # fmt: skip
    return found


def load(path: pathlib.Path) -> Results:
  """Reads what the benchmark wrote."""
  found = json.loads(path.read_text())
  by_key = {
    (e["layout"], e["rate"], e["framework"], e["row"], e["part"]): e
    for e in found["rows"]
  }
  cells = []
  for (layout, rate, framework, row, part), entry in by_key.items():
    if part != "step":
      continue

    def median(row: str, part: str, key: tuple = (layout, rate, framework)):
      other = by_key.get((*key, row, part))
      return statistics.median(other["seconds"]) if other else None

    def half_range(row: str, key: tuple = (layout, rate, framework)) -> float:
      other = by_key.get((*key, row, "step"), {"seconds": [0.0]})
      return (max(other["seconds"]) - min(other["seconds"])) / 2

    is_none = row == NO_EXCHANGE
    cells.append(
      Cell(
        layout=layout,
        replicas=entry["replicas"],
        threads=entry["threads"],
        rate=rate,
        framework=framework,
        row=row,
        step=median(row, "step"),
        without=median(NO_EXCHANGE, "step"),
        compress=0.0 if is_none else median(row, "compress"),
        communicate=0.0 if is_none else median(row, "communicate"),
        wire_bytes=0.0 if is_none else entry.get("wire_bytes"),
        sent_bytes=statistics.median(entry["sent_bytes"]),
        noise=half_range(row) + half_range(NO_EXCHANGE),
      )
    )
  about = {
    key: found[key]
    for key in found
    if key not in ("rows", "advice", "failures")
  }
  return Results(
    tuple(cells), tuple(found["advice"]), tuple(found["failures"]), about
  )
