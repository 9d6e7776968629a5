"""Old configuration keys raise an error that names the new key."""

import inspect
import re
import subprocess
import sys

import pytest
from flax import traverse_util
from ml_collections import ConfigDict

import edgc_jax
from configs import common
from experiments import tasks
from experiments.runtime import renamed_keys
from experiments.study.runner import _ROOT as ROOT
from experiments.training import checks, optimizer

# Keys that `make_reducer` turns into other arguments.
CONVERTED = {"exponent", "scale_exponent", "final_rank"}


def values():
  return traverse_util.flatten_dict(common.base("edgc").to_dict(), sep=".")


def config_with(key):
  """Returns a configuration that also has this key, in place of its parents."""
  kept = {name: x for name, x in values().items() if f"{name}." not in key}
  return ConfigDict(traverse_util.unflatten_dict(kept | {key: 1}, sep="."))


def test_new_keys_exist_and_old_keys_do_not():
  existing = set(values())
  assert existing >= set(renamed_keys.RENAMED.values())
  assert not existing & {*renamed_keys.RENAMED, *renamed_keys.REMOVED}
  assert renamed_keys.problem(existing) is None


@pytest.mark.parametrize("key", sorted(renamed_keys.RENAMED))
def test_an_old_key_names_the_new_one(key):
  with pytest.raises(
    ValueError, match=f"`{key}` is now `{renamed_keys.RENAMED[key]}`"
  ):
    checks.check_keys(config_with(key))


@pytest.mark.parametrize("key", sorted(renamed_keys.REMOVED))
def test_a_removed_key_names_the_remedy(key):
  message = f"`{key}` was removed; {renamed_keys.REMOVED[key]}."
  with pytest.raises(ValueError, match=re.escape(message)):
    checks.check_keys(config_with(key))


def test_an_old_key_of_the_command_line(tmp_path):
  """A key inside of what is now a value gets the same error."""
  key = "edgc.rule.name"
  command = [
    sys.executable,
    str(ROOT / "experiments" / "train_gpt2.py"),
    f"--config={ROOT}/configs/gpt2_tiny.py",
    f"--config.{key}=linear",
  ]
  done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
  assert done.returncode != 0
  assert f"error: `{key}` is now `edgc.rule`; use the new key." in done.stderr
  assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", list(edgc_jax.REDUCERS))
def test_each_reducer_has_a_section_of_its_arguments(name):
  config = common.base(name)
  arguments = inspect.signature(edgc_jax.REDUCERS[name]).parameters
  assert set(config[name]) - CONVERTED <= set(arguments)
  optimizer.make_reducer(config, tasks.make(config), {})


def test_defaults_are_those_of_the_package():
  """Those of `edgc` that do not depend on the length of a run."""
  options = common.base("edgc").edgc
  assert edgc_jax.Sampling(**options.sampling) == edgc_jax.Sampling()
  assert options.scale_exponent == edgc_jax.ErrorAllocation().scale_exponent
  cqm = inspect.signature(edgc_jax.cqm).parameters
  assert options.exponent == cqm["exponent"].default
  for name, argument in inspect.signature(edgc_jax.edgc).parameters.items():
    if name in options and name != "rule" and argument.default is not None:
      assert options[name] == argument.default, name
