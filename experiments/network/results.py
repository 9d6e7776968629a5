"""What the network benchmark measured, cell by cell."""

import dataclasses
import functools
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

NO_EXCHANGE, DENSE = "no exchange", "dense"


@dataclasses.dataclass(frozen=True)
class Cell:
  """One way to train at one link speed; seconds are medians of a step."""

  layout: str
  replicas: int
  rate: float  # Mbit/s of an uplink
  framework: str
  row: str
  step: float
  without: float  # the framework's own step without an exchange
  compress: float | None  # None where it is not measured
  communicate: float | None
  wire_bytes: float | None  # payload of an exchange
  sent_bytes: float  # by a host, with the headers of packets
  count: int  # of steps

  @property
  def exchange(self) -> float:
    """What the step takes longer than without one."""
    return self.step - self.without

  @property
  def parts(self) -> float | None:
    """Compute, compress and communicate, each measured alone."""
    if self.compress is None or self.communicate is None:
      return None
    return self.without + self.compress + self.communicate

  @property
  def limit(self) -> float | None:
    """The least that a step can take if nothing overlaps.

    Compute, compress, and the bytes that a ring of N replicas moves over each
    uplink, 2 (N - 1) / N of the payload, at the full speed of the link.
    """
    if self.compress is None or self.wire_bytes is None:
      return None
    ring = self.wire_bytes * 2 * (self.replicas - 1) / self.replicas
    return self.without + self.compress + ring / (self.rate * 1e6 / 8)


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

  def dense(self, cell: Cell) -> Cell | None:
    """The dense float32 one to compare a cell with."""
    found = self.of(
      layout=cell.layout, rate=cell.rate, framework=cell.framework, row=DENSE
    )
    return found[0] if found else None


def load(path: pathlib.Path) -> Results:
  """Reads what `bench_network.py` wrote."""
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

    without = median(NO_EXCHANGE, "step")
    if without is None:
      continue
    is_none = row == NO_EXCHANGE
    cells.append(
      Cell(
        layout=layout,
        replicas=entry["replicas"],
        rate=rate,
        framework=framework,
        row=row,
        step=median(row, "step"),
        without=without,
        compress=0.0 if is_none else median(row, "compress"),
        communicate=0.0 if is_none else median(row, "communicate"),
        wire_bytes=0.0 if is_none else entry.get("wire_bytes"),
        sent_bytes=statistics.median(entry["sent_bytes"]),
        count=len(entry["seconds"]),
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
