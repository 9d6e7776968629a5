"""Runs the methods of a study with several seeds and writes a page of results.

  python experiments/compare.py --study=configs/studies/methods.py

`study/study.py` describes the file of a study. Runs come one after the other,
each in a separate process. Finished runs are recorded in --records and not
repeated, so the same command resumes an interrupted study, on another machine,
too. A failed run is reported, and repeated by the next call. With --nowait the
page is made from the existing records only; --fresh first deletes them.

The page is docs/<study>.md (docs/results.md for the study `methods`). Pictures
and a table of all runs, <study>.csv, are written to the same folder.
"""

import pathlib
import sys

# `experiments` is not an installed package.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from experiments.study import comparison, page, plots
from experiments.study import study as studies
from experiments.study.records import Records
from experiments.study.runner import Runner
from experiments.study.study import Study

_STUDY = flags.DEFINE_string("study", None, "A file in configs/studies/.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of each row.")
_RUNS = flags.DEFINE_string("runs", "runs/compare", "Parent of run folders.")
_RECORDS = flags.DEFINE_string(
  "records", "docs/runs", "Parent of each study's folder of records."
)
_OUTPUT = flags.DEFINE_string(
  "output", "", "The page; by default docs/<study>.md."
)
_WAIT = flags.DEFINE_bool("wait", True, "Whether to start missing runs.")
_FRESH = flags.DEFINE_bool("fresh", False, "Delete finished runs first.")


def main(argv: list[str]) -> None:
  """Starts the missing runs, then writes the page."""
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
      f"error: `--records` must hold finished runs of the study, got"
      f" {_RECORDS.value}, which has none; leave out --nowait to start them."
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
