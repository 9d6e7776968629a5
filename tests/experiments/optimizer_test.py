"""Reducers from configurations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import edgc_jax
from configs import gpt2_tiny
from experiments import tasks
from experiments.training import optimizer


def test_warmup_rank_of_a_configuration():
  for text, expected in (("max", "max"), ("dense", None), ("12", 12)):
    assert optimizer._warmup_rank(text) == expected


@pytest.mark.parametrize("reducer", optimizer.LOW_RANK)
def test_allocation_of_a_configuration(reducer):
  config = gpt2_tiny.get_config(reducer)
  options = config[reducer]
  options.update(allocation="error", scale_exponent=2.0)
  expected = edgc_jax.ErrorAllocation(2.0)
  assert optimizer.allocation_of(options) == expected
  options.allocation = "uniform"
  assert optimizer.allocation_of(options) == "uniform"
  task = tasks.make(config)
  optimizer.make_reducer(config, task, {})
  options.allocation = "stage"
  with pytest.raises(ValueError, match="`allocation` must be one of"):
    optimizer.make_reducer(config, task, {})


def test_arguments_of_a_configuration(monkeypatch):
  """The rule, its exponent, and zeros that stand for None."""
  config = gpt2_tiny.get_config("edgc")
  config.edgc.update(rank_min=0, max_rank_step=0, exponent=1.0, window=0)
  given = {}
  make = lambda **options: given.update(options)  # noqa: E731
  monkeypatch.setattr(edgc_jax, "REDUCERS", {"edgc": make})
  optimizer.make_reducer(config, tasks.make(config), {})
  assert given["axis_name"] == "data" and given["rank_max"] == 28
  assert given["rank_min"] is given["max_rank_step"] is given["window"] is None
  assert given["total_steps"] == config.steps
  assert given["rule"].keywords == {"exponent": 1.0}
  assert not {"exponent", "scale_exponent"} & set(given)


def test_a_fractional_rank_is_a_mean_over_the_run():
  assert optimizer._rank_schedule(11.3, 0, 400) == {0: 12, 120: 11}
  assert optimizer._rank_schedule(8.0, 0, 400) == {0: 8}
  # A share of less than half a step is dropped.
  assert optimizer._rank_schedule(8.02, 0, 20) == {0: 8}
  assert optimizer._rank_schedule(8.99, 0, 20) == {0: 9}
  for rank, final_rank in ((0.5, 0), (11.3, 5)):
    with pytest.raises(ValueError, match=r"`powersgd.rank` must be at least 1"):
      optimizer._rank_schedule(rank, final_rank, 400)


def test_ranks_have_names():
  names = [optimizer.rank_name("powersgd", rank) for rank in (0, 8.0)]
  assert names == ["dense", "8"]
  assert optimizer.rank_name("allreduce", 0) == "dense"
  assert optimizer.rank_name("topk", 0) == "-"


@pytest.mark.parametrize(
  "spec, expected",
  [(P("stage"), [[3 * 1] * 3, [3 * 5] * 3]), (P(), [[6 * 6] * 3] * 2)],
)
def test_stand_ins_of_gradients_vary_as_parameters_do(spec, expected):
  """They are sums over a stage, or over all stages."""

  def sums(param, values):
    gradient = lax.pcast(param, "data", to="varying") + values[0]
    return optimizer._as_invariant_as(gradient, param)

  values = jnp.arange(4.0)  # 0 and 1 on the first stage, 2 and 3 on the other
  found = jax.shard_map(
    sums,
    mesh=mesh_of((2, 2)),
    in_specs=(spec, P(("stage", "data"))),
    out_specs=spec,
  )(jnp.zeros((2, 3)), values)
  np.testing.assert_array_equal(found, expected)
