"""Tables and a picture of results/paper.md, of what `make plan-paper` wrote."""

import functools
import json
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from configs.paper import gpt2_2b5, gpt2_12b, gpt2_345m
from experiments import ROOT
from experiments.trainer.reporting.style import COLORS, WIDTH, dress, markdown

_DATA = ROOT / "results/data"
_MODELS = (gpt2_345m, gpt2_2b5, gpt2_12b)


def _of_clusters(name: str) -> list[dict[str, Any]]:
  """Returns the lines that `planning.paper_clusters` wrote under a name."""
  return json.loads((_DATA / "paper_clusters.json").read_text())[name]


def _modelled(name: str) -> Sequence[str]:
  """Returns a table of `planning.paper_clusters`."""
  return markdown(_of_clusters(name))


def _layouts() -> Sequence[str]:
  """Returns what compiling for the paper's meshes has found."""
  found = json.loads((_DATA / "paper_layouts.json").read_text())
  lines = []
  for config in (module.get_config("edgc") for module in _MODELS):
    own = found[config.name]
    is_exact = own["program_bytes"] == own["predicted_bytes"]
    memory = own["argument_bytes"] + own["temporary_bytes"]
    dense, *sent = (each / 1e6 for each in own["program_bytes"])
    lines.append(
      {
        "configuration": config.name,
        "parameters": f"{own['params']:,}",
        "mesh": " x ".join(f"{n} {axis}" for axis, n in own["mesh"].items()),
        "a device's": f"{own['device_params']:,}",
        "GiB": f"{memory / 2**30:.1f}",
        "dense, MB": f"{dense:.1f}",
        "ranks": f"{own['ranks'][1]} to {own['ranks'][-1]}",
        "at these, MB": f"{sent[0]:.1f} to {sent[-1]:.1f}",
        "as predicted": "to the byte" if is_exact else "no",
        "compiled in, s": f"{own['seconds']:.0f}",
      }
    )
  return markdown(lines)


def _by_size() -> Sequence[str]:
  """Returns the paper's three models, as compiled from their scripts."""
  lines = []
  for module in _MODELS:
    config = module.get_config("edgc")
    mesh = config.mesh
    lines.append(
      {
        "configuration": f"`configs/paper/{module.__name__.split('.')[-1]}.py`",
        "layers": config.model.num_layers,
        "width": config.model.width,
        "heads": config.model.num_heads,
        "tensor, stages, replicas": f"{mesh.tensor}, {mesh.stage}, {mesh.data}",
        "sequences a step": config.batch_size,
        "microbatches": config.pipeline.microbatches,
      }
    )
  return markdown(lines)


def draw_ranks() -> Figure:
  """Draws the modelled ranks of the stages over the run."""
  found = pd.DataFrame(_of_clusters("ranks"))
  clusters = found["cluster"].unique()
  falls = found["fall of the entropy"].unique()
  figure = Figure(figsize=(WIDTH, 6), layout="constrained")
  panels = figure.subplots(
    len(clusters), len(falls), sharex=True, sharey="row", squeeze=False
  )
  for axes, (_, run) in zip(panels.flat, found.iterrows(), strict=True):
    starts, ranks = zip(*run["ranks"], strict=True)
    starts = [*starts, run["steps"]]
    for stage, own in enumerate(zip(*ranks, strict=True)):
      # Rank 0 is dense, which has no rank.
      own = [rank or np.nan for rank in (*own, own[-1])]
      axes.step(
        np.divide(starts, 1e3), own, where="post", color=COLORS[stage],
        linewidth=1.2, label=f"stage {stage}",
      )  # fmt: skip
    dress(axes, run["cluster"])
  for axes, text in zip(panels[0], falls, strict=True):
    axes.annotate(
      textwrap.fill(text, 30), (0, 1.2), xycoords="axes fraction", fontsize=7,
    )  # fmt: skip
  for axes in panels[:, 0]:
    axes.set_ylabel("rank")
  for axes in panels[-1]:
    axes.set_xlabel("thousands of steps")
  figure.legend(
    *panels[0, 0].get_legend_handles_labels(),
    fontsize=8, frameon=False, loc="outside lower center", ncols=4,
  )  # fmt: skip
  return figure


PICTURES = {"paper-ranks": draw_ranks}
TABLES = {"paper models": _by_size, "paper layouts": _layouts} | {
  f"paper {name}": functools.partial(_modelled, name)
  for name in ("check", "assumptions", "clusters", "links", "others", "falls")
}
