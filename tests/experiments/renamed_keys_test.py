"""Old configuration keys raise an error that names the new key."""

import pytest
from flax import traverse_util

import edgc_jax
from configs import common
from experiments.runtime import renamed_keys
from experiments.training import checks


def keys():
  return traverse_util.flatten_dict(common.base("edgc").to_dict(), sep=".")


def test_new_keys_exist_and_old_keys_do_not():
  existing = set(keys())
  assert existing >= set(renamed_keys.RENAMED.values())
  assert not existing & set(renamed_keys.RENAMED)
  assert renamed_keys.problem(existing) is None


@pytest.mark.parametrize("key", sorted(renamed_keys.RENAMED))
def test_an_old_key_names_the_new_one(key):
  config = common.base("edgc")
  section, name = key.split(".")
  if name == "rule":
    del config[section][name]
  config[section][name] = 1
  with pytest.raises(ValueError, match=f"now `{renamed_keys.RENAMED[key]}`"):
    checks.check(config)


@pytest.mark.parametrize("section", ["edgc", "powersgd"])
@pytest.mark.parametrize("name", sorted(renamed_keys.REMOVED))
def test_a_removed_key_names_the_remedy(section, name):
  config = common.base("edgc")
  config[section][name] = True
  with pytest.raises(ValueError, match=f"{section}.{name}` was removed"):
    checks.check(config)


def test_defaults_are_those_of_the_package():
  """A section's defaults are the defaults of the class that it configures."""
  options = common.base("edgc").edgc
  assert edgc_jax.Sampling(**options.sampling) == edgc_jax.Sampling()
  assert edgc_jax.Allocation(**options.allocation) == edgc_jax.Allocation()
