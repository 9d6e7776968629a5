"""Submits a training run to SLURM, and submits it again until it has ended.

    python examples/slurm.py --nodes=4 --gpus=8 --hours=24 --partition=gpu -- \
        --config=configs/gpt2_124m.py --config.mesh.data=32 \
        --config.mesh.backend=jit --config.run_dir=/shared/runs/gpt2

What follows `--` goes to `experiments/train_gpt2.py`, on every host: one task
for each GPU, or one for each host without GPUs. JAX finds the tasks by SLURM's
variables. Shortly before the time is over, or if SLURM takes the hosts back,
the run is saved and waits in the queue to continue.
"""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import time

import submitit

ROOT = pathlib.Path(__file__).resolve().parents[1]
SAVE_SECONDS = 120  # from the signal until SLURM kills the tasks
# Exit codes after SIGTERM: of a saved run, and of one that had not yet begun.
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)


class Training(submitit.helpers.Checkpointable):
  """The command of each task; it alone passes signals on to the command."""

  def __init__(self, arguments):
    self.arguments = arguments
    self._is_stopping = False

  def __call__(self):
    """Trains to the end, in each task."""
    script = ROOT / "experiments" / "train_gpt2.py"
    self._process = subprocess.Popen(
      [sys.executable, script, *self.arguments],
      cwd=ROOT,
      start_new_session=True,
    )
    signal.signal(signal.SIGTERM, self._stop)
    code = self._process.wait()
    if code in STOPPED:
      # A task that ends now might end the first one before it requeues. That
      # one requeues after SIGUSR2 alone, which may follow a SIGTERM.
      time.sleep(SAVE_SECONDS)
    if code:
      raise RuntimeError(f"train_gpt2.py ended with exit code {code}.")

  def checkpoint(self):
    """Saves after SIGUSR2; submitit calls it in the first task and requeues.

    It does not requeue if this returns None: the command has failed.
    """
    self._stop()
    code = self._process.returncode
    if code is None:
      # `wait` has been interrupted, and holds a lock.
      end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
      code = end.si_status * (1 if end.si_code == os.CLD_EXITED else -1)
    if code not in (0, *STOPPED):
      return None
    return submitit.helpers.DelayedSubmission(Training(self.arguments))

  def _stop(self, *signal_and_frame):
    """Tells the command to save, once; JAX tells those of the other tasks."""
    del signal_and_frame
    if not self._is_stopping:
      self._is_stopping = True
      self._process.terminate()


def executor_of(options):
  """Returns submitit's executor, with the resources of a job."""
  executor = submitit.AutoExecutor(
    options.folder, cluster="slurm", slurm_max_num_timeout=options.starts
  )
  executor.update_parameters(
    name="edgc",
    nodes=options.nodes,
    tasks_per_node=options.gpus or 1,
    cpus_per_task=options.cpus,
    timeout_min=60 * options.hours,
    slurm_signal_delay_s=SAVE_SECONDS,
    slurm_additional_parameters={"requeue": True},
  )
  if options.gpus:
    executor.update_parameters(gpus_per_node=options.gpus)
  if options.partition:
    executor.update_parameters(slurm_partition=options.partition)
  return executor


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--nodes", type=int, default=1)
  parser.add_argument("--gpus", type=int, default=0, help="of each node")
  parser.add_argument("--cpus", type=int, default=8, help="of each task")
  parser.add_argument("--hours", type=int, default=24, help="of each start")
  parser.add_argument(
    "--starts", type=int, default=100, help="after time-outs, at most"
  )
  parser.add_argument("--partition")
  parser.add_argument("--folder", default="slurm", help="shared, for output")
  parser.add_argument("arguments", nargs="*", help="of train_gpt2.py")
  options = parser.parse_args()
  job = executor_of(options).submit(Training(options.arguments))
  print(f"job {job.job_id}, output in {job.paths.stdout}")
