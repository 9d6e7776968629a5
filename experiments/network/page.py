"""Writes the page of the network benchmark, and its pictures."""

import pathlib
import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from edgc_jax.measure.advice import TOLERANCE
from experiments.network.results import DENSE, NARROW, NO_EXCHANGE, Results
from experiments.reporting import markdown
from experiments.reporting.style import COLORS, DPI, WIDTH, dress
from experiments.reporting.style import DENSE as GREY

_MARK = "<!-- Made by experiments/network: do not edit. -->"
_NONE = "-"
_PARTS = (
  ("compute", GREY),
  ("compress", COLORS[4]),
  ("communicate", COLORS[0]),
)


def write(results: Results, page: pathlib.Path) -> None:
  """Writes the page, and <page>-parts.png and <page>-speeds.png.

  Args:
    results: The results, with at least one cell.
    page: The file to write; pictures go to its folder.
  """
  pictures = {
    "Parts of a step": draw_parts(results),
    "Step time by link speed": draw_speeds(results),
  }
  lines = [_MARK, "", *_heading(results)]
  for layout in results.layouts:
    lines += ["", f"## {layout[0].upper()}{layout[1:]}", ""]
    lines += _about_layout(results, layout)
    lines += markdown.table(_table(results, layout))
    peers = _peers(results, layout)
    if len(peers) > 1:
      lines += ["", "Compared with PyTorch, in seconds:", ""]
      lines += markdown.table(peers)
  if results.predictions:
    lines += ["", "## Advice", "", *_advice(results)]
  for (title, figure), name in zip(
    pictures.items(), ("parts", "speeds"), strict=True
  ):
    file = page.with_name(f"{page.stem}-{name}.png")
    figure.savefig(file, dpi=DPI)
    lines += ["", f"## {title}", "", f"![{title}]({file.name})"]
  if results.failures:
    lines += ["", "## Failures", ""]
    lines += [
      f"- {f['layout']}, {f['framework']}, {f['row']}: {f['error']}"
      for f in results.failures
    ]
  page.write_text("\n".join(lines) + "\n")


def draw_parts(results: Results) -> Figure:
  """Draws bars of the parts, measured alone, and marks of the whole step."""
  rate = _middle(results.rates)
  layouts = [
    layout
    for layout in results.layouts
    if any(c.parts for c in results.of(layout=layout, rate=rate))
  ] or results.layouts[:1]
  figure = Figure(
    figsize=(WIDTH, 0.8 + 3.2 * len(layouts)), layout="constrained"
  )
  panels = figure.subplots(len(layouts), 1, squeeze=False).ravel()
  for axes, layout in zip(panels, layouts, strict=True):
    cells = results.of(layout=layout, rate=rate)
    for place, cell in enumerate(cells):
      left = 0.0
      widths = (cell.without, cell.compress, cell.communicate)
      for (_, color), width in zip(_PARTS, widths, strict=True):
        axes.barh(place, width or 0.0, left=left, color=color, height=0.6)
        left += width or 0.0
      axes.plot([cell.step] * 2, [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(
      range(len(cells)), [f"{c.framework}, {c.row}" for c in cells]
    )
    axes.invert_yaxis()
    dress(axes, f"{layout}, {rate:g} Mbit/s")
    axes.set_xlabel("seconds a step")
  for name, color in _PARTS:
    panels[0].barh(0, 0, color=color, label=name)
  panels[0].plot([], [], color="black", label="the whole step")
  panels[0].legend(fontsize=8, frameon=False)
  return figure


def draw_speeds(results: Results) -> Figure:
  """Draws step time by link speed, with a panel for each layout."""
  layouts = [
    layout
    for layout in results.layouts
    if len({cell.rate for cell in results.of(layout=layout)}) > 1
  ] or results.layouts[:1]
  count = len(layouts)
  figure = Figure(figsize=(WIDTH, 0.6 + 3.6 * count), layout="constrained")
  panels = figure.subplots(count, 1, squeeze=False).ravel()
  for axes, layout in zip(panels, layouts, strict=True):
    cells = results.of(layout=layout)
    rows = list(dict.fromkeys(c.row for c in cells))
    for row in rows:
      color = COLORS[rows.index(row) % len(COLORS)]
      for framework, style in (("jax", "o-"), ("torch", "s--")):
        line = [c for c in cells if (c.row, c.framework) == (row, framework)]
        if line:
          axes.plot(
            [c.rate for c in line], [c.step for c in line], style,
            color=color, label=f"{framework}, {row}", markersize=4,
          )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="seconds a step")
    axes.set_xticks(results.rates, [f"{rate:g}" for rate in results.rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    dress(axes, layout)
    axes.legend(fontsize=7, frameon=False, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
  panels[-1].set_xlabel("Mbit/s of a host's uplink")
  return figure


def _middle(rates: Sequence[float]) -> float:
  """Returns 100 Mbit/s if it was measured, or else the middle rate."""
  return 100.0 if 100.0 in rates else rates[len(rates) // 2]


def _heading(results: Results) -> Sequence[str]:
  about = results.about
  return [
    f"# Step times on real links: {about['params']:,} parameters",
    "",
    f"Configuration `{about['config']}`, {about['tokens']} tokens per replica"
    " and step. Times are medians of several rounds, in which the rows take"
    " turns; steps above 1.5 s are timed twice, and communication above 1.5 s"
    " once. Made by:",
    "",
    *(
      f"- {', '.join(run['layouts'])}: `{run['command']}`,"
      f" {run['minutes']:.0f} minutes in all; {run['versions']}"
      for run in results.runs
    ),
    "",
    "Hosts are network namespaces of one Linux machine, with shaped uplinks and"
    " one process each, over Gloo. They share the cores, so computation gets"
    " slower with more hosts; the links do not. *Exchange* is the step time"
    " minus the step time of the same framework without an exchange. *Compress*"
    " is the update of the transformation for one replica, on all hosts at"
    " once, and *communicate* the collectives of the compiled program without"
    " computation. Both are measured alone, so their sum may exceed the step;"
    " neither is measured on stages, on shards or in PyTorch. *Link alone* is"
    " the time of the payload, as a ring moves it, at the full speed of the"
    " link. *Limit* is its sum with compute and, if measured, compress. An idle"
    " link passes its first 64 KiB (or 1 ms of its speed, if that is more) at"
    " once, so steps with few bytes can be faster than the limit. A dash"
    " replaces a ratio of exchanges if one of them is within the noise: half"
    " the range of its steps plus half the range of the steps without an"
    " exchange. *Sent* includes packet headers as the kernel counts them: on"
    " fast links one header for many packets. Ranks of edgc are fixed here, and"
    " no timed step ends a window, at which ranks are allocated.",
    *_doubts(results),
    *(_about_peer() if results.of(framework="torch") else ()),
  ]  # fmt: skip


def _about_layout(results: Results, layout: str) -> Sequence[str]:
  """Says where a layout was measured, and what its shards send."""
  cells, run = results.of(layout=layout), results.run_of(layout)
  threads, shards = cells[0].threads, cells[0].shards
  lines = [
    f"Commit {run['commit']}. {run['machine']}, {run['cores']} cores for all"
    f" hosts together; threads of a host: {threads}. {run['rounds']} rounds.",
    "",
  ]
  if shards == 1:
    return lines
  ratios = [
    c.sent_bytes / c.predicted_bytes for c in cells if c.predicted_bytes
  ]
  lines += [
    f"Each host has {shards} devices, which shard the parameters of its"
    " replica (FSDP). They gather parameters and sum gradients inside the host,"
    " over its loopback interface, which is not shaped: *compute* includes"
    " that. Only the exchange between replicas crosses the link: each device"
    " has a ring with the devices of the other hosts that hold the same shard."
    f" *Payload* counts all {shards} shards. A ring moves it 2 (N - 1) / N"
    " times between N replicas: that is the prediction of the bytes that a host"
    f" sends. The kernel counted {min(ratios, default=0):.2f} to"
    f" {max(ratios, default=0):.2f} times as many at the uplink.",
    "",
  ]
  return lines


def _doubts(results: Results) -> Sequence[str]:
  """Returns a warning if the noise is larger than an exchange."""
  exchanges = [c.exchange for c in results.cells if c.exchange is not None]
  if min(exchanges, default=0) >= 0:
    return []
  return [
    "",
    "**Some steps were faster than the step without an exchange, because of"
    " noise. Use more `--rounds`, on a machine without other load.**",
  ]


def _about_peer() -> Sequence[str]:
  return [
    "",
    "PyTorch is DistributedDataParallel over Gloo, with the same shapes, batch"
    " and threads, fused AdamW and fused attention. It keeps freed memory, as"
    " this project does, and its bf16 hook is allowed on Gloo. Differences:"
    " nothing is compiled. Gradients are sent during the backward pass; with"
    " the PowerSGD hook, which hangs or aborts over Gloo with several buckets,"
    " they are in one bucket and so sent after it. The learning rate is"
    " constant. Non-finite steps are not skipped. The loss is not averaged over"
    " replicas, so without an exchange the hosts do not wait for each other.",
  ]  # fmt: skip


def _table(results: Results, layout: str) -> list[list[str]]:
  head = [
    "Mbit/s", "method", "step, s", "exchange, s", "exchange less than dense",
    "than bf16", "step less than dense", "than bf16", "compute", "compress",
    "communicate",
    "payload, MB", "sent, MB", "limit, s", "step / limit",
  ]  # fmt: skip
  lines = [head]
  for cell in results.of(layout=layout, framework="jax"):
    is_none = cell.row == NO_EXCHANGE
    limit = None if is_none else cell.limit
    dense = narrow = None
    if cell.row not in (NO_EXCHANGE, DENSE):
      dense = results.other_row(cell, DENSE)
    if cell.row not in (NO_EXCHANGE, DENSE, NARROW):
      narrow = results.other_row(cell, NARROW)
    lines.append(
      [
        f"{cell.rate:g}",
        cell.row,
        f"{cell.step:.3f}",
        _NONE if is_none else _number(cell.exchange, ".3f"),
        _NONE
        if dense is None
        else _less(cell.clear_exchange, dense.clear_exchange),
        _NONE
        if narrow is None
        else _less(cell.clear_exchange, narrow.clear_exchange),
        _NONE if dense is None else _less(cell.step, dense.step),
        _NONE if narrow is None else _less(cell.step, narrow.step),
        _number(cell.without, ".3f"),
        _number(cell.compress, ".3f"),
        _number(cell.communicate, ".3f"),
        _number(cell.wire_bytes, ".2f", 1e-6),
        _number(cell.sent_bytes, ".2f", 1e-6),
        _number(limit, ".3f"),
        _NONE if limit is None else f"{cell.step / limit:.2f}",
      ]
    )
  return lines


def _peers(results: Results, layout: str) -> list[list[str]]:
  lines = [
    ["Mbit/s", "method", "step, ours", "step, PyTorch", "step, ratio",
     "exchange, ours", "exchange, PyTorch", "exchange, ratio", "link alone"]
  ]  # fmt: skip
  for theirs in results.of(layout=layout, framework="torch"):
    found = results.of(
      layout=layout, rate=theirs.rate, framework="jax", row=theirs.row
    )
    if not found:
      continue
    (ours,) = found
    exchanges = [_NONE] * 4
    both = (ours.exchange, theirs.exchange)
    if theirs.row != NO_EXCHANGE and None not in both:
      exchanges = [f"{seconds:.3f}" for seconds in both]
      is_clear = None not in (ours.clear_exchange, theirs.clear_exchange)
      exchanges.append(f"{both[0] / both[1]:.2f}" if is_clear else _NONE)
      exchanges.append(_number(ours.link_alone, ".3f"))
    lines.append(
      [
        f"{theirs.rate:g}",
        theirs.row,
        f"{ours.step:.3f}",
        f"{theirs.step:.3f}",
        f"{ours.step / theirs.step:.2f}",
        *exchanges,
      ]
    )
  return lines


def _advice(results: Results) -> Sequence[str]:
  """Compares predicted with measured steps, and the choice with the right."""
  methods = list(results.predictions[0].predicted)
  lines = [
    ["layout", "Mbit/s", *methods, "choice", "right", "choice / fastest"]
  ]
  for found in results.predictions:
    both = ((found.predicted[name], found.measured[name]) for name in methods)
    lines.append(
      [
        found.layout, f"{found.rate:g}",
        *(f"{p:.3f} / {m:.3f} ({p / m - 1:+.0%})" for p, m in both),
        found.choice, found.right_choice, f"{1 + found.loss:.2f}",
      ]
    )  # fmt: skip
  right = sum(p.choice == p.right_choice for p in results.predictions)
  errors = [
    abs(found.predicted[name] / found.measured[name] - 1)
    for found in results.predictions
    for name in methods
  ]
  orders = [order for p in results.predictions for order in p.orders]
  return [
    "Seconds per step, predicted / measured. `advise` predicts them from"
    " measured links, steps and times to compute exchanges. The right choice is"
    " the one that the same rule makes from the measured steps: the method that"
    f" loses least among those at most {TOLERANCE:.0%} slower than the fastest."
    f" Right: {right} of {len(results.predictions)}; errors: median"
    f" {statistics.median(errors):.0%}, largest {max(errors):.0%}. Of"
    f" {len(orders)} pairs of methods whose steps differ by more than"
    f" {TOLERANCE:.0%}, {sum(orders)} are in the right order.",
    "",
    *markdown.table(lines),
  ]


def _less(ours: float | None, others: float | None) -> str:
  """Formats by how much `ours` is less than `others`, in percent."""
  if ours is None or others is None:
    return _NONE
  return f"{1 - ours / others:.1%}"


def _number(value: float | None, spec: str, factor: float = 1.0) -> str:
  return _NONE if value is None else format(value * factor, spec)
