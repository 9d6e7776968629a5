"""The commands `sbatch`, `srun` and `scontrol` of a cluster in one folder.

`install` writes them into a folder for PATH. A job is the script that sbatch
was given: `bash FOLDER/job.sh` starts it, with the variables of `environment`.
Its tasks run on this host, with the variables that SLURM would set.
"""

import os
import pathlib
import signal
import subprocess
import sys

_SBATCH = """#!/bin/sh
cp "$1" "$FAKE_SLURM/job.sh"
echo "Submitted batch job $FAKE_SLURM_JOB"
"""
_SCONTROL = """#!/bin/sh
echo "$@" >> "$FAKE_SLURM/scontrol.txt"
"""


def install(folder):
  """Writes the commands into a folder."""
  srun = f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n'
  commands = {"sbatch": _SBATCH, "scontrol": _SCONTROL, "srun": srun}
  for name, text in commands.items():
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)


def environment(folder, job, tasks):
  """Returns the variables under which commands and jobs run."""
  return os.environ | {
    "PATH": f"{folder}:{os.environ['PATH']}", "FAKE_SLURM": str(folder),
    "FAKE_SLURM_JOB": str(job), "SLURM_JOB_ID": str(job),
    "SLURM_JOB_NUM_NODES": str(tasks), "SLURM_NTASKS": str(tasks),
  }  # fmt: skip


def signal_tasks(folder, number):
  """Sends a signal to the tasks of the running job, as SLURM does."""
  for pid in (folder / "tasks.txt").read_text().split():
    os.kill(int(pid), number)


def srun(arguments):
  """Runs a command in all tasks, until all or one requeued by itself ended."""
  options, command = {}, arguments
  while command[0].startswith("--"):
    name, *command = command
    if name != "--unbuffered":
      options[name], *command = command
  job, count = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_NTASKS"])
  folder = pathlib.Path(os.environ["FAKE_SLURM"])
  tasks = []
  for i in range(count):
    environment = os.environ | {
      "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count),
      "SLURM_PROCID": str(i), "SLURM_NODEID": str(i), "SLURM_LOCALID": "0",
    }  # fmt: skip
    name = options["--output"].replace("%j", job).replace("%t", str(i))
    with open(name, "ab") as output:
      tasks += [subprocess.Popen(command, stdout=output, stderr=output,
                                 env=environment)]  # fmt: skip
  (folder / "tasks.txt").write_text(" ".join(str(t.pid) for t in tasks))
  codes = [tasks[0].wait()]
  if (folder / "scontrol.txt").exists():  # a requeued job is killed
    for task in tasks:
      task.kill()
  codes += [task.wait() for task in tasks[1:]]
  sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  srun(sys.argv[1:])
