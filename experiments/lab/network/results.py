"""Layouts, rows and results of the network benchmark."""

import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from edgc_jax.wire.link_model import ring_bytes
from experiments import ROOT
from experiments.trainer.runs import run_folder
from experiments.trainer.runtime.json_files import read_json

FILE = ROOT / "results/data/network.json"
WHOLE_RUNS = ROOT / "results/data/whole_runs.json"
SITE_ROUNDS = ROOT / "results/data/site_rounds.json"
SITE_RUNS = ROOT / "results/data/site_runs.json"
OVERLAP = ROOT / "results/data/overlap.json"
# Ways of OVERLAP: without an exchange, and with one that nothing hides.
ALONE, WAITS = "no exchange", "exchange waits"
SITES_ALONE, SITES_WAIT = "sites, no exchange", "sites, exchange"
NO_EXCHANGE, DENSE, NARROW = "no exchange", "dense", "dense, bf16"
RANKS = (32, 8)
# Methods, with settings of the configuration and arguments of torch_host.
ROWS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
  NO_EXCHANGE: {"jax": {"reducer": "none"}, "torch": {"hook": "none"}},
  DENSE: {"jax": {"reducer": "allreduce"}, "torch": {"hook": "dense"}},
  NARROW: {
    "jax": {"reducer": "allreduce", "allreduce.wire_dtype": "bfloat16"},
    "torch": {"hook": "bf16"},
  },
  **{
    f"powersgd, rank {rank}": {
      "jax": {
        "reducer": "powersgd",
        "powersgd.rank": float(rank),
        "powersgd.wire_dtype": "float32",
      },
      "torch": {"hook": "powersgd", "rank": rank},
    }
    for rank in RANKS
  },
  **{
    f"edgc, rank {rank}": {
      "jax": {
        "reducer": "edgc",
        "edgc.rank_max": rank,
        "edgc.rank_min": rank,
        "edgc.wire_dtype": "float32",
      }
    }
    for rank in RANKS
  },
}
# With stages each row compiles for a minute.
STAGED = {NO_EXCHANGE, DENSE, "powersgd, rank 8", "edgc, rank 8"}
# Layouts of the page, and speeds of an uplink in Mbit/s.
LAYOUTS: Mapping[str, tuple[float, ...]] = {
  "2 replicas": (50, 100, 300, 1000),
  "4 replicas": (100, 300, 1000),
  "2 stages of 2 replicas": (100,),
  "2 replicas of 4 shards": (100,),
}


def link_name(rate: float, round_trip: float) -> str:
  """Names a link by its Mbit/s, and by its ms of a round trip if it has one.

  >>> link_name(100.0, 50.0), link_name(10.0, 0.0)
  ('100 Mbit/s, 50 ms', '10 Mbit/s')
  """
  return f"{rate:g} Mbit/s" + (round_trip > 0) * f", {round_trip:g} ms"


@dataclasses.dataclass(frozen=True)
class Layout:
  """Replicas, the stages of each or the devices that shard its parameters.

  There is a host for each stage of a replica.
  """

  name: str
  replicas: int
  stages: int = 1
  shards: int = 1

  @classmethod
  def of(cls, name: str) -> "Layout":
    """Reads the name of a layout.

    Raises:
      ValueError: if it names none.

    >>> Layout.of("2 stages of 3 replicas").hosts
    6
    """
    found = re.fullmatch(
      r"(?:(?P<stages>[1-9]\d*) stages of )?(?P<replicas>[1-9]\d*) replicas"
      r"|(?P<wide>[1-9]\d*) replicas of (?P<shards>[1-9]\d*) shards",
      name,
    )
    groups = found.groupdict() if found else {}
    sizes = {key: int(number or 1) for key, number in groups.items()}
    replicas = sizes.get("replicas", 1) * sizes.get("wide", 1)
    if replicas < 2:
      raise ValueError(
        "`--layout` must be like 4 replicas, 2 stages of 2 replicas, or 2"
        f" replicas of 4 shards, with 2 replicas at least, got {name!r}; change"
        " it."
      )
    return cls(name, replicas, sizes["stages"], sizes["shards"])

  @property
  def hosts(self) -> int:
    return self.replicas * self.stages

  @property
  def has_replicas_only(self) -> bool:
    """Whether each host is one whole replica on one device."""
    return self.stages == self.shards == 1


class Results:
  """The benchmark's JSON file; layouts that are not measured again are kept.

  Attributes:
    found: All that the file holds.
  """

  def __init__(
    self, file: pathlib.Path, model: Mapping[str, Any], run: Mapping[str, Any]
  ):
    """Reads the file, if there is one, and writes nothing yet.

    Args:
      file: The file.
      model: What all its measurements have in common.
      run: What is known of this run.

    Raises:
      ValueError: if the file is of another configuration.
    """
    found = dict(model)
    if file.exists():
      found = read_json(file, "--output", "give another file")
    older = {key: found.get(key) for key in model}
    if older != model:
      raise ValueError(
        f"`--output` must be a new file or one of this configuration, {model},"
        f" got {file} of {older}; choose another."
      )
    lists = {"runs": [], "rows": [], "advice": [], "failures": []}
    self.found = lists | found
    self._file, self._layout, self._start = file, "", time.monotonic()
    self._run = {**run, "layouts": []}

  def begin(self, layout: str) -> None:
    """Drops what is known of a layout; what is added belongs to it."""
    found, self._layout = self.found, layout
    for key in ("rows", "advice", "failures"):
      found[key] = [each for each in found[key] if each["layout"] != layout]
    for run in found["runs"]:
      run["layouts"] = [name for name in run["layouts"] if name != layout]
    self._run["layouts"].append(layout)
    others = [run for run in found["runs"] if run is not self._run]
    found["runs"] = [*(run for run in others if run["layouts"]), self._run]

  def add(self, kind: str, **entry: Any) -> None:
    """Adds an entry of the layout: to rows, advice or failures."""
    self.found[kind].append({"layout": self._layout, **entry})

  def write(self) -> None:
    """Writes the file."""
    self._run["minutes"] = (time.monotonic() - self._start) / 60
    self._file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(self.found, indent=1, allow_nan=False)
    run_folder.write(self._file, text + "\n")


def cells_of(file: pathlib.Path) -> pd.DataFrame:
  """Reads the benchmark's JSON file.

  Returns:
    A line for each row of a layout at a link's speed and `round_trip` (ms, 0 in
    older files); times are medians in seconds, NaN if not measured: `step`;
    `without`, the same framework's step without an exchange; `compress` and
    `communicate`, each measured alone; `exchange`, step minus without; `clear`,
    the exchange if it is above the noise; `noise`, half the ranges of step and
    without; `wire_bytes`, the payload of all shards; `sent_bytes` of a host,
    with packet headers; `ring_bytes`, what a host sends of the payload in a
    ring; `link_alone`, their time at the link's full speed; `limit`, the step
    without overlap and overhead, and without round trips.
  """
  rows = json.loads(file.read_text())["rows"]
  keys = ["layout", "rate", "round_trip", "framework", "row"]
  found = pd.DataFrame([{"round_trip": 0.0, **row} for row in rows])
  found = found.set_index(keys)
  found["noise"] = found["seconds"].map(np.ptp) / 2
  for name in ("seconds", "sent_bytes"):
    found[name] = found[name].map(np.median)
  found = found.rename(columns={"seconds": "step"})
  cells = found[found["part"] == "step"].copy()
  for part in ("compress", "communicate"):
    cells[part] = found.loc[found["part"] == part, "step"]
  plain = cells.xs(NO_EXCHANGE, level="row")[["step", "noise"]]
  plain.columns = ["without", "noise_without"]
  cells = cells.join(plain, on=keys[:-1]).reset_index()
  cells["noise"] += cells["noise_without"].fillna(0.0)
  sent = ["compress", "communicate", "wire_bytes"]
  cells.loc[cells["row"] == NO_EXCHANGE, sent] = 0.0
  cells["exchange"] = cells["step"] - cells["without"]
  cells["clear"] = cells["exchange"].where(cells["exchange"] > cells["noise"])
  # Bytes that a host sends in a ring all-reduce of the payload.
  replicas = cells["layout"].map(lambda name: Layout.of(name).replicas)
  cells["ring_bytes"] = ring_bytes(cells["wire_bytes"], replicas)
  cells["link_alone"] = cells["ring_bytes"] / (cells["rate"] * 1e6 / 8)
  compress = cells["compress"].fillna(0.0)
  cells["limit"] = cells["without"] + compress + cells["link_alone"]
  return cells
