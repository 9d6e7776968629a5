"""examples/slurm.py on a cluster that is one folder: `helpers.fake_slurm`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from helpers import environments, fake_slurm, soak
from helpers.processes import lines_written

SECONDS = 300
STEPS = 400  # so many that the signal comes before the last one
PORTS = range(61440, 65536)  # JAX chooses one by the number of the job


def free_job():
  """Returns the number of a job whose port is free."""
  for port in PORTS:
    with contextlib.suppress(OSError), socket.socket() as server:
      server.bind(("127.0.0.1", port))
      return port - PORTS.start + 4096
  raise AssertionError("There is no free port.")


@pytest.fixture
def submitted(tmp_path):
  """Returns a submitted job: its folder, its environment and its number."""
  fake_slurm.install(tmp_path)
  job = free_job()
  environment = fake_slurm.environment(tmp_path, job, tasks=2) | {
    **environments.QUICK,
    **environments.cache,
    "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{job - 4096 + PORTS.start}",
  }
  for name in ("NPROC", "PYTHONWARNINGS"):
    environment.pop(name, None)
  settings = soak.SETTINGS | {
    "steps": STEPS, "run_dir": tmp_path / "run", "mesh.data": 2,
    "mesh.backend": "jit", "checkpoint.every": 0, "powersgd.warmup_steps": 2,
    "log_every": 1,
  }  # fmt: skip
  command = [
    sys.executable, str(soak.ROOT / "examples" / "slurm.py"), "--nodes=2",
    "--hours=24", "--partition=cpu", f"--folder={tmp_path / 'out'}", "--",
    *soak.command_of("gpt2_tiny", "powersgd", settings)[2:],
  ]  # fmt: skip
  said = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=True
  )
  assert f"job {job}, output in" in said.stdout
  return tmp_path, environment, job


def output_of(folder, task):
  (file,) = (folder / "out").glob(f"*_{task}_log.out")
  return file.read_text()


# The command and its task; SAVE_SECONDS is short, so that the test is.
_COMMAND = """
import pathlib, signal, sys, time
code = int(sys.argv[1])
if code >= 0:
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
pathlib.Path("started").touch()
time.sleep(60)
"""
_TASK = """
import pathlib, signal, sys
import slurm

def requeue(*signal_and_frame):
  print("requeue" if training.checkpoint() else "give up", flush=True)
  sys.exit()

slurm.ROOT, slurm.SAVE_SECONDS = pathlib.Path(sys.argv[1]), 2
training = slurm.Training([sys.argv[2]])
signal.signal(signal.SIGCONT, lambda *_: None)
signal.signal(signal.SIGUSR2, requeue)
training()
"""


def begin_task(folder, code):
  """Starts a task whose command ends with a code after SIGTERM."""
  (folder / "experiments").mkdir()
  (folder / "experiments" / "train_gpt2.py").write_text(_COMMAND)
  task = subprocess.Popen(
    [sys.executable, "-c", _TASK, str(folder), str(code)],
    env=os.environ | {"PYTHONPATH": str(soak.ROOT / "examples")},
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
  )  # fmt: skip
  while not (folder / "started").exists():
    assert task.poll() is None, task.communicate()
    time.sleep(0.05)
  return task


@pytest.mark.parametrize(
  "code, said", [(143, "requeue"), (-15, "requeue"), (0, "requeue"),
                 (1, "give up")],
)  # fmt: skip
def test_requeued_unless_the_command_failed(tmp_path, code, said):
  task = begin_task(tmp_path, code)
  if code == 143:  # SLURM may send both
    task.send_signal(signal.SIGTERM)
  task.send_signal(signal.SIGUSR2)
  assert task.communicate(timeout=SECONDS)[0] == f"{said}\n"


def test_a_stopped_task_neither_ends_at_once_nor_stays(tmp_path):
  """SLURM sends SIGCONT, too."""
  task, began = begin_task(tmp_path, 143), time.monotonic()
  task.send_signal(signal.SIGTERM)
  while task.poll() is None:
    assert time.monotonic() < began + SECONDS
    task.send_signal(signal.SIGCONT)
    time.sleep(0.1)
  assert time.monotonic() > began + 2
  assert "ended with exit code 143" in task.communicate()[0]
  assert task.returncode == 1


@pytest.mark.soak("examples/slurm.py", "experiments/trainer/runtime")
def test_requeued_until_the_end(submitted):
  """Two tasks find each other, save at the signal, and continue."""
  folder, environment, job = submitted
  run = folder / "run"
  script = (folder / "job.sh").read_text().splitlines()
  for option in (
    "nodes=2", "ntasks-per-node=1", "cpus-per-task=8", "time=1440",
    "partition=cpu", "signal=USR2@120", "requeue", "open-mode=append",
  ):  # fmt: skip
    assert f"#SBATCH --{option}" in script
  assert any(line.startswith("srun --unbuffered") for line in script)

  def start():
    return subprocess.Popen(["bash", folder / "job.sh"], env=environment)

  deadline = time.monotonic() + SECONDS
  process = start()
  try:
    while lines_written(run) < 3:
      assert process.poll() is None, output_of(folder, 0)
      assert time.monotonic() < deadline, output_of(folder, 0)
      time.sleep(0.05)
    fake_slurm.signal_tasks(folder, signal.SIGUSR2)
    process.wait(deadline - time.monotonic())
    assert (folder / "scontrol.txt").read_text() == f"requeue {job}\n"
    (folder / "scontrol.txt").unlink()
    assert 3 <= lines_written(run) < STEPS
    process = start()
    assert process.wait(deadline - time.monotonic()) == 0, output_of(folder, 0)
  finally:
    if process.poll() is None:
      fake_slurm.signal_tasks(folder, signal.SIGKILL)
      process.kill()
  steps = [line["step"] for line in soak.lines_of(run)]
  assert steps == list(range(1, STEPS + 1))
  assert "resuming after step" in output_of(folder, 0)
  assert "compression ratio" in output_of(folder, 0)
  assert "compression ratio" not in output_of(folder, 1)
  assert not os.path.exists(folder / "scontrol.txt")
