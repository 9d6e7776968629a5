"""What a configuration's words mean to a reducer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from configs import gpt2_tiny
from experiments.training import optimizer


def test_warmup_rank_of_a_configuration():
  options = gpt2_tiny.get_config().edgc.rule.to_dict()
  assert optimizer._rule(dict(options)).warmup_rank == "max"
  for text, expected in (("dense", None), ("12", 12)):
    rule = optimizer._rule(options | {"warmup_rank": text})
    assert rule.warmup_rank == expected


def test_a_fraction_of_a_rank_is_a_mean_over_the_run():
  assert optimizer._rank_schedule(11.3, 0, 400) == {0: 12, 120: 11}
  assert optimizer._rank_schedule(8.0, 0, 400) == {0: 8}
  # Shares of less than half a step are none.
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


def test_what_takes_the_place_of_gradients_does_not_vary():
  """As the parameter does: the sums of either stage, or of all."""

  def sums(param, values):
    gradient = lax.pcast(param, "data", to="varying") + values[0]
    return optimizer._as_invariant_as(gradient, param)

  values = jnp.arange(4.0)  # 0 and 1 on the first stage, 2 and 3 on the other
  stages, everywhere = [[3 * 1] * 3, [3 * 5] * 3], [[6 * 6] * 3] * 2
  for spec, expected in ((P("stage"), stages), (P(), everywhere)):
    found = jax.shard_map(
      sums,
      mesh=mesh_of((2, 2)),
      in_specs=(spec, P(("stage", "data"))),
      out_specs=spec,
    )(jnp.zeros((2, 3)), values)
    np.testing.assert_array_equal(found, expected)
