"""Runs the methods of a study with several seeds and writes what came out.

  python experiments/compare.py --study=configs/studies/methods.py

`study/study.py` says what a study is. One run after the other, each a process
of its own; what is finished is recorded in --records and not run again, so the
same command goes on where it was cut off, on another machine, too. A run that
fails is reported and run again next time. With --nowait the page is written of
the records that are there, with --fresh all are forgotten first.

The page is docs/<study>.md (docs/results.md for the study `methods`), with
pictures and a table of all runs as <study>.csv beside it.
"""

import pathlib
import sys

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from experiments.study import comparison, page, plots
from experiments.study import study as studies
from experiments.study.records import Records
from experiments.study.runner import Runner
from experiments.study.study import Study

_STUDY = flags.DEFINE_string("study", None, "A file in configs/studies/.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_RUNS = flags.DEFINE_string("runs", "runs/compare", "Where the runs go.")
_RECORDS = flags.DEFINE_string(
  "records", "docs/runs", "Where a folder of records is kept for each study."
)
_OUTPUT = flags.DEFINE_string("output", "", "The page; else by the study.")
_WAIT = flags.DEFINE_bool("wait", True, "Run what is missing.")
_FRESH = flags.DEFINE_bool("fresh", False, "Forget finished runs first.")


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes the page."""
  del argv
  try:
    study = studies.load(_STUDY.value)
    output = _output_of(study)
    page.require_own(output)
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
  pictures = plots.write(found, output.parent)
  print(page.write(found, output, pictures, _command()))
  for row, seed, error in found.failures:
    print(f"failed: {row}, seed {seed}: {error}", file=sys.stderr)
  if _WAIT.value and found.failures:
    sys.exit(1)


def _output_of(study: Study) -> pathlib.Path:
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
