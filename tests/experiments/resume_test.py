"""Checkpoints of runs: damage, refusals, retention."""

import functools
import json
import os
import shutil
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import cut_runs
from helpers.cut_runs import lines_of, newest, tensorboard_of, whole_runs
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.handlers import json_checkpoint_handler

from experiments.runs.checkpoints import CheckpointError, Checkpoints
from experiments.runs.storage import RunInUse
from experiments.training import trainer as trainer_module
from experiments.training.trainer import Trainer

pytestmark = pytest.mark.slow

# All backends write such files; tests/runs/exact_resume_test.py has the others.
config_of = functools.partial(cut_runs.config_of, backend="vmap")
run = functools.partial(cut_runs.run, compiles=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return whole_runs(tmp_path_factory.mktemp("whole"))


class Damage:
  def newest(folder):
    return max(folder.glob("[0-9]*"), key=lambda path: int(path.name))

  def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())

  def flipped(folder):
    """Flips a bit in the middle of the largest file."""
    file = max(Damage.files(folder), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

  def truncated(folder):
    file = max(Damage.files(folder), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])

  def missing(folder):
    (folder / "about" / "metadata").unlink()

  def without_sums(folder):
    (folder / "sha256.json").unlink()

  def emptied(folder):
    for file in Damage.files(folder):
      file.write_bytes(b"")


@pytest.mark.parametrize(
  "damage",
  [Damage.flipped, Damage.truncated, Damage.missing, Damage.without_sums,
   Damage.emptied],
)  # fmt: skip
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
  tmp_path, whole, damage, capfd
):
  expected = whole("allreduce", "vmap")
  folder = tmp_path / "checkpoints"
  shutil.copytree(expected.folder.checkpoints, folder)
  damage(Damage.newest(folder))
  step, about = Checkpoints(folder, 2).newest()
  assert (step, about["log"]["step"]) == (6, 6)
  assert "step 8 is damaged" in capfd.readouterr().err


def test_a_run_continues_from_the_one_before(tmp_path, whole):
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=7)
  Damage.truncated(Damage.newest(trainer.folder.checkpoints))
  trainer = run(config)
  assert lines_of(trainer) == lines_of(whole("allreduce", "vmap"))
  assert (trainer.folder.checkpoints / "damaged-6").is_dir()


def test_repeated_damage_gets_another_name(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  for step in (5, 7):
    trainer = run(config, cut_after=step)
    folder = trainer.folder.checkpoints
    shutil.copytree(folder / "4", folder / "2", dirs_exist_ok=True)
    Damage.emptied(folder / "2")
  trainer = run(config)
  assert newest(trainer)[0] == config.steps
  names = {path.name for path in trainer.folder.checkpoints.iterdir()}
  assert names >= {"damaged-2", "damaged-2-2", "8"} and "2" not in names


def test_lost_events_are_written_again(tmp_path, whole):
  """A killed process loses the buffers of its event file."""
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=5)
  for file in trainer.folder.path.glob("events.out.tfevents.*"):
    file.write_bytes(b"")
  trainer = run(config)
  assert tensorboard_of(trainer) == tensorboard_of(whole("allreduce", "vmap"))


def test_other_data_raises(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  text = tmp_path / "text.txt"
  text.write_text(str(list(range(2000))))
  config.data.path = str(text)
  run(config, cut_after=3)
  text.write_text(str(list(range(2001))))
  with pytest.raises(ValueError, match=r"`data.path` must hold .* began"):
    Trainer(config)


def test_only_damaged_checkpoints_raise(tmp_path, whole):
  folder = tmp_path / "checkpoints"
  shutil.copytree(whole("allreduce", "vmap").folder.checkpoints, folder)
  for path in folder.glob("[0-9]*"):
    Damage.truncated(path)
  with pytest.raises(CheckpointError, match=r"All checkpoints in .*another"):
    Checkpoints(folder, 2).newest()


def test_a_failed_write_stops_the_run(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=3)
  before = newest(trainer)[0]
  # A file takes the place of the folder of the next ones.
  blocked = Trainer(config)
  load = blocked._load

  def load_and_block():
    found = load()
    blocked.checkpoints.path = tmp_path / "a_file"
    blocked.checkpoints.path.write_text("")
    return found

  blocked._load = load_and_block
  with pytest.raises(
    CheckpointError, match=r"could not be written to .*a_file"
  ):
    blocked.run()
  assert newest(run(config))[0] == config.steps > before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_stops_the_run(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=3)
  trainer.folder.checkpoints.chmod(0o500)
  with pytest.raises(CheckpointError, match="could not be written to"):
    run(config)
  trainer.folder.checkpoints.chmod(0o700)
  assert newest(run(config))[0] == config.steps


def test_states_of_an_earlier_version_are_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(trainer_module, "STATE_VERSION", 1)
  run(config_of(tmp_path / "run", "allreduce"), cut_after=3)
  monkeypatch.undo()
  message = rf"`run_dir`.*version {trainer_module.STATE_VERSION}.*init_from="
  with pytest.raises(ValueError, match=message):
    Trainer(config_of(tmp_path / "run", "allreduce"))


@pytest.mark.parametrize("cut_after", [1, 3, None])
def test_resume_can_be_refused(tmp_path, cut_after):
  """The run has a line, or a checkpoint, or is finished."""
  run(config_of(tmp_path / "run", "allreduce"), cut_after=cut_after)
  with pytest.raises(ValueError, match=r"resume=false, got .* holds a run"):
    Trainer(config_of(tmp_path / "run", "allreduce", resume=False))


def test_two_starts_in_one_folder(tmp_path, whole):
  config = config_of(tmp_path / "run", "allreduce")
  first = Trainer(config)
  first.folder.lock()
  with pytest.raises(RunInUse, match=f"where process {os.getpid()} on"):
    Trainer(config).run()
  first.folder.close()
  assert lines_of(run(config)) == lines_of(whole("allreduce", "vmap"))


def test_a_start_that_read_an_older_state(tmp_path):
  """As if the same command were given while the first one still saves."""
  config = config_of(tmp_path / "run", "allreduce")
  late = Trainer(config)
  run(config, cut_after=3)
  with pytest.raises(RunInUse, match="another process has written since"):
    late.run()


@pytest.mark.parametrize(
  "name, text", [("config.json", '{"steps"'), ("summary.json", "")]
)
def test_damaged_files_of_the_folder(tmp_path, whole, name, text):
  folder = tmp_path / "run"
  shutil.copytree(whole("allreduce", "vmap").folder.path, folder)
  (folder / name).write_text(text)
  with pytest.raises(ValueError, match=f"{name}, which is damaged.*restore"):
    Trainer(config_of(folder, "allreduce"))
  (folder / "config.json").unlink()
  with pytest.raises(FileExistsError, match=r"config.json is missing; restore"):
    Trainer(config_of(folder, "allreduce"))


def test_lost_lines_are_reported(tmp_path, whole, capfd):
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=5)
  file = trainer.folder.path / "metrics.jsonl"
  lines = file.read_text().splitlines(keepends=True)
  file.write_text(lines[0] + "\0" * 80 + "\n")
  run(config)
  assert "has lost its lines from step 1 to 4" in capfd.readouterr().err
  found = lines_of(trainer)
  steps = [line["step"] for line in lines_of(whole("allreduce", "vmap"))]
  assert [line["step"] for line in found] == [1, *(s for s in steps if s > 4)]


def test_another_model_raises(tmp_path):
  run(config_of(tmp_path / "run", "allreduce"), cut_after=3)
  config = config_of(tmp_path / "run", "allreduce")
  config.model.width = 64
  with pytest.raises(ValueError, match=r"model.width is 32 and not 64"):
    Trainer(config)


def test_parameters_alone(tmp_path, whole, capsys):
  """Another reducer starts from the parameters of a finished run."""
  first = whole("allreduce", "vmap")
  config = config_of(tmp_path / "run", "quantize", backend="jit")
  config.init_from = str(first.folder.path)
  config.steps = 1
  trainer = run(config)
  loss = first.folder.summary()["train_loss"]
  assert abs(lines_of(trainer)[0]["loss"] - loss) < 0.2
  assert lines_of(first)[0]["loss"] > loss + 0.2
  said = f"the parameters of {first.folder.path} after step "
  assert said + str(first.folder.summary()["steps"]) in capsys.readouterr().out
  assert trainer.folder.summary()["steps"] == 1


def test_parameters_of_another_model(tmp_path, whole):
  config = config_of(tmp_path / "run", "allreduce")
  config.init_from = str(whole("allreduce", "vmap").folder.path)
  config.model.width = 64
  with pytest.raises(CheckpointError, match=r"`init_from`.*shape \(1, 96\)"):
    Trainer(config)


def pretend(monkeypatch, **about):
  """Changes what checkpoints say of their run."""
  newest = Checkpoints.newest

  def other(self):
    found = newest(self)  # None in the folder of a new run
    return found and (found[0], {**found[1], **about})

  monkeypatch.setattr(Checkpoints, "newest", other)


def test_simulated_replicas_take_no_state_of_shards(tmp_path, monkeypatch):
  config = config_of(tmp_path / "run", "allreduce")
  run(config, cut_after=3)
  pretend(monkeypatch, shards=2)
  with pytest.raises(ValueError, match=r"`mesh.backend` must be .*jit where"):
    Trainer(config)


def test_parameters_of_other_tensor_shards(tmp_path, whole, monkeypatch):
  """They lie in another order, in arrays of the same shapes."""
  config = config_of(tmp_path / "run", "allreduce")
  config.init_from = str(whole("allreduce", "vmap").folder.path)
  pretend(monkeypatch, tensor=2)
  with pytest.raises(CheckpointError, match=r"They are of mesh.tensor=2\."):
    Trainer(config)


def test_parameters_of_no_run(tmp_path):
  config = config_of(tmp_path / "run", "allreduce", init_from=str(tmp_path))
  with pytest.raises(CheckpointError, match=r"`init_from` must be .* got"):
    Trainer(config)
  assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_a_snapshot(tmp_path, monkeypatch):
  """The writing thread may run several steps later."""
  may_write = threading.Event()

  class Late:
    loads = json.loads

    def dumps(x):
      may_write.wait(30)
      return json.dumps(x)

  monkeypatch.setattr(json_checkpoint_handler, "json", Late)
  checkpoints = Checkpoints(tmp_path, keep=2)
  losses, trees = [1.0], {"params": {"w": np.ones(3)}}
  checkpoints.save(1, trees, {"log": {"losses": losses}}, None)
  losses.append(2.0)
  may_write.set()
  checkpoints.close()
  assert Checkpoints(tmp_path, 2).newest() == (1, {"log": {"losses": [1.0]}})


def test_saving_compiles_no_program(tmp_path):
  mesh = jax.make_mesh((4,), ("data",))
  everywhere = NamedSharding(mesh, PartitionSpec())
  arrays = {
    str(size): jax.device_put(np.ones((size, 4)), everywhere)
    for size in (16, 24)
  }
  compiled = []

  def note(event, seconds, **about):
    if event == "/jax/core/compile/backend_compile_duration":
      compiled.append(about)

  # Others in this process may write keys, which need more than this handler.
  of_others = ocp.type_handlers.get_type_handler(jax.Array)
  jax.monitoring.register_event_duration_secs_listener(note)
  try:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {"params": arrays}, {}, None)
    checkpoints.close()
  finally:
    jax.monitoring.unregister_event_duration_listener(note)
  assert Checkpoints(tmp_path, 2).newest() == (1, {})
  assert not compiled
  assert ocp.type_handlers.get_type_handler(jax.Array) is of_others


def test_only_the_newest_and_the_best_are_kept(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  config.checkpoint.update(every=1, keep=2)
  config.evaluation.every = 2
  trainer = run(config)
  losses = {
    line["step"]: line["val_loss"]
    for line in lines_of(trainer) if "val_loss" in line
  }  # fmt: skip
  best = min(losses, key=losses.get)
  assert trainer.checkpoints.steps() == sorted({8, 7, best}, reverse=True)
