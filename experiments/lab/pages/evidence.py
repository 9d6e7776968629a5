"""Makes the evidence of `edgc_jax.advise` from the protocol's records."""

import json
from typing import Any

import numpy as np
import pandas as pd

import edgc_jax
from experiments.lab.pages import protocol
from experiments.lab.study.study import MATCHED, Study
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.training import optimizer

_STUDIES = ("protocol/table", "protocol/rounds", "protocol/muon")
_DIGITS = 4


def text() -> str:
  """Returns the file of all arms that have all judged seeds, as JSON."""
  found: dict[tuple[str, str], dict[str, Any]] = {}
  for name in _STUDIES:
    study, arms = protocol.study_of(name), protocol.arms_of(name)
    for (_, arm), row in arms.iterrows():
      if _counts(study, arm, row):
        line = _line(study, arm, row)
        found.setdefault((line["optimizer"], arm), line)
  lines = (f"  {json.dumps(line)}" for line in found.values())
  return "[\n" + ",\n".join(lines) + "\n]\n"


def _counts(study: Study, arm: str, row: pd.Series) -> bool:
  """Returns whether an arm is judged beside dense, and of the package."""
  if arm.endswith(MATCHED) or row["dense_pairs"] < len(study.seeds):
    return False
  own = study.arms[arm]
  is_ours = own["reducer"] in edgc_jax.REDUCERS
  return is_ours and not own.get("local.lookahead")


def _line(study: Study, arm: str, row: pd.Series) -> dict[str, Any]:
  """Returns the fields of `edgc_jax.measure.evidence.Evidence`."""
  taken = study.taken(arm, protocol.all_records())
  assert taken is not None  # its runs are judged
  settings = study.choices(arm)[taken[0]]
  reducer = settings["reducer"]
  start = f"{reducer}."
  config = study.configuration(settings)
  every = max(1, config.local.every)
  local = config.local
  outer: dict[str, Any] = {"learning_rate": local.lr}
  if local.momentum:
    outer |= {"momentum": local.momentum, "nesterov": True}
  return {
    "name": arm,
    "optimizer": config.optimizer.name,
    "reducer": reducer,
    "options": {
      k.removeprefix(start): v
      for k, v in settings.items()
      if k.startswith(start)
    },
    "every": every,
    "outer": outer if every > 1 else {},
    "bits": _short(row["bits"]),
    "predicted_bits": _short(_predicted_bits(config) / every)
    if reducer in optimizer.LOW_RANK
    else _short(row["bits"]),
    "loss": _short(row["gap"]),
    "error": _short(row["gap_error"]),
    "steps": 1.0 if arm == study.dense else _short(1 / (1 - row["saved"])),
    "seeds": int(row["seeds"]),
    "is_current": bool(row["is_current"]),
  }


def _predicted_bits(config: Any) -> float:
  """Returns bits a parameter of an exchange, a mean over the ranks."""
  task = tasks.make(config)
  shapes = task.layout(meshes.shape_of(config.mesh.data)).shapes
  part, *_ = edgc_jax.describe(
    optimizer.make_reducer(config, task, {}), shapes, replicas=config.mesh.data
  ).parts
  return 8 * float(np.mean(part.wire_bytes)) / (part.dense_bytes / 4)


def _short(value: float) -> float:
  return float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else 0.0
