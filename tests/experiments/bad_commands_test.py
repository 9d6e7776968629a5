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

from experiments.runs.run_folder import RunFolder

pytestmark = pytest.mark.slow
TINY = "--config=configs/gpt2_tiny.py:allreduce"
PIPELINE = "--config=configs/gpt2_tiny_pipeline.py"
VIT = "--config=configs/vit_digits.py:allreduce"


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


CONFIGS = {
  "syntax": "def get_config(:",
  "indent": "  x = 3",
  "empty": "",
  "no_function": "x = 3",
  "function_fails": "def get_config(reducer='edgc'):\n  raise KeyError('a')",
  "divides": "1 / 0",
  "import": "import nothing_of_this_name",
  "returns_none": "def get_config(reducer='edgc'):\n  return None",
  "returns_dict": "def get_config(reducer='edgc'):\n  return {'steps': 3}",
  "two_lines": "raise RuntimeError('two\\nlines')",
  "no_keys": "from ml_collections import ConfigDict\n"
  "def get_config(reducer='edgc'):\n  return ConfigDict({'steps': 3})",
  "other_types": "from configs import common\n"
  "def get_config(reducer='edgc'):\n"
  "  c = common.base(reducer)\n"
  "  with c.ignore_type():\n    c.steps = 'many'\n  return c",
}


@pytest.mark.parametrize("content", CONFIGS.values(), ids=CONFIGS)
def test_files_of_configurations(commands, tmp_path, content):
  file = tmp_path / "config.py"
  file.write_text(content)
  run_dir = f"--config.run_dir={tmp_path / 'run'}"
  with unchanged(tmp_path):
    for more in ((), (run_dir,)):
      assert_refused(commands.run("train_gpt2", f"--config={file}", *more))


@pytest.mark.parametrize(
  "arguments, parts",
  [
    ([], ["--config"]),
    (["--config="], ["`--config`", "''"]),
    (["--config=configs/none.py"], ["`--config`", "none.py"]),
    (["--config=configs"], ["`--config`", "which is none"]),
    (["--config=README.md"], ["`--config`", "README.md"]),
    (["--config=docs/pictures/protocol-frontier.png"], ["`--config`"]),
    (["--config=/dev/null"], ["`--config`"]),
    (["--config=configs/gpt2_tiny.py:magic"], ["`reducer`", "magic"]),
    (["--config=configs/gpt2_tiny.py:"], ["`reducer`"]),
    ([TINY, "steps=3"], ["must begin with --", "steps=3"]),
    ([TINY, "--steps=3"], ["steps"]),
    (["--config", "nowhere.py"], ["`--config`", "'nowhere.py'"]),
    ([TINY, "--config.stepz=3"], ["'stepz'", "the nearest is steps"]),
    ([TINY, "--config.optimizer.weight_decai=1"], ["optimizer.weight_decay"]),
    ([TINY, "--config.edgc=3"], ["'edgc'", "edgc.rule"]),
    (
      [TINY, "--config.edgc.rule.name=3"],
      ["'edgc.rule.name'", "the nearest is edgc.rule"],
    ),
    ([TINY, "--config.steps=abc"], ["of the types", "got --config.steps=abc"]),
    ([TINY, "--config.steps="], ["of the types", "got --config.steps="]),
    ([TINY, "--config.steps=1.5"], ["of the types", "got --config.steps=1.5"]),
    ([TINY, "--config.steps=99999999999"], ["`steps`"]),
    ([TINY, "--config.resume=perhaps"], ["of the types", "resume=perhaps"]),
    ([TINY, "--config.optimizer.lr=nan"], ["`optimizer.lr`", "nan"]),
    ([TINY, "--config.optimizer.lr=-inf"], ["`optimizer.lr`", "-inf"]),
    ([TINY, "--config.mesh.data=3"], ["`batch_size`"]),
    ([TINY, "--config.mesh.data=100000"], ["`mesh`", "1024"]),
    ([TINY, "--config.mesh.data=-1"], ["`mesh.data`", "-1"]),
    ([TINY, "--config.mesh.stage=2"], ["`mesh.backend`"]),
    ([PIPELINE, "--config.mesh.stage=3"], ["`model.num_layers`"]),
    ([TINY, "--config.model.width=999999996"], ["`model`", "GiB"]),
    ([TINY, "--config.data.path=/nowhere"], ["`data.path`"]),
    ([TINY, "--config.data.path=/dev/null"], ["`data.path`"]),
    ([TINY, "--config.init_from=/nowhere"], ["`init_from`"]),
    ([TINY, "--config.run_dir=README.md"], ["`run_dir`"]),
    ([TINY, "--config.run_dir=docs"], ["`run_dir`", "other files"]),
    ([TINY, "--config.run_dir=README.md/run"], ["`run_dir`", "README.md/run"]),
    ([VIT, "--config.model.num_heads=3"], ["`model.num_heads`"]),
    ([TINY, "--num_processes=2"], ["`--coordinator_address`"]),
    ([TINY, "--num_processes=two"], ["num_processes=two"]),
    ([TINY, "--num_processes=0"], ["`--num_processes`"]),
    ([TINY, "--heartbeat_timeout=0"], ["`--heartbeat_timeout`"]),
    *(
      (
        [
          TINY, f"--coordinator_address={address}", "--num_processes=2",
          "--process_id=0",
        ],
        ["`--coordinator_address`", address],
      )
      for address in (
        "here", "here:", ":5000", "here:port", "here:0", "here:70000", "::",
        "here:-1",
      )
    ),
    (
      [
        TINY, "--coordinator_address=here:5000", "--num_processes=2",
        "--process_id=2",
      ],
      ["`--process_id`"],
    ),
  ],
  ids=str,
)  # fmt: skip
def test_training(commands, arguments, parts):
  with unchanged(ROOT / "docs", ROOT / "README.md"):
    assert_refused(commands.run("train_gpt2", *arguments), *parts)


@pytest.mark.parametrize(
  "environment, parts",
  [
    ({"SLURM_STEP_NUM_TASKS": "2"}, ["SLURM_STEP_NUM_TASKS=2"]),
    ({"SLURM_STEP_NUM_TASKS": "two"}, ["`SLURM_STEP_NUM_TASKS`", "'two'"]),
    ({"SLURM_STEP_NUM_TASKS": "-2"}, ["`SLURM_STEP_NUM_TASKS`"]),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_SIZE=2"]),
    ({"OMPI_COMM_WORLD_SIZE": ""}, ["`OMPI_COMM_WORLD_SIZE`"]),
    ({"NPROC": "1"}, ["NPROC", "at least 8"]),
    ({"NPROC": "many"}, ["NPROC"]),
  ],
  ids=str,
)
def test_environments(commands, environment, parts):
  assert_refused(commands.run("train_gpt2", TINY, **environment), *parts)


# Run folders.


@pytest.fixture
def begun(tmp_path):
  """The folder of a run that has logged a line."""
  own = RunFolder(tmp_path / "run", small(tmp_path / "run").to_dict())
  own.start()
  own.log({"step": 1, "loss": 2.0, "dense_bytes": 8, "compression_ratio": 2})
  own.close()
  return own.path


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[3]", b"\xff\0"])
def test_files_of_runs(commands, begun, name, content):
  (begun / name).write_bytes(content)
  with unchanged(begun):
    given = (TINY, f"--config.run_dir={begun}")
    assert_refused(commands.run("train_gpt2", *given), "`run_dir`")
    assert_refused(commands.run("report", begun), name)


def test_runs_of_another_configuration(commands, begun):
  with unchanged(begun):
    given = (TINY, f"--config.run_dir={begun}")
    assert_refused(commands.run("train_gpt2", *given), "batch_size is 8")
    again = (*given, "--config.resume=false")
    assert_refused(commands.run("train_gpt2", *again), "`run_dir`")


@pytest.mark.parametrize(
  "lines, parts",
  [
    ("", []),
    ("{\n", ["line 1"]),
    ('{"step": 1}\n', ["dense_bytes"]),
    ('{"step": "x"}\n', ["line 1"]),
    ("\0\n", ["line 1"]),
  ],
)
def test_reports(commands, tmp_path, lines, parts):
  run = tmp_path / "run"
  run.mkdir()
  if lines:
    (run / "metrics.jsonl").write_text(lines)
  with unchanged(tmp_path):
    assert_refused(commands.run("report", run, cwd=tmp_path), *parts)
    both = commands.run("report", run, tmp_path / "none", cwd=tmp_path)
    assert_refused(both, *parts)


def test_a_report_of_nothing(commands):
  ended = commands.run("report")
  assert ended.code != 0 and "Traceback" not in ended.err
  assert "give at least one run folder" in ended.err + ended.out


# Studies.


STUDY = (
  "CONFIG = 'configs/gpt2_tiny.py'\nSEEDS = (0,)\n"
  "TABLES = {'one': {'dense': {'reducer': 'allreduce'}}}\n"
)


@pytest.mark.parametrize(
  "content, arguments, parts",
  [
    (None, [], ["`study`"]),
    ("", [], ["CONFIG"]),
    ("TABLES = {", [], ["`study`", "SyntaxError"]),
    ("import nothing_of_this_name", [], ["`study`", "nothing_of_this_name"]),
    (STUDY + "MORE = 3", [], ["`MORE`"]),
    (STUDY + "CONFIG = 'none.py'", [], ["`CONFIG`", "none.py"]),
    (STUDY + "CONFIG = 'README.md'", [], ["`CONFIG`", "README.md"]),
    (
      STUDY + "TABLES['one']['own'] = {'reducer': 'topk', 'topk.densty': 1}",
      [],
      ["densty"],
    ),
    (STUDY, ["--arms=("], ["`--arms`", "("]),
    (STUDY, ["--arms=nothing"], ["`--arms`", "nothing"]),
    (STUDY, ["--jobs=0"], ["jobs"]),
    (STUDY, ["--together=none"], ["together"]),
    (STUDY, ["--slurm=gpu"], ["`--slurm`"]),
    (STUDY, ["--records=README.md"], ["`records`"]),
    (STUDY, ["--nothing"], ["nothing"]),
  ],
)
def test_studies(commands, tmp_path, content, arguments, parts):
  file = tmp_path / "study.py"
  if content is not None:
    file.write_text(content)
  given = [f"--study={file}", f"--runs={tmp_path}/runs"]
  given += arguments or [f"--records={tmp_path}/records"]
  with unchanged(tmp_path):
    assert_refused(commands.run("run_study", *given), *parts)


def test_records_of_studies(commands, tmp_path):
  (tmp_path / "study.py").write_text(STUDY)
  (tmp_path / "records").mkdir()
  (tmp_path / "records" / "run.json").write_text('{"config": {}}')
  given = [f"--study={tmp_path}/study.py", f"--records={tmp_path}/records"]
  given.append(f"--runs={tmp_path}/runs")
  with unchanged(tmp_path):
    for more in ([], ["--retry"]):
      assert_refused(commands.run("run_study", *given, *more), "run.json")


@pytest.mark.parametrize(
  "content", ["", "[3]", "{}", '[{"steps": 3}]', '[{"reducer": "topk"}]']
)
def test_runs_of_one_program(commands, tmp_path, content):
  file = tmp_path / "runs.json"
  file.write_text(content)
  with unchanged(tmp_path):
    assert_refused(commands.run("train_together", f"--runs={file}"))
  none = commands.run("train_together", f"--runs={tmp_path}/none.json")
  assert_refused(none, "`--runs`")


# Plans and advice.


@pytest.mark.parametrize(
  "script, arguments, parts",
  [
    ("advise", [TINY, "--config.mesh.data=1"], ["`mesh`"]),
    ("advise", [PIPELINE], ["`mesh`", "stages"]),
    ("advise", [TINY, "--config.link.bandwidth=-1"], ["`link.bandwidth`"]),
    ("advise", [TINY, "--config.link.latency=nan"], ["`link.latency`"]),
    ("advise", ["--config=none.py"], ["`--config`"]),
    ("plan_cluster", [PIPELINE, "--hardware=abacus"], ["hardware"]),
    ("plan_cluster", [PIPELINE, "--megabits=nan"], ["`megabits`", "nan"]),
    ("plan_cluster", [PIPELINE, "--megabits=0"], ["`megabits`"]),
    ("plan_cluster", [PIPELINE, "--share=2"], ["`share`", "2"]),
    ("plan_cluster", [PIPELINE, "--peak=-1"], ["`peak`"]),
    ("plan_cluster", [PIPELINE, "--memory=few"], ["memory"]),
    ("plan_cluster", [PIPELINE, "--fall=inf"], ["`fall`", "inf"]),
    ("plan_cluster", [PIPELINE, "--curve=up"], ["`curve`", "falling"]),
    ("plan_cluster", [VIT, "--config.mesh.backend=jit"], ["`task`", "gpt2"]),
    ("plan_cluster", [TINY, "--config.mesh.data=1"], ["`mesh.data`"]),
    ("plan_layout", [TINY], ["`mesh.backend`"]),
    ("plan_layout", [PIPELINE, "--output=README.md"], ["`--output`"]),
    ("plan_layout", [PIPELINE, "--output=docs"], ["`--output`"]),
    ("plan_stages", [PIPELINE, "--mbits=fast"], ["`--mbits`", "fast"]),
    ("plan_stages", [PIPELINE, "--mbits=10,-1"], ["`--mbits`"]),
    ("plan_stages", [PIPELINE, "--mbits=nan"], ["`--mbits`"]),
    ("plan_stages", [PIPELINE, "--mbits="], ["`--mbits`"]),
    ("plan_stages", [TINY], ["`mesh.stage`"]),
    ("plan_stages", [PIPELINE, "--config.steps=0"], ["`steps`"]),
  ],
)
def test_plans(commands, script, arguments, parts):
  with unchanged(ROOT / "docs", ROOT / "README.md"):
    assert_refused(commands.run(script, *arguments), *parts)


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
    ({"JAX_NUM_CPU_DEVICES": "0"}, ["JAX_NUM_CPU_DEVICES=0"]),
    ({"JAX_NUM_CPU_DEVICES": "2"}, ["`mesh.data`", "(2 cpu)"]),
    ({"JAX_PLATFORMS": "abacus"}, ["JAX_PLATFORMS=abacus"]),
    ({"JAX_PLATFORMS": "cuda"}, ["JAX_PLATFORMS=cuda"]),
    ({"JAX_ENABLE_X64": "perhaps"}, ["JAX_ENABLE_X64"]),
  ],
  ids=str,
)
def test_environments_that_jax_reads(environment, parts):
  assert_refused(started(**environment), *parts)


@pytest.mark.parametrize("flags", ["--nothing=3", "nothing"])
def test_flags_that_xla_does_not_know(flags):
  """XLA ends the process itself, with one line."""
  code, _, err = started(XLA_FLAGS=flags)
  assert code != 0 and "Traceback" not in err
  assert len(err.strip().splitlines()) == 1
  assert "XLA_FLAGS" in err and flags in err


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
