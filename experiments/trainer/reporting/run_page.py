"""Writes the report of training runs: a page with charts, and a picture."""

import datetime
import html
import pathlib
import time
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from flax import traverse_util
from plotly.offline import get_plotlyjs

from experiments.trainer.reporting import charts, key_numbers, picture
from experiments.trainer.reporting.logged_run import Run, load
from experiments.trainer.reporting.style import DPI
from experiments.trainer.runs import run_folder

_CONFIG = {"responsive": True, "displaylogo": False, "showSendToCloud": False}
_SECONDS = 60  # between two pages of a run that goes on
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Gradient compression</title>
<meta name="viewport" content="width=device-width">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 88rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .3rem 1.5rem .3rem 0; text-align: left; white-space: pre-line;
  vertical-align: top; border-bottom: 1px solid #8886; }
tr:first-child { font-weight: bold; }
h2 { font-size: 1.1rem; margin: 1.5rem 0 0; }
pre { overflow-x: auto; }
main { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 32rem), 1fr)); }
section { min-width: 0; }
.infolayer text, .cartesianlayer text { fill: CanvasText !important; }
</style>
"""
# Keeps the zoom when the page is loaded again. Fingers scroll, and do not zoom.
_SCRIPT = """<script>
document.querySelectorAll(".js-plotly-plot").forEach((plot, number) => {
  const key = location.pathname + number
  const zoom = JSON.parse(sessionStorage.getItem(key) || "{}")
  if (matchMedia("(pointer: coarse)").matches) zoom.dragmode = false
  Plotly.relayout(plot, zoom)
  plot.on("plotly_relayout", change => change.autosize
    || sessionStorage.setItem(key, JSON.stringify(change)))
})
</script>
"""


class LivePage:
  """The page of a run that goes on, written again from time to time."""

  def __init__(self, run_dir: pathlib.Path):
    """Writes nothing yet."""
    self._run_dir, self._due = run_dir, 0.0

  def update(self) -> None:
    """Writes the page if it is due; a failure is printed and does no harm."""
    began = time.monotonic()
    if began < self._due:
      return
    try:
      write_report([self._run_dir], has_picture=False)
    except Exception as error:
      print(f"warning: report.html could not be written: {error}", flush=True)
    # The page of a long run takes seconds: a hundredth of the time at most.
    now = time.monotonic()
    self._due = now + max(_SECONDS, 100 * (now - began))


def write_report(
  run_dirs: Sequence[pathlib.Path | str],
  out_dir: pathlib.Path | str | None = None,
  *,
  has_picture: bool = True,
) -> pathlib.Path:
  """Writes report.html, with numbers, charts and configurations.

  Args:
    run_dirs: Folders of runs, finished or not.
    out_dir: The folder to write to. By default the run's folder for one run,
      and the current directory for several.
    has_picture: Whether to draw report.png, the curves alone, beside it.

  Returns:
    The path of the page.

  Raises:
    FileNotFoundError: if a run folder or its `metrics.jsonl` is missing.
    ValueError: if there is no run, or one of its files is broken.
  """
  if not run_dirs:
    raise ValueError(f"run_dirs is {run_dirs!r}: give at least one run folder")
  runs = [load(pathlib.Path(run_dir)) for run_dir in run_dirs]
  if out_dir is None:
    out_dir = run_dirs[0] if len(runs) == 1 else "."
  page = pathlib.Path(out_dir, "report.html")
  page.parent.mkdir(parents=True, exist_ok=True)
  drawn = charts.draw(runs)
  run_folder.write(page, _page(runs, drawn))
  if has_picture:
    title = ", ".join(run.name for run in runs)
    picture.draw(drawn, title).savefig(page.with_suffix(".png"), dpi=DPI)
  return page


def _page(runs: Sequence[Run], drawn: Mapping[str, go.Figure]) -> str:
  numbers = _table(runs, [_numbers(run) for run in runs])
  configs = [traverse_util.flatten_dict(run.config, sep=".") for run in runs]
  config = _table(runs, configs)
  differs = config.drop("run_dir", errors="ignore").nunique(axis=1) > 1
  parts = [_HEAD, f"<script>{get_plotlyjs()}</script>"]
  if len(runs) == 1 and not runs[0].summary and not runs[0].stopped:
    parts.append(f'<meta http-equiv="refresh" content="{_SECONDS}">')
  parts += ["<h1>Gradient compression</h1>", _html(numbers)]
  if differs.any():
    differing = config.loc[differs[differs].index]
    parts += ["<h2>Differences</h2>", _html(differing)]
  parts.append("<main>")
  for title, chart in drawn.items():
    text = chart.to_html(_CONFIG, include_plotlyjs=False, full_html=False)
    parts.append(f"<section><h2>{html.escape(title)}</h2>{text}</section>")
  parts += ["</main>", _SCRIPT, "<details><summary>Configuration</summary>"]
  parts += [_html(config), "</details>"]
  for run in runs:
    title = html.escape(f"How each leaf is sent: {run.name}")
    parts.append(f"<details><summary>{title}</summary>")
    parts.append(f"<pre>{html.escape(run.leaves)}</pre></details>")
  return "\n".join([*parts, "</html>\n"])


def _numbers(run: Run) -> dict[str, str]:
  """Returns key numbers, and what is left of a run that is not finished."""
  seconds, steps = run.table("seconds"), run.config.get("steps", "?")
  state = f"not finished: {seconds.index.max()} of {steps} steps"
  if run.summary or seconds.empty:
    state = "finished" if run.summary else "nothing logged yet"
  elif run.stopped:
    state = (
      f"stopped after {seconds.index.max()} of {steps} steps: {run.stopped}"
    )
  elif len(seconds) > 1 and "steps" in run.config:
    # The first line's seconds are those of compilation.
    (first, began), *_, (last, now) = seconds.itertuples()
    left = (now - began) / (last - first) * (steps - last)
    state += f", about {datetime.timedelta(seconds=round(left))} left"
  return {"state": state, **key_numbers.texts(run.numbers(), width=100)}


def _table(runs: Sequence[Run], columns: Sequence[dict]) -> pd.DataFrame:
  """Returns a table of texts, with a column for each run."""
  frame = pd.DataFrame(columns, [run.name for run in runs], dtype=object).T
  return frame.fillna("-").map(str)


def _html(table: pd.DataFrame) -> str:
  rows = [("", *table.columns), *table.itertuples(name=None)]
  lines = ["<tr><th>" + "<td>".join(map(html.escape, row)) for row in rows]
  return "\n".join(["<table>", *lines, "</table>"])
