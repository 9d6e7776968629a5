"""Reports of runs: page, charts and final table."""

import html
import json
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from experiments.trainer.reporting import charts, key_numbers, picture, run_page
from experiments.trainer.reporting.logged_run import load

pytestmark = pytest.mark.slow

DENSE_BYTES = 8_000_000
SUMMARY = {
  "reducer": "edgc", "steps": 400, "params": 2_000_000, "replicas": 4,
  "stages": 1, "train_loss": 3.21987, "val_loss": 3.45678,
  "dense_bytes_per_step": DENSE_BYTES, "wire_bytes_per_step": 2_500_000.0,
  "compression_ratio": 3.2, "rank_history": [[1, [0]], [41, [32]], [61, [28]]],
  "seconds": 61.25, "tokens_per_second": 65536.4,
}  # fmt: skip
CONFIG = {"reducer": "edgc", "steps": 400}
RANK, ERROR = "Rank (gap: dense)", "Error (share of energy)"
ENTROPY = "Entropy of the gradient (nats)"


def metrics(step, stages=1, compressed=True, **more):
  """Returns a line of metrics."""
  rank = 0 if not compressed or step <= 40 else max(16, 42 - step // 20)
  line = {
    "step": step, "loss": 4 + 6 / step, "rank": [rank] * stages,
    "wire_bytes": [DENSE_BYTES / stages / (4 if rank else 1)] * stages,
    "dense_bytes": DENSE_BYTES,
    "compression_ratio": 2.5 if compressed else 1.0,
    "relative_error": [0.2 if rank else 0.0] * stages,
    "predicted_error": [0.25 if rank else 0.0] * stages,
    "skipped_steps": 3, "seconds": step / 10, "tokens_per_second": 1234.0,
  }  # fmt: skip
  if compressed:
    line["entropy"] = [1.5 - stage for stage in range(stages)]
  if step % 100 == 0:
    line["val_loss"] = 4.1 + 6 / step
  return line | more


def by_matrix(step, stages=1, path="blocks/mlp/kernel"):
  """Returns metrics of matrices: two in a stack and one alone."""
  ranks = {path: [[4, 0]] * stages, "embedding": [[8]] * stages}
  share = lambda x: {k: [[x] * len(v[0])] * stages for k, v in ranks.items()}  # noqa: E731
  return {
    "matrix_rank": ranks, "matrix_entropy": share(-7.0 + 1 / step),
    "matrix_error": share(0.4), "matrix_predicted_error": share(0.3),
  }  # fmt: skip


def write_run(folder, steps, summary=None, config=None, **options):
  """Writes a run folder and returns it."""
  folder.mkdir()
  add(folder, *(metrics(step, **options) for step in range(1, steps + 1)))
  (folder / "config.json").write_text(json.dumps(config or {"reducer": "edgc"}))
  if summary:
    (folder / "summary.json").write_text(json.dumps(summary))
  return folder


def add(folder, *lines):
  with (folder / "metrics.jsonl").open("a") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)


def draw(*folders):
  """Returns the charts of runs by title."""
  return charts.draw([load(folder) for folder in folders])


def page_of(*folders, out=None):
  """Returns the page of runs without the library that draws."""
  text = run_page.write_report(folders, out).read_text()
  assert text.count(get_plotlyjs()) == 1, "readable offline"
  return text.replace(get_plotlyjs(), "")


def tables_of(page):
  """Returns the tables of a page: texts by name and run."""
  tables = []
  for text in re.findall("<table>(.*?)\n</table>", page, re.DOTALL):
    rows = [row.split("<td>") for row in text.split("\n<tr><th>")]
    _, (_, *runs), *rows = rows
    tables.append({n: dict(zip(runs, row, strict=True)) for n, *row in rows})
  return tables


def test_pages_have_the_charts_of_what_was_logged(tmp_path):
  compressed = {ENTROPY, RANK, ERROR}
  for name, steps, options, some, none in (
    ("empty", 0, {}, set(), {"Loss"}),
    ("one", 1, {}, {"Loss", ENTROPY}, {RANK, ERROR, "Rank by matrix"}),
    ("dense", 400, {"compressed": False}, {"Loss"}, compressed),
    ("edgc", 400, {"stages": 4}, compressed, set()),
    ("topk", 50, {"rank": [0]}, {ENTROPY, ERROR}, {RANK}),
  ):
    run = write_run(tmp_path / name, steps, **options)
    page, drawn = page_of(run), draw(run)
    assert (run / "report.html").exists() and not list(run.glob("*.tmp"))
    found = re.findall("<section><h2>(.*?)</h2>", page)
    assert found == [html.escape(title) for title in drawn]
    assert page.count("Plotly.newPlot(") == len(found)
    assert some <= set(drawn) and not none & set(drawn)
    assert bool(drawn) == bool(steps)
  assert compressed < set(draw(tmp_path / "dense", tmp_path / "edgc"))


def test_several_runs_side_by_side(tmp_path, monkeypatch):
  config = {"reducer": "edgc", "optimizer": {"lr": 0.1, "b1": 0.9}}
  other = {"reducer": "allreduce", "optimizer": {"lr": 0.2, "b1": 0.9}}
  name = "a $x_$ name"
  first = write_run(tmp_path / "first", 120, SUMMARY, config, stages=2)
  second = write_run(tmp_path / name, 120, SUMMARY, other)
  monkeypatch.chdir(tmp_path)
  page = run_page.write_report([first, str(second)])
  assert page.resolve() == tmp_path / "report.html"
  picture = matplotlib.image.imread(page.with_suffix(".png"))
  assert picture.shape[1] == 900
  # Curves have colours, and smooth edges.
  assert len(np.unique((picture[..., :3] * 255).reshape(-1, 3), axis=0)) > 50
  page = page_of(first, second, out=tmp_path / "new" / "out")
  numbers, differences, everything = tables_of(page)
  assert set(numbers["state"]) == {"first", name}
  assert differences == {
    "reducer": {"first": "edgc", name: "allreduce"},
    "optimizer.lr": {"first": "0.1", name: "0.2"},
  }
  assert everything["optimizer.b1"] == {"first": "0.9", name: "0.9"}
  drawn = draw(first, second)
  loss, entropy = drawn["Loss"].data, drawn[ENTROPY].data
  names = [curve.name for curve in loss]
  assert names[:2] == ["first, loss", "first, val loss"]
  assert names[2:] == [f"{name}, loss", f"{name}, val loss"]
  colors = [curve.line.color for curve in loss]
  assert colors[0] == colors[1] != colors[2] == colors[3]
  assert [curve.line.color for curve in entropy] == colors[:3]
  assert entropy[0].opacity == entropy[2].opacity > entropy[1].opacity


def test_curves(tmp_path):
  drawn = draw(write_run(tmp_path / "run", 200, stages=2, val_accuracy=0.5))
  sent, held_out = drawn["Loss by bytes sent"].data
  # 8 MB a step over a ratio of 2.5, at the evaluations of steps 100 and 200.
  np.testing.assert_allclose(held_out.x, [320e6, 640e6])
  np.testing.assert_allclose(held_out.y, [4.16, 4.13])
  assert len(sent.x) == 200
  assert drawn["Accuracy"].data[0].y[0] == 0.5
  stages = drawn[ENTROPY].data
  assert [curve.name for curve in stages] == ["stage 0", "stage 1"]
  assert stages[0].line.color != stages[1].line.color
  rank = drawn[RANK].data[0].y
  assert np.isnan(rank[:40]).all() and rank[40] == 40 and rank[-1] == 32
  wire, dense = drawn["Bytes a step"].data  # of both stages
  np.testing.assert_allclose(wire.y[[0, -1]], [DENSE_BYTES, DENSE_BYTES / 4])
  assert (dense.y == DENSE_BYTES).all()
  error, _, predicted, _ = drawn[ERROR].data
  assert np.isnan(error.y[:40]).all() and (error.y[40:] == 0.2).all()
  assert predicted.line.dash == "dot" and predicted.y[-1] == 0.25
  assert drawn["Seconds so far"].data[0].y[-1] == 20
  assert (drawn["Tokens a second"].data[0].y == 1234).all()
  # A line has the rank of the steps up to its own: up at once, then along.
  assert {curve.line.shape for curve in drawn[RANK].data} == {"vh"}
  panels = picture.draw(drawn, "a $run").axes
  (axes,) = [a for a in panels if a.get_title(loc="left").startswith("Rank")]
  assert {line.get_drawstyle() for line in axes.lines} == {"steps-pre"}


def test_damaged_files(tmp_path):
  """A line that is half written is left out; all else is an error."""
  run = write_run(tmp_path / "run", 2)
  metrics_file = run / "metrics.jsonl"
  whole = metrics_file.read_bytes()
  for tail in (b'{"step": 3, "lo', b'{"step": 3, "x": "\xe9'):
    metrics_file.write_bytes(whole + tail)
    assert load(run).lines["step"].tolist() == [1, 2]
    run_page.write_report([run])
  for line in (b'{"step": 3, "lo', b"[3]", b'{"loss": 3}', b""):
    metrics_file.write_bytes(whole + line + b"\n" + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3,.*repair"):
      run_page.write_report([run])
  metrics_file.write_bytes(whole)
  (run / "config.json").write_text('{"reducer')
  for runs, error, message in (
    ([run], ValueError, r"config\.json, which is damaged"),
    ([], ValueError, r"run_dirs is \[\].*at least one"),
    ([tmp_path], FileNotFoundError, r"has no metrics\.jsonl"),
  ):
    with pytest.raises(error, match=message):
      run_page.write_report(runs)


def test_page_is_escaped_and_self_contained(tmp_path):
  evil = "<script>alert('&')</script>"
  config = {"reducer": evil, "data": {"text": evil}}
  runs = [
    write_run(tmp_path / name, 60, None, config, **by_matrix(3, path=evil))
    for name in ("<b>run", "other")
  ]
  (runs[0] / "leaves.txt").write_text(evil)
  (runs[1] / "stopped.txt").write_text(evil)
  page = page_of(*runs, out=tmp_path)
  assert "<script>alert" not in page and "<b>" not in page
  # The reducer and the text of two runs, twice, the leaves, and an end.
  assert page.count("&lt;script&gt;alert(") >= 8
  assert '"name":"&lt;b&gt;run, loss"' in page, "a chart takes some HTML, too"
  assert not re.findall(r"""(?:src|href)=|url\(|https?:""", page)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(BROWSERS)} here")
def test_page_in_a_browser(tmp_path):
  """The browser draws the charts and keeps to the width of a window."""
  config = {"reducer": "edgc", "data": {"text": "x" * 3000}}
  run = write_run(tmp_path / "run", 30, SUMMARY, config, **by_matrix(3))
  page, shot = run_page.write_report([run]), tmp_path / "page.png"
  subprocess.run(
    [BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
     f"--screenshot={shot}", "--window-size=1200,1400", "--hide-scrollbars",
     "--virtual-time-budget=10000", page.as_uri()],
    check=True, timeout=60, capture_output=True,
  )  # fmt: skip
  pixels = matplotlib.image.imread(shot)[..., :3]
  assert pixels[:400].std() > 0.02
  # The first colour of curves, in charts side by side.
  curve = np.abs(pixels - np.array([0x00, 0x72, 0xB2]) / 255).max(-1) < 0.05
  assert curve[:, :600].any() and curve[:, 600:].any()
  assert not curve[:, 590:610].any(), "a chart lies over the one beside it"


def test_the_page_shows_what_is_left_of_a_run(tmp_path):
  running = write_run(tmp_path / "running", 50, config=CONFIG, stages=2)
  done = write_run(tmp_path / "done", 50, SUMMARY, CONFIG)
  ended = write_run(tmp_path / "ended", 50, None, CONFIG)
  (ended / "stopped.txt").write_text("3 steps had no end\n")
  page = page_of(running, done, ended, out=tmp_path)
  table, _ = tables_of(page)
  assert table["state"] == {
    "running": "not finished: 50 of 400 steps, about 0:00:35 left",
    "done": "finished",
    "ended": "stopped after 50 of 400 steps: 3 steps had no end",
  }
  rank = table["rank over time"]["running"]
  spans = "dense until 40, 40 until 50"
  assert rank == f"stage 0: {spans}\nstage 1: {spans}"
  for name, texts in {
    "steps": ("50", "400"), "parameters": ("-", "2,000,000"),
    "held-out loss": ("-", "3.4568"), "training loss": ("4.1200", "3.2199"),
    "compression ratio": ("2.50", "3.20"), "skipped steps": ("3", "3"),
    "bytes a step": ("3.2 MB (dense 8 MB)", "2.5 MB (dense 8 MB)"),
  }.items():  # fmt: skip
    assert tuple(table[name].values())[:2] == texts, name
  # The page of a run that goes on loads itself again.
  pages = [page_of(running), page_of(done), page_of(ended), page]
  is_live = ['<meta http-equiv="refresh"' in page for page in pages]
  assert is_live == [True, False, False, False]


def test_the_page_shows_no_older_loss_where_the_newest_is_not_finite(tmp_path):
  """Lines leave out what is not finite; evaluations are rarer than lines."""
  done = {"steps": 150, "replicas": 4}
  runs = [write_run(tmp_path / "running", 150, None, CONFIG),
          write_run(tmp_path / "done", 150, done, CONFIG)]  # fmt: skip
  line = metrics(151)
  del line["loss"]
  for run in runs:
    add(run, line)
  table, _ = tables_of(page_of(*runs, out=tmp_path))
  assert "training loss" not in table
  assert table["held-out loss"] == {"running": "4.1600", "done": "-"}


def test_bytes_of_lines_of_both_kinds(tmp_path):
  """Lines of earlier runs have only a ratio; a later one resumed this run."""
  run = write_run(tmp_path / "run", 2)
  add(run, metrics(3, total_wire_bytes=7.0))
  found = load(run).lines["bytes"].tolist()
  assert found == [DENSE_BYTES / 2.5, 2 * DENSE_BYTES / 2.5, 7.0]


def test_a_live_page_is_written_now_and_then(tmp_path, monkeypatch, capsys):
  run, now = write_run(tmp_path / "run", 5), [0.0]
  monkeypatch.setattr(run_page.time, "monotonic", lambda: now[0])
  page, live = run / "report.html", run_page.LivePage(run)

  def is_written_at(seconds):
    now[0] = seconds
    page.unlink(missing_ok=True)
    live.update()
    return page.exists()

  assert [*map(is_written_at, (0, 30, 61, 90))] == [True, False, True, False]

  def slow(folders, **options):
    now[0] += 5
    page.write_text("")

  with monkeypatch.context() as patch:
    patch.setattr(run_page, "write_report", slow)
    written = [*map(is_written_at, (200, 600, 710))]
    assert written == [True, False, True], "a hundredth of the time"
  (run / "metrics.jsonl").write_text("[]\n")
  assert not is_written_at(5000)
  assert "warning: report.html could not be" in capsys.readouterr().out


def test_summary_table_shows_the_numbers():
  def rows_of(summary):
    lines = key_numbers.summary_table(summary).splitlines()
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines)

  assert rows_of(SUMMARY) == {
    "reducer": "edgc", "steps": "400", "parameters": "2,000,000",
    "replicas": "4", "held-out loss": "3.4568", "training loss": "3.2199",
    "bytes a step": "2.5 MB (dense 8 MB)", "compression ratio": "3.20",
    "rank over time": "dense until 40, 32 until 60, 28 until 400",
    "tokens a second": "65,536", "seconds": "61.2",
  }  # fmt: skip
  unknown = {"reducer": "edgc", "val_loss": None}
  assert rows_of(unknown) == {"reducer": "edgc"}
  dense = {"rank_history": [[1, [0]]], "steps": 50}
  assert "rank over time" not in rows_of(dense | {"reducer": "topk"})
  found = rows_of(dense | {"reducer": "powersgd"})
  assert found["rank over time"] == "dense until 50"
  # Spans of equal rank are merged.
  history = [[1, [0, 0]], [11, [0, 8]], [21, [4, 8]]]
  table = key_numbers.summary_table({"steps": 30, "rank_history": history})
  assert "stage 0: dense until 20, 4 until 30" in table
  assert "stage 1: dense until 10, 8 until 30" in table


@pytest.mark.parametrize("stages", [1, 4])
def test_summary_table_is_narrow(stages):
  history = [[20 * i + 1, [100 + i] * stages] for i in range(500)]
  long = {"reducer": "x" * 200, "steps": 10_000, "rank_history": history}
  table = key_numbers.summary_table(SUMMARY | long | {"tensor": 2})
  assert re.search(r"^devices of a stage +2$", table, re.MULTILINE)
  assert max(map(len, table.splitlines())) <= 78
  spans = [line for line in table.splitlines() if " until " in line]
  assert len(spans) == stages
  for line in spans:
    assert "100 until 20, " in line and ", ..., " in line
    assert line.endswith("599 until 10000")


def test_long_curves_are_thinned_and_keep_ends_spikes_and_gaps(tmp_path):
  values = pd.Series(1.0, np.arange(100_000) * 10)
  values.iloc[[12_345, 77_777]] = [9.0, -9.0]
  values.iloc[50_000:51_000] = np.nan
  kept = charts.thin(values)
  assert len(kept) <= 2002 and kept.index.is_monotonic_increasing
  assert {0, 123_450, 777_770, 999_990} <= set(kept.index)
  assert kept[500_000:509_990].isna().all() and kept.isna().sum() > 1
  assert charts.thin(values[:2000]).equals(values[:2000])
  drawn = draw(write_run(tmp_path / "run", 5000, **by_matrix(3)))
  for figure in drawn.values():
    assert max(len(curve.x) for curve in figure.data) <= 2002
  assert drawn["Loss"].data[0].x[[0, -1]].tolist() == [1, 5000]
  steps = drawn["Rank by matrix"].data[0].x
  assert 300 <= len(steps) <= 400 and len(set(np.diff(steps))) == 1


@pytest.mark.parametrize("stages, names", [
  (1, ["blocks/mlp 0", "blocks/mlp 1", "embedding"]),
  (2, ["stage 0 blocks/mlp 0", "stage 0 blocks/mlp 1", "stage 1 blocks/mlp 0",
       "stage 1 blocks/mlp 1", "stage 0 embedding", "stage 1 embedding"]),
])  # fmt: skip
def test_heat_maps(tmp_path, stages, names):
  of_matrices = by_matrix(3, stages)
  drawn = draw(write_run(tmp_path / "run", 30, stages=stages, **of_matrices))
  rank = drawn["Rank by matrix"].data[0]
  assert list(rank.y) == names and rank.z.shape == (3 * stages, 30)
  assert rank.z[0, 0] == 4 and np.isnan(rank.z[1, 0])  # a gap where dense
  for key, number in (("Error", 0.4), ("Predicted error", 0.3)):
    assert (drawn[f"{key} by matrix"].data[0].z == number).all()
  assert "Entropy by matrix" in drawn
