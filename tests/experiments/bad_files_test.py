"""Bad files: data, run folders, checkpoints, records, studies.

Each is refused by one clear error, and no file changes. Data that is too short
or no text is in data_test.py; checkpoints of whole runs, damaged by a flipped
bit or cut off, are in resume_test.py.
"""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from helpers.refusals import allowed_or_clear, drawn, refused, unchanged
from helpers.small_runs import small
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from ml_collections import ConfigDict

import edgc_jax
from experiments import train_together
from experiments.data import text
from experiments.network.results import Results
from experiments.reporting import logged_run
from experiments.runs import checkpoints as checkpoints_module
from experiments.runs.checkpoints import CheckpointError, Checkpoints
from experiments.runs.run_folder import RunFolder, _lines_up_to
from experiments.study import runner, study
from experiments.study.records import Records, numbers_of
from experiments.training import trainer as trainer_module
from experiments.training.trainer import Trainer

KINDS = (TypeError, ValueError, OSError)
# What should be one JSON object.
NO_OBJECT = {
  "empty": b"",
  "cut": b'{"steps": 8',
  "binary": b"\x89PNG\r\n\x00\xff",
  "zeros": b"\0" * 100,
  "utf16": '{"steps": 8}'.encode("utf-16"),
  "list": b"[1, 2]",
  "number": b"3",
  "null": b"null",
  "text": b'"steps"',
  "python": b"{'steps': 8}",
  "deep": b"[" * 100_000,
  "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
}
no_object = pytest.mark.parametrize(
  "content", [pytest.param(v, id=k) for k, v in NO_OBJECT.items()]
)
anything = drawn(60)
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["step", "loss", "a"]), inner, max_size=2)
  ),
  max_leaves=4,
)


# Data.


@pytest.fixture
def loop(tmp_path):
  """Two links that point to each other."""
  (tmp_path / "a").symlink_to(tmp_path / "b")
  (tmp_path / "b").symlink_to(tmp_path / "a")
  return tmp_path / "a"


@pytest.mark.parametrize(
  "name", ["none", "none/text.txt", "~nobody", "text\0", "a" * 300, "/dev/zero"]
)
def test_data_that_is_not_there(tmp_path, name):
  path = name if name[0] in "/~" else tmp_path / name
  refused(lambda: text.load_corpus(str(path), context=4), "`data.path`",
          kinds=KINDS)  # fmt: skip


def test_data_behind_links(tmp_path, loop):
  refused(lambda: text.load_corpus(str(loop), context=4), "`data.path`",
          kinds=KINDS)  # fmt: skip
  # In a folder they are left out, as are links to nothing.
  (tmp_path / "nothing").symlink_to(tmp_path / "gone")
  (tmp_path / "text.txt").write_text("some words " * 20)
  with unchanged(tmp_path / "text.txt"):
    corpus = text.load_corpus(str(tmp_path), context=4)
  assert len(corpus.train) + len(corpus.held_out) == 220


def test_data_that_may_not_be_read(tmp_path, monkeypatch):
  """As root may read everything, the refusal is simulated."""
  file = tmp_path / "text.txt"
  file.write_text("some words " * 20)

  def refuse(path, *args):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(text.pathlib.Path, "read_bytes", refuse)
  for path in (file, tmp_path):
    refused(lambda p=path: text.load_corpus(str(p), context=4), "`data.path`",
            "Permission denied", kinds=KINDS)  # fmt: skip


@pytest.mark.parametrize(
  "content",
  [
    "word ".encode("utf-16"), b"\xff\xfe", b"words\xc3", b"\x1f\x8b\x08" * 40,
    b"\0" * 100, NO_OBJECT["pickle"] * 9,
  ],
  ids=["utf16", "mark", "cut", "gzip", "zeros", "pickle"],
)  # fmt: skip
def test_data_that_is_no_text(tmp_path, content):
  file = tmp_path / "text.txt"
  file.write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: text.load_corpus(str(file), context=4), "`data.path`",
            "UTF-8")  # fmt: skip


# Run folders.


def folder_of(path):
  """Returns a run folder's object for a small configuration."""
  return RunFolder(path, small(path, "allreduce").to_dict())


@pytest.fixture
def begun(tmp_path):
  """The folder of a run that has logged two lines, without checkpoints."""
  own = folder_of(tmp_path / "run")
  own.start()
  own.log({"step": 1, "loss": 2.0})
  own.log({"step": 2, "loss": 1.0})
  own.close()
  return own.path


@no_object
@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_files_of_a_run(begun, name, content):
  (begun / name).write_bytes(content)
  with unchanged(begun):
    refused(lambda: folder_of(begun).summary(), "`run_dir`", name)


@pytest.mark.parametrize(
  "changes, parts",
  [
    ({"steps": 9}, ["steps is 9 and not 8"]),
    ({"reducer": "topk"}, ["reducer is 'topk' and not 'allreduce'"]),
    ({"model": {"width": 64}}, ["model.context is None", "and not 16"]),
    ({"model": 3}, ["model is 3"]),
    ({"new": 1}, ["new is 1 and not None"]),
  ],
)
def test_configurations_of_another_run(begun, changes, parts):
  file = begun / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))
  with unchanged(begun):
    refused(lambda: folder_of(begun), "`run_dir`", "init_from", *parts)


@pytest.mark.parametrize("content", [b"{}", b'{"loss": 1}'])
def test_a_summary_without_steps(begun, content):
  (begun / "summary.json").write_bytes(content)
  with unchanged(begun):
    refused(lambda: folder_of(begun).summary(), "`run_dir`", "without steps")


def test_a_missing_configuration(begun):
  (begun / "config.json").unlink()
  with unchanged(begun):
    refused(lambda: folder_of(begun), "config.json is missing", kinds=KINDS)


@pytest.mark.parametrize("kind", ["file", "loop", "dangling", "foreign"])
def test_folders_that_are_none(tmp_path, kind):
  path = tmp_path / "run"
  if kind == "file":
    path.write_text("mine")
  elif kind == "foreign":
    path.mkdir()
    (path / "notes.txt").write_text("mine")
  else:
    path.symlink_to(tmp_path / ("run" if kind == "loop" else "gone"))
  with unchanged(tmp_path):
    refused(lambda: folder_of(path), "`run_dir`", str(path), kinds=KINDS)


@pytest.mark.parametrize(
  "line",
  [
    "{", "3", "[1]", "null", '{"loss": 1}', '{"step": "1"}', '{"step": null}',
    '{"step": [1]}', "\0\0\0", "\N{SNOWMAN}",
  ],
)  # fmt: skip
def test_a_broken_line_in_the_middle(tmp_path, capfd, line):
  """When a run resumes, the line is left out, and the others stay."""
  file = tmp_path / "metrics.jsonl"
  kept = [f'{{"step": {step}}}\n' for step in (1, 3)]
  file.write_text(f'{kept[0]}{line}\n{kept[1]}{{"step": 5}}\n{{"st')
  with unchanged(tmp_path):
    assert _lines_up_to(file, 4) == kept
  assert "has 1 damaged lines" in capfd.readouterr().err


@anything
@given(st.lists(JSON.map(json.dumps) | st.text(max_size=9), max_size=4))
def test_any_lines(tmp_path_factory, lines):
  folder = tmp_path_factory.mktemp("lines")
  file = folder / "metrics.jsonl"
  file.write_text("\n".join([*lines, ""]), "utf-8", "surrogatepass")
  with unchanged(folder):
    assert len(_lines_up_to(file, 4)) <= len(file.read_text().splitlines())
    allowed_or_clear(lambda: logged_run.load(folder), KINDS)


LINE = {"step": 1, "dense_bytes": 8.0, "compression_ratio": 2.0}


@pytest.mark.parametrize(
  "lines, parts",
  [
    (["{"], ["line 1"]),
    (["3"], ["line 1"]),
    (['{"step": null}'], ["line 1"]),
    ([json.dumps(LINE), "\0" * 9], ["line 2"]),
    (["[" * 100_000], ["line 1"]),
    (['{"step": 1}'], ["dense_bytes"]),
    ([json.dumps(LINE | {"dense_bytes": "8"})], ["dense_bytes"]),
    ([json.dumps(LINE | {"dense_bytes": [8.0]})], ["dense_bytes"]),
    ([json.dumps(LINE | {"compression_ratio": {}})], ["dense_bytes"]),
    (['{"step": "one"}'], ["line 1"]),
  ],
)
def test_reports_of_broken_lines(tmp_path, lines, parts):
  (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
  with unchanged(tmp_path):
    refused(lambda: logged_run.load(tmp_path), "metrics.jsonl", *parts)


@no_object
@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_reports_of_broken_files(tmp_path, name, content):
  (tmp_path / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
  (tmp_path / name).write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: logged_run.load(tmp_path), name)


def test_reports_of_no_run(tmp_path):
  (tmp_path / "metrics.jsonl").mkdir()
  for path in (tmp_path, tmp_path / "none", __file__):
    refused(lambda p=path: logged_run.load(pathlib.Path(p)),
            "metrics.jsonl", kinds=KINDS)  # fmt: skip


# Checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Returns a folder with checkpoints of steps 2 and 4."""
  folder = tmp_path_factory.mktemp("saved")
  own = Checkpoints(folder, keep=2)
  for step in (2, 4):
    own.save(step, {"params": {"w": np.full(3, step)}}, {"step": step}, None)
  own.close()
  return folder


@pytest.fixture
def copied(tmp_path, saved):
  return shutil.copytree(saved, tmp_path / "checkpoints")


SUMS = "sha256.json"


def write_sums(folder, about=None):
  """Makes a checkpoint intact again after a change."""
  if about is not None:
    (folder / "about" / "metadata").write_text(json.dumps(about))
  sums = checkpoints_module._sums(folder)
  (folder / SUMS).write_text(json.dumps(sums))


def emptied(folder):
  files = [f for f in (folder / "params").rglob("*") if f.is_file()]
  max(files, key=lambda f: f.stat().st_size).write_bytes(b"")


DAMAGE = {
  **{
    f"sums_{name}": lambda f, c=content: (f / SUMS).write_bytes(c)
    for name, content in NO_OBJECT.items()
  },
  "sums_of_nothing": lambda f: (f / SUMS).write_text("{}"),
  "sums_of_another": lambda f: (f / SUMS).write_text('{"about/metadata": 3}'),
  "no_sums": lambda f: (f / SUMS).unlink(),
  "no_about": lambda f: shutil.rmtree(f / "about"),
  "no_arrays": lambda f: shutil.rmtree(f / "params"),
  "empty_array": emptied,
  "empty_folder": lambda f: (shutil.rmtree(f), f.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_not_used(copied, damage, capfd):
  damage(copied / "4")
  with unchanged(copied):
    assert Checkpoints(copied, 2).newest() == (2, {"step": 2})
  assert "step 4 is damaged" in capfd.readouterr().err
  damage(copied / "2")
  with unchanged(copied), pytest.raises(CheckpointError, match="All checkp"):
    Checkpoints(copied, 2).newest()


def test_a_checkpoint_without_its_arrays_is_not_whole(tmp_path, monkeypatch):
  find = checkpoints_module._sums

  def without_params(folder):
    return {k: v for k, v in find(folder).items() if "params" not in k}

  own = Checkpoints(tmp_path, keep=2)
  own.save(2, {"params": {"w": np.ones(3)}}, {"step": 2}, None)
  own.wait()
  monkeypatch.setattr(checkpoints_module, "_sums", without_params)
  own.save(4, {"params": {"w": np.ones(3)}}, {"step": 4}, None)
  with pytest.raises(
    CheckpointError, match=r"step 4 .*\['params'\] are not in"
  ):
    own.wait()
  monkeypatch.undo()
  assert Checkpoints(tmp_path, 2).newest() == (2, {"step": 2})


@anything
@given(st.binary(max_size=40) | JSON.map(lambda x: json.dumps(x).encode()))
def test_any_sums(tmp_path_factory, saved, content):
  folder = tmp_path_factory.mktemp("sums")
  shutil.copytree(saved, folder / "checkpoints")
  (folder / "checkpoints" / "4" / SUMS).write_bytes(content)
  assert Checkpoints(folder / "checkpoints", 2).newest() == (2, {"step": 2})


def test_other_names_in_the_folder(copied):
  for name in ("\N{SUPERSCRIPT TWO}", "007", "8.tmp", "damaged-6", "-1", "٣"):
    (copied / name).mkdir()
  (copied / "10").write_text("a file")
  assert Checkpoints(copied, 2).newest() == (4, {"step": 4})


@pytest.mark.parametrize(
  "shapes, parts",
  [
    ({"w": (4,)}, ["w of shape (3,) instead of (4,)"]),
    ({"w": ()}, ["instead of ()"]),
    ({"v": (3,)}, ["v of shape none", "instead of (3,)"]),
    ({"w": (3,), "v": (2,)}, ["v of shape none"]),
  ],
)
def test_arrays_of_another_model(copied, shapes, parts):
  wanted = {k: jax.ShapeDtypeStruct(s, float) for k, s in shapes.items()}
  with unchanged(copied):
    refused(lambda: Checkpoints(copied, 2).load(4, {"params": wanted}), *parts,
            kinds=CheckpointError)  # fmt: skip


# Checkpoints that `edgc_jax.restore` reads.


PARAMS = {"w": np.ones((64, 32), np.float32)}
TX = optax.chain(edgc_jax.powersgd(4), optax.sgd(0.1))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  folder = tmp_path_factory.mktemp("stored") / "checkpoint"
  mesh = restore_arguments()["mesh"]
  tx = optax.chain(edgc_jax.powersgd(4, mesh=mesh), optax.sgd(0.1))
  tree = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(folder, tree)
  return folder


def restore_arguments():
  auto = (AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
  return {"tx": TX, "params": PARAMS, "mesh": mesh}


def largest(folder):
  files = [f for f in folder.rglob("*") if f.is_file()]
  return max(files, key=lambda f: f.stat().st_size)


RESTORE_DAMAGE = {
  "no_metadata": lambda f: (f / "_METADATA").unlink(),
  "cut_metadata": lambda f: (f / "_METADATA").write_text('{"tree'),
  "other_metadata": lambda f: (f / "_METADATA").write_text("[]"),
  "no_manifest": lambda f: (f / "manifest.ocdbt").unlink(),
  "cut_manifest": lambda f: (f / "manifest.ocdbt").write_bytes(b"\x0c"),
  "no_arrays": lambda f: largest(f).unlink(),
  "empty_array": lambda f: largest(f).write_bytes(b""),
  "cut_array": lambda f: largest(f).write_bytes(largest(f).read_bytes()[:9]),
  "emptied": lambda f: (shutil.rmtree(f), f.mkdir()),
}


# Orbax leaves calls behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", RESTORE_DAMAGE.values(), ids=RESTORE_DAMAGE)
def test_restore_of_a_damaged_checkpoint(tmp_path, stored, damage):
  folder = shutil.copytree(stored, tmp_path / "checkpoint")
  damage(folder)
  with unchanged(folder):
    refused(lambda: edgc_jax.restore(folder, **restore_arguments()), "`path`")


@pytest.mark.parametrize(
  "changes, parts",
  [
    ({"params": {"v": PARAMS["w"]}}, ["params['v']"]),
    ({"params": PARAMS | {"v": PARAMS["w"]}}, ["params['v']"]),
    ({"params": {"w": np.ones((32, 64), np.float32)}}, []),
    ({"params": {"w": np.ones((8, 4), np.float32)}}, ["`params`", "(8, 4)"]),
    ({"params": {"w": PARAMS["w"].astype("float16")}}, ["`params`", "float16"]),
    ({"tx": optax.chain(edgc_jax.topk(), optax.adam(0.1))}, ["opt_state"]),
    (
      {"tx": optax.chain(edgc_jax.powersgd(4), *[optax.adam(0.1)] * 5)},
      ["`path`", "opt_state"],
    ),
    (
      {
        "tx": optax.partition(
          {"one": edgc_jax.powersgd(4)},
          lambda tree: jax.tree.map(lambda _: "one", tree),
        )
      },
      ["`path`", "opt_state"],
    ),
    ({"axis_name": "replica"}, ["`axis_name`"]),
    ({"mesh": None}, ["`mesh`"]),
    ({"tx": None}, ["`tx`"]),
  ],
)
def test_restore_with_other_arguments(stored, changes, parts):
  given = restore_arguments() | changes
  with unchanged(stored):
    refused(lambda: edgc_jax.restore(stored, **given), *parts)


def test_restore_of_a_module_in_place_of_an_array(tmp_path):
  tree = {"params": {"w": PARAMS}, "opt_state": (PARAMS,)}
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "nested", tree)
  refused(
    lambda: edgc_jax.restore(tmp_path / "nested", **restore_arguments()),
    "`path`", "params['w']",
  )  # fmt: skip


def test_restore_of_another_tree(tmp_path):
  for name, tree in {
    "lists": [1.0, 2.0, 3.0], "one": {"params": PARAMS}, "other": {"a": 1.0},
  }.items():  # fmt: skip
    with ocp.PyTreeCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / name, tree)
    refused(
      lambda n=name: edgc_jax.restore(tmp_path / n, **restore_arguments()),
      "`path`", "opt_state",
    )  # fmt: skip


# Records and files of several runs.


RECORD = {
  "config": {"seed": 0, "reducer": "allreduce"},
  "changed": [],
  "summary": {"val_loss": 1.0},
  "lines": {"step": [1]},
}


def without(*keys):
  return {key: value for key, value in RECORD.items() if key not in keys}


@pytest.mark.parametrize(
  "content",
  [
    *NO_OBJECT.values(),
    *(
      json.dumps(value).encode()
      for value in (
        {}, without("config"), without("changed"), without("summary"),
        without("lines"), RECORD | {"config": []}, RECORD | {"config": {}},
        RECORD | {"config": {"seed": "0", "reducer": "topk"}},
        RECORD | {"config": {"seed": 0, "reducer": None}},
        RECORD | {"lines": [1]}, RECORD | {"summary": None},
        RECORD | {"changed": "steps"},
      )
    ),
  ],
  ids=[*NO_OBJECT, *map(str, range(12))],
)  # fmt: skip
def test_records(tmp_path, content):
  folder = tmp_path / "records" / "some"
  folder.mkdir(parents=True)
  (folder / "good.json").write_text(json.dumps(RECORD))
  (folder / "run.json").write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: Records(tmp_path / "records"), "`records`", "run.json")


@anything
@given(st.dictionaries(st.sampled_from([*RECORD, "error"]), JSON))
def test_any_record(tmp_path_factory, values):
  folder = tmp_path_factory.mktemp("records")
  (folder / "run.json").write_text(json.dumps(values))
  found = allowed_or_clear(lambda: Records(folder))
  if found is not None:
    assert found.find(small(folder, "edgc")) is None


def test_a_folder_of_records_that_is_none(tmp_path):
  (tmp_path / "records").write_text("")
  refused(lambda: Records(tmp_path / "records"), "`records`", kinds=KINDS)


@no_object
def test_files_of_a_finished_run_of_a_study(tmp_path, content):
  """They make a failed run, and do not end the study."""
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
  (tmp_path / "summary.json").write_bytes(content)
  with unchanged(tmp_path), pytest.raises(ValueError):
    numbers_of(tmp_path)
  (tmp_path / "summary.json").write_text('{"val_loss": 1.0}')
  (tmp_path / "metrics.jsonl").write_bytes(content + b"\n3\n")
  with unchanged(tmp_path), pytest.raises(ValueError):
    numbers_of(tmp_path)


@no_object
def test_results_of_the_network(tmp_path, content):
  file = tmp_path / "network.json"
  file.write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: Results(file, {"config": "a"}, {}), "`--output`")


@pytest.mark.parametrize(
  "content",
  [b"{}", b"[3]", b'[{"a": 1}, null]', *NO_OBJECT.values()],
  ids=["object", "numbers", "mixed", *NO_OBJECT],
)  # fmt: skip
def test_runs_of_one_program(tmp_path, content):
  file = tmp_path / "runs.json"
  file.write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: train_together._read(str(file)), "`--runs`")
  refused(lambda: train_together._read(str(tmp_path / "no.json")), "`--runs`")


# Studies.


GOOD = "CONFIG = 'configs/gpt2_tiny.py'\nSEEDS = (0,)\n"
TABLES = "TABLES = {'one': {'dense': {'reducer': 'allreduce'}}}\n"
TUNING = {
  "key": "optimizer.lr", "start": (1e-3,), "factor": 2, "seed": 9,
  "settings": {},
}  # fmt: skip
FILES = {
  "syntax": "TABLES = {",
  "indent": "  SEEDS = 3",
  "name": "SEEDS = seeds",
  "import": "import nothing_of_this_name",
  "raises": "raise RuntimeError('two\\nlines')",
  "divides": "SEEDS = (1 // 0,)",
  "no_tables": GOOD,
  "other_names": GOOD + TABLES + "TABLE = {}",
  "config_number": GOOD + TABLES + "CONFIG = 3",
  "seeds_number": GOOD + TABLES + "SEEDS = 3",
  "seeds_text": GOOD + TABLES + "SEEDS = '01'",
  "seeds_negative": GOOD + TABLES + "SEEDS = (-1,)",
  "seeds_floats": GOOD + TABLES + "SEEDS = (0.5,)",
  "more_number": GOOD + TABLES + "MORE = 3",
  "best_text": GOOD + TABLES + "BEST = 'two'",
  "tables_list": GOOD + "TABLES = [1]",
  "tables_empty": GOOD + "TABLES = {}",
  "tables_without_arms": GOOD + "TABLES = {'one': {}}",
  "tables_numbers": GOOD + "TABLES = {1: {2: {}}}",
  "arm_list": GOOD + "TABLES = {'one': {'dense': []}}",
  "matched_list": GOOD + TABLES + "MATCHED = ['dense']",
  "matched_numbers": GOOD + TABLES + "MATCHED = {'dense': 3}",
  "matched_strangers": GOOD + TABLES + "MATCHED = {'a': 'b'}",
  "alternatives_list": GOOD + TABLES + "ALTERNATIVES = [{}]",
  "alternatives_settings": GOOD + TABLES + "ALTERNATIVES = {'dense': {}}",
  "alternatives_numbers": GOOD + TABLES + "ALTERNATIVES = {'dense': [3]}",
  "tuning_list": GOOD + TABLES + "TUNING = [1]",
  **{
    f"tuning_without_{key}": GOOD + TABLES + "TUNING = "
    + repr({k: v for k, v in TUNING.items() if k != key})
    for key in TUNING
  },
  **{
    f"tuning_{key}_{value}": GOOD + TABLES + f"TUNING = {TUNING | {key: value}}"
    for key, value in (
      ("key", 3), ("start", ()), ("start", 3), ("start", (2, 1)),
      ("start", (-1,)), ("start", ("a",)), ("factor", 1), ("factor", -2),
      ("factor", "a"), ("seed", -1), ("seed", None), ("settings", []),
      ("more", 1),
    )
  },
}  # fmt: skip


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_files_of_studies(tmp_path, content):
  file = tmp_path / "study.py"
  file.write_text(content)
  refused(lambda: study.load(str(file)))


@pytest.mark.parametrize("content", [b"\0\0", b"\xff\xfe", NO_OBJECT["pickle"]])
def test_studies_that_are_no_programs(tmp_path, content):
  file = tmp_path / "study.py"
  file.write_bytes(content)
  refused(lambda: study.load(str(file)), "`study`", str(file))


def test_studies_that_are_no_files(tmp_path):
  for path in (tmp_path, tmp_path / "none.py", "/dev/null"):
    refused(lambda p=path: study.load(str(p)), kinds=KINDS)


@pytest.mark.parametrize(
  "settings, config, parts",
  [
    ({"steps": 3}, None, ["`reducer`"]),
    ({"reducer": "magic"}, None, ["`reducer`", "magic"]),
    ({"reducer": "topk", "topk.densty": 0.1}, None, ["densty"]),
    ({"reducer": "topk", "topk.density": "few"}, None, ["few"]),
    ({"reducer": "topk", "stepz": 3}, None, ["stepz"]),
    ({"reducer": "topk", "steps": 3.5}, None, ["3.5"]),
    ({"reducer": "topk"}, "none.py", ["`CONFIG`", "none.py"]),
    ({"reducer": "topk"}, __file__, ["`CONFIG`", "get_config"]),
    ({"reducer": "topk"}, "README.md", ["`CONFIG`", "README.md"]),
  ],
)
def test_settings_of_studies(settings, config, parts, monkeypatch):
  monkeypatch.chdir(os.path.dirname(os.path.dirname(train_together.__file__)))
  arms = {"one": {"dense": {"reducer": "allreduce"}, "own": settings}}
  own = study.Study("own", config or "configs/gpt2_tiny.py", arms, (0,))
  refused(own.require_settings, *parts, kinds=KINDS)


@pytest.mark.parametrize("options", ["gpu", "=3", "slurm_partition=", "a b=3"])
def test_parameters_of_slurm(options):
  refused(lambda: runner.slurm_parameters(options), "`--slurm`", options)


# Whole runs.


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a run that has stopped after a checkpoint."""
  folder = tmp_path_factory.mktemp("whole")
  file = folder / "text.txt"
  file.write_text("some words to read and to learn from " * 60)
  Trainer(config_of(folder)).run()
  (folder / "run" / "summary.json").unlink()
  return folder


def config_of(folder, reducer="allreduce", **changes):
  config = small(folder / "run", reducer)
  config.data.path = str(folder / "text.txt")
  config.mesh.backend, config.checkpoint.every = "vmap", 4
  config.update_from_flattened_dict(changes)
  return config


@pytest.fixture
def stopped(tmp_path, whole):
  folder = shutil.copytree(whole, tmp_path / "whole")
  file = folder / "run" / "config.json"  # has paths
  file.write_text(file.read_text().replace(str(whole), str(folder)))
  return folder


def about_of(folder):
  return folder / "about" / "metadata"


def with_about(change):
  """Returns damage: what all checkpoints say of the run is changed."""

  def damage(folder):
    for step in (4, 8):
      own = folder / "run" / "checkpoints" / str(step)
      write_sums(own, change(json.loads(about_of(own).read_text())))

  return damage


def nothing(folder):
  """Leaves all files as they are."""


def with_parameters(folder, value):
  """Saves the checkpoint of the last step again, with other parameters."""
  path = folder / "run" / "checkpoints" / "8"
  with ocp.PyTreeCheckpointer() as checkpointer:
    handler = ocp.PyTreeCheckpointHandler()
    shapes = handler.metadata(epath.Path(path / "params")).tree
    tree = {k: np.full(x.shape, value, x.dtype) for k, x in shapes.items()}
    shutil.rmtree(path / "params")
    checkpointer.save(path / "params", tree)
  write_sums(path)


@pytest.mark.slow
@pytest.mark.parametrize(
  "damage, changes, parts",
  [
    (with_about(lambda x: x | {"state_version": 0}), {}, ["version"]),
    (with_about(lambda x: x | {"state_version": None}), {}, ["version"]),
    (with_about(lambda x: x | {"corpus": "other"}), {}, ["`data.path`"]),
    (with_about(lambda x: {"state_version": 4}), {}, ["version"]),
    (with_about(lambda x: {}), {}, ["version"]),
    (with_about(lambda x: [3]), {}, ["version"]),
    (nothing, {"reducer": "topk"}, ["reducer is 'allreduce'"]),
    (nothing, {"model.width": 64}, ["model.width is 32"]),
    (nothing, {"steps": 9}, ["steps is 8"]),
    (nothing, {"resume": False}, ["resume=false"]),
    (nothing, {"mesh.data": 3}, ["`batch_size`"]),
    (
      lambda f: (f / "text.txt").write_text("other words " * 99),
      {},
      ["`data.path`"],
    ),
    (lambda f: (f / "text.txt").unlink(), {}, ["`data.path`"]),
  ],
)
def test_a_run_that_cannot_resume(stopped, damage, changes, parts):
  damage(stopped)
  config = config_of(stopped, **changes)
  with unchanged(stopped):
    refused(lambda: Trainer(config), *parts, kinds=KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite(stopped, value):
  with_parameters(stopped, value)
  with unchanged(stopped):
    refused(Trainer(config_of(stopped)).run, "`run_dir`", "finite",
            kinds=CheckpointError)  # fmt: skip
  other = config_of(stopped, init_from=str(stopped / "run"))
  other.run_dir = str(stopped.parent / "new")
  with unchanged(stopped):
    refused(Trainer(other).run, "`init_from`", "finite",
            kinds=CheckpointError)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
  "damage, changes, parts",
  [
    (nothing, {"model.width": 64}, ["shape"]),
    (nothing, {"model.num_layers": 2}, ["shape"]),
    (nothing, {"model.vocab_size": 300}, ["shape"]),
    (with_about(lambda x: {}), {}, ["another program"]),
    (with_about(lambda x: [3]), {}, ["another program"]),
    (
      lambda f: shutil.rmtree(f / "run/checkpoints"),
      {},
      ["There are no checkpoints"],
    ),
    (
      lambda f: [p.unlink() for p in (f / "run").rglob(SUMS)],
      {},
      ["damaged"],
    ),
  ],
)
def test_parameters_of_another_run(stopped, damage, changes, parts):
  damage(stopped)
  config = config_of(stopped, init_from=str(stopped / "run"), **changes)
  config.run_dir = str(stopped.parent / "new")
  with unchanged(stopped):
    refused(lambda: Trainer(config), "`init_from`", *parts,
            kinds=CheckpointError)  # fmt: skip
  assert not (stopped.parent / "new").exists()


@pytest.mark.slow
def test_what_a_checkpoint_says_of_a_run(whole):
  about = json.loads(about_of(whole / "run" / "checkpoints" / "8").read_text())
  # Older checkpoints, which runs continue from, do not say `tensor`.
  assert about.keys() == trainer_module._ABOUT | {"tensor"}
  assert ConfigDict(json.loads((whole / "run" / "config.json").read_text()))
