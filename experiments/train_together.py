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

from experiments.training.together import train_together

_RUNS = flags.DEFINE_string("runs", None, "A JSON file of configurations.")


def main(argv: list[str]) -> None:
  """Trains the runs."""
  del argv
  try:
    configs = json.loads(pathlib.Path(_RUNS.value).read_text())
    train_together([ConfigDict(each) for each in configs])
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  flags.mark_flag_as_required("runs")
  app.run(main)
