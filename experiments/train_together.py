"""Trains several runs as one program; `run_study.py --together` starts it.

  python experiments/train_together.py --runs=FILE

FILE holds a JSON list of whole configurations, which differ in the numbers of
`experiments/training/together.py` alone and name a `run_dir` each.
"""

import json
import pathlib
import sys

# `configs` and `experiments` are not installed packages.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags
from ml_collections import ConfigDict

from experiments.runtime.refusals import refusals
from experiments.training.together import train_together

_RUNS = flags.DEFINE_string("runs", None, "A JSON file of configurations.")


def main(argv: list[str]) -> None:
  """Trains the runs."""
  del argv
  with refusals():
    train_together(_read(_RUNS.value))


def _read(path: str) -> list[ConfigDict]:
  """Reads the configurations of a file."""
  try:
    return [ConfigDict(each) for each in json.loads(open(path).read())]
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"`--runs` must name a JSON file with a list of configurations, got"
      f" {path!r} ({error}); run_study.py writes such files."
    ) from error


if __name__ == "__main__":
  flags.mark_flag_as_required("runs")
  app.run(main)
