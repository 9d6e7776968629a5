"""Starts the runs of a study, one after the other, and records them.

Each run is a separate process. Recorded runs are not repeated; failed runs are.
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
  """A plan of a study's runs, and the folders and records they go to."""

  def __init__(
    self, study: Study, records: Records, seeds: Sequence[str], folder: str
  ):
    """Plans all runs, seed by seed, so that all rows progress together.

    Args:
      study: The study to run.
      records: Its records, to read and to write.
      seeds: Seeds of every row.
      folder: Parent of the run folders.
    """
    self._study, self._records = study, records
    self._folder = pathlib.Path(folder) / study.name
    self._plan = [
      (row, seed, is_matched)
      for seed in seeds
      for row in study.rows
      for is_matched in (False, True)[: 1 + study.has_match(row)]
    ]

  def run(self) -> None:
    """Starts the missing runs, one after the other, and records them."""
    for number, (row, seed, is_matched) in enumerate(self._plan, 1):
      run = self._run_of(row, seed, is_matched)
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
    """Deletes the records and folders of all runs."""
    # Matched runs first, because they depend on the records of the others.
    for row, seed, is_matched in sorted(self._plan, key=lambda p: not p[2]):
      run = self._run_of(row, seed, is_matched)
      if run:
        shutil.rmtree(self._path(run), ignore_errors=True)
        self._records.remove(run)

  def _run_of(self, row: str, seed: str, is_matched: bool) -> Run | None:
    """Returns a planned run; None for a match whose rank is not known yet."""
    run = self._study.run(row, seed)
    if not is_matched:
      return run
    record = self._records.finished(run)
    try:
      return record and self._study.matched_run(run, record)
    except ValueError:  # no rank sends the same; the page reports it
      return None

  def _time_left(self, plan: Sequence[tuple[str, str, bool]]) -> str:
    """Estimates the time of the missing runs from the recorded ones."""
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
    """Returns the run's folder; its name has the configuration's digest."""
    return self._folder / f"{run.name}-{self._study.digest(run)[:8]}"

  def _command(self, run: Run) -> Sequence[str]:
    """Returns the command of a run; it ends at once if the run is finished."""
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
  """Formats a time, such as "about 2 h 10 min"."""
  minutes = max(1, round(seconds / 60))
  hours, minutes = divmod(minutes, 60)
  parts = [f"{hours} h"] * bool(hours) + [f"{minutes} min"] * bool(minutes)
  return f"about {' '.join(parts)}"


def _execute(command: Sequence[str]) -> str:
  """Runs a command; returns its exit code and last error line, or ""."""
  last = ""
  with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
    try:
      for line in process.stderr:
        sys.stderr.write(line)
        last = line.strip() or last
      code = process.wait()
    except KeyboardInterrupt:
      process.wait()  # it got the same signal, and saves its state
      raise
  # Records are committed, so they must not contain paths of this machine.
  last = last.replace(f"{_ROOT}/", "").replace(f"{pathlib.Path.home()}/", "~/")
  return f"exit code {code}: {last}"[:300] if code else ""
