"""Keys of configurations are arguments of the package, with its defaults."""

import inspect

import pytest

import edgc_jax
import experiments.lab  # noqa: F401  (adds the methods of others)
from configs import common
from experiments.trainer import tasks
from experiments.trainer.training import optimizer, reducers

# Keys that `make_reducer` turns into other arguments.
CONVERTED = {
  "exponent", "scale_exponent", "final_rank", "final_exponent", "warmup_steps",
}  # fmt: skip


@pytest.mark.parametrize("name", list(reducers.by_name()))
def test_each_reducer_has_a_section_of_its_arguments(name):
  config = common.base(name)
  arguments = inspect.signature(reducers.by_name()[name]).parameters
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
