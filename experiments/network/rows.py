"""What the network benchmark compares, and on which hosts."""

import dataclasses
from collections.abc import Mapping
from typing import Any


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
