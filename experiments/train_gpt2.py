r"""Trains GPT-2, or another task, with a chosen reducer.

  python experiments/train_gpt2.py --config=configs/gpt2_tiny.py
  python experiments/train_gpt2.py --config=configs/gpt2_tiny.py:powersgd \
      --config.powersgd.rank=8 --config.steps=100 --config.run_dir=/tmp/run
"""

import pathlib
import shlex
import sys
from typing import Any

# `configs` and `experiments` are not installed packages.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ml_collections import ConfigDict

from experiments.trainer.reporting import key_numbers, run_page
from experiments.trainer.runs.checkpoints import CheckpointError
from experiments.trainer.runs.storage import RunInUse, StorageError
from experiments.trainer.runtime import command_line, hosts
from experiments.trainer.runtime.refusals import refusals
from experiments.trainer.runtime.stop_signals import TrainingInterrupted
from experiments.trainer.training import checks
from experiments.trainer.training.trainer import Trainer, TrainingStopped


def main(config: ConfigDict) -> None:
  """Trains on the devices that there are."""
  with refusals():
    checks.fit_devices(config)
  train(config)


def train(config: ConfigDict) -> None:
  """Trains, or prints the summary if the run is already finished."""
  with refusals(CheckpointError):
    trainer = Trainer(config)
  summary = trainer.folder.summary()
  try:
    if summary is not None:
      hosts.say("This run is finished; another --config.run_dir begins one.")
    else:
      hosts.say(f"run folder: {trainer.folder.name}")
      summary = _run(trainer)
    if hosts.is_first():
      try:
        run_page.write_report([trainer.folder.path])
      except ValueError as error:  # a damaged line of the log
        sys.exit(f"error: {error}")
      trainer.folder.storage.upload()
  except (TrainingStopped, CheckpointError, RunInUse, StorageError) as error:
    sys.exit(f"error: {error}")
  except OSError as error:
    if isinstance(error, TimeoutError):  # another process failed
      raise
    sys.exit(
      "error: `run_dir` must be a folder that can be read and written, got"
      f" {trainer.folder.name} ({error}); give the same command again once that"
      " is possible."
    )
  except TrainingInterrupted as stop:
    if hosts.is_first():
      command = shlex.join([sys.executable, *sys.argv])
      print(f"{stop} Resume with the same command:\n  {command}", flush=True)
    sys.exit(128 + stop.signal)  # as shells report a signal
  if not hosts.is_first():
    return
  print(key_numbers.summary_table(summary))
  print(f"run folder: {trainer.folder.name} (see report.html, report.png)")


def _run(trainer: Trainer) -> dict[str, Any]:
  """Trains, and returns the summary; the page says why a run stopped."""
  path = trainer.folder.path
  try:
    return trainer.run(run_page.LivePage(path).update)
  except TrainingStopped:
    if hosts.is_first():
      run_page.LivePage(path).update()
      trainer.folder.upload()
    hosts.wait_for_all("stopped")
    raise


if __name__ == "__main__":
  command_line.run(main)
