"""Tables of single benchmarks, each from its JSON file in docs/."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pandas as pd

_DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def _read(name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
  found = json.loads((_DOCS / f"{name}.json").read_text())
  return pd.DataFrame(found["lines"]), found["about"]


def _growth() -> Sequence[str]:
  """Returns the cost of the reducers by size of the model, and its origin."""
  table, about = _read("growth")
  return [
    table.to_markdown(index=False, disable_numparse=True),
    "",
    f"`{about['command']}`, commit {about['commit']}; {about['device']};"
    f" {about['versions']}; medians of {about['rounds']} rounds.",
  ]


def _wide_layer() -> Sequence[str]:
  """Returns what each method loses on a narrow and on a wide layer."""
  lines, about = _read("wide_layer")
  table = lines.assign(
    step=lines["step"].map("{:.2%}".format),
    sum=lines["sum"].map("{:.3%}".format),
    bits=lines["bits"].map("{:.2f}".format),
    width=[f"{width} x {4 * width}" for width in lines["width"]],
  ).rename(
    columns={
      "width": "matrix",
      "step": "lost in a step",
      "sum": f"lost of the sum of {about['measured']} steps",
    }
  )
  return [
    table.to_markdown(index=False, disable_numparse=True),
    "",
    f"`{about['command']}`, commit {about['commit']}, the last"
    f" {about['measured']} of {about['steps']} steps, one seed.",
  ]


TABLES = {"growth": _growth, "wide layer": _wide_layer}
