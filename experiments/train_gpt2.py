"""Trains GPT-2 with the reducer of your choice.

  python experiments/train_gpt2.py --config=configs/gpt2_tiny.py
  python experiments/train_gpt2.py --config=configs/gpt2_tiny.py:powersgd \
      --config.powersgd.rank=8 --config.steps=100 --config.run_dir=/tmp/run
"""

import os
import pathlib
import sys

# `configs` and `experiments` lie in the repository, and are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
from absl import app, flags
from ml_collections import config_flags

from experiments import report
from experiments.trainer import Trainer

_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file in configs/, with :REDUCER behind it if you like."
)


def main(argv: list[str]) -> None:
  """Trains, or shows the table of a run that is finished."""
  if len(argv) > 1:
    sys.exit(f"error: unknown arguments {argv[1:]}; options begin with --.")
  config = _CONFIG.value
  if not _devices_are_chosen():
    # Only the CPU platform heeds this: replicas on one machine's cores.
    jax.config.update("jax_num_cpu_devices", max(1, config.mesh.data))
  try:
    trainer = Trainer(config)
  except (ValueError, TypeError, OSError) as error:
    sys.exit(f"error: {error}")
  summary = trainer.folder.summary()
  if summary is None:
    summary = trainer.run()
  print(report.summary_table(summary))
  print(f"run folder: {trainer.folder.path} (see report.png, report.html)")


def _devices_are_chosen() -> bool:
  """Whether the user says how many CPU devices there are."""
  in_flags = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
  return in_flags or "JAX_NUM_CPU_DEVICES" in os.environ


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  app.run(main)
