r"""Trains as `train_gpt2.py` does, with the methods of others by name, too.

It takes the mesh of the configuration, whatever devices there are.

python experiments/lab/train.py --config=configs/protocol/gpt.py:demo
"""

import pathlib
import sys

# `configs` and `experiments` are not installed packages.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import experiments.lab  # noqa: F401  (adds them)
from experiments import train_gpt2
from experiments.trainer.runtime import command_line

if __name__ == "__main__":
  command_line.run(train_gpt2.train)
