"""Tables of sites, from results/data/."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.lab.benchmarks import sites
from experiments.lab.network import results
from experiments.trainer.reporting.style import markdown

_ALL = "all there"


def _read(file: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
  found = json.loads(file.read_text())
  return found["lines"], found["about"]


def _rounds() -> Sequence[str]:
  """Returns the seconds and bytes of a round on each link."""
  lines, about = _read(results.SITE_ROUNDS)
  table = []
  for line in lines:
    rate, hosts = line["rate"] * 1e6, about["hosts"]
    middle = {
      key: statistics.median(line[key])
      for key in ("seconds", "gather", "sent", "uplink")
    }
    limit = hosts * 8 * middle["sent"] / rate
    has_limit = limit > 0
    table.append(
      {
        "code": line["code"],
        "link": results.link_name(line["rate"], line["round_trip"]).replace(
          "inf Mbit/s", "no limit"
        ),
        "up, kB": f"{middle['sent'] / 1e3:,.1f}",
        "on the link, kB": f"{middle['uplink'] / 1e3:,.1f}",
        "round, s": f"{middle['seconds']:.2f}",
        "limit, s": f"{limit:.2f}" if has_limit else "-",
        "all-gather, s": f"{middle['gather']:.2f}",
      }
    )
  return [*markdown(pd.DataFrame(table)), "", _origin(about)]


def _runs() -> Sequence[str]:
  """Returns whole runs by sites and by local steps."""
  lines, about = _read(results.SITE_RUNS)
  table = pd.DataFrame(
    {
      "link": results.link_name(line["rate"], line["round_trip"]),
      "way": line["way"],
      "s a step": f"{line['step_seconds']:.3f}",
      "whole run, s": f"{line['seconds']:.0f}",
      "sent, MB": f"{line['sent'] / 1e6:.2f}",
      "held-out loss": f"{line['loss']:.4f}",
    }
    for line in lines
  )
  return [*markdown(table), "", _origin(about)]


def _overlap() -> Sequence[str]:
  """Returns seconds of a step, and the share of an exchange that is hidden."""
  lines, about = _read(results.OVERLAP)
  table = []
  for rate in dict.fromkeys(line["rate"] for line in lines):
    seconds = {x["way"]: x["seconds"] for x in lines if x["rate"] == rate}
    for way, own in seconds.items():
      ends = [results.ALONE, results.WAITS]
      if way.startswith("sites"):
        ends = [results.SITES_ALONE, results.SITES_WAIT]
      is_hidden = way not in ends
      alone, waits = (seconds[name] for name in ends)
      hidden = f"{1 - (own - alone) / (waits - alone):.0%}"
      table.append(
        {
          "link": results.link_name(rate, 0.0), "exchanges": way,
          "s a step": f"{own:.3f}", "hidden": hidden if is_hidden else "-",
        }
      )  # fmt: skip
  return [*markdown(pd.DataFrame(table)), "", _origin(about)]


def _absent() -> Sequence[str]:
  """Returns losses with a site that is often away, or slow."""
  files = sorted(sites.FOLDER.glob("*.json"))
  found = [_read(file) for file in files]
  lines = pd.DataFrame([line for (line, *_), _ in found])
  commits = ", ".join(sorted({about["commit"] for _, about in found}))
  losses = lines.pivot_table(index="arm", columns="seed", values="loss")
  tokens = lines.groupby("arm")["tokens"].first()
  arms = [sites.LOCAL, *sites.ARMS]
  arms += sorted(set(losses.index) - {*arms})  # of earlier code
  table = []
  for arm in (x for x in arms if x in losses.index):
    own = losses.loc[arm].dropna()
    above = (own - losses.loc[_ALL]).dropna()
    table.append(
      {
        "arm": arm,
        "of all tokens": f"{tokens[arm] / tokens[_ALL]:.1%}",
        "held-out loss": ", ".join(f"{x:.4f}" for x in own),
        "above all there": "-"
        if arm == _ALL
        else ", ".join(f"{x:+.4f}" for x in above),
      }
    )
  missing = [x for x in arms if x not in losses.index]
  ends = [f"{len(lines)} runs; commits {commits}."]
  if missing:
    ends.append(f"Not finished yet: {'; '.join(missing)}.")
  return [*markdown(pd.DataFrame(table)), "", " ".join(ends)]


def _origin(about: dict[str, Any]) -> str:
  return (
    f"`{about['command']}`, commit {about['commit']}; {about['hosts']} hosts on"
    f" {about['cores']} cores."
  )


TABLES = {
  "site rounds": _rounds, "site runs": _runs, "overlap": _overlap,
  "absent sites": _absent,
}  # fmt: skip
