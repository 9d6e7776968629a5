"""Checkpoints of runs: runs that go on after damage, refusals, retention."""

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

from experiments.trainer.runs.checkpoints import CheckpointError, Checkpoints
from experiments.trainer.runs.storage import RunInUse
from experiments.trainer.training.trainer import Trainer

pytestmark = pytest.mark.slow

# All backends write such files; tests/runs/exact_resume_test.py has the others.
config_of = functools.partial(cut_runs.config_of, backend="vmap")
run = functools.partial(cut_runs.run, compiles=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return whole_runs(tmp_path_factory.mktemp("whole"))


def empty(folder):
  for file in folder.rglob("*"):
    if file.is_file():
      file.write_bytes(b"")


def test_a_run_continues_from_the_one_before(tmp_path, whole):
  config = config_of(tmp_path / "run", "allreduce")
  trainer = run(config, cut_after=7)
  empty(trainer.folder.checkpoints / "6")
  trainer = run(config)
  assert lines_of(trainer) == lines_of(whole("allreduce", "vmap"))
  assert (trainer.folder.checkpoints / "damaged-6").is_dir()


def test_repeated_damage_gets_another_name(tmp_path):
  config = config_of(tmp_path / "run", "allreduce")
  for step in (5, 7):
    trainer = run(config, cut_after=step)
    folder = trainer.folder.checkpoints
    shutil.copytree(folder / "4", folder / "2", dirs_exist_ok=True)
    empty(folder / "2")
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
