"""Writes a page with interactive charts of one or several training runs.

  python experiments/report.py RUN [RUN ...]

writes `report.html` and `report.png` into the run's folder, or, for several
runs, into the current directory. It can be called during a run. A run folder
may be in a bucket (`s3://BUCKET/RUN`).
"""

import pathlib
import sys
from collections.abc import Sequence

# `experiments` is not an installed package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app

from experiments.trainer.reporting import run_page
from experiments.trainer.runs.storage import storage_of
from experiments.trainer.runtime.refusals import refusals


def main(argv: Sequence[str]) -> None:
  """Writes the report of the runs that the command line names.

  Args:
    argv: The program's name and the run folders.

  Raises:
    app.UsageError: if no run is named.
  """
  if len(argv) < 2:
    raise app.UsageError("give at least one run folder")
  with refusals():
    runs = [storage_of(run, with_checkpoints=False) for run in argv[1:]]
    page = run_page.write_report([run.path for run in runs])
    if len(runs) == 1:
      runs[0].upload()
      page = f"{argv[1].rstrip('/')}/{page.name}"  # not of the local copy
    print(page)


if __name__ == "__main__":
  app.run(main)
