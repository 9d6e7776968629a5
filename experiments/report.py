"""One picture and one page from the folders that training runs wrote.

  python experiments/report.py RUN [RUN ...]

writes `report.png` and `report.html` into the run's folder, or into the
current directory for several runs. It may be called while a run goes on.
"""

import pathlib
import sys
from collections.abc import Sequence

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app

from experiments.reporting import run_page


def main(argv: Sequence[str]) -> None:
  """Writes the report of the runs that the command line names.

  Args:
    argv: The program's name and the run folders.

  Raises:
    app.UsageError: No run is named.
  """
  if len(argv) < 2:
    raise app.UsageError("give at least one run folder")
  print(*run_page.write_report(argv[1:]), sep="\n")


if __name__ == "__main__":
  app.run(main)
