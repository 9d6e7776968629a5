"""Rows and results of the network benchmark."""

import dataclasses
import itertools
import json
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from edgc_jax.measure.advice import TOLERANCE, first_fast
from edgc_jax.wire.link_model import ring_bytes

NO_EXCHANGE, DENSE, NARROW = "no exchange", "dense", "dense, bf16"
FILE = pathlib.Path("docs/network.json")


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


def cells_of(file: pathlib.Path) -> pd.DataFrame:
  """Reads the benchmark's JSON file.

  Returns:
    A line for each row of a layout at a link speed; times are medians in
    seconds, NaN if not measured: `step`; `without`, the same framework's step
    without an exchange; `compress` and `communicate`, each measured alone;
    `exchange`, step minus without; `clear`, the exchange if it is above the
    noise; `noise`, half the ranges of step and without; `wire_bytes`, the
    payload of all shards; `sent_bytes` of a host, with packet headers;
    `ring_bytes`, what a host sends of the payload in a ring; `link_alone`,
    their time at the link's full speed; `limit`, the step without overlap and
    overhead.
  """
  keys = ["layout", "rate", "framework", "row"]
  found = pd.DataFrame(json.loads(file.read_text())["rows"])
  seconds = found["seconds"].map(statistics.median)
  found = found.assign(
    median=seconds,
    half_range=found["seconds"].map(lambda x: (max(x) - min(x)) / 2),
    sent_bytes=found["sent_bytes"].map(statistics.median),
  ).drop(columns=["seconds"])
  # Older entries do not name their shards.
  found["shards"] = found.get("shards", seconds * np.nan).fillna(1).astype(int)
  steps = found[found["part"] == "step"].set_index(keys)
  alone = found.pivot(index=keys, columns="part", values="median")
  cells = steps.drop(columns="part").rename(columns={"median": "step"})
  for part in ("compress", "communicate"):
    cells[part] = alone.get(part, np.nan)
  cells = cells.reset_index()
  none = cells[cells["row"] == NO_EXCHANGE].set_index(keys[:3])
  is_none = cells["row"] == NO_EXCHANGE
  by_key = pd.MultiIndex.from_frame(cells[keys[:3]])
  cells["without"] = none["step"].reindex(by_key).to_numpy()
  noise = none["half_range"].reindex(by_key, fill_value=0.0).to_numpy()
  cells["noise"] = cells["half_range"] + noise
  for name in ("compress", "communicate", "wire_bytes"):
    cells.loc[is_none, name] = 0.0
  cells["exchange"] = cells["step"] - cells["without"]
  cells["clear"] = cells["exchange"].where(cells["exchange"] > cells["noise"])
  # Bytes that a host sends in a ring all-reduce of the payload.
  cells["ring_bytes"] = ring_bytes(cells["wire_bytes"], cells["replicas"])
  cells["link_alone"] = cells["ring_bytes"] / (cells["rate"] * 1e6 / 8)
  compress = cells["compress"].fillna(0.0)
  cells["limit"] = cells["without"] + compress + cells["link_alone"]
  return cells


def right_choice(measured: Mapping[str, float]) -> str:
  """Returns the choice that `advise` makes from measured steps."""
  return list(measured)[first_fast(list(measured.values()))]


def orders_of(
  predicted: Mapping[str, float], measured: Mapping[str, float]
) -> list[bool]:
  """Returns whether pairs of clearly different methods are in right order."""
  return [
    (predicted[a] < predicted[b]) == (measured[a] < measured[b])
    for a, b in itertools.combinations(measured, 2)
    if abs(measured[a] / measured[b] - 1) > TOLERANCE
  ]
