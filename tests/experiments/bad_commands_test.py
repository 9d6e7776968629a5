"""Bad input to the commands: one line on stderr, an exit code, and no loss.

Forks of one process run them, since each process takes seconds to start; those
whose environment JAX reads when it is imported are processes of their own.
"""

import json
import shutil
import subprocess
import sys

import pytest
from helpers import environments
from helpers.forked_commands import ROOT, Commands, Ended
from helpers.local_processes import free_port
from helpers.refusals import assert_clear, unchanged
from helpers.small_runs import small

from experiments.trainer.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow
TINY = "--config=configs/gpt2_tiny.py:allreduce"
PIPELINE = "--config=configs/gpt2_tiny_pipeline.py"


@pytest.fixture(scope="module")
def commands():
  own = Commands()
  yield own
  own.close()


def assert_refused(ended, *parts):
  """A command has ended with one clear error."""
  code, out, err = ended
  assert code not in (0, None), (out, err)
  assert "Traceback" not in out + err, err
  lines = err.strip().splitlines()
  if "FATAL Flags parsing error: " in err:  # absl's own
    assert len(lines) <= 5, err
  else:
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    assert_clear(lines[0])
  for part in parts:
    assert part in err, err


DEF = "def get_config(reducer='edgc'):\n  "


@pytest.mark.parametrize(
  "content",
  [
    DEF + "syntax(:", DEF + "raise RuntimeError('two\\nlines')",
    DEF + "return {'steps': 3}",
    DEF + "from ml_collections import ConfigDict\n"
    "  return ConfigDict({'steps': 3})",
    "x = 3",
  ],
)  # fmt: skip
def test_files_of_configurations(commands, tmp_path, content):
  file = tmp_path / "config.py"
  file.write_text(content)
  given = (f"--config={file}", f"--config.run_dir={tmp_path / 'run'}")
  with unchanged(tmp_path):
    assert_refused(commands.run("train_gpt2", *given))


@pytest.mark.parametrize(
  "script, arguments, parts",
  [
    ("train_gpt2", [], ["--config"]),
    ("train_gpt2", ["--config", "configs"], ["`--config`", "'configs'"]),
    ("train_gpt2", ["--config=configs/gpt2_tiny.py:magic"], ["`reducer`"]),
    ("train_gpt2", [TINY, "steps=3"], ["must begin with --", "steps=3"]),
    ("train_gpt2", [TINY, "--steps=3"], ["steps"]),
    ("train_gpt2", [TINY, "--config.stepz=3"], ["the nearest is steps"]),
    ("train_gpt2", [TINY, "--config.steps=abc"], ["got --config.steps=abc"]),
    ("train_gpt2", [TINY, "--config.optimizer.lr=nan"], ["`optimizer.lr`"]),
    ("train_gpt2", [TINY, "--config.mesh.data=100000"], ["`mesh`", "1024"]),
    ("train_gpt2", [TINY, "--config.data.path=/nowhere"], ["`data.path`"]),
    ("train_gpt2", [TINY, "--config.init_from=/nowhere"], ["`init_from`"]),
    ("train_gpt2", [TINY, "--config.run_dir=README.md/run"], ["`run_dir`"]),
    ("train_gpt2", [TINY, "--num_processes=2"], ["`--coordinator_address`"]),
    ("train_gpt2", [TINY, "--num_processes=0"], ["`--num_processes`"]),
    (
      "train_gpt2",
      [TINY, "--coordinator_address=here:port", "--num_processes=2",
       "--process_id=0"],
      ["`--coordinator_address`", "here:port"],
    ),
    (
      "train_gpt2",
      [TINY, "--coordinator_address=here:5000", "--num_processes=2",
       "--process_id=2"],
      ["`--process_id`"],
    ),
    ("report", ["none"], ["metrics.jsonl"]),
    ("lab/train_together", ["--runs=none.json"], ["`--runs`"]),
    ("advise", [PIPELINE], ["`mesh`", "stages"]),
    ("lab/plan_cluster", [PIPELINE, "--megabits=nan"], ["`megabits`", "nan"]),
    ("lab/plan_cluster", [PIPELINE, "--fall=inf"], ["`fall`", "inf"]),
    ("lab/plan_cluster", [PIPELINE, "--curve=up"], ["`curve`", "falling"]),
    ("lab/plan_layout", [TINY], ["`mesh.backend`"]),
    ("lab/plan_layout", [PIPELINE, "--output=README.md"], ["`--output`"]),
    ("lab/plan_stages", [PIPELINE, "--mbits=10,-1"], ["`--mbits`"]),
    ("lab/plan_stages", [TINY], ["`mesh.stage`"]),
  ],
  ids=str,
)  # fmt: skip
def test_arguments(commands, script, arguments, parts):
  with unchanged(ROOT / "docs", ROOT / "README.md"):
    assert_refused(commands.run(script, *arguments), *parts)


@pytest.mark.parametrize(
  "environment, part",
  [
    ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
    ({"OMPI_COMM_WORLD_SIZE": "two"}, "`OMPI_COMM_WORLD_SIZE`"),
    ({"NPROC": "1"}, "at least 8"),
  ],
  ids=str,
)
def test_environments(commands, environment, part):
  assert_refused(commands.run("train_gpt2", TINY, **environment), part)


def test_run_folders(commands, tmp_path):
  folder = tmp_path / "run"
  own = RunFolder(folder, small(folder).to_dict())
  own.start()
  own.log({"step": 1, "loss": 2.0})
  own.close()
  given = (TINY, f"--config.run_dir={folder}")
  with unchanged(folder):
    assert_refused(commands.run("train_gpt2", *given), "batch_size is 8")
    again = (*given, "--config.resume=false")
    assert_refused(commands.run("train_gpt2", *again), "`run_dir`")
    assert_refused(commands.run("report", folder), "dense_bytes")
  (folder / "config.json").write_text("{")
  with unchanged(folder):
    assert_refused(commands.run("train_gpt2", *given), "`run_dir`")
    assert_refused(commands.run("report", folder), "config.json")


def test_a_report_of_nothing(commands):
  ended = commands.run("report")
  assert ended.code != 0 and "Traceback" not in ended.err
  assert "give at least one run folder" in ended.err + ended.out


@pytest.mark.parametrize(
  "content, arguments, part",
  [
    ("TABLES = {", [], "`study`"),
    ("", ["--arms=("], "`--arms`"),
    ("", ["--arms=nothing"], "`--arms`"),
    ("", ["--jobs=0"], "jobs"),
    ("", ["--slurm=gpu"], "`--slurm`"),
    ("", ["--records=README.md"], "`records`"),
    ("TABLES['one']['dense']['stepz'] = 3", [], "stepz"),
  ],
)
def test_studies(commands, tmp_path, content, arguments, part):
  file = tmp_path / "study.py"
  file.write_text(
    "CONFIG = 'configs/gpt2_tiny.py'\nSEEDS = (0,)\n"
    "TABLES = {'one': {'dense': {'reducer': 'allreduce'}}}\n" + content
  )
  given = [f"--study={file}", f"--runs={tmp_path}/runs"]
  given += arguments or [f"--records={tmp_path}/records"]
  with unchanged(tmp_path):
    assert_refused(commands.run("lab/run_study", *given), part)


# What a process has from its beginning.


def started(arguments=(), **environment):
  """Runs the training command in a process of its own."""
  done = subprocess.run(
    [sys.executable, "experiments/train_gpt2.py", TINY, *arguments],
    cwd=ROOT, env=environments.of_users() | environment, capture_output=True,
    text=True, timeout=120,
  )  # fmt: skip
  return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
  "environment, parts",
  [
    ({"JAX_NUM_CPU_DEVICES": "two"}, ["jax_num_cpu_devices"]),
    ({"JAX_NUM_CPU_DEVICES": "2"}, ["`mesh.data`", "(2 cpu)"]),
    ({"JAX_PLATFORMS": "abacus"}, ["JAX_PLATFORMS=abacus"]),
  ],
  ids=str,
)
def test_environments_that_jax_reads(environment, parts):
  assert_refused(started(**environment), *parts)


def test_flags_that_xla_does_not_know():
  """XLA ends the process itself, with one line."""
  code, _, err = started(XLA_FLAGS="--nothing=3")
  assert code != 0 and "Traceback" not in err
  assert len(err.strip().splitlines()) == 1
  assert "XLA_FLAGS" in err and "--nothing=3" in err


def test_an_address_in_use(tmp_path):
  """Two first processes: the second one ends, with the address in its line."""
  port = free_port()
  address = f"--coordinator_address=127.0.0.1:{port}"
  given = (address, "--num_processes=2", "--process_id=0")
  server = subprocess.Popen(
    [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"],
    cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  try:
    code, _, err = started(given)
  finally:
    server.kill()
    server.wait()
  assert code != 0 and "Traceback" not in err, err
  assert f"127.0.0.1:{port}" in err, err


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 1 MiB, if this user may mount one."""
  folder = tmp_path / "disk"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
  if (
    shutil.which("mount") is None
    or subprocess.run(mount, capture_output=True).returncode
  ):
    pytest.skip("no permission to mount a file system")
  yield folder
  subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(commands, small_disk):
  """The run that was there is as it was, and the error names the folder."""
  kept = small_disk / "kept"
  kept.mkdir()
  (kept / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
  (small_disk / "full").write_bytes(b"0" * (1020 * 1024))
  given = [
    TINY, "--config.steps=4", "--config.batch_size=8",
    "--config.model.width=32", "--config.model.num_heads=2",
    "--config.model.num_layers=1", "--config.mesh.backend=vmap",
    f"--config.run_dir={small_disk}/run",
  ]  # fmt: skip
  with unchanged(kept):
    code, _, err = commands.run("train_gpt2", *given)
  errors = [line for line in err.splitlines() if line.startswith("error: ")]
  assert code == 1 and len(errors) == 1 and "Traceback" not in err, err
  assert str(small_disk) in errors[0] and "No space left" in errors[0]
