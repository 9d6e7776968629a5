"""Runs the methods of a study with several seeds and writes what came out.

  python experiments/compare.py --study=configs/studies/methods.py

`study` says what a study is. One run after the other, each in a process of its
own; what is finished is recorded in --records and not run again, so the same
command goes on where it was cut off, on another machine, too. A run that fails
is reported and run again next time. With --nowait the page is written of the
records that are there, with --fresh all are forgotten first.

The page is docs/<study>.md (docs/results.md for the study `methods`), with
pictures and a table of all runs as <study>.csv beside it.
"""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from experiments import comparison, comparison_page, comparison_plots
from experiments import study as studies
from experiments.records import Records, numbers_of
from experiments.study import Run, Study

_STUDY = flags.DEFINE_string("study", None, "A file in configs/studies/.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_RUNS = flags.DEFINE_string("runs", "runs/compare", "Where the runs go.")
_RECORDS = flags.DEFINE_string(
  "records", "docs/runs", "Where a folder of records is kept for each study."
)
_OUTPUT = flags.DEFINE_string("output", "", "The page; else by the study.")
_WAIT = flags.DEFINE_bool("wait", True, "Run what is missing.")
_FRESH = flags.DEFINE_bool("fresh", False, "Forget finished runs first.")

_HERE = pathlib.Path(__file__).resolve().parent


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes the page."""
  del argv
  try:
    study = studies.load(_STUDY.value)
    page = _page_of(study)
    comparison_page.require_own(page)
  except (ValueError, OSError) as error:
    sys.exit(f"error: {error}")
  records = Records(_RECORDS.value, study)
  runner = Runner(study, records, _SEEDS.value, _RUNS.value)
  if _FRESH.value:
    runner.forget()
  if _WAIT.value:
    runner.run()
  found = comparison.collect(study, records, _SEEDS.value)
  if not found.dense.runs and not any(row.runs for row in found.rows):
    sys.exit(
      f"error: `--records` must be where runs of the study are recorded, got"
      f" {_RECORDS.value}, which has none that came to an end; leave out"
      " --nowait to make them."
    )
  pictures = comparison_plots.write(found, page.parent)
  print(comparison_page.write(found, page, pictures, _command()))
  for row, seed, error in found.failures:
    print(f"failed: {row}, seed {seed}: {error}", file=sys.stderr)
  if _WAIT.value and found.failures:
    sys.exit(1)


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
      str(_HERE / "train_gpt2.py"),
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
  last = last.replace(f"{_HERE.parent}/", "").replace(
    f"{pathlib.Path.home()}/", "~/"
  )
  return f"exit code {code}: {last}"[:300] if code else ""


def _page_of(study: Study) -> pathlib.Path:
  if _OUTPUT.value:
    return pathlib.Path(_OUTPUT.value)
  name = "results" if study.name == "methods" else study.name
  return pathlib.Path("docs") / f"{name}.md"


def _command() -> str:
  seeds = f" --seeds={','.join(_SEEDS.value)}"
  default = _SEEDS.value == ["0", "1", "2"]
  return f"python experiments/compare.py --study={_STUDY.value}" + (
    "" if default else seeds
  )


if __name__ == "__main__":
  flags.mark_flag_as_required("study")
  app.run(main)
