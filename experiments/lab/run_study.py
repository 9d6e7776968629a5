"""Runs what a study lacks, and records it; `make pages` makes the tables.

  python experiments/lab/run_study.py --study=configs/protocol/table.py --jobs=2

`experiments/lab/study/study.py` describes the file of a study. Finished runs
are recorded in --records and not repeated, so the same command continues an
interrupted study, on another machine, too. A run that diverged is recorded as
such, and repeated with --retry; one that failed begins again with the next
call. --renew repeats judged runs of an older version of their method; their new
records take the place of the old. On a cluster, --slurm submits runs as jobs:

  --jobs=16 --slurm="slurm_partition=gpu gpus_per_node=1 timeout_min=60"

On a GPU, which one small run does not fill, --together=16 runs up to 16 that
differ in seed, rates or momentum alone as one program; it tunes on a grid.

Several --study are run by one pool of processes, the first one's runs first.
--minutes is for a machine that is lent: no run starts after them.

Ctrl-C has the runs save first. SIGTERM to this process alone leaves them
running; the next call records what they finish.

Machines that share no disk take different arms (--arms="dense|quantize"); a
fixed rank that matches edgc's bytes belongs with edgc and its partner.
"""

import math
import pathlib
import sys

# `configs` and `experiments` are not installed packages.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from absl import app, flags

from experiments import ROOT
from experiments.lab.study import runner, study
from experiments.lab.study.records import Records
from experiments.trainer.runtime.refusals import refusals, require_pattern

_STUDIES = flags.DEFINE_multi_string("study", None, "A study's file.")
_RUNS = flags.DEFINE_string("runs", "runs/studies", "Parent of run folders.")
_RECORDS = flags.DEFINE_string(
  "records", str(ROOT / "results/records"), "The records."
)
_ARMS = flags.DEFINE_string("arms", "", "A regular expression of arms to run.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Processes at once.", lower_bound=1)
_TOGETHER = flags.DEFINE_integer(
  "together", 1, "Runs of one process, at most.", lower_bound=1
)
_LIMIT = flags.DEFINE_integer(
  "limit", None, "Runs to start, at most.", lower_bound=0
)
_MINUTES = flags.DEFINE_float(
  "minutes", math.inf, "Minutes after which no run starts.", lower_bound=0.0
)
_SLURM = flags.DEFINE_string("slurm", "", "Parameters of submitit, for SLURM.")
_RENEW = flags.DEFINE_bool(
  "renew", False, "Repeat judged runs of older versions; remove their folders."
)
_RETRY = flags.DEFINE_bool("retry", False, "Repeat runs that diverged.")


def main(argv: list[str]) -> None:
  """Starts the missing runs."""
  del argv
  with refusals():
    studies = [study.load(file) for file in _STUDIES.value]
    for found in studies:
      found.require_settings()
    arms = [arm for found in studies for arm in found.all_arms]
    require_pattern("arms", _ARMS.value, arms)
    runner.slurm_parameters(_SLURM.value)
    records = Records(_RECORDS.value)
  if _RETRY.value:
    records.forget_diverged()
  failed = runner.run_all(
    studies,
    records,
    pathlib.Path(_RUNS.value),
    arms=_ARMS.value,
    jobs=_JOBS.value,
    together=_TOGETHER.value,
    renew=_RENEW.value,
    slurm=_SLURM.value,
    limit=_LIMIT.value,
    minutes=_MINUTES.value,
  )
  left = sum(1 for found in studies for _ in found.plan(records, _RENEW.value))
  if left:
    print(f"{left} runs are left that could start now")
  elif stuck := [arm for found in studies for arm in found.stuck(records)]:
    print(
      "nothing is left that could start; these arms cannot be judged, because"
      " their tuning found no best value, a run of their partner diverged, or"
      f" no rank sends its bytes: {'; '.join(stuck)}"
    )
  else:
    print("complete")
  if failed:
    sys.exit(
      f"error: {failed} runs failed, for the reasons above; the same command"
      " begins them again."
    )


if __name__ == "__main__":
  flags.mark_flag_as_required("study")
  app.run(main)
