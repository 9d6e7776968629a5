"""Rows and results of the network benchmark."""

import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from edgc_jax.measure.advice import TOLERANCE, first_fast
from edgc_jax.wire.link_model import ring_bytes

NO_EXCHANGE, DENSE, NARROW = "no exchange", "dense", "dense, bf16"


@dataclasses.dataclass(frozen=True)
class Row:
  """A method of one framework."""

  name: str
  framework: str  # jax or torch
  settings: Mapping[str, Any]  # of the configuration, or arguments of `build`
  is_for_stages: bool = True  # with stages each row compiles for a minute


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
# The rows that `advise` chooses from.
ADVISED = {"dense", "dense, bf16", *(f"edgc, rank {rank}" for rank in RANKS)}


@dataclasses.dataclass(frozen=True)
class Layout:
  """Hosts, the stages that they are divided into, and the devices of each.

  If a host has several devices, they shard the parameters of its replica.
  """

  hosts: int
  stages: int = 1
  shards: int = 1

  @property
  def has_replicas_only(self) -> bool:
    """Whether each host is one whole replica on one device."""
    return self.stages == self.shards == 1

  @property
  def name(self) -> str:
    if self.shards > 1:
      return f"{self.hosts} replicas of {self.shards} shards"
    if self.stages > 1:
      return f"{self.stages} stages of {self.hosts // self.stages} replicas"
    return f"{self.hosts} replicas"


@dataclasses.dataclass(frozen=True)
class Cell:
  """One row at one link speed; times are medians in seconds per step."""

  layout: str
  replicas: int
  shards: int  # of a replica
  threads: int  # of a host
  rate: float  # Mbit/s of an uplink
  framework: str
  row: str
  step: float
  without: float | None  # the same framework's step without an exchange
  compress: float | None  # None if it is not measured
  communicate: float | None
  wire_bytes: float | None  # payload of an exchange, of all shards together
  sent_bytes: float  # sent by a host, including packet headers
  noise: float  # half the range of steps, plus that of steps without exchange

  @property
  def exchange(self) -> float | None:
    """Step time minus the step time without an exchange."""
    return None if self.without is None else self.step - self.without

  @property
  def clear_exchange(self) -> float | None:
    """The exchange for use in ratios; None if it is not above the noise."""
    exchange = self.exchange
    is_clear = exchange is not None and exchange > self.noise
    return exchange if is_clear else None

  @property
  def parts(self) -> float | None:
    """Sum of compute, compress and communicate, each measured alone."""
    parts = (self.without, self.compress, self.communicate)
    return None if None in parts else sum(parts)

  @property
  def predicted_bytes(self) -> float | None:
    """Bytes that a host sends in a ring all-reduce of the payload."""
    if self.wire_bytes is None:
      return None
    return ring_bytes(self.wire_bytes, self.replicas)

  @property
  def link_alone(self) -> float | None:
    """Time of the predicted bytes at the links' full speed."""
    if self.predicted_bytes is None:
      return None
    return self.predicted_bytes / (self.rate * 1e6 / 8)

  @property
  def limit(self) -> float | None:
    """Step time without overlap and without any overhead.

    It is the sum of compute, compress if measured, and the link alone.
    """
    if self.without is None or self.link_alone is None:
      return None
    return self.without + (self.compress or 0.0) + self.link_alone


@dataclasses.dataclass(frozen=True)
class Prediction:
  """Predicted and measured step times, {method: seconds}."""

  layout: str
  rate: float
  choice: str
  predicted: Mapping[str, float]
  measured: Mapping[str, float]

  @property
  def right_choice(self) -> str:
    """The choice of the same rule from the measured steps."""
    return list(self.measured)[first_fast(list(self.measured.values()))]

  @property
  def orders(self) -> Sequence[bool]:
    """Whether pairs of clearly different methods are predicted in order."""
    return [
      (self.predicted[a] < self.predicted[b])
      == (self.measured[a] < self.measured[b])
      for a, b in itertools.combinations(self.measured, 2)
      if abs(self.measured[a] / self.measured[b] - 1) > TOLERANCE
    ]

  @property
  def loss(self) -> float:
    """How much slower the choice is than the fastest, as a fraction."""
    return self.measured[self.choice] / min(self.measured.values()) - 1


@dataclasses.dataclass(frozen=True)
class Results:
  """The results of one run of the benchmark, or of several with one model."""

  cells: tuple[Cell, ...]
  advice: tuple[dict[str, Any], ...]
  failures: tuple[dict[str, str], ...]
  runs: tuple[dict[str, Any], ...]  # command, commit, machine, layouts, ...
  about: dict[str, Any]  # the model

  @functools.cached_property
  def layouts(self) -> Sequence[str]:
    """Names of the layouts, in the order of measurement."""
    return tuple(dict.fromkeys(cell.layout for cell in self.cells))

  def run_of(self, layout: str) -> dict[str, Any]:
    """Returns the run that measured a layout."""
    (run,) = (run for run in self.runs if layout in run["layouts"])
    return run

  @functools.cached_property
  def rates(self) -> Sequence[float]:
    """Link speeds in Mbit/s, in the order of measurement."""
    return tuple(dict.fromkeys(cell.rate for cell in self.cells))

  def of(self, **wanted: Any) -> list[Cell]:
    """Returns the cells with these attributes."""
    return [
      cell
      for cell in self.cells
      if all(getattr(cell, k) == v for k, v in wanted.items())
    ]

  def other_row(self, cell: Cell, row: str) -> Cell | None:
    """Returns the cell of another row, with the same framework and links."""
    found = self.of(
      layout=cell.layout, rate=cell.rate, framework=cell.framework, row=row
    )
    return found[0] if found else None

  @functools.cached_property
  def predictions(self) -> Sequence[Prediction]:
    """Predictions of the advice, if all of its methods were measured."""
    found = []
    for advice in self.advice:
      cells = self.of(
        layout=advice["layout"], rate=advice["rate"], framework="jax"
      )
      measured = {cell.row: cell.step for cell in cells}
      predicted = advice["seconds"]
      if measured.keys() >= predicted.keys():
        found.append(
          Prediction(
            advice["layout"], advice["rate"], advice["choice"], predicted,
            {method: measured[method] for method in predicted},
          )
        )  # fmt: skip
    return found


def load(path: pathlib.Path) -> Results:
  """Reads the JSON file of the benchmark."""
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
        shards=entry.get("shards", 1),
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
  lists = [tuple(found.pop(key)) for key in ("advice", "failures", "runs")]
  found.pop("rows")
  return Results(tuple(cells), *lists, found)
