"""Models the paper's clusters, for the tables of results/paper.md.

  python -m experiments.lab.planning.paper_clusters

Writes results/data/paper_clusters.json, in some minutes. Measured are the steps
of results/data/network.json, with which the model is checked, and two curves of
the entropy, from results/records and results/data/noise_scale.json.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd
from absl import app
from ml_collections import ConfigDict

import edgc_jax
from configs import gpt2_10m
from configs.paper import gpt2_2b5, gpt2_12b
from edgc_jax.measure.evidence import of_protocol
from experiments import ROOT
from experiments.lab.network import results
from experiments.lab.network.results import NO_EXCHANGE, ROWS, Layout
from experiments.lab.planning import cluster, presets
from experiments.lab.planning.cluster import Hardware, Run
from experiments.lab.planning.presets import Curve
from experiments.lab.study import statistics, study
from experiments.lab.study.records import Records

_DATA = ROOT / "results/data"
_OUTPUT, _NETWORK = _DATA / "paper_clusters.json", _DATA / "network.json"
_NOISE, _TOKENS = _DATA / "noise_scale.json", 32_768  # of the paper's replicas
_CLOSE = 0.15  # of measured times, that a model must reach
_FALL = presets.falling(3.0)
# Curves of the entropy whose ranks the page draws, by their names.
_GIVEN = "3 nats, half of it in the first tenth"
_GAUSSIAN, _HISTOGRAM = (
  f"as measured in the protocol's run, of {_TOKENS:,} tokens, by the {name}"
  for name in ("Gaussian estimator", "histogram")
)
_HORIZONS = "as measured over 20,000 steps, 2,048 tokens a replica"
# Longest runs measured here, of the rule as described.
_HORIZON, _DESCRIBED = "configs/paper/horizon.py", "as described, 16 to 4"
# Of the run, after which the rule acts.
_WARMUP = 0.1
# Configuration and devices of the paper, by model.
_CLUSTERS = {
  "2.5B, 32 V100": (gpt2_2b5, presets.HARDWARE["v100"]),
  "12.1B, 64 H100": (gpt2_12b, presets.HARDWARE["h100"]),
}
# Of the protocol's methods, by the names that they have on the page: those that
# work on stages and win at their bits.
_TODAY = {
  "dense, bfloat16": "dense, bfloat16",
  "quantize, 4 bits": "quantize, 4 bits",
  "powersgd 44.6, int4, error": "powersgd, int4, error, 2 bits",
}
# The public codes move the rank by 4 a window, whatever the largest one is; a
# step of a ladder of 16 ranks is wider.
_SLOW, _SLOW_RANKS = "edgc, by 4 ranks a window", 4
_NAMES = {
  "allreduce": "dense",
  "edgc": "edgc, as described",
  _SLOW: _SLOW,
  **_TODAY,
}
Lines = list[dict[str, Any]]  # of a table


def _check() -> Lines:
  """Returns how well the model predicts the measured steps, by layout."""
  cells = results.cells_of(_NETWORK)
  is_known = cells["row"].isin(ROWS.keys() - {NO_EXCHANGE})
  cells = cells[(cells["framework"] == "jax") & is_known]
  modelled = cells.apply(_modelled, axis=1)
  exchange = (modelled - cells["without"]) / cells["exchange"] - 1
  error = pd.DataFrame(
    {"step": modelled / cells["step"] - 1, "exchange": exchange}
  )
  lines = []
  for layout, own in error.groupby(cells["layout"], sort=False):
    step, exchange = own["step"], own["exchange"].abs()
    lines.append(
      {
        "layout": layout,
        "steps": len(own),
        "median error": f"{step.abs().median():.1%}",
        "largest": f"{step.loc[step.abs().idxmax()]:+.1%}",
        "within 15%": int((step.abs() <= _CLOSE).sum()),
        "of the exchange alone, median": f"{exchange.median():.1%}",
        "and largest": f"{exchange.max():.1%}",
      }
    )
  return lines


def _modelled(cell: pd.Series) -> float:
  """Returns the modelled seconds of a measured step.

  Computing is as measured: of the step without an exchange, and of an exchange
  where it was measured alone.
  """
  layout, microbatches = Layout.of(cell["layout"]), 4
  config = gpt2_10m.get_config("edgc").unlock()
  config.mesh.update(
    data=layout.replicas, stage=layout.stages, fsdp=layout.shards
  )
  config.pipeline.align = "none"
  config.update_from_flattened_dict(dict(ROWS[cell["row"]]["jax"]))
  link = edgc_jax.LinkModel.of_uplink(
    cell["rate"], cell["round_trip"] / 1e3, layout.replicas, layout.shards
  )
  compress = 0.0 if pd.isna(cell["compress"]) else cell["compress"]
  ticks = microbatches + layout.stages - 1
  backward = cell["without"] / ticks * 2 / 3 if layout.stages > 1 else 0.0
  exchanges = cluster.Exchanges(
    config, link, edgc_jax.CompressionModel(compress, 0.0), backward
  )
  level = len(exchanges.ladder) - 1
  return cell["without"] + exchanges.exposed(exchanges.levels_at(level))


@functools.cache
def _run(
  name: str, reducer: str, hardware: Hardware, curve: Curve = _FALL
) -> Run:
  """Models a run of one of the paper's models."""
  most = None
  if reducer == _SLOW:
    reducer, most = "edgc", _SLOW_RANKS
  return cluster.run_of(_config(name, reducer), hardware, curve, most)


def _config(name: str, reducer: str) -> ConfigDict:
  """Returns a configuration with a reducer, or with a method judged here."""
  module, _ = _CLUSTERS[name]
  judged = {one.name: one for one in of_protocol()["adamw"]}.get(reducer)
  if judged is None:
    return module.get_config(reducer)
  config = module.get_config(judged.reducer)
  config[judged.reducer].update(dict(judged.options))
  if judged.reducer == "powersgd":
    config.powersgd.warmup_steps = 0
    config.powersgd.rank = float(_rank_of(config, judged.predicted_bits))
  return config


def _rank_of(config: ConfigDict, bits: float) -> int:
  """Returns the rank at which a device sends so many bits a parameter."""
  free = edgc_jax.LinkModel(0.0, 1.0), edgc_jax.CompressionModel(0.0, 0.0)

  def bytes_of(**settings: Any) -> float:
    own = config.copy_and_resolve_references()
    own.update_from_flattened_dict(settings)
    found = cluster.Exchanges(own, *free, 0.0)
    return float(found.own_bytes[-1] + found.late_bytes[-1])

  # Bytes rise by as much from each rank to the next.
  first, second = (bytes_of(**{"powersgd.rank": r}) for r in (8.0, 9.0))
  wanted = bytes_of(reducer="allreduce") * bits / 32
  return 8 + int((wanted - first) / (second - first))


def _less(value: float, than: float) -> str:
  return f"{value / than - 1:+.1%}"


def _savings(run: Run, dense: Run) -> dict[str, str]:
  """Returns what a run saves of a dense one's communication and time."""
  return {
    "stage 0's communication": _less(run.communication, dense.communication),
    "bytes of all stages": _less(run.megabytes, dense.megabytes),
    "step": _less(run.step, dense.step),
  }


def _both(name: str, hardware: Hardware) -> str:
  """Returns what `edgc` saves of stage 0's communication and of a step."""
  dense, run = (_run(name, x, hardware) for x in ("allreduce", "edgc"))
  saved = _savings(run, dense)
  return ", ".join(saved[name] for name in ("stage 0's communication", "step"))


def _clusters() -> Lines:
  """Returns the modelled runs on the paper's clusters."""
  steps = {one.name: one.steps for one in of_protocol()["adamw"]}
  steps["allreduce"] = 1.0
  steps["edgc"] = steps[_SLOW] = _described_steps()
  lines = []
  for name, (module, hardware) in _CLUSTERS.items():
    total = module.get_config("edgc").steps
    dense = _run(name, "allreduce", hardware)
    for reducer in _NAMES:
      run, more = _run(name, reducer, hardware), steps[reducer]
      lines.append(
        {
          "cluster": name,
          "method": _NAMES[reducer],
          "step, s": f"{run.step:.2f}",
          "of it added by exchanges": f"{run.exposed:.3f}",
          **_savings(run, dense),
          "steps to a loss": f"{more:.3f}",
          "time to it": _less(run.step * more, dense.step),
          "hours": f"{run.step * total / 3600:,.0f}",
        }
      )
  return lines


def _assumptions() -> Lines:
  """Returns what the modelled clusters assume."""
  fields = [field.name for field in dataclasses.fields(Hardware)]
  return [
    {"assumption": f"`{field}`"}
    | {
      name: f"{getattr(hardware, field):g}"
      for name, (_, hardware) in _CLUSTERS.items()
    }
    for field in fields
  ]


def _links() -> Lines:
  """Returns the modelled savings of `edgc` by speed of the link and share."""
  lines = []
  for name, (_, hardware) in _CLUSTERS.items():
    for gigabits in (10, 25, 40, 100, 200, 400):
      line = {"cluster": name, "Gbit/s a node": f"{gigabits}"}
      for share in (0.3, 0.45, 0.6):
        own = dataclasses.replace(
          hardware, megabits=1000.0 * gigabits, share=share
        )
        column = f"stage 0's communication, step at {share:.0%} of the peak"
        line[column] = _both(name, own)
      lines.append(line)
  return lines


def _others() -> Lines:
  """Returns the same with each other assumption halved and doubled."""
  lines = []
  for name, (_, hardware) in _CLUSTERS.items():
    for field in ("peak", "memory", "inside", "round_trip", "recomputes"):
      line = {"cluster": name, "assumption": f"`{field}`"}
      for times in (0.5, 1.0, 2.0):
        value = getattr(hardware, field)
        value = times > 1 if field == "recomputes" else times * value
        own = dataclasses.replace(hardware, **{field: value})
        line[f"times {times:g}"] = _both(name, own)
      lines.append(line)
  return lines


@functools.cache
def _horizon() -> tuple[study.Study, Records]:
  """Returns the study of the longest runs, and all records."""
  return study.load(_HORIZON), Records(_DATA.parent / "records")


def _described_steps() -> float:
  """Returns the steps of the described rule to a loss, of those of dense."""
  judged = statistics.judged(*_horizon())
  saved = judged.loc[judged["arm"] == _DESCRIBED, "saved"].mean()
  return 1 / (1 - saved)


def _measured() -> Curve:
  """Returns the mean entropy of the runs of `make horizon`, as described."""
  horizon, records = _horizon()
  found = [
    record.curve
    for _, record in horizon.all_judged(_DESCRIBED, horizon.seeds, records)
    if record is not None
  ]
  entropy = pd.concat(found).groupby("step")["entropy"].mean().dropna()
  return presets.through(entropy.index / max(entropy.index), entropy)


def _of_large_batches(estimator: str) -> Curve:
  """Returns the entropy of the mean gradient of the paper's tokens a replica.

  In a run of the protocol.
  """
  found = json.loads(_NOISE.read_text())
  index = found["about"]["means"].index(_TOKENS)
  shares = [line["step"] / found["about"]["steps"] for line in found["lines"]]
  entropy = [line["entropy"][estimator][index] for line in found["lines"]]
  return presets.through(shares, entropy)


@functools.cache
def _curves() -> dict[str, Curve]:
  """Returns the curves of the entropy to compare, by name."""
  return {
    _HORIZONS: _measured(),
    _GAUSSIAN: _of_large_batches("gaussian"),
    _HISTOGRAM: _of_large_batches("histogram"),
    "1.7 nats, all in the first twentieth: as in the protocol": (
      presets.early(1.7)
    ),
    **{
      f"{nats:g} nats, half of it in the first tenth": presets.falling(nats)
      for nats in (0.3, 1.0, 2.0)
    },
    _GIVEN: _FALL,  # the same curve, so that its runs are modelled once
  }


def _falls() -> Lines:
  """Returns the modelled savings of `edgc` by curve of the entropy."""
  curves = _curves()
  lines = []
  for name, (_, hardware) in _CLUSTERS.items():
    dense = _run(name, "allreduce", hardware)
    for text, curve in curves.items():
      run = _run(name, "edgc", hardware, curve)
      least = min(map(curve, np.linspace(_WARMUP, 1.0, 901)))
      lines.append(
        {
          "cluster": name,
          "fall of the entropy": text,
          "after the warm-up": f"{curve(_WARMUP) - least:.2f}",
          "least rank of stage 0": f"{min(r[0] for _, r in run.ranks if r[0])}",
          **_savings(run, dense),
        }
      )
  return lines


def _ranks() -> Lines:
  """Returns the modelled ranks of the stages, by curve of the entropy."""
  return [
    {
      "cluster": name,
      "fall of the entropy": text,
      "steps": _config(name, "edgc").steps,
      "ranks": _run(name, "edgc", hardware, _curves()[text]).ranks,
    }
    for name, (_, hardware) in _CLUSTERS.items()
    for text in (_GIVEN, _GAUSSIAN, _HISTOGRAM, _HORIZONS)
  ]


def main(argv: Sequence[str]) -> None:
  """Writes all tables."""
  del argv
  tables = {
    "check": _check(),
    "assumptions": _assumptions(),
    "clusters": _clusters(),
    "links": _links(),
    "others": _others(),
    "falls": _falls(),
    "ranks": _ranks(),
  }
  _OUTPUT.write_text(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  app.run(main)
