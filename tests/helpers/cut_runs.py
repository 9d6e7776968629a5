"""Runs that are cut off after a step in this process, and their results."""

import functools
import json
import struct

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from experiments.trainer.parallel import backends
from experiments.trainer.runtime.stop_signals import StopSignals
from experiments.trainer.training.trainer import Trainer
from helpers.small_runs import small

CLOCK = (
  "seconds", "step_seconds", "tokens_per_second", "images_per_second",
  "peak_memory_bytes",
)  # fmt: skip


# Keys of a configuration that its training step does not depend on.
_OF_A_RUN = ("run_dir", "checkpoint", "resume", "init_from")
_MOST = 8  # backends that are kept
_make = backends.make
_made = {}  # by configuration


class CutOff(Exception):
  """Stands for a kill of the process."""


def config_of(folder, reducer, backend="pmap", **options):
  config = small(folder, reducer)
  config.mesh.backend = backend
  config.checkpoint.update(every=2, keep=100)
  config.update(options)
  return config


def _key(config):
  own = {k: v for k, v in config.to_dict().items() if k not in _OF_A_RUN}
  return json.dumps(own)


def _make_or_take(config, *others):
  """Takes the backend of an earlier run, if there is one."""
  return _made.get(_key(config)) or _make(config, *others)


def run(config, cut_after=None, compiles=None):
  """Returns the trainer after a run, which `cut_after` may cut off.

  Args:
    config: Its configuration.
    cut_after: The step after which it is cut off; None for a whole run.
    compiles: Whether it compiles its own step, as in a process of its own, or
      takes the step of an earlier run with its configuration. By default whole
      runs compile.
  """
  assert config.reducer != "auto", "measuring makes backends, too"
  if compiles is None:
    compiles = cut_after is None
  with pytest.MonkeyPatch.context() as patch:
    if not compiles:
      patch.setattr(backends, "make", _make_or_take)
    trainer = Trainer(config)
  _made[_key(config)] = trainer.parallel
  for oldest in [*_made][:-_MOST]:
    del _made[oldest]
  if cut_after is None:
    trainer.run()
    return trainer

  def wants_stop(self, step):
    if step == cut_after:
      trainer.checkpoints.wait()
      raise CutOff
    return False

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(StopSignals, "wants_stop", wants_stop)
    with pytest.raises(CutOff):
      trainer.run()
  return trainer


def lines_of(trainer):
  text = (trainer.folder.path / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  return [{k: v for k, v in x.items() if k not in CLOCK} for x in lines]


def tensorboard_of(trainer):
  """Returns {(tag, step): value} of all TensorBoard files of the run."""
  shown = {}
  for file in sorted(trainer.folder.path.glob("events.out.tfevents.*")):
    data = file.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      event = event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      for value in event.summary.value:
        assert (value.tag, event.step) not in shown
        shown[value.tag, event.step] = value.simple_value
  return {k: v for k, v in shown.items() if k[0] not in CLOCK}


def newest(trainer):
  """Returns step and arrays of the newest checkpoint."""
  step, about = trainer.checkpoints.newest()
  shapes = trainer.parallel.stored.template(about["replicas"])
  trees = trainer.checkpoints.load(step, shapes)
  return step, jax.tree.map(np.asarray, trees)


def whole_runs(folder):
  """Returns a cache of uninterrupted runs by reducer and backend."""
  return functools.cache(
    lambda reducer, backend: run(
      config_of(folder / f"{reducer}-{backend}", reducer, backend)
    )
  )
