"""Trains several runs as one program; `run_study.py --together` starts it.

  python experiments/lab/train_together.py --runs=FILE

FILE holds a JSON list of whole configurations, which differ in the numbers of
`experiments/lab/study/together.py` alone and name a `run_dir` each.
"""

import pathlib
import sys

# `configs` and `experiments` are not installed packages.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from absl import app, flags
from ml_collections import ConfigDict

from experiments.lab.study import together
from experiments.trainer.runtime.json_files import read_json
from experiments.trainer.runtime.refusals import refusals

_RUNS = flags.DEFINE_string("runs", None, "A JSON file of configurations.")


def main(argv: list[str]) -> None:
  """Trains the runs."""
  del argv
  with refusals():
    train = together.prepare(_read(_RUNS.value))
  train()


def _read(path: str) -> list[ConfigDict]:
  """Reads the configurations of a file."""
  found = read_json(path, "--runs", "run_study.py writes it again", list)
  if not all(isinstance(each, dict) for each in found):
    raise ValueError(
      f"`--runs` must name a file with a list of configurations, got {path}"
      " with other values; run_study.py writes it again."
    )
  return [ConfigDict(each) for each in found]


if __name__ == "__main__":
  flags.mark_flag_as_required("runs")
  app.run(main)
