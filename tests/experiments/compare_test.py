"""Comparisons of made-up runs."""

import csv
import dataclasses
import json
import pathlib
import runpy
import sys

import matplotlib.image
import pytest

import edgc_jax
from experiments.models import gpt2
from experiments.parallel import layout, meshes
from experiments.study import comparison, page, plots, study
from experiments.study import runner as runners
from experiments.study.records import Records, numbers_of
from experiments.training import optimizer

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
EDGC = {"reducer": "edgc", "edgc.rank_max": 8}
STUDY = study.Study(
  "made_up",
  str(ROOT / "configs/gpt2_tiny.py"),
  {
    "Dense": {"all-reduce": {"reducer": "allreduce"}},
    "Low rank": {
      "strong": {"reducer": "powersgd", "powersgd.rank": 4}, "edgc": EDGC,
    },
    "Sparse": {"sparse": {"reducer": "topk"}},
  },
  {"steps": 40},
)  # fmt: skip


def numbers(loss, ratio=4.0, reducer="powersgd", **more):
  """Returns the record of a finished run of a held-out loss."""
  return {
    "reducer": reducer, "val_loss": loss, "train_loss": loss, "steps": 40,
    "params": 1, "replicas": 4, "compression_ratio": ratio,
    "wire_bytes_per_step": [8e6 / ratio], "dense_bytes_per_step": 8e6,
    "peak_wire_bytes_per_step": 9e6 / ratio, "step_seconds": 0.5,
    "peak_memory_bytes": 2e9, "seconds": 60.0, "traces": 1,
    "rank_history": [[1, [0]], [3, [4]]], "skipped_steps": 0,
    "environment": {"commit": "abc", "device": "cpu", "cores": 2,
                    "python": "3", "versions": {}},
    "corpus": {"name": "text", "sha256": "0"},
    "curve": {"step": [1, 20, 40], "loss": [5.0, 3.0, loss],
              "wire_bytes": [1e6, 2e7, 4e7]},
    "evaluations": [[40, loss]], **more,
  }  # fmt: skip


@pytest.fixture
def records(tmp_path):
  """Returns records: dense has a mean of 2.5, strong is 0.2 and 0.3 above."""
  kept = Records(tmp_path / "records", STUDY)
  for seed, dense in (("0", 2.0), ("1", 3.0)):
    run = STUDY.run("all-reduce", seed)
    kept.write(run, numbers(dense, 1.0, "allreduce"))
    strong = dense + 0.2 + 0.1 * int(seed)
    kept.write(STUDY.run("strong", seed), numbers(strong))
    edgc = numbers(strong - 0.1, 6.0, "edgc")
    kept.write(STUDY.run("edgc", seed), edgc)
    other = STUDY.matched_run(STUDY.run("edgc", seed), edgc)
    kept.write(other, numbers(strong + 0.1 * int(seed), 6.0))
  kept.write(STUDY.run("sparse", "0"), {"error": "exit code 1: no room"})
  return kept


@pytest.fixture
def found(records):
  return comparison.collect(STUDY, records, ["0", "1"])


def row(found, name):
  (one,) = [row for row in found.rows if row.name.startswith(name)]
  return one


def test_gaps_are_seed_by_seed(found):
  mean, error = comparison.gap(row(found, "strong"), found.dense)
  assert mean == pytest.approx(0.1) and error == pytest.approx(0.02)
  assert comparison.gap(found.dense, found.dense) is None
  # Seed 1 alone: 0.3 of 3, and no standard error.
  one = row(found, "strong")
  alone = dataclasses.replace(one, runs={"1": one.runs["1"]})
  assert comparison.gap(alone, found.dense) == (pytest.approx(0.1), None)
  edgc = row(found, "edgc")
  mean, error = comparison.difference(edgc, edgc.matched)
  assert mean == pytest.approx(-0.15) and error == pytest.approx(0.05)


def test_the_page_is_complete(found, tmp_path):
  pictures = plots.write(found, tmp_path)
  assert len(pictures) == 3
  for file in pictures.values():
    height, width = matplotlib.image.imread(file).shape[:2]
    assert width == 900 and height > 300 and file.stat().st_size < 2e5
  file = tmp_path / "page.md"
  text = page.write(found, file, pictures, "python compare.py")
  assert file.read_text() == text
  cells = {
    line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
    for line in text.splitlines()
    if line.count("|") > 9
  }
  assert cells["strong"] == [
    "2.7500", "0.7778", "+10.00% ± 2.00%", "2.000", "2.250", "4.00", "500",
    "2.00", "2", "",
  ]  # fmt: skip
  assert cells["edgc"][-1] == "-0.1500 ± 0.0500"
  (partner,) = [name for name in cells if name.startswith("↳ fixed rank")]
  assert list(cells).index(partner) == list(cells).index("edgc") + 1
  assert "**8 of 10 runs:**" in text and "**1 failed,**" in text
  assert "| sparse | 0 | failed: exit code 1: no room | | |" in text
  assert "| strong | 1 | 3.3000 | 4.00 | dense from 1, 4 from 3 |" in text
  for file in pictures.values():
    assert f"]({file.name})" in text


def test_table_of_all_runs(found, tmp_path):
  page.write(found, tmp_path / "page.md", {}, "command")
  with open(tmp_path / "made_up.csv", newline="") as file:
    lines = list(csv.DictReader(file))
  assert tuple(lines[0]) == page.COLUMNS
  assert len(lines) == 9
  assert lines[2]["row"] == "strong" and lines[2]["wire_bytes"] == "80000000"
  assert [line["beside"] for line in lines].count("edgc") == 2
  assert lines[-1]["error"] == "exit code 1: no room"


def test_other_pages_are_not_overwritten(found, tmp_path):
  file = tmp_path / "page.md"
  file.write_text("# Mine\n")
  with pytest.raises(ValueError, match="`--output` must be new"):
    page.write(found, file, {}, "command")
  assert file.read_text() == "# Mine\n"
  file.unlink()
  for _ in range(2):
    page.write(found, file, {}, "command")


def test_records_hold_for_the_same_contents_of_a_configuration(tmp_path):
  """Settings of other reducers do not matter."""
  file = tmp_path / "config.py"
  of_file = dataclasses.replace(STUDY, config=str(file))
  text = (ROOT / "configs/gpt2_tiny.py").read_text()
  file.write_text(text)
  run = of_file.run("strong", "0")
  first = of_file.digest(run)
  section = run.settings["reducer"]
  for added, is_same in (
    ("  config.model.width = 96\n", False),
    (f"  config.{section}.min_ratio = 3.0\n", False),
    ("  config.quantize.block = 64\n", True),
  ):
    file.write_text(text.replace("  return config", added + "  return config"))
    assert (of_file.digest(run) == first) == is_same, added


def test_records_hold_for_the_same_settings(records, tmp_path):
  run = STUDY.run("strong", "0")
  assert records.finished(run)["val_loss"] == 2.2
  other = dataclasses.replace(run, settings={**run.settings, "steps": 41})
  assert records.find(other) is None
  other = tmp_path / "other.py"
  file = pathlib.Path(STUDY.config)
  text = file.read_text()
  other.write_text(text)
  moved = Records(
    records.folder.parent, dataclasses.replace(STUDY, config=str(other))
  )
  assert moved.find(run) is None
  failed = STUDY.run("sparse", "0")
  assert records.find(failed) and not records.finished(failed)


def test_record_of_a_run_folder_is_small(tmp_path):
  lines = [
    {"step": step, "loss": 1 / step, "dense_bytes": 8e6,
     "compression_ratio": 4.0} for step in range(1, 20_001)
  ]  # fmt: skip
  lines[-1]["val_loss"] = 0.25
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "metrics.jsonl").write_text(text)
  history = [[1 + 10 * i, [i % 9]] for i in range(2000)]
  summary = numbers(0.25, rank_history=history)
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  kept = numbers_of(tmp_path)
  assert len(json.dumps(kept)) < 10_000
  assert kept["curve"]["step"][-1] == 20_000
  assert kept["curve"]["wire_bytes"][-1] == 20_000 * 2_000_000
  mean = sum(1 / step for step in range(1, 335)) / 334
  assert kept["curve"]["loss"][0] == pytest.approx(mean, rel=1e-3)
  assert kept["evaluations"] == [[20_000, 0.25]]
  del summary["val_loss"]
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  with pytest.raises(ValueError, match="not finite"):
    numbers_of(tmp_path)


@pytest.fixture
def runner(records, tmp_path, monkeypatch):
  """Returns a runner that keeps its commands and makes up run folders."""
  made = runners.Runner(STUDY, records, ["0", "1"], str(tmp_path / "runs"))
  made.commands = []

  def execute(command):
    settings = dict(part.split("=", 1) for part in command[2:])
    made.commands.append(settings)
    folder = pathlib.Path(settings["--config.run_dir"])
    if folder.name.startswith("sparse"):
      return "exit code 1: still no room"
    folder.mkdir(parents=True)
    line = {"step": 40, "loss": 2.0, "dense_bytes": 8, "compression_ratio": 4}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "summary.json").write_text(json.dumps(numbers(2.5)))
    return ""

  monkeypatch.setattr(runners, "_execute", execute)
  return made


def test_recorded_runs_do_not_run_again(runner, records, capsys):
  runner.run()
  # Failed runs do, and they do not stop the rest.
  names = [c["--config.run_dir"].split("/")[-1] for c in runner.commands]
  assert [name.rsplit("-", 1)[0] for name in names] == [
    "sparse-seed0", "sparse-seed1",
  ]  # fmt: skip
  found = comparison.collect(STUDY, records, ["0", "1"])
  assert [error for _, _, error in found.failures] == [
    "exit code 1: still no room"
  ] * 2
  shown = capsys.readouterr().out
  assert "--- run 5 of 10: sparse, seed 0; about 2 min left" in shown


def test_changed_settings_run_again(runner, records):
  tables = {**STUDY.tables, "Low rank": {"edgc": {**EDGC, "edgc.window": 5}}}
  runner._study = dataclasses.replace(STUDY, tables=tables)
  runner._plan = [p for p in runner._plan if p[0] == "edgc"]
  runner.run()
  edgc = runner.commands[0]
  assert edgc["--config.edgc.window"] == "5"
  assert edgc["--config"].endswith("gpt2_tiny.py:edgc")
  # Its bytes have changed, and with them the rank of its partner.
  assert runner.commands[1]["--config"].endswith("gpt2_tiny.py:powersgd")
  assert len(runner.commands) == 4
  runner.run()
  assert len(runner.commands) == 4


def test_forgotten_runs_run_again(runner):
  runner.forget()
  runner.run()
  assert len(runner.commands) == 10


def test_last_words_of_a_command(capfd):
  code = "import sys; print('x', file=sys.stderr); sys.exit('error: why')"
  assert runners._execute([sys.executable, "-c", code]) == (
    "exit code 1: error: why"
  )
  assert runners._execute([sys.executable, "-c", "pass"]) == ""
  assert capfd.readouterr().err == "x\nerror: why\n"


def test_times_for_people():
  assert runners.about(7800) == "about 2 h 10 min"
  assert runners.about(20) == "about 1 min"
  assert runners.about(7200) == "about 2 h"


def test_a_fixed_rank_of_the_same_bytes():
  run = STUDY.run("edgc", "1")
  bytes_of_step = study._bytes_of_step(STUDY.config, '{"steps": 400}')
  for target in (0.3e6, 0.62e6, 0.9137e6, 1.24e6, 2e6):
    other = STUDY.matched_run(run, {"wire_bytes_per_step": [target]})
    ranks = optimizer._rank_schedule(other.settings["powersgd.rank"], 0, 400)
    ends = [*ranks, 400][1:]
    sent = sum(
      bytes_of_step(rank, min(ranks.values())) * (end - start)
      for (start, rank), end in zip(ranks.items(), ends, strict=True)
    )
    assert sent / 400 == pytest.approx(target, rel=0.005)
    assert other.row == f"fixed rank {other.settings['powersgd.rank']:g}"
    assert not any(key.startswith("edgc.") for key in other.settings)
  for target in (1e4, 8e6):  # less than rank 1, and more than dense
    with pytest.raises(ValueError, match="bytes must be from"):
      STUDY.matched_run(run, {"wire_bytes_per_step": [target]})


def test_a_fixed_rank_where_a_matrix_becomes_dense():
  """It is dense from rank 39 on, but not in a run whose least rank is 38."""
  bytes_of_step = study._bytes_of_step(STUDY.config, '{"steps": 400}')
  assert bytes_of_step(39, 38) < bytes_of_step(39) - 40_000
  for target, expected in ((2.05e6, 38.4), (2.12e6, 39)):
    assert study.equal_rank(bytes_of_step, target) == expected


def test_a_fixed_rank_keeps_other_settings_of_its_row():
  settings = {"steps": 40, **EDGC, "edgc.min_ratio": 1.5, "mesh.data": 2}
  other = STUDY.matched_run(
    study.Run("edgc", "0", settings), {"wire_bytes_per_step": [1e6]}
  )
  assert other.settings["powersgd.min_ratio"] == 1.5
  assert other.settings["mesh.data"] == 2 and other.settings["steps"] == 40
  assert other.row.endswith(", mesh.data 2, powersgd.min_ratio 1.5")


def test_non_dominated_points():
  points = [(1, 0.0), (8, 1.0), (4, -0.1), (8, 0.5), (16, 3.0), (12, 4.0)]
  assert comparison.non_dominated(points) == [2, 3, 4]
  assert comparison.non_dominated([(2, 1.0), (2, 1.0)]) == [0]


def test_rows_of_one_name_must_be_one_run(tmp_path):
  text = "CONFIG = 'c.py'\nTABLES = {'one': {'a b': {'x': 1}}, 'two': %s}"
  file = tmp_path / "some.py"
  file.write_text(text % "{'a b': {'x': 1}}")
  assert study.load(str(file)).rows == {"a b": {"x": 1}}
  for other in ("{'a b': {'x': 2}}", "{'A-b': {'x': 1}}"):
    file.write_text(text % other)
    with pytest.raises(ValueError, match="`TABLES` must have one row"):
      study.load(str(file))


def test_schedules_of_the_study_send_as_much_as_the_fixed_rank():
  tables = runpy.run_path(str(ROOT / "configs/studies/allocation.py"))["TABLES"]
  for table in list(tables.values())[1:]:
    rows = list(table.values())
    fixed, schedules = rows[0]["powersgd.rank"], rows[2:4]
    for settings in schedules:
      ranks = optimizer._rank_schedule(
        settings["powersgd.rank"], settings["powersgd.final_rank"], 400
      )
      ends = [*ranks, 400][1:]
      sent = sum(
        rank * (end - start)
        for (start, rank), end in zip(ranks.items(), ends, strict=True)
      )
      assert abs(sent / 400 - fixed) < 0.01 * fixed


@pytest.mark.parametrize("name", ["methods", "ablations", "allocation"])
def test_settings_of_the_studies_are_valid(name):
  found = study.load(str(ROOT / f"configs/studies/{name}.py"))
  path = str(ROOT / found.config)
  for settings in found.rows.values():
    config = runpy.run_path(path)["get_config"](settings["reducer"])
    config.update_from_flattened_dict(
      {key: value for key, value in settings.items() if key != "reducer"}
    )
    optimizer.make_reducer(config, "data", {})


def test_a_narrow_row_has_a_narrow_partner():
  narrow = {**EDGC, "edgc.wire_dtype": "bfloat16"}
  sent = {"wire_bytes_per_step": [0.62e6]}
  other = STUDY.matched_run(study.Run("edgc", "0", narrow), sent)
  assert other.settings["powersgd.wire_dtype"] == "bfloat16"
  wide = STUDY.matched_run(STUDY.run("edgc", "0"), sent)
  ranks = [run.settings["powersgd.rank"] for run in (other, wide)]
  assert 1.8 < ranks[0] / ranks[1] < 2.2


def test_a_row_on_shards_has_a_partner_of_equal_bytes():
  """The bytes of all shards count, as in the summary of a run on shards."""
  mesh_keys = {
    "mesh.data": 2, "mesh.fsdp": 4, "mesh.backend": "jit"
  }  # fmt: skip
  bytes_of_step = study._bytes_of_step(STUDY.config, json.dumps(mesh_keys))
  config = study._configuration(STUDY.config, "powersgd", mesh_keys)
  config.powersgd.rank = 8
  tx = optimizer.make_reducer(config, "data", {})
  mesh = meshes.make_mesh(2, 1, 4)
  model = gpt2.GPT2Config(**config.model.to_dict())
  params = layout.of_params(model, mesh.shape)
  (part,) = edgc_jax.describe(
    tx, params.shapes, mesh=mesh, param_specs=params.specs
  ).parts
  assert bytes_of_step(8) == 4 * part.wire_bytes[0]
  sent = {"wire_bytes_per_step": [float(bytes_of_step(8))]}
  other = STUDY.matched_run(study.Run("edgc", "0", {**EDGC, **mesh_keys}), sent)
  assert other.settings["powersgd.rank"] == pytest.approx(8)
  assert other.settings["mesh.fsdp"] == 4


def test_rows_share_fixed_ranks_on_a_grid():
  coarse = dataclasses.replace(STUDY, grid=0.5)
  run = STUDY.run("edgc", "0")
  for target in (0.3e6, 0.5e6, 0.62e6):
    sent = {"wire_bytes_per_step": [target]}
    exact, near = (
      which.matched_run(run, sent).settings["powersgd.rank"]
      for which in (STUDY, coarse)
    )
    assert near % 0.5 == 0 and abs(near - exact) <= 0.25
