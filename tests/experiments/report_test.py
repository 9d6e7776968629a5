"""Reports of runs: picture, page and final table."""

import base64
import json
import os
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from experiments.reporting import heat_maps, panels, run_page

pytestmark = pytest.mark.slow

DENSE_BYTES = 8_000_000
SUMMARY = {
  "reducer": "edgc",
  "steps": 400,
  "params": 2_000_000,
  "replicas": 4,
  "stages": 1,
  "train_loss": 3.21987,
  "val_loss": 3.45678,
  "dense_bytes_per_step": DENSE_BYTES,
  "wire_bytes_per_step": 2_500_000.0,
  "compression_ratio": 3.2,
  "rank_history": [[1, [0]], [41, [32]], [61, [28]]],
  "seconds": 61.25,
  "tokens_per_second": 65536.4,
}


def metrics(step, stages=1, compressed=True, **more):
  """Returns a line of metrics."""
  rank = 0 if not compressed or step <= 40 else max(16, 42 - step // 20)
  wire = DENSE_BYTES / stages / (4 if rank else 1)
  line = {
    "step": step,
    "loss": 4 + 6 / step,
    "rank": [rank] * stages,
    "wire_bytes": [wire] * stages,
    "dense_bytes": DENSE_BYTES,
    "compression_ratio": 2.5 if compressed else 1.0,
    "relative_error": [0.2 if rank else 0.0] * stages,
    "predicted_error": [0.25 if rank else 0.0] * stages,
    "skipped_steps": 3,
    "seconds": step / 10,
    "tokens_per_second": 1234.0,
  }
  if compressed:
    line["entropy"] = [1.5 - stage for stage in range(stages)]
  if step % 100 == 0:
    line["val_loss"] = 4.1 + 6 / step
  return line | more


def by_matrix(step, stages=1):
  """Returns metrics of matrices: two in a stack and one alone."""
  ranks = {"blocks/mlp/kernel": [[4, 0]] * stages, "embedding": [[8]] * stages}
  share = lambda x: {k: [[x] * len(v[0])] * stages for k, v in ranks.items()}  # noqa: E731
  return {
    "matrix_rank": ranks,
    "matrix_entropy": share(-7.0 + 1 / step),
    "matrix_error": share(0.4),
    "matrix_predicted_error": share(0.3),
  }


def write_run(folder, steps, summary=None, config=None, **options):
  """Writes a run folder and returns it."""
  folder.mkdir()
  lines = [metrics(step, **options) for step in range(1, steps + 1)]
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (folder / "metrics.jsonl").write_text(text)
  (folder / "config.json").write_text(json.dumps(config or {"reducer": "edgc"}))
  if summary:
    (folder / "summary.json").write_text(json.dumps(summary))
  return folder


def draw(*folders):
  """Returns the panels of the picture by the first word of the title."""
  axes = panels.draw([run_page._load(folder) for folder in folders]).axes
  names = ("loss", "sent", "entropy", "rank", "wire", "error")
  return dict(zip(names, axes, strict=True))


def shown(axes):
  """Returns the text in the middle of a panel."""
  return [text.get_text() for text in axes.texts]


def test_a_page_older_than_the_summary_is_not_the_newest(tmp_path):
  page, summary = tmp_path / "report.html", tmp_path / "summary.json"
  summary.write_text("{}")
  assert not run_page.is_newest(tmp_path)
  page.write_text("")
  os.utime(page, (1, 1))
  assert not run_page.is_newest(tmp_path)
  os.utime(page)
  assert run_page.is_newest(tmp_path)


@pytest.mark.parametrize(
  ("steps", "options"),
  [
    (0, {}),
    (1, {}),
    (400, {}),
    (400, {"stages": 4}),
    (400, {"compressed": False}),
  ],
)
def test_picture_and_page_of_one_run(tmp_path, steps, options):
  run = write_run(tmp_path / "run", steps, **options)
  picture, page = run_page.write_report([run])
  assert (picture, page) == (run / "report.png", run / "report.html")
  pixels = matplotlib.image.imread(picture)
  assert pixels.shape == (900, 1400, 4)
  assert pixels.std() > 0.02
  assert base64.b64encode(picture.read_bytes()).decode() in page.read_text()


def test_several_runs_side_by_side(tmp_path, monkeypatch):
  first = write_run(tmp_path / "first", 120, SUMMARY, stages=2)
  second = write_run(
    tmp_path / "a $x_$ name", 120, SUMMARY | {"reducer": "allreduce"}
  )
  monkeypatch.chdir(tmp_path)
  picture, page = run_page.write_report([first, str(second)])
  assert picture.resolve() == tmp_path / "report.png"
  assert "allreduce (a $x_$ name)" in page.read_text()
  picture, _ = run_page.write_report([first, second], tmp_path / "new" / "out")
  assert picture.is_file()
  loss = draw(first, second)["loss"]
  assert len({line.get_color().tobytes() for line in loss.lines}) == 2


def test_curves(tmp_path):
  drawn = draw(write_run(tmp_path / "run", 200, stages=2))
  held_out = drawn["sent"].lines[0]
  # 8 MB a step over a ratio of 2.5, at the evaluations of steps 100 and 200.
  np.testing.assert_allclose(held_out.get_xdata(), [320, 640])
  np.testing.assert_allclose(held_out.get_ydata(), [4.16, 4.13])
  assert drawn["sent"].get_xlabel() == "sent so far (MB per replica)"
  assert drawn["sent"].get_ylabel() == "held-out loss (nats)"
  assert len(drawn["entropy"].lines) == 2
  rank = drawn["rank"].lines[0].get_ydata()
  assert rank[40] == 40 and rank[-1] == 32
  labels = [tick.get_text() for tick in drawn["rank"].get_yticklabels()]
  assert labels[-1] == "dense" and "0" not in labels
  assert (rank[:40] > 40).all()
  # Both stages' bytes, and a line for dense.
  np.testing.assert_allclose(
    drawn["wire"].lines[0].get_ydata()[[0, -1]], [DENSE_BYTES, DENSE_BYTES / 4]
  )
  assert list(drawn["wire"].lines[-1].get_ydata()) == [DENSE_BYTES] * 2
  error = drawn["error"].lines[0].get_ydata()
  assert np.isnan(error[:40]).all() and (error[40:] == 0.2).all()


def test_with_one_evaluation_the_training_loss_is_drawn(tmp_path):
  sent = draw(write_run(tmp_path / "run", 100))["sent"]
  assert sent.get_ylabel() == "training loss (nats)"
  assert len(sent.lines[0].get_xdata()) == 100


def test_panels_without_data_say_so(tmp_path):
  dense = write_run(tmp_path / "dense", 50, compressed=False)
  drawn = draw(dense)
  assert shown(drawn["entropy"]) == ["not measured by this reducer"]
  assert shown(drawn["error"]) == ["nothing was compressed"]
  assert not shown(drawn["loss"])
  empty = write_run(tmp_path / "empty", 0)
  for axes in draw(empty).values():
    assert shown(axes) == ["nothing logged yet"]
  # Another run's data fills the panel.
  edgc = write_run(tmp_path / "edgc", 50)
  assert not shown(draw(dense, empty, edgc)["entropy"])


@pytest.mark.parametrize("tail", ['{"step": 3, "lo', '{"step": 3, "x": "\xe9'])
def test_half_written_last_line_is_ignored(tmp_path, tail):
  run = write_run(tmp_path / "run", 2)
  with (run / "metrics.jsonl").open("ab") as file:
    file.write(tail.encode("latin-1"))
  assert run_page._load(run).columns["step"].tolist() == [[1], [2]]
  run_page.write_report([run])


@pytest.mark.parametrize("line", ['{"step": 3, "lo', "[3]", '{"loss": 3}', ""])
def test_broken_middle_line_is_an_error(tmp_path, line):
  run = write_run(tmp_path / "run", 2)
  with (run / "metrics.jsonl").open("a") as file:
    file.write(line + "\n" + json.dumps(metrics(4)) + "\n")
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3:.*repair"):
    run_page.write_report([run])


def test_errors_name_the_missing_part(tmp_path):
  with pytest.raises(ValueError, match=r"run_dirs is \[\].*at least one"):
    run_page.write_report([])
  with pytest.raises(FileNotFoundError, match=r"absent is not a folder"):
    run_page.write_report([tmp_path / "absent"])
  with pytest.raises(FileNotFoundError, match=r"has no metrics\.jsonl"):
    run_page.write_report([tmp_path])
  run = write_run(tmp_path / "run", 1)
  (run / "config.json").write_text('{"reducer')
  with pytest.raises(ValueError, match=r"config\.json must be a JSON object"):
    run_page.write_report([run])


def test_page_is_escaped_and_self_contained(tmp_path):
  evil = "<script>alert('&')</script>"
  config = {"reducer": evil, "data": {"text": evil}}
  run = write_run(tmp_path / "<b>run", 3, config=config)
  page = run_page.write_report([run])[1].read_text()
  assert "<script" not in page and "<b>" not in page
  assert (
    page.count("&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;") >= 3
  )
  assert page.count("<details>") == 2
  references = re.findall(r"""(?:src|href)=["'](.{0,22})|url\(""", page)
  assert references == ["data:image/png;base64,"]
  assert "http" not in re.sub(r"base64,[^\"]*", "", page)


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(not BROWSER, reason=f"none of {', '.join(BROWSERS)} here")
@pytest.mark.parametrize("steps", [0, 30])
def test_page_in_a_browser(tmp_path, steps):
  """The browser renders the table and the picture below it."""
  config = {"reducer": "edgc", "data": {"text": "x" * 3000}}
  run = write_run(tmp_path / "run", steps, config=config, **by_matrix(3))
  _, page = run_page.write_report([run])
  command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
  shot = tmp_path / "page.png"
  subprocess.run(
    [*command, f"--screenshot={shot}", "--window-size=1200,1400",
     "--hide-scrollbars", page.as_uri()],
    check=True, timeout=60, capture_output=True,
  )  # fmt: skip
  pixels = matplotlib.image.imread(shot)[..., :3]
  assert pixels.shape[:2] == (1400, 1200)
  assert pixels[:400].std() > 0.02
  # The first colour of curves or of the legend.
  curve = np.abs(pixels - np.array([0x00, 0x72, 0xB2]) / 255).max(-1) < 0.05
  assert curve.any()


def test_the_page_shows_whether_a_run_is_finished(tmp_path):
  def cells(page):
    rows = re.findall(r"<tr><th>(.*?)<td>(.*)", page.read_text())
    return {name: cell.split("<td>") for name, cell in rows}

  running = write_run(tmp_path / "running", 50)
  done = write_run(tmp_path / "done", 50, SUMMARY)
  table = cells(run_page.write_report([running, done], tmp_path)[1])
  assert table["state"] == ["not finished", "finished"]
  assert table["steps"] == ["50", "400"]
  assert table["parameters"] == ["-", "2,000,000"]
  assert table["held-out loss"] == ["-", "3.4568"]
  assert table["training loss"] == ["4.1200", "3.2199"]
  assert table["compression ratio"] == ["2.50", "3.20"]
  assert table["bytes a step"][0] == "3.2 MB (dense 8 MB)"
  assert table["skipped steps"] == ["3", "3"]
  rank = table["rank over time"][0].replace("\N{NO-BREAK SPACE}", " ")
  assert rank == "dense \N{RIGHTWARDS ARROW} 40, 40 \N{RIGHTWARDS ARROW} 50"


def test_summary_table_shows_the_numbers():
  lines = run_page.summary_table(SUMMARY).splitlines()
  rows = [re.split(r"\s{2,}|(?<=ratio) ", line, maxsplit=1) for line in lines]
  assert dict(rows) == {
    "reducer": "edgc",
    "steps": "400",
    "parameters": "2,000,000",
    "replicas": "4",
    "stages": "1",
    "held-out loss": "3.4568",
    "training loss": "3.2199",
    "bytes a step": "2.5 MB (dense 8 MB)",
    "compression ratio": "3.20",
    "rank over time": "dense ->40, 32 ->60, 28 ->400",
    "tokens a second": "65,536",
    "seconds": "61.2",
  }


@pytest.mark.parametrize("stages", [1, 4])
def test_summary_table_is_narrow(stages):
  history = [[20 * i + 1, [100 + i] * stages] for i in range(500)]
  long = {"reducer": "x" * 200, "steps": 10_000, "rank_history": history}
  table = run_page.summary_table(SUMMARY | long)
  assert max(map(len, table.splitlines())) <= 78
  spans = [line for line in table.splitlines() if "->" in line]
  assert len(spans) == stages
  for line in spans:
    assert "100 ->20, " in line and ", ..., " in line
    assert line.endswith("599 ->10000")


def test_reducers_without_ranks_show_none(tmp_path):
  history = {"rank_history": [[1, [0]]], "steps": 50}
  for reducer, text in (("topk", ""), ("powersgd", "dense ->50")):
    table = run_page.summary_table({"reducer": reducer, **history})
    assert ("rank over time" in table) == bool(text) and text in table
  config = {"reducer": "topk"}
  run = write_run(tmp_path / "topk", 50, config=config, compressed=False)
  drawn = draw(run)
  assert shown(drawn["rank"]) == ["not measured by this reducer"]
  assert (drawn["error"].lines[0].get_ydata() == 0).all()


def test_summary_table_merges_spans_of_equal_rank():
  history = [[1, [0, 0]], [11, [0, 8]], [21, [4, 8]]]
  table = run_page.summary_table({"steps": 30, "rank_history": history})
  assert "stage 0: dense ->20, 4 ->30" in table
  assert "stage 1: dense ->10, 8 ->30" in table


def test_summary_table_omits_unknown_numbers():
  assert run_page.summary_table({"reducer": "edgc", "val_loss": None}) == (
    "reducer           edgc"
  )


def test_downsample_keeps_ends_and_spikes():
  values = np.zeros(100_000)
  values[[12_345, 77_777]] = [9.0, -9.0]
  kept = panels.downsample(values)
  assert len(kept) <= 2000
  assert {0, 12_345, 77_777, 99_999} <= set(kept.tolist())
  assert (np.diff(kept) > 0).all()
  np.testing.assert_array_equal(panels.downsample(values[:2000]), range(2000))


def test_long_runs_are_thinned(tmp_path):
  drawn = draw(write_run(tmp_path / "run", 5000))
  for axes in drawn.values():
    assert max(len(line.get_xdata()) for line in axes.lines) <= 2000
  assert drawn["loss"].lines[0].get_xdata()[[0, -1]].tolist() == [1, 5000]


@pytest.mark.parametrize(("steps", "stages"), [(1, 1), (30, 2)])
def test_matrices_have_a_picture(tmp_path, steps, stages):
  run = write_run(tmp_path / "run", steps, **by_matrix(3, stages))
  run_page.write_report([run])
  assert matplotlib.image.imread(run / "matrices.png").ndim == 3
  page = (run / "report.html").read_text()
  assert page.count("data:image/png;base64,") == 2
  matrices = run_page._load(run).matrices
  names = ["blocks/mlp 0", "blocks/mlp 1", "embedding"]
  if stages == 2:
    names = [f"stage {s} {n}" for s in (0, 1) for n in names[:2]] + [
      f"stage {s} embedding" for s in (0, 1)
    ]
  assert matrices.names == names
  assert matrices.values("matrix_rank").shape == (steps, 3 * stages)


def test_heat_maps_and_errors(tmp_path):
  run = run_page._load(write_run(tmp_path / "run", 8, **by_matrix(3)))
  rank, entropy, error, against = heat_maps.draw(run.matrices, "run").axes[:4]
  shown = rank.collections[0].get_array()
  assert shown[:, 0].tolist() == [4.0, None, 8.0]  # white where dense
  assert entropy.collections[0].get_array().count() == 3 * 8
  assert error.collections[0].get_array().count() == 2 * 8
  x, y = against.lines[1].get_data()
  np.testing.assert_allclose([x, y], [[0.3, 0.3], [0.4, 0.4]])


def test_runs_without_matrices_have_no_such_picture(tmp_path):
  run = write_run(tmp_path / "run", 5)
  run_page.write_report([run])
  assert not (run / "matrices.png").exists()


def test_matrices_of_long_runs_are_thinned():
  matrices = heat_maps.Matrices()
  for step in range(1, 10_001):
    matrices.add({"step": step, **by_matrix(step)})
  assert 400 <= len(matrices.steps) < 800
  assert np.all(np.diff(matrices.steps) == np.diff(matrices.steps)[0])
