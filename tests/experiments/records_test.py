"""Records of runs: what they hold, and which run they are of."""

import json

import pytest
from ml_collections import ConfigDict

import edgc_jax
from configs import common, conv_digits, gpt2_tiny
from experiments.lab.study import records as own
from experiments.lab.study.records import Record, Records
from experiments.trainer.tasks.gpt2 import Gpt2


def config_of(reducer="edgc", **changes):
  config = gpt2_tiny.get_config(reducer)
  config.update_from_flattened_dict(changes)
  return config


def found(reducer="edgc", loss=2.5, **summary):
  """Returns what a finished run has logged, as `numbers_of`."""
  summary = {
    "reducer": reducer, "steps": 4, "params": 1000, "val_loss": loss,
    "wire_bytes_per_step": [250.0], "seconds": 60.0,
    "versions": {"task": 1, "method": edgc_jax.METHOD_VERSIONS.get(reducer)},
  } | summary  # fmt: skip
  lines = {
    "step": [1, 2, 4], "loss": [5.0, 4.0, 3.0], "val_loss": [None, 3.5, loss],
    "matrix_rank/blocks/mlp_in/kernel": [[8, 4], [8, 4], [4, 4]],
  }  # fmt: skip
  return {"summary": summary, "lines": lines}


@pytest.fixture
def records(tmp_path):
  return Records(tmp_path / "records")


@pytest.fixture(autouse=True)
def forget_defaults():
  yield
  own._defaults.cache_clear()


@pytest.mark.parametrize("file", [gpt2_tiny, conv_digits])
def test_a_record_comes_back(records, file):
  config = file.get_config("edgc")
  config.run_dir = "/some/path"
  path = records.add(config, found())
  assert path.parent == records.folder / config.name
  text = path.read_text()
  for known in (records, Records(records.folder)):
    record = known.find(config)
    assert dict(record) == json.loads(text)
    assert {name: record[name] for name in ("summary", "lines")} == found()
    assert record.is_finished and record == known.find(config)
    assert record == known.find(ConfigDict(record["config"]))
    assert record.bits == 8 * 250 / 1000
    assert list(record.curve) == ["step", "loss", "val_loss"]
    assert record.curve["val_loss"].tolist()[1:] == [3.5, 2.5]
  assert "/some/path" not in text
  assert "steps" in record["changed"] and "seed" not in record["changed"]
  assert len(text.splitlines()) == 6, "a line for each part"


def test_keys_that_make_another_run(records):
  """And those that change no result, on which no name depends, either."""
  records.add(config_of(), found())
  others = {
    "seed": 1, "steps": 401, "optimizer.lr": 3e-3, "edgc.rank_max": 32,
    "edgc.sampling.entry_rate": 0.1, "model.width": 96, "evaluation.every": 50,
    "mesh.data": 2, "data.path": "other.txt",
  }  # fmt: skip
  for i, (key, value) in enumerate(others.items()):
    other = config_of(**{key: value})
    assert records.find(other) is None, key
    assert own.name_of(other) != own.name_of(config_of())
    records.add(other, found(loss=9.0 + i))
    for config, loss in ((config_of(), 2.5), (other, 9.0 + i)):
      assert records.find(config)["summary"]["val_loss"] == loss
  assert records.find(config_of("powersgd")) is None
  assert records.find(conv_digits.get_config()) is None
  for changes in (
    {"run_dir": "elsewhere"}, {"name": "renamed"}, {"log_every": 3},
    {"resume": False}, {"checkpoint.every": 7, "checkpoint.keep": 5},
    {"sentinel.every": 11}, {"mesh.backend": "vmap"},
    {"powersgd.rank": 3.0, "quantize.bits": 4},  # of other reducers
  ):  # fmt: skip
    assert records.find(config_of(**changes)) is not None, changes
    assert own.name_of(config_of(**changes)) == own.name_of(config_of())


def change_base(monkeypatch, key, value):
  """Gives all configurations a default; returns a function that sets a key."""
  base = common.base

  def changed(config, value):
    *sections, name = key.split(".")
    part = config[sections[0]] if sections else config
    with config.unlocked():
      part[name] = value
    return config

  monkeypatch.setattr(common, "base", lambda x: changed(base(x), value))
  own._defaults.cache_clear()
  return lambda value: changed(config_of(), value)


@pytest.mark.parametrize("key", ["restarts", "edgc.momentum", "mesh.hosts"])
def test_a_new_key_counts_at_its_default(records, monkeypatch, key):
  records.add(config_of(), found())
  before = own.name_of(config_of())
  extended = change_base(monkeypatch, key, 0.5)
  assert records.find(extended(0.5)) is not None
  assert own.name_of(extended(0.5)) == before
  assert records.find(extended(0.75)) is None


def test_a_new_default_is_another_run(records, monkeypatch):
  """The configuration of a run counts, not what was changed in it."""
  records.add(config_of(), found())
  change_base(monkeypatch, "optimizer.b2", 0.99)
  assert records.find(config_of()) is None
  assert records.find(config_of(**{"optimizer.b2": 0.95})) is not None


def test_a_key_that_has_vanished_must_have_been_at_its_default(records):
  file = records.add(config_of(), found())
  values = json.loads(file.read_text())
  values["config"]["older"] = 0.5
  for changed, is_found in ((values["changed"], True), (["older"], False)):
    file.write_text(json.dumps(values | {"changed": changed}))
    again = Records(records.folder).find(config_of())
    assert (again is not None) == is_found


def test_diverged_runs_are_recorded_and_forgotten(records):
  diverged, finished = config_of(), config_of(seed=1)
  file = records.add(diverged, {"error": "3 steps were not finite"})
  records.add(finished, found())
  for known in (records, Records(records.folder)):
    record = known.find(diverged)
    assert record["error"] == "3 steps were not finite"
    assert not record.is_finished and known.find(diverged) == record
  known.forget_diverged()
  assert known.find(diverged) is None and known.find(finished) is not None
  assert file.exists(), "until the run is repeated"
  # A run that finishes in the end takes the place of its failure.
  records.add(diverged, {"error": "again"})
  records.add(diverged, found())
  assert records.find(diverged).is_finished
  assert len(list(records.folder.rglob("*.json"))) == 2


def test_records_of_older_versions_are_marked(records, monkeypatch):
  records.add(config_of(), found())
  record = records.find(config_of())
  versions = edgc_jax.METHOD_VERSIONS
  for change, is_current in (
    (lambda patch: None, True),
    (lambda patch: patch.setitem(versions, "powersgd", 9), True),
    (lambda patch: patch.setitem(versions, "edgc", 9), False),
    (lambda patch: patch.delitem(versions, "edgc"), False),
    (lambda patch: patch.setattr(Gpt2, "version", 2), False),
  ):
    with monkeypatch.context() as patch:
      change(patch)
      assert record.is_current == is_current
  values = {**record, "config": {**record["config"], "task": "gone"}}
  assert not Record(values).is_current


def test_numbers_of_a_run_folder(tmp_path):
  """Numbers keep five digits; lists over one stage become its value."""
  lines = [
    {"step": 1, "loss": 1 / 3, "rank": [8], "entropy": [-1.23456789, 2.0],
     "matrix_rank": {"blocks/mlp": [[8, 4]], "embedding": [[4]]}},
    {"step": 2, "loss": 2.0, "val_loss": 12345678.9, "rank": [4],
     "entropy": [float("nan"), 2.0]},
  ]  # fmt: skip
  text = "".join(json.dumps(line) + "\n" for line in lines)
  (tmp_path / "metrics.jsonl").write_text(text)
  summary = {"val_loss": 1 / 3, "reducer": "edgc"}
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  numbers = own.numbers_of(tmp_path)
  assert numbers["summary"] == summary
  entropies = numbers["lines"].pop("entropy")
  assert entropies[0] == [-1.2346, 2] and entropies[1][1] == 2
  assert entropies[1][0] != entropies[1][0]
  assert numbers["lines"] == {
    "step": [1, 2], "loss": [0.33333, 2], "val_loss": [None, 12346000],
    "rank": [8, 4], "matrix_rank/blocks/mlp": [[8, 4], None],
    "matrix_rank/embedding": [4, None],
  }  # fmt: skip
  del summary["val_loss"]
  (tmp_path / "summary.json").write_text(json.dumps(summary))
  error = {"error": "the held-out loss is not finite"}
  assert own.numbers_of(tmp_path) == error
  (tmp_path / "summary.json").unlink()
  with pytest.raises(OSError, match="summary"):
    own.numbers_of(tmp_path)
