"""The page of the network benchmark, and its pictures."""

import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.frontier_plot import COLORS, DPI, WIDTH, dress
from experiments.frontier_plot import DENSE as GREY
from experiments.network.results import DENSE, NO_EXCHANGE, Results

_MARK = "<!-- Made by experiments/bench_network.py: do not edit. -->"
_NONE = "-"
_PARTS = (
  ("compute", GREY),
  ("compress", COLORS[4]),
  ("communicate", COLORS[0]),
)


def write(results: Results, page: pathlib.Path, command: str) -> None:
  """Writes the page, with <page>-parts.png and <page>-speeds.png beside it.

  Args:
    results: At least one cell.
    page: Where to.
    command: That makes the page.
  """
  pictures = {
    "Parts of a step": draw_parts(results),
    "Step time by link speed": draw_speeds(results),
  }
  lines = [_MARK, "", *_heading(results, command)]
  for layout in results.layouts:
    lines += ["", f"## {layout[0].upper()}{layout[1:]}", ""]
    lines += _rows(_table(results, layout))
    peers = _peers(results, layout)
    if len(peers) > 1:
      lines += ["", "Beside PyTorch, seconds:", "", *_rows(peers)]
  if results.advice:
    lines += ["", "## Advice", "", *_advice(results)]
  for (title, figure), name in zip(
    pictures.items(), ("parts", "speeds"), strict=True
  ):
    file = page.with_name(f"{page.stem}-{name}.png")
    figure.savefig(file, dpi=DPI)
    lines += ["", f"## {title}", "", f"![{title}]({file.name})"]
  if results.failures:
    lines += ["", "## What did not run", ""]
    lines += [
      f"- {f['layout']}, {f['framework']}, {f['row']}: {f['error']}"
      for f in results.failures
    ]
  page.write_text("\n".join(lines) + "\n")


def draw_parts(results: Results) -> Figure:
  """Bars of the parts, each measured alone, and marks of the whole step."""
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
  """Step time against the speed of the links, a panel for each layout."""
  count = len(results.layouts)
  figure = Figure(figsize=(WIDTH, 0.6 + 3.6 * count), layout="constrained")
  panels = figure.subplots(count, 1, squeeze=False).ravel()
  for axes, layout in zip(panels, results.layouts, strict=True):
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
    axes.minorticks_off()
    dress(axes, layout)
    axes.legend(fontsize=7, frameon=False, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
  panels[-1].set_xlabel("Mbit/s of a host's uplink")
  return figure


def _heading(results: Results, command: str) -> Sequence[str]:
  about = results.about
  return [
    f"# Step times on real links: {about['params']:,} parameters",
    "",
    f"`{command}`, configuration `{about['config']}`,"
    f" {about['tokens']} tokens a replica and step, commit {about['commit']}."
    f" {about['machine']}, {about['cores']} cores for all hosts together;"
    f" {about['versions']}. {about['rounds']} rounds, all rows in turn;"
    " medians.",
    "",
    "Hosts are network namespaces of one Linux machine with shaped uplinks and"
    " one process each, with Gloo; they share the cores, so computing gets"
    " slower with more hosts, and the links do not. *Exchange* is the step less"
    " that of the same framework without an exchange. *Compress* is the update"
    " of the transformation for one replica, on all hosts at once, and"
    " *communicate* the compiled program's collectives with nothing to compute:"
    " both are measured alone. *Limit* is compute and compress, and the bytes"
    " of a ring at the full speed of the link.",
    "",
    "PyTorch is DistributedDataParallel, eager, with one bucket: the same"
    " shapes, batch, threads and AdamW, and its PowerSGD hook. It differs in"
    " what it compiles (nothing), in its fused attention, and in how it skips"
    " steps that are not finite (not at all).",
  ]  # fmt: skip


def _table(results: Results, layout: str) -> list[list[str]]:
  head = [
    "Mbit/s", "way", "step, s", "exchange, s", "exchange less than dense",
    "step less than dense", "compute", "compress", "communicate", "payload, MB",
    "sent, MB", "limit, s", "step / limit",
  ]  # fmt: skip
  lines = [head]
  for cell in results.of(layout=layout, framework="jax"):
    dense = results.dense(cell)
    is_dense = cell.row in (DENSE, NO_EXCHANGE) or dense is None
    limit = None if cell.row == NO_EXCHANGE else cell.limit
    lines.append(
      [
        f"{cell.rate:g}",
        cell.row,
        f"{cell.step:.3f}",
        _NONE if cell.row == NO_EXCHANGE else f"{cell.exchange:.3f}",
        _NONE if is_dense else f"{1 - cell.exchange / dense.exchange:.1%}",
        _NONE if is_dense else f"{1 - cell.step / dense.step:.1%}",
        f"{cell.without:.3f}",
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
    ["Mbit/s", "way", "step, ours", "step, PyTorch", "exchange, ours",
     "exchange, PyTorch", "exchange, ratio"]
  ]  # fmt: skip
  for theirs in results.of(layout=layout, framework="torch"):
    found = results.of(
      layout=layout, rate=theirs.rate, framework="jax", row=theirs.row
    )
    if not found:
      continue
    (ours,) = found
    exchanges = [_NONE] * 3
    if theirs.row != NO_EXCHANGE:
      exchanges = [
        f"{ours.exchange:.3f}",
        f"{theirs.exchange:.3f}",
        f"{ours.exchange / theirs.exchange:.2f}",
      ]
    lines.append(
      [
        f"{theirs.rate:g}",
        theirs.row,
        f"{ours.step:.3f}",
        f"{theirs.step:.3f}",
        *exchanges,
      ]
    )
  return lines


def _advice(results: Results) -> Sequence[str]:
  """Predicted against measured steps, and choice against the best choice."""
  names = {"edgc 32": "rank 32", "edgc 8": "rank 8"}
  lines = [
    [
      "layout",
      "Mbit/s",
      "way",
      "predicted, s",
      "measured, s",
      "error",
      "choice",
    ]
  ]
  for advice in results.advice:
    cells = results.of(
      layout=advice["layout"], rate=advice["rate"], framework="jax"
    )
    for cell in cells:
      name = names.get(cell.row, cell.row)
      if name not in advice["seconds"]:
        continue
      predicted = advice["seconds"][name]
      lines.append(
        [
          advice["layout"], f"{advice['rate']:g}", name, f"{predicted:.3f}",
          f"{cell.step:.3f}", f"{predicted / cell.step - 1:+.0%}",
          "chosen" if name == advice["choice"] else "",
        ]
      )  # fmt: skip
  return _rows(lines)


def _middle(rates: Sequence[float]) -> float:
  """100 Mbit/s where it is there."""
  return 100.0 if 100.0 in rates else rates[len(rates) // 2]


def _number(value: float | None, spec: str, factor: float = 1.0) -> str:
  return _NONE if value is None else format(value * factor, spec)


def _rows(lines: Sequence[Sequence[str]]) -> list[str]:
  lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
  return [f"| {' | '.join(cells)} |" for cells in lines]
