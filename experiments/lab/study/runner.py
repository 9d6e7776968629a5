"""Runs what a study lacks, several runs at once, and records them.

Each run is a process, or some share one: on this machine, or as a job of SLURM
through submitit.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import submitit
from flax import traverse_util
from ml_collections import ConfigDict

from experiments import ROOT, from_root
from experiments.lab.study.records import Record, Records, name_of, numbers_of
from experiments.lab.study.study import Run, Study
from experiments.lab.study.together import can_share, program_of


def run_all(
  studies: Sequence[Study],
  records: Records,
  folder: pathlib.Path,
  *,
  arms: str = "",
  jobs: int = 1,
  together: int = 1,
  renew: bool = False,
  slurm: str = "",
  limit: int | None = None,
  minutes: float = math.inf,
) -> int:
  """Runs what is missing, until nothing is left to start.

  Args:
    studies: The studies; runs of the first ones come first.
    records: Their records, to read and to write.
    folder: The parent of a folder for each study, which holds run folders.
    arms: A regular expression; arms in which it is not found do not run.
    jobs: Number of processes at once.
    together: Runs of one process, at most. From 2 on, runs that can share a
      program do (`study.together`), and tuning tries values ahead.
    renew: Whether to repeat judged runs of older versions.
    slurm: Empty for this machine; otherwise parameters of submitit, such as
      "slurm_partition=gpu gpus_per_node=1 timeout_min=60".
    limit: Number of runs to start, at most.
    minutes: Time after which no run starts.

  Returns:
    The number of runs that failed; they are not recorded. A run that diverged
    has not failed.
  """
  failed = 0
  begun: set[tuple[str, str]] = set()  # runs of this call, by `_key`
  end = time.monotonic() + 60 * minutes
  running: dict[futures.Future, tuple[Study, Sequence[Run]]] = {}
  # `together` is for GPUs, whose processes need all cores while they compile.
  is_pinned = jobs > 1 and together == 1
  submit = _on_slurm(slurm, folder) if slurm else _here(jobs, is_pinned)

  # Planning takes seconds: of a study again only when its own runs have ended.
  plans: dict[str, Sequence[Run]] = {}

  def next_runs() -> tuple[Study, Sequence[Run]] | None:
    """Returns the next runs of one process, and their study."""
    for study in studies:
      if study.name not in plans:
        plans[study.name] = _waiting(study, records, arms, together, renew)
      free = [run for run in plans[study.name] if _key(run) not in begun]
      if free:
        most = together if limit is None else min(together, limit - len(begun))
        return study, _sharing(free, most)
    return None

  while True:
    while (
      len(running) < jobs and len(begun) != limit and time.monotonic() < end
    ):
      if (chosen := next_runs()) is None:
        break
      study, runs = chosen
      path_of = _path_in(folder / study.name)
      for run in runs:
        begun.add(_key(run))
        kind = "judged" if run.is_judged else "tuning"
        print(
          f"--- run {len(begun)}, {kind}: {run.arm}, {path_of(run).name}",
          flush=True,
        )
      running[submit(_command(study, runs, path_of))] = study, runs
    if not running:
      return failed
    done = _next_finished(running)
    study, runs = running.pop(done)
    try:
      error = done.result()
    except Exception as failure:  # submitit raises what became of a job
      error = f"the job ended with {type(failure).__name__}"
    path_of = _path_in(folder / study.name)
    for run in runs:
      # A run may have ended before its process failed. One that has not says
      # nothing of its settings: a full disk must not decide a learning rate.
      try:
        found = numbers_of(path_of(run))
        if not Record({"config": run.config.to_dict(), **found}).is_current:
          raise ValueError(f"{path_of(run)} is of an older version; remove it")
      except (OSError, ValueError) as damage:
        failed += 1
        print(f"    {run.arm}: not recorded: {error or damage}", flush=True)
        continue
      records.add(run.config, found)
      loss = found.get("error") or f"{found['summary']['val_loss']:.4f}"
      print(f"    {run.arm}: {loss}", flush=True)
    if running:
      plans.pop(study.name, None)
    else:
      plans.clear()  # what one study has run may have been missing in another


def _key(run: Run) -> tuple[str, str]:
  """Returns what tells a run from those of all studies."""
  return run.config.name, name_of(run.config)


def _path_in(folder: pathlib.Path) -> Callable[[Run], pathlib.Path]:
  return lambda run: folder / name_of(run.config)


def _sharing(free: Sequence[Run], most: int) -> Sequence[Run]:
  """Returns the first run, and others that can share its program."""
  first, *others = free
  if most < 2 or not can_share(first.config):
    return [first]
  program = program_of(first.config)
  runs = [first, *(r for r in others if program_of(r.config) == program)]
  return runs[:most]


def _waiting(
  study: Study, records: Records, arms: str, together: int, renew: bool
) -> Sequence[Run]:
  """Returns the runs that can start, in their order."""
  runs = list(study.plan(records, renew))
  if together > 1:
    # Whole arms first, since all of their runs take as long as one.
    runs = sorted([*runs, *study.ahead(records)], key=lambda r: not r.is_judged)
  unique: dict[str, Run] = {}
  for run in runs:
    if re.search(arms, run.arm):
      unique.setdefault(name_of(run.config), run)
  return list(unique.values())


def _command(
  study: Study,
  runs: Sequence[Run],
  path_of: Callable[[Run], pathlib.Path],
) -> list[str]:
  """Returns the command of a process."""
  if len(runs) == 1:
    return command_of(study, runs[0], path_of(runs[0]))
  file = path_of(runs[0]).with_suffix(".runs.json")
  file.parent.mkdir(parents=True, exist_ok=True)
  configs = []
  for run in runs:
    config = json.loads(run.config.to_json())
    configs.append({**config, "run_dir": str(path_of(run))})
  file.write_text(json.dumps(configs))
  return [
    sys.executable,
    str(ROOT / "experiments/lab/train_together.py"),
    f"--runs={file}",
  ]


def command_of(study: Study, run: Run, path: pathlib.Path) -> list[str]:
  """Returns the command of a run; it ends at once if the run is finished."""
  base = study.configuration({"reducer": run.config.reducer})
  own, common = (_flat(config) for config in (run.config, base))
  return [
    sys.executable,
    str(ROOT / "experiments/lab/train.py"),
    f"--config={pathlib.Path(from_root(study.config)).resolve()}:{run.config.reducer}",
    f"--config.run_dir={path}",
    *(
      f"--config.{key}={value}"
      for key, value in own.items()
      if value != common[key]
    ),
  ]


def _flat(config: ConfigDict) -> dict[str, Any]:
  return traverse_util.flatten_dict(config.to_dict(), sep=".")


def _execute(command: list[str], cores: set[int] | None = None) -> str:
  """Runs a command; returns its exit code and last error line, or ""."""
  last = ""
  with subprocess.Popen(
    command,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    errors="replace",
  ) as process:
    if cores:  # before it starts threads
      os.sched_setaffinity(process.pid, cores)
    for line in process.stderr or ():
      last = line.strip() or last
    code = process.wait()
  return f"exit code {code}: {last}"[:300] if code else ""


def _here(jobs: int, is_pinned: bool) -> Callable[[list[str]], futures.Future]:
  """Runs commands on this machine, each on its share of the cores if pinned."""
  pool = futures.ThreadPoolExecutor(jobs)
  cores = sorted(os.sched_getaffinity(0))
  shares = [set(cores[i::jobs]) or set(cores) for i in range(jobs)]

  def call(command: list[str]) -> str:
    share = shares.pop()
    try:
      return _execute(command, share if is_pinned else None)
    finally:
      shares.append(share)

  return lambda command: pool.submit(call, command)


def slurm_parameters(options: str) -> Mapping[str, int | str]:
  """Returns parameters of submitit.

  Raises:
    ValueError: if one is not NAME=VALUE.
  """
  given = [part.partition("=") for part in options.split()]
  if not all(name and value for name, _, value in given):
    raise ValueError(
      f"`--slurm` must be parameters NAME=VALUE of submitit, got {options!r};"
      ' for example --slurm="slurm_partition=gpu timeout_min=60".'
    )
  return {k: int(v) if v.isdecimal() else v for k, _, v in given}


def _on_slurm(
  options: str, folder: pathlib.Path
) -> Callable[[list[str]], futures.Future]:
  """Submits commands as jobs of SLURM."""
  executor = submitit.AutoExecutor(folder / "slurm", cluster="slurm")
  executor.update_parameters(**slurm_parameters(options))
  return lambda command: executor.submit(_execute, command)


def _next_finished(running: Mapping[Any, Any]) -> Any:
  """Waits until one of the calls has ended."""
  while True:
    for call in running:
      if call.done():
        return call
    time.sleep(1)
