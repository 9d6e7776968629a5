"""`python -m edgc_jax`: its flags, its report, and what makes it fail."""

import functools
import itertools
import json
import subprocess
import sys

import jax
import optax
import pytest
from helpers import environments
from helpers.pages import ROOT

import edgc_jax
from edgc_jax import __main__ as command
from edgc_jax.diagnosis import installation, self_test
from edgc_jax.diagnosis.shapes import shapes_of
from edgc_jax.measure.advice import Candidate
from edgc_jax.measure.evidence import of_protocol
from edgc_jax.wire import averages, collectives

LINK = ["--gbit=1", "--round_trip_ms=1", "--replicas=8"]
MODEL = ["--shapes=64x256x3,100x64", "--step_seconds=2"]
SLEEPER = """
import time
from edgc_jax import __main__ as command
from edgc_jax.diagnosis import self_test
self_test.checks = lambda devices: {"sleeping": lambda: time.sleep(60)}
command.main(["--time_limit=5"])
"""


def started(*arguments, **environment):
  """Runs Python in the project's folder, as a user would."""
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    env=environments.of_users() | {"JAX_PLATFORMS": "cpu"} | environment,
    capture_output=True,
    text=True,
    timeout=300,
  )


@pytest.fixture
def without_reducers(monkeypatch):
  """The collectives alone, which compile in a second."""
  monkeypatch.setattr(self_test, "_REDUCERS", {})


def test_the_report_and_the_collectives(capsys, without_reducers):
  assert command.main(["--time_limit=1000"]) == 0
  text = capsys.readouterr().out
  for part in (
    f"edgc_jax   {edgc_jax.__version__}",
    f"jax {jax.__version__}",
    f"devices: {jax.device_count()}, processes: 1",
    "known traps on cpu",
    "collectives  10 are right",
  ):
    assert part in text
  assert text.endswith("passed\n")
  assert all(len(line) <= 78 for line in text.splitlines() if "- " in line)


def test_a_backend_that_the_project_has_not_tried(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
  (trap,) = installation.traps()
  assert "no step time was measured" in trap


@pytest.mark.parametrize("name", ["mean", "gather", "exchange_parts"])
def test_a_broken_collective(monkeypatch, capsys, without_reducers, name):
  right = getattr(collectives, name)
  monkeypatch.setattr(
    collectives, name, lambda *args: jax.tree.map(lambda x: 2 * x, right(*args))
  )
  assert command.main(["--time_limit=1000"]) == 1
  text = capsys.readouterr().out
  assert f"collectives  FAILED: SelfTestError: `{name}` must give" in text
  assert text.endswith("1 FAILED\n")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--advise"], "give --shapes, --step_seconds together"),
    (["--advise", *MODEL, "--gbit=1"], "give --gbit, --round_trip_ms, --repl"),
    (MODEL, "--shapes is for --advise"),
    (["--optimizer=muon"], "--optimizer is for --advise"),
    (
      [
        "--advise",
        *MODEL,
        "--gbit=1",
        "--round_trip_ms=1",
        "--replicas=2",
        "--optimizer=sgd",
      ],
      "`optimizer` must be one of",
    ),
    (["--process_id=0"], "give --coordinator_address, --num_processes, --proc"),
    (
      ["--coordinator_address=a:1", "--num_processes=0", "--process_id=0"],
      "--num_processes must be at least 1, got 0",
    ),
    (["--advise", *MODEL], "have no link to measure; give --gbit"),
    (["--advise", "--shapes=8y8", "--step_seconds=1", *LINK], "got '8y8'"),
  ],
)
def test_wrong_arguments(capsys, arguments, message):
  with pytest.raises(SystemExit) as error:
    command.main([*arguments, "--time_limit=1000"])
  assert error.value.code == 2
  assert message in " ".join(capsys.readouterr().err.split())


def made_by(code):
  """Evaluates the code of a method as a user would."""
  names = {"optax": optax, "edgc_jax": edgc_jax, "OPTIMISER": optax.sgd(1.0)}
  return eval(code, names)


def test_the_code_of_each_method_runs():
  for found in itertools.chain(*of_protocol().values()):
    options = dict(found.options)
    if "rank" in options:
      options["rank"] = round(options["rank"])
    method = Candidate(
      found.name, found.reducer, options, found.every, found.outer,
      0, 0.0, 0.0, 1.0, 0.0,
    )  # fmt: skip
    assert ("local_steps" in method.code) == (found.every > 1), found.name
    assert isinstance(made_by(method.code), optax.GradientTransformation)


@pytest.mark.slow
def test_advice_has_code_that_runs(capsys):
  assert command.main(["--advise", *MODEL, *LINK, "--time_limit=1000"]) == 0
  printed = capsys.readouterr().out
  assert "8 replicas, uplinks of 1000 Mbit/s, 7 ms an all-reduce" in printed
  (code,) = [line for line in printed.splitlines() if "OPTIMISER" in line]
  assert isinstance(made_by(code), optax.GradientTransformation)


def test_shapes_in_a_file(tmp_path):
  params = {
    "layers": [{"w": jax.numpy.zeros((3, 4, 5))}, {"b": jax.numpy.zeros(7)}],
    "scale": jax.numpy.zeros(()),
  }
  file = tmp_path / "model.json"
  file.write_text(json.dumps(jax.tree.map(jax.numpy.shape, params)))
  assert shapes_of(str(file)) == jax.eval_shape(lambda: params)
  for content in "{", "{}", '{"w": 3}', '{"w": [3, "a"]}', "[[3, 0]]", "[1.5]":
    file.write_text(content)
    with pytest.raises(ValueError, match="`shapes` must be"):
      shapes_of(str(file))


def test_wrong_shapes():
  with pytest.raises(ValueError, match="a JSON file that can be read"):
    shapes_of("none.json")
  for text in "0x3", "3", "1x2x3x4", "8x4x00", "8x4x99999999999":
    with pytest.raises(ValueError, match="matrices of 1 to"):
      shapes_of(text)


@pytest.mark.slow
def test_the_command_passes():
  """On devices of its own."""
  done = started("-m", "edgc_jax")
  assert done.returncode == 0, done.stdout + done.stderr
  assert "made of one CPU" in done.stdout
  assert "bytes a step as predicted" in done.stdout


@pytest.mark.slow
def test_a_single_device_simulates_replicas():
  checks = self_test.checks(jax.devices()[:1])
  assert set(checks) == {"collectives", *self_test._REDUCERS}
  for check in checks.values():
    assert "bytes a step as predicted" not in check()


@pytest.mark.slow
def test_a_pool_in_which_it_would_hang():
  done = started("-m", "edgc_jax", NPROC="2")
  assert done.returncode == 1
  assert "NPROC must be at least 8" in done.stdout


@pytest.mark.slow
def test_the_time_limit():
  done = started("-c", SLEEPER, JAX_NUM_CPU_DEVICES="1")
  assert done.returncode == 1, done.stderr
  assert "made of one CPU" not in done.stdout
  assert "sleeping FAILED: not done 5 s after the start" in done.stdout


@pytest.mark.slow
def test_replicas_that_differ(monkeypatch, capsys):
  """JAX would see it in the types, so it must not track them here."""
  average = averages.average

  def apart(values, channel, *rest):
    found = average(values, channel, *rest)
    index = 1e-6 * jax.lax.axis_index(channel.axis_name)
    return found._replace(mean=[x + index for x in found.mean])

  untracked = functools.partial(jax.shard_map, check_vma=False)
  monkeypatch.setattr(jax, "shard_map", untracked)
  monkeypatch.setattr(averages, "average", apart)
  assert command.main(["--time_limit=1000"]) == 1
  text = capsys.readouterr().out
  assert "edgc         FAILED: SelfTestError: replicas must have equal" in text


@pytest.mark.slow
def test_bytes_that_are_not_as_predicted(monkeypatch, capsys):
  quantize = self_test._REDUCERS["quantize"]
  monkeypatch.setattr(self_test, "_REDUCERS", {"quantize": quantize})
  predicted = functools.partial(edgc_jax.describe, edgc_jax.allreduce())
  monkeypatch.setattr(
    self_test, "describe", lambda _, *shapes, **mesh: predicted(*shapes, **mesh)
  )
  assert command.main(["--time_limit=1000"]) == 1
  assert "compiled step must send [8320] bytes" in capsys.readouterr().out
