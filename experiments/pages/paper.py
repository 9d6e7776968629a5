"""Tables of docs/paper.md, from what `make plan-paper` has written."""

import functools
import json
import pathlib
from collections.abc import Sequence

from configs.paper import gpt2_2b5, gpt2_12b, gpt2_345m
from experiments.reporting.style import markdown

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
_MODELS = (gpt2_345m, gpt2_2b5, gpt2_12b)


def _modelled(name: str) -> Sequence[str]:
  """Returns a table of `planning.paper_clusters`."""
  return markdown(json.loads((_DOCS / "paper_clusters.json").read_text())[name])


def _layouts() -> Sequence[str]:
  """Returns what compiling for the paper's meshes has found."""
  found = json.loads((_DOCS / "paper_layouts.json").read_text())
  lines = []
  for config in (module.get_config("edgc") for module in _MODELS):
    own = found[config.name]
    differences = {
      sent - predicted
      for sent, predicted in zip(
        own["program_bytes"], own["predicted_bytes"], strict=True
      )
    }
    is_exact = differences == {own["other_bytes"]}
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


TABLES = {"paper models": _by_size, "paper layouts": _layouts} | {
  f"paper {name}": functools.partial(_modelled, name)
  for name in ("check", "assumptions", "clusters", "links", "others", "falls")
}
