"""Tables of single benchmarks, each from its JSON file in results/data/."""

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments import ROOT
from experiments.trainer.reporting.style import markdown

_DATA = ROOT / "results/data"


def _read(name: str) -> tuple[pd.DataFrame, dict[str, Any]]:
  found = json.loads((_DATA / f"{name}.json").read_text())
  return pd.DataFrame(found["lines"]), found["about"]


def _with_origin(table: pd.DataFrame, origin: str) -> Sequence[str]:
  """Returns a table, and a line that says how it was measured."""
  return [*markdown(table), "", origin]


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
  return _with_origin(
    table,
    f"`{about['command']}`, commit {about['commit']}, the last"
    f" {about['measured']} of {about['steps']} steps, one seed.",
  )


def _noise_scale() -> Sequence[str]:
  """Returns the gradient noise scale over a run."""
  lines, about = _read("noise_scale")
  table = pd.DataFrame(
    {
      "step": lines["step"],
      "training loss": lines["loss"].map("{:.2f}".format),
      "noise scale, tokens": lines["noise_scale"].map("{:,.0f}".format),
      "gradient's share of a batch's energy": (
        1 / (1 + lines["noise_scale"] / about["batch"])
      ).map("{:.0%}".format),
    }
  )
  return _with_origin(
    table,
    f"`{about['command']}`, commit {about['commit']}; {about['batches']}"
    f" batches of {about['tokens']:,} tokens at each step, one seed. The run"
    f" and the share are of batches of {about['batch']:,}.",
  )


def _entropy_by_tokens() -> Sequence[str]:
  """Returns the entropy of gradients of more and more tokens, over a run."""
  lines, about = _read("noise_scale")
  table = {"step": lines["step"]}
  for i, tokens in enumerate(about["means"]):
    table[f"{tokens:,} tokens"] = lines["entropy"].map(
      lambda found, i=i: (
        f"{found['gaussian'][i]:.2f}, {found['histogram'][i]:.2f}"
      )
    )
  return markdown(table)


def _estimate() -> Sequence[str]:
  """Returns what sampling the entropy costs and misses on large models."""
  lines, about = _read("estimate")
  table = pd.DataFrame(
    {
      "parameters": lines["model"],
      "estimator": lines["estimator"],
      "entries": lines["share"].map("{:.0%}".format),
      "seconds": lines["seconds"].map("{:.3f}".format),
      "of a sequence's gradient": lines["of_step"].map("{:.1%}".format),
      "less than all entries": (1 - lines["of_all"]).map("{:.0%}".format),
      "and one step in ten": (1 - 0.1 * lines["of_all"]).map("{:.1%}".format),
      "off by at most, nats": lines["error"].map("{:.4f}".format),
    }
  )
  return _with_origin(
    table,
    f"`{about['command']}`, commit {about['commit']}; {about['device']}; the"
    f" gradients of {about['steps']} steps, and medians of {about['rounds']}"
    " rounds.",
  )


TABLES = {
  "wide layer": _wide_layer,
  "noise scale": _noise_scale,
  "entropy by tokens": _entropy_by_tokens,
  "estimate": _estimate,
}
