"""Shardings of states: each replica has its own residuals and sums."""

import chex
import jax
import jax.numpy as jnp
import optax
from helpers import float32
from jax.sharding import PartitionSpec as P

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,)), "s": jnp.zeros(())}


def test_only_residuals_and_sums_are_sharded():
  tx = edgc_jax.accumulate(
    edgc_jax.skip_nonfinite(
      optax.chain(float32.edgc(rank_max=4), optax.adam(1e-3))
    ),
    every=2,
  )
  specs = edgc_jax.state_specs(tx, PARAMS)
  chex.assert_trees_all_equal_structs(specs, tx.init(PARAMS))
  sharded = {
    jax.tree_util.keystr(path)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs)
    if spec == P("data")
  }
  assert sharded == {
    ".accumulated.values['b']",
    ".accumulated.values['s']",
    ".accumulated.values['w']",
    ".inner_state.inner_state[0].leaves['w'].residual.values",
  }


def test_other_axis_and_no_reducer():
  specs = edgc_jax.state_specs(float32.powersgd(2), PARAMS, "replica")
  assert specs.leaves["w"].residual.values == P("replica")
  plain = edgc_jax.state_specs(optax.adam(1e-3), PARAMS)
  assert set(jax.tree.leaves(plain)) == {P()}
