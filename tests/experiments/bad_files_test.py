"""Bad files: data, run folders, checkpoints, records, studies.

Each is refused by one clear error, and no file changes. More data is in
data_test.py; runs that go on after damage are in resume_test.py.
"""

import json
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

import edgc_jax
from experiments.lab import train_together
from experiments.lab.network.results import Results
from experiments.lab.study import runner, study
from experiments.lab.study.records import Records, numbers_of
from experiments.trainer.data import text
from experiments.trainer.reporting import logged_run
from experiments.trainer.runs import checkpoints as checkpoints_module
from experiments.trainer.runs.checkpoints import CheckpointError, Checkpoints
from experiments.trainer.runs.run_folder import RunFolder, _lines_up_to
from experiments.trainer.runtime.json_files import read_json
from experiments.trainer.training import trainer as trainer_module
from experiments.trainer.training.trainer import Trainer

KINDS = (TypeError, ValueError, OSError)
DEEP = b"[" * 100_000
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["step", "loss", "a"]), inner, max_size=2)
  ),
  max_leaves=4,
)


@pytest.mark.parametrize(
  "content",
  [
    b"", b'{"steps": 8', b"\x89PNG\r\n\xff", b"\0" * 100, b"[1, 2]", b"null",
    '{"steps": 8}'.encode("utf-16"), b"{'steps': 8}", DEEP,
  ],
  ids=range(9),
)  # fmt: skip
def test_files_that_hold_no_object(tmp_path, content):
  (tmp_path / "x.json").write_bytes(content)
  with unchanged(tmp_path):
    refused(lambda: read_json(tmp_path / "x.json", "some", "restore it"),
            "`some`", "x.json, which is damaged", "; restore it")  # fmt: skip


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


@pytest.mark.parametrize(
  "read, argument, name",
  [
    (folder_of, "run_dir", "config.json"),
    (lambda x: folder_of(x).summary(), "run_dir", "summary.json"),
    (logged_run.load, "run_dir", "config.json"),
    (logged_run.load, "run_dir", "summary.json"),
    (Records, "records", "config.json"),
    (lambda x: Results(x / "x.json", {"config": "a"}, {}), "--output",
     "x.json"),
    (lambda x: train_together._read(str(x / "x.json")), "--runs", "x.json"),
  ],
)  # fmt: skip
def test_readers_of_damaged_files(begun, read, argument, name):
  (begun / name).write_bytes(b"{")
  with unchanged(begun):
    refused(lambda: read(begun), f"`{argument}`", f"{name}, which is damaged")


# Data.


def test_data_that_is_not_there(tmp_path):
  (tmp_path / "a").symlink_to(tmp_path / "b")
  (tmp_path / "b").symlink_to(tmp_path / "a")
  for name in (tmp_path / "a", "~nobody", "text\0", "a" * 300, "/dev/zero"):
    refused(lambda n=name: text.load_corpus(str(n), context=4), "`data.path`",
            kinds=KINDS)  # fmt: skip
  # In a folder such links are left out.
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


# Run folders.


def test_configurations_of_another_run(begun):
  file = begun / "config.json"
  own = json.loads(file.read_text())
  for changes, parts in (
    ({"reducer": "topk"}, ["reducer is 'topk' and not 'allreduce'"]),
    ({"model": 3}, ["model, which is 3,", "model.context is None and not 16"]),
    ({"old": 1}, ["old, which is 1, is no key any more"]),
  ):
    file.write_text(json.dumps(own | changes))
    with unchanged(begun):
      refused(lambda: folder_of(begun), "`run_dir`", "init_from", *parts)
  (begun / "metrics.jsonl").write_text("")  # it has logged nothing yet
  folder_of(begun)


def test_files_that_a_run_lacks(begun):
  (begun / "summary.json").write_text('{"loss": 1}')
  refused(lambda: folder_of(begun).summary(), "`run_dir`", "without steps")
  (begun / "config.json").unlink()
  refused(lambda: folder_of(begun), "config.json is missing; restore",
          kinds=KINDS)  # fmt: skip


def test_folders_that_are_none(tmp_path):
  (tmp_path / "file").write_text("mine")
  (tmp_path / "loop").symlink_to(tmp_path / "loop")
  (tmp_path / "dangling").symlink_to(tmp_path / "gone")
  with unchanged(tmp_path):
    for name in ("file", "loop", "dangling"):
      refused(lambda n=name: folder_of(tmp_path / n), "`run_dir`", name,
              "which is none", kinds=KINDS)  # fmt: skip
    refused(lambda: folder_of(tmp_path), "other files", kinds=KINDS)


@pytest.mark.parametrize(
  "line",
  ["{", "3", '{"loss": 1}', '{"step": null}', "\0\0\0", DEEP.decode()],
  ids=lambda line: line[:15],
)
def test_a_broken_line_in_the_middle(tmp_path, capfd, line):
  """When a run resumes it is left out; a report ends with its number."""
  file = tmp_path / "metrics.jsonl"
  kept = [f'{{"step": {step}}}\n' for step in (1, 3)]
  file.write_text(f'{kept[0]}{line}\n{kept[1]}{{"step": 5}}\n{{"st')
  with unchanged(tmp_path):
    assert _lines_up_to(file, 4) == kept
    refused(lambda: logged_run.load(tmp_path), "metrics.jsonl, line 2")
  assert "has 1 damaged lines" in capfd.readouterr().err


@drawn(60)
@given(st.lists(JSON.map(json.dumps) | st.text(max_size=9), max_size=4))
def test_any_lines(tmp_path_factory, lines):
  folder = tmp_path_factory.mktemp("lines")
  file = folder / "metrics.jsonl"
  file.write_text("\n".join([*lines, ""]), "utf-8", "surrogatepass")
  with unchanged(folder):
    assert len(_lines_up_to(file, 4)) <= len(file.read_text().splitlines())
    allowed_or_clear(lambda: logged_run.load(folder), KINDS)


def test_reports_of_no_run(tmp_path):
  (tmp_path / "run").mkdir()
  file = tmp_path / "run" / "metrics.jsonl"
  for line in (
    '{"step": 1}',
    DEEP.decode(),
    '{"step": 1, "dense_bytes": [8.0], "compression_ratio": 2.0}',
  ):
    file.write_text(line + "\n")
    refused(lambda: logged_run.load(file.parent), "metrics.jsonl",
            "line 1" if line[0] == "[" else "dense_bytes")  # fmt: skip
  (tmp_path / "metrics.jsonl").mkdir()
  for path in (tmp_path, tmp_path / "none", pathlib.Path(__file__)):
    refused(lambda p=path: logged_run.load(p), "metrics.jsonl", kinds=KINDS)


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


def write_sums(folder):
  """Makes a checkpoint intact again after a change."""
  sums = checkpoints_module._sums(folder)
  (folder / SUMS).write_text(json.dumps(sums))


def change_largest(folder, change):
  files = [f for f in folder.rglob("*") if f.is_file()]
  file = max(files, key=lambda f: f.stat().st_size)
  file.write_bytes(change(file.read_bytes()))


def flipped(data):
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {
  "flipped": lambda f: change_largest(f, flipped),
  "cut": lambda f: change_largest(f, lambda x: x[:-1]),
  "empty": lambda f: (shutil.rmtree(f), f.mkdir()),
  "no_sums": lambda f: (f / SUMS).unlink(),
  "sums_of_nothing": lambda f: (f / SUMS).write_text("{}"),
  "deep_sums": lambda f: (f / SUMS).write_bytes(DEEP),
  "no_about": lambda f: (f / "about" / "metadata").unlink(),
  "no_arrays": lambda f: shutil.rmtree(f / "params"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_not_used(copied, damage, capfd):
  damage(copied / "4")
  with unchanged(copied):
    assert Checkpoints(copied, 2).newest() == (2, {"step": 2})
  assert "step 4 is damaged" in capfd.readouterr().err
  damage(copied / "2")
  with (
    unchanged(copied),
    pytest.raises(CheckpointError, match=r"All checkpoints in .*another"),
  ):
    Checkpoints(copied, 2).newest()


def test_a_checkpoint_without_its_arrays_is_not_whole(copied, monkeypatch):
  monkeypatch.setattr(checkpoints_module, "_sums", lambda _: {"about/x": ""})
  own = Checkpoints(copied, keep=3)
  own.save(6, {"params": {"w": np.ones(3)}}, {"step": 6}, None)
  with pytest.raises(
    CheckpointError, match=r"step 6 .*\['params'\] are not in"
  ):
    own.wait()
  monkeypatch.undo()
  assert Checkpoints(copied, 3).newest() == (4, {"step": 4})


@drawn(60)
@given(st.binary(max_size=40) | JSON.map(lambda x: json.dumps(x).encode()))
def test_any_sums(tmp_path_factory, saved, content):
  folder = tmp_path_factory.mktemp("sums")
  shutil.copytree(saved, folder / "checkpoints")
  (folder / "checkpoints" / "4" / SUMS).write_bytes(content)
  assert Checkpoints(folder / "checkpoints", 2).newest() == (2, {"step": 2})


def test_an_intact_checkpoint(copied):
  for name in ("\N{SUPERSCRIPT TWO}", "007", "8.tmp", "damaged-6", "-1", "٣"):
    (copied / name).mkdir()
  (copied / "10").write_text("a file")
  own = Checkpoints(copied, 2)
  assert own.newest() == (4, {"step": 4})
  for shapes, part in (
    ({"w": (4,)}, "w of shape (3,) instead of (4,)"),
    ({"w": (3,), "v": (2,)}, "v of shape none instead of (2,)"),
  ):
    tree = {k: jax.ShapeDtypeStruct(s, float) for k, s in shapes.items()}
    refused(lambda x=tree: own.load(4, {"params": x}), part,
            kinds=CheckpointError)  # fmt: skip


# Checkpoints that `edgc_jax.restore` reads.


PARAMS = {"w": np.ones((64, 32), np.float32)}
TX = optax.chain(edgc_jax.powersgd(4), optax.sgd(0.1))


def restore_arguments():
  auto = (AxisType.Auto,)
  mesh = jax.make_mesh((2,), ("data",), auto, devices=jax.devices()[:2])
  return {"tx": TX, "params": PARAMS, "mesh": mesh}


def store(folder, tree):
  with ocp.PyTreeCheckpointer() as checkpointer:
    checkpointer.save(folder, tree)
  return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
  mesh = restore_arguments()["mesh"]
  tx = optax.chain(edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.sgd(0.1))
  tree = {"params": PARAMS, "opt_state": tx.init(PARAMS)}
  return store(tmp_path_factory.mktemp("stored") / "checkpoint", tree)


# Orbax leaves calls behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
  "damage",
  [
    lambda f: (f / "_METADATA").write_text("[]"),
    lambda f: (f / "manifest.ocdbt").unlink(),
    lambda f: change_largest(f, lambda x: x[:9]),
    DAMAGE["empty"],
  ],
  ids=["other_metadata", "no_manifest", "cut", "empty"],
)
def test_restore_of_a_damaged_checkpoint(tmp_path, stored, damage):
  folder = shutil.copytree(stored, tmp_path / "checkpoint")
  damage(folder)
  with unchanged(folder):
    refused(lambda: edgc_jax.restore(folder, **restore_arguments()), "`path`")


def test_restore_with_other_arguments(stored):
  one = lambda tree: jax.tree.map(lambda _: "one", tree)  # noqa: E731
  for changes, parts in (
    ({"params": {"v": PARAMS["w"]}}, ["params.v"]),
    ({"params": {"w": np.ones((8, 4), np.float32)}}, ["params.w", "(8, 4)"]),
    ({"params": {"w": PARAMS["w"].astype("float16")}}, ["params.w", "float16"]),
    ({"tx": optax.chain(edgc_jax.topk(), optax.adam(0.1))}, ["opt_state"]),
    (
      {"tx": optax.partition({"one": edgc_jax.powersgd(4)}, one)},
      ["`path`", "opt_state"],
    ),
    ({"axis_name": "replica"}, ["`axis_name`"]),
    ({"mesh": None}, ["`mesh`"]),
    ({"tx": None}, ["`tx`"]),
  ):
    given = restore_arguments() | changes
    with unchanged(stored):
      refused(lambda x=given: edgc_jax.restore(stored, **x), *parts)


def test_restore_of_another_tree(tmp_path):
  for i, (tree, part) in enumerate(
    (
      ([1.0, 2.0, 3.0], "opt_state"),
      ({"params": PARAMS}, "opt_state"),
      ({"a": 1.0}, "opt_state"),
      ({"params": {"w": PARAMS}, "opt_state": (PARAMS,)}, "params.w"),
    )
  ):
    folder = store(tmp_path / str(i), tree)
    refused(lambda f=folder: edgc_jax.restore(f, **restore_arguments()),
            "`path`", part)  # fmt: skip


# Records and files of several runs.


RECORD = {
  "config": {"seed": 0, "reducer": "allreduce"},
  "changed": [],
  "summary": {"val_loss": 1.0},
  "lines": {"step": [1]},
}


@pytest.mark.parametrize(
  "changes",
  [
    {"config": {"seed": "0", "reducer": "topk"}}, {"config": {"seed": 0}},
    {"changed": "steps"}, {"summary": None}, {"lines": [1]},
  ],
  ids=str,
)  # fmt: skip
def test_records(tmp_path, changes):
  (tmp_path / "good.json").write_text(json.dumps(RECORD))
  (tmp_path / "run.json").write_text(json.dumps(RECORD | changes))
  with unchanged(tmp_path):
    refused(lambda: Records(tmp_path), "`records`", "run.json", *changes)
    refused(lambda: Records(tmp_path / "run.json"), "a folder", kinds=KINDS)


@drawn(60)
@given(st.dictionaries(st.sampled_from([*RECORD, "error"]), JSON))
def test_any_record(tmp_path_factory, values):
  folder = tmp_path_factory.mktemp("records")
  (folder / "run.json").write_text(json.dumps(values))
  found = allowed_or_clear(lambda: Records(folder))
  if found is not None:
    assert found.find(small(folder, "edgc")) is None


@pytest.mark.parametrize("content", [b"{", b"3", DEEP], ids=range(3))
def test_files_of_a_finished_run_of_a_study(tmp_path, content):
  """They make a failed run, and do not end the study."""
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
  (tmp_path / "summary.json").write_bytes(content)
  with unchanged(tmp_path), pytest.raises(ValueError):
    numbers_of(tmp_path)
  (tmp_path / "summary.json").write_text('{"val_loss": 1.0}')
  (tmp_path / "metrics.jsonl").write_bytes(content + b"\n")
  with unchanged(tmp_path), pytest.raises(ValueError):
    numbers_of(tmp_path)


def test_runs_of_one_program(tmp_path):
  file = tmp_path / "runs.json"
  file.write_text('[{"a": 1}, null]')
  for path in (file, tmp_path / "no.json"):
    refused(lambda p=path: train_together._read(str(p)), "`--runs`")


# Studies.


GOOD = (
  "CONFIG = 'configs/gpt2_tiny.py'\nSEEDS = (0,)\n"
  "TABLES = {'one': {'dense': {'reducer': 'allreduce'}}}\n"
)
TUNING = {
  "key": "optimizer.lr", "start": (1e-3,), "factor": 2, "seed": 9,
  "settings": {},
}  # fmt: skip
BROKEN = (
  "CONFIG = 3", "SEEDS = 3", "SEEDS = '01'", "SEEDS = (-1,)", "SEEDS = (0.5,)",
  "MORE = 3", "BEST = 'two'", "TABLES = {}", "TABLES = {'one': {}}",
  "TABLES = [1]", "TABLES = {1: {2: {}}}", "TABLES = {'one': {'dense': []}}",
  "MATCHED = ['dense']", "MATCHED = {'dense': 3}", "ALTERNATIVES = [{}]",
  "ALTERNATIVES = {'dense': [3]}", "TUNING = [1]", "TUNING = {'key': 'steps'}",
  *(
    f"TUNING = {TUNING | changes}"
    for changes in (
      {"key": 3}, {"start": ()}, {"start": 3}, {"start": (2, 1)},
      {"start": (-1,)}, {"start": ("a",)}, {"factor": 1}, {"factor": "a"},
      {"seed": None}, {"settings": []}, {"more": 1},
    )
  ),
)  # fmt: skip


def test_files_of_studies(tmp_path):
  file = tmp_path / "study.py"
  file.write_text(GOOD)
  study.load(str(file))
  for line in BROKEN:
    file.write_text(GOOD + line)
    refused(lambda: study.load(str(file)), f"`{line.split()[0]}`")
  for content in ("TABLES = {", "raise RuntimeError('two\\nlines')", "\0\0"):
    file.write_text(content)
    refused(lambda: study.load(str(file)), "`study`", str(file))
  for path in (tmp_path, tmp_path / "none.py"):
    refused(lambda p=path: study.load(str(p)), "`study`", kinds=KINDS)


def test_settings_of_studies(monkeypatch):
  monkeypatch.chdir(pathlib.Path(train_together.__file__).parents[2])
  for settings, config, parts in (
    ({"steps": 3}, "", ["`reducer`"]),
    ({"reducer": "magic"}, "", ["`reducer`", "magic"]),
    ({"reducer": "topk", "topk.densty": 0.1}, "", ["densty"]),
    ({"reducer": "topk", "topk.density": "few"}, "", ["few"]),
    ({"reducer": "topk"}, "none.py", ["`CONFIG`", "none.py"]),
    ({"reducer": "topk"}, __file__, ["`CONFIG`", "get_config"]),
  ):
    arms = {"one": {"dense": {"reducer": "allreduce"}, "own": settings}}
    own = study.Study("own", config or "configs/gpt2_tiny.py", arms, (0,))
    refused(own.require_settings, *parts, kinds=KINDS)


def test_parameters_of_slurm():
  for options in ("gpu", "=3", "slurm_partition=", "a b=3"):
    refused(lambda o=options: runner.slurm_parameters(o), "`--slurm`", options)


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


def config_of(folder, **changes):
  config = small(folder / "run", "allreduce")
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


def with_about(change):
  """Returns damage: what all checkpoints say of the run is changed."""

  def damage(folder):
    for step in (4, 8):
      own = folder / "run" / "checkpoints" / str(step)
      file = own / "about" / "metadata"
      file.write_text(json.dumps(change(json.loads(file.read_text()))))
      write_sums(own)

  return damage


def nothing(folder):
  """Leaves all files as they are."""


@pytest.mark.slow
@pytest.mark.parametrize(
  "damage, changes, parts",
  [
    (with_about(lambda x: x | {"state_version": 0}), {},
     ["`run_dir`", f"version {trainer_module.STATE_VERSION}", "init_from="]),
    (with_about(lambda x: {"state_version": 4}), {}, ["version"]),
    (with_about(lambda x: [3]), {}, ["version"]),
    (nothing, {"model.width": 64}, ["model.width is 32 and not 64"]),
    (nothing, {"mesh.data": 3}, ["`batch_size`"]),
    (lambda f: (f / "text.txt").write_text("other words " * 99), {},
     ["`data.path` must hold", "began"]),
    (lambda f: (f / "text.txt").unlink(), {}, ["`data.path`"]),
    (nothing, {"init_from": "run", "model.width": 64},
     ["`init_from`", "shape (1, 96)"]),
    (with_about(lambda x: [3]), {"init_from": "run"},
     ["`init_from`", "another program"]),
    (lambda f: shutil.rmtree(f / "run/checkpoints"), {"init_from": "run"},
     ["`init_from`", "There are no checkpoints"]),
    (lambda f: [p.unlink() for p in (f / "run").rglob(SUMS)],
     {"init_from": "run"}, ["`init_from`", "damaged"]),
  ],
  ids=range(11),
)  # fmt: skip
def test_a_run_that_cannot_go_on(stopped, damage, changes, parts):
  damage(stopped)
  config, kinds = config_of(stopped, **changes), KINDS
  if config.init_from:
    config.init_from = str(stopped / config.init_from)
    config.run_dir, kinds = str(stopped / "new"), CheckpointError
  with unchanged(stopped):
    refused(lambda: Trainer(config), *parts, kinds=kinds)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite(stopped, value):
  path = stopped / "run" / "checkpoints" / "8"
  handler = ocp.PyTreeCheckpointHandler()
  shapes = handler.metadata(epath.Path(path / "params")).tree
  tree = {k: np.full(x.shape, value, x.dtype) for k, x in shapes.items()}
  shutil.rmtree(path / "params")
  store(path / "params", tree)
  write_sums(path)
  other = config_of(stopped, init_from=str(stopped / "run"))
  other.run_dir = str(stopped.parent / "new")
  for config, name in ((config_of(stopped), "run_dir"), (other, "init_from")):
    with unchanged(stopped):
      refused(Trainer(config).run, f"`{name}`", "finite",
              kinds=CheckpointError)  # fmt: skip


@pytest.mark.slow
def test_what_a_checkpoint_says_of_a_run(whole):
  file = whole / "run" / "checkpoints" / "8" / "about" / "metadata"
  # Older checkpoints, which runs continue from, do not say these two.
  about = json.loads(file.read_text()).keys()
  assert about == trainer_module._ABOUT | {"tensor", "site"}
