"""Tables and pictures of the protocol's study, from its records."""

import collections
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments import ROOT
from experiments.lab.study import statistics, study
from experiments.lab.study.records import Records
from experiments.lab.study.study import MATCHED, Study
from experiments.trainer.reporting.style import (
  COLORS,
  DENSE,
  WIDTH,
  dress,
  markdown,
)

_STALE = " (older version)"
_SHORT = ("arm", "bits", "above dense", "dense needs")
_RARE = ", every H steps"
_BITS = (0.03, 0.06, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_NATS, _LINEAR = (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1), 0.02
_BUDGET = "About"  # begins the name of a table of arms of about equal bits
_AND = " and "  # between the names of studies whose tables are joined


@functools.cache
def all_records() -> Records:
  return Records(ROOT / "results/records")


@functools.cache
def study_of(name: str) -> Study:
  return study.load(str(ROOT / f"configs/{name}.py"))


@functools.cache
def _judged(name: str) -> pd.DataFrame:
  return statistics.judged(study_of(name), all_records())


@functools.cache
def arms_of(name: str) -> pd.DataFrame:
  frame = _judged(name)
  return statistics.by_arm(frame) if len(frame) else frame


def _results(name: str) -> Sequence[str]:
  """Returns a table for each budget of a study."""
  found, own, lines = arms_of(name), study_of(name), []
  for table in own.tables:
    lines += ["", f"**{table}**"]
    arms = (
      found.loc[table] if len(found) and table in found.index else found[:0]
    )
    if len(arms):
      cells = [
        _line(arm, row) | _outer(own, arm) for arm, row in arms.iterrows()
      ]
      lines += ["", *markdown(cells)]
    lines += _unfinished(
      [arm for arm in own.table_of(table) if arm not in arms.index]
    )
  return lines[1:]


def _unfinished(arms: Sequence[str]) -> Sequence[str]:
  """Names arms without a line; nothing if there are none."""
  return ["", f"Not finished yet: {'; '.join(arms)}."] if arms else []


def _outer(own: Study, arm: str) -> dict[str, str]:
  """Returns the cell of the outer rule, if a study has arms that choose one."""
  if not own.alternatives:
    return {}
  rule = "-"
  if arm in own.alternatives and (taken := own.taken(arm, all_records())):
    local = own.configuration(own.choices(arm)[taken[0]]).local
    rule = f"{local.lr:g}, {local.momentum:g}"
  return {"outer rate, momentum": rule}


def _line(arm: str, row: pd.Series) -> dict[str, str]:
  """Returns the cells of an arm."""
  is_match = arm.endswith(MATCHED)
  stale = "" if row["is_current"] else _STALE
  line = {
    "arm": ("↳ a fixed rank of the same bytes" if is_match else arm) + stale,
    "bits": f"{row['bits']:.2f}",
    "held-out loss": f"{row['loss']:.4f}",
    "above dense": _difference(row["gap"], row["gap_error"]),
    "dense needs": "-" if np.isnan(row["saved"]) else f"{1 - row['saved']:.0%}",
    "seeds": str(row["seeds"]),
    "learning rate": "-" if np.isnan(row["value"]) else f"{row['value']:g}",
  }
  if row["gap"] == 0 and not row["gap_error"] > 0:
    line |= {"above dense": "-", "dense needs": "-"}
  return line


def _fixed_ranks(name: str) -> Sequence[str]:
  """Compares each arm of edgc with the fixed rank of the same bytes."""
  found, lines = arms_of(name), []
  paired = found.dropna(subset="beside") if len(found) else found
  for (_, arm), row in paired.iterrows():
    sure = statistics.verdict(row["beside"], row["beside_error"])
    lines.append(
      {
        "arm": arm,
        "bits": f"{row['bits']:.2f}",
        "minus its fixed rank": _difference(row["beside"], row["beside_error"]),
        "seeds": str(row["pairs"]),
        "so edgc is": sure,
      }
    )
  return markdown(lines) if lines else ["No run is finished yet."]


def _fixed_arms(name: str) -> Sequence[str]:
  """Compares arms of rules with the study's fixed ranks, of other bytes."""
  found, lines = _joined(name), []
  bits = found.droplevel("table")["bits"] if len(found) else {}
  matched = study_of(name).matched
  for arm in (arm for arm in matched if arm in bits):
    line = {"arm": arm, "bits": f"{bits[arm]:.2f}"}
    for fixed in (
      arm for arm in dict.fromkeys(matched.values()) if arm in bits
    ):
      difference, error, _ = statistics.beside(_judged(name), arm, fixed)
      column = f"minus {fixed} ({bits[fixed]:.2f} bits)"
      verdict = statistics.verdict(difference, error)
      line[column] = f"{_difference(difference, error)}, {verdict}"
    lines.append(line)
  return markdown(lines) if lines else ["No run is finished yet."]


def _first_arms(name: str) -> Sequence[str]:
  """Compares the arms of each table with the table's first arm."""
  found, lines = _joined(name), []
  bits = found.droplevel("table")["bits"] if len(found) else {}
  left = []
  for first, *others in study_of(name).tables.values():
    for arm in others:
      if arm not in bits or first not in bits:
        left.append(arm)
        continue
      difference, error, pairs = statistics.beside(_judged(name), arm, first)
      sure = statistics.verdict(difference, error)
      lines.append(
        {
          "arm": arm,
          "bits": f"{bits[arm]:.2f}",
          "minus": f"{first} ({bits[first]:.2f} bits)",
          "nats": _difference(difference, error),
          "seeds": str(pairs),
          "so it is": sure if pairs > 1 else "one seed",
        }
      )
  return [*(markdown(lines) if lines else ()), *_unfinished(left)]


def _tuning(name: str) -> Sequence[str]:
  """Returns the loss of every run of the tuning."""
  own = study_of(name)
  lines = []
  for arm in own.arms:
    best = own.taken(arm, all_records())
    for choice, found in enumerate(own.tuned(arm, all_records())):
      line = {"arm": arm}
      if choice:
        changes = own.alternatives[arm][choice - 1].items()
        line["arm"] = "↳ " + ", ".join(f"{k} {v:g}" for k, v in changes)
      for value, record in found.items():
        loss = study.loss_of(record)
        text = f"{loss:.4f}" if np.isfinite(loss) else "diverged"
        is_best = (choice, value) == best
        line[f"{value:g}"] = f"**{text}**" if is_best else text
      lines.append(line)
  table = pd.DataFrame(lines).fillna("")
  rates = sorted((c for c in table if c != "arm"), key=float)
  return markdown(table[["arm", *rates]].to_dict("records"))


def _origin(name: str) -> Sequence[str]:
  """Says from which code, machines and hours a study's numbers are."""
  own = study_of(name)
  records = [
    record
    for arm in own.arms
    for found in own.tuned(arm, all_records())
    for record in found.values()
    if record.is_finished
  ]
  frame = _judged(name)
  records += list(frame["record"]) if len(frame) else []
  records = list({id(r): r for r in records}.values())
  if not records:
    return ["No run is finished yet."]
  hours: dict[str, float] = collections.defaultdict(float)
  for record in records:
    summary, place = record["summary"], record["summary"]["environment"]
    machine = (
      f"{place['device']}, {place['cores']} cores, Python {place['python']},"
      f" jax {place['versions']['jax']}"
    )
    # Several runs may share the seconds of one process.
    hours[machine] += summary["seconds"] / 3600 / summary.get("together", 1)
  data = {r["summary"]["corpus"]["name"] for r in records}
  left = sum(1 for _ in own.plan(all_records()))
  commits = {r["summary"]["environment"]["commit"] for r in records}
  spent = [f"{each:.1f} hours ({name})" for name, each in sorted(hours.items())]
  return [
    f"{len(records)} runs took {'; '.join(spent)} of one process. Data:"
    f" {'; '.join(sorted(data))}; commits {', '.join(sorted(commits))}."
    + (f" **At least {left} runs are missing.**" if left else ""),
  ]


def _summary(names: str) -> Sequence[str]:
  """Returns the best arm of each budget beside those of edgc, for the README.

  The arms of the first table are all there; arms of a single seed are left out.
  """
  found = _joined(names)
  found = found[found["seeds"] > 1] if len(found) else found
  lines = []
  first = next(iter(study_of(names.split(_AND)[0]).tables))
  bits = found.groupby("table")["bits"].median() if len(found) else pd.Series()
  budgets = [table for table in bits.index if table.startswith(_BUDGET)]
  for table in [first, *sorted(budgets, key=lambda table: -bits[table])]:
    own = found[found.index.get_level_values("table") == table]
    own = own.droplevel("table").sort_values("gap")
    own = own[[not arm.endswith(MATCHED) for arm in own.index]]
    if table == first:
      own = own.sort_values("bits", ascending=False)
    elif len(own):
      is_edgc = own.index.str.startswith("edgc")
      others = own[~is_edgc]
      # Two seeds may be best by chance.
      is_sure = others["seeds"] > 2
      best = others[is_sure] if is_sure.any() else others
      own = own.loc[[*best.index[:1], *own.index[is_edgc]]]
    for arm, row in own.iterrows():
      whole = _line(arm, row)
      line = {k: whole[k] for k in _SHORT}
      if row["seeds"] < statistics.MANY:
        line["arm"] += f" ({row['seeds']} seeds)"
      lines.append(line)
  return markdown(lines) if lines else ["No run is finished yet."]


def _joined(names: str) -> pd.DataFrame:
  """Returns the arms of several studies, each once."""
  frames = [arms_of(name) for name in names.split(_AND)]
  found = pd.concat([frame for frame in frames if len(frame)] or frames[:1])
  if not len(found):
    return found
  return found[~found.index.get_level_values("arm").duplicated()]


def draw_frontier(names: str) -> Figure:
  """Draws the gap to dense by bits, with standard errors."""
  figure = Figure(figsize=(WIDTH, 6.5), layout="constrained")
  axes = figure.subplots()
  found = _joined(names)
  found = found.droplevel("table") if len(found) else found
  families: dict[str, list[str]] = {}
  for arm in found.index:
    families.setdefault(_family(arm), []).append(arm)
  method_of = lambda family: family.split()[0].rstrip(",")  # noqa: E731
  methods = dict.fromkeys(map(method_of, families))
  colors = dict(zip(methods, itertools.cycle([DENSE, *COLORS]), strict=False))
  for (family, arms), marker in zip(
    families.items(), itertools.cycle("osD^vP*X"), strict=False
  ):
    own = found.loc[arms].sort_values("bits")
    is_rare, color = family.endswith(_RARE), colors[method_of(family)]
    axes.errorbar(
      own["bits"], own["gap"], yerr=own["gap_error"], color=color, label=family,
      marker=marker, linestyle=":" if len(own) > 1 else "", capsize=2,
      markersize=6, linewidth=1, markerfacecolor="white" if is_rare else color,
    )  # fmt: skip
  axes.axhline(0, color=DENSE, linestyle="--", linewidth=1, zorder=0)
  axes.set_xscale("log", base=2)
  axes.set_xticks(_BITS, [f"{tick:g}" for tick in _BITS])
  axes.set_xlim(1.25 * _BITS[-1], 0.8 * _BITS[0])
  axes.set_yscale("symlog", linthresh=_LINEAR)
  axes.set_yticks(_NATS, [f"{tick:g}" for tick in _NATS])
  axes.set_ylim(-_LINEAR / 2, 1.5 * _NATS[-1])
  dress(axes, "Held-out loss above dense, by bits a parameter and step")
  axes.set_xlabel("bits sent a parameter and step, over the whole run")
  axes.set_ylabel(f"nats above dense float32, logarithmic from {_LINEAR:g} on")
  if families:
    figure.legend(
      fontsize=8, frameon=False, loc="outside lower center", ncols=4
    )
  return figure


def draw_entropy(name: str) -> Figure:
  """Draws entropy, rank, and predicted and measured error of edgc's arms."""
  figure = Figure(figsize=(WIDTH, 8.5), layout="constrained")
  panels = figure.subplots(3, 1, sharex=True)
  frame = _judged(name)
  is_edgc = [r["summary"]["reducer"] == "edgc" for r in frame.get("record", [])]
  own = frame[is_edgc] if len(frame) else frame
  groups = own.groupby("arm", sort=False)["record"] if len(own) else ()
  for (arm, records), color in zip(groups, COLORS, strict=False):
    curves = pd.concat(record.curve for record in records)
    mean = curves.groupby("step").mean(numeric_only=True)
    panels[0].plot(mean.index, mean["entropy"], color=color, label=arm)
    panels[1].plot(mean.index, mean["rank"], color=color, drawstyle="steps-pre")
    panels[2].plot(mean.index, mean["relative_error"], color=color)
    panels[2].plot(mean.index, mean["predicted_error"], "--", color=color)
  for axes, title, label in zip(
    panels,
    ("Entropy of the gradient", "Rank of the rule",
     "Energy lost: measured, predicted dashed"),
    ("nats", "rank", "fraction"),
    strict=True,
  ):  # fmt: skip
    dress(axes, title)
    axes.set_ylabel(label)
  if len(own):
    panels[0].legend(fontsize=8, frameon=False)
  panels[2].set_xlabel("step")
  return figure


def draw_by_bytes(name: str) -> Figure:
  """Draws held-out loss by the bytes sent until then, of each arm."""
  figure = Figure(figsize=(WIDTH, 5), layout="constrained")
  axes = figure.subplots()
  frame = _judged(name)
  groups = frame.groupby("arm", sort=False)["record"] if len(frame) else ()
  for (arm, records), color in zip(
    groups, itertools.cycle([DENSE, *COLORS]), strict=False
  ):
    curves = pd.concat(record.curve for record in records)
    # The ratio is of all bytes until then.
    ratio = curves["compression_ratio"]
    curves["sent"] = curves["dense_bytes"] * curves["step"] / ratio
    mean = curves.groupby("step")[["sent", "val_loss"]].mean().dropna()
    axes.plot(mean["sent"] / 1e9, mean["val_loss"], color=color, label=arm)
  axes.set_xscale("log")
  dress(axes, "Held-out loss by bytes sent")
  axes.set_xlabel("GB sent by a replica")
  axes.set_ylabel("held-out loss, nats")
  if len(frame):
    axes.legend(fontsize=8, frameon=False)
  return figure


def _family(arm: str) -> str:
  """Returns the group of an arm in the picture; allocations share one."""
  if arm.endswith(MATCHED):
    return "fixed rank of edgc's bytes"
  own, _, every = arm.partition(", every ")
  name = own.split()[0].rstrip(",")
  if name == "powersgd":
    name = ", ".join([name, own.split(", ")[1]])
  if "lookahead" in own:
    return "dense, lookahead"
  # One number of bits has a line, and what was published another.
  if every and (name == "quantize" or "published" in own):
    name = own
  return name + _RARE if every else name


def _difference(mean: float, error: float) -> str:
  if not np.isfinite(mean):
    return "-"
  return f"{mean:+.4f}" + (f" ± {error:.4f}" if np.isfinite(error) else "")


TABLES = {
  "results": _results,
  "fixed ranks": _fixed_ranks,
  "fixed arms": _fixed_arms,
  "first arms": _first_arms,
  "tuning": _tuning,
  "origin": _origin,
  "summary": _summary,
}
PICTURES = {
  "protocol-frontier": functools.partial(
    draw_frontier, "protocol/table and protocol/rounds"
  ),
  "protocol-entropy": functools.partial(draw_entropy, "protocol/table"),
  "horizon-entropy": functools.partial(draw_entropy, "paper/horizon"),
  "objectives-entropy": functools.partial(draw_entropy, "paper/objectives"),
  "horizon-bytes": functools.partial(draw_by_bytes, "paper/horizon"),
}
