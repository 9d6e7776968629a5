"""Makes the runs of a study, one after the other, and records them.

Each is a process of its own. What is recorded is not run again; a run that
failed is.
"""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

from experiments.study.records import Records, numbers_of
from experiments.study.study import Run, Study

_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Runner:
  """Makes the runs of a study that are not recorded yet."""

  def __init__(
    self, study: Study, records: Records, seeds: Sequence[str], folder: str
  ):
    """Plans all runs, a seed at a time: all methods grow together.

    Args:
      study: What to run.
      records: Of what was run.
      seeds: With each of which every row is run.
      folder: Where run folders go.
    """
    self._study, self._records = study, records
    self._folder = pathlib.Path(folder) / study.name
    self._plan = [
      (row, seed, is_beside)
      for seed in seeds
      for row in study.rows
      for is_beside in (False, True)[: 1 + study.has_beside(row)]
    ]

  def run(self) -> None:
    """Runs what is missing, one after the other, and records it."""
    for number, (row, seed, is_beside) in enumerate(self._plan, 1):
      run = self._run_of(row, seed, is_beside)
      if run is None or self._records.finished(run):
        continue
      left = self._time_left(self._plan[number - 1 :])
      print(
        f"--- run {number} of {len(self._plan)}: {run.row}, seed {seed}{left}",
        flush=True,
      )
      error = _execute(self._command(run))
      try:
        numbers = {"error": error} if error else numbers_of(self._path(run))
      except (OSError, ValueError) as damage:
        numbers = {"error": str(damage)}
      self._records.write(run, numbers)

  def forget(self) -> None:
    """Removes what was recorded of the runs, and their folders."""
    # Those beside first: which they are follows from what they are beside.
    for row, seed, is_beside in sorted(self._plan, key=lambda p: not p[2]):
      run = self._run_of(row, seed, is_beside)
      if run:
        shutil.rmtree(self._path(run), ignore_errors=True)
        self._records.remove(run)

  def _run_of(self, row: str, seed: str, is_beside: bool) -> Run | None:
    """None where it is not known yet what sends the same bytes."""
    run = self._study.run(row, seed)
    if not is_beside:
      return run
    record = self._records.finished(run)
    try:
      return record and self._study.run_beside(run, record)
    except ValueError:  # no rank does; the page says so
      return None

  def _time_left(self, plan: Sequence[tuple[str, str, bool]]) -> str:
    """From the mean of the runs that are recorded."""
    records = {}
    for planned in self._plan:
      run = self._run_of(*planned)
      records[planned] = run and self._records.finished(run)
    seconds = [r["seconds"] for r in records.values() if r]
    if not seconds:
      return ""
    count = sum(not records[planned] for planned in plan)
    return f"; {about(count * sum(seconds) / len(seconds))} left"

  def _path(self, run: Run) -> pathlib.Path:
    """A folder belongs to one configuration, hence the digest."""
    return self._folder / f"{run.name}-{self._study.digest(run)[:8]}"

  def _command(self, run: Run) -> Sequence[str]:
    """The command line of one run; it ends at once where it was run before."""
    settings = dict(run.settings)
    reducer = settings.pop("reducer")
    return [
      sys.executable,
      str(_ROOT / "experiments" / "train_gpt2.py"),
      f"--config={self._study.config}:{reducer}",
      f"--config.seed={run.seed}",
      f"--config.run_dir={self._path(run)}",
      *(f"--config.{key}={value}" for key, value in settings.items()),
    ]


def about(seconds: float) -> str:
  """A time for people, such as "about 2 h 10 min"."""
  minutes = max(1, round(seconds / 60))
  hours, minutes = divmod(minutes, 60)
  parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes)
  return f"about {' '.join(parts)}"


def _execute(command: Sequence[str]) -> str:
  """Runs a command and returns the last line of its error, or nothing."""
  last = ""
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    try:
      for line in process.stderr:
        sys.stderr.write(line)
        last = line.strip() or last
      code = process.wait()
    except KeyboardInterrupt:
      process.wait()  # it was told, too, and saves what it can
      raise
  # Records are for others, who have other folders.
  last = last.replace(f"{_ROOT}/", "").replace(f"{pathlib.Path.home()}/", "~/")
  return f"exit code {code}: {last}"[:300] if code else ""
