"""A data dependency orders collectives, and changes no value."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.wire import order


@pytest.mark.parametrize(
  "earlier",
  [np.nan, np.inf, -np.inf, -5.0, -1.0, -0.5, 0.0, 0.5, 1e-45, 3e38, True, 7,
   np.float16(-2)],
)  # fmt: skip
def test_values_stay_for_any_earlier_value(earlier):
  tree = {
    "float": np.array([np.nan, -0.0, np.inf, 1.5], np.float32),
    "narrow": jnp.array([1.5, -2], jnp.bfloat16),
    "int": np.array([-3, 2**31 - 1], np.int32),
    "byte": np.array(255, np.uint8),
    "bool": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
  }
  before = [jnp.array([0, earlier]), jnp.zeros((0,))]
  waited = jax.jit(order.after)(tree, before)
  chex.assert_trees_all_equal_dtypes(waited, tree)
  for name, leaf in tree.items():  # bytes tell -0.0 from 0.0
    assert waited[name].tobytes() == leaf.tobytes(), name


def test_random_keys_and_nothing_earlier():
  keys = {"one": jax.random.key(0), "two": jax.random.split(jax.random.key(1))}
  found = jax.jit(order.after)({"x": jnp.ones(2), **keys}, keys)
  np.testing.assert_array_equal(found["x"], 1)
  for name, key in keys.items():
    np.testing.assert_array_equal(
      jax.random.key_data(found[name]), jax.random.key_data(key)
    )
  assert order.after(3, []) == order.after(3, [jnp.zeros((2, 0))]) == 3


def test_integers_are_finite_without_a_reduction():
  """XLA computed one over constants as it compiled: 10 of 16 s of `topk`."""
  tree = [jnp.ones((4, 1000), jnp.uint8), jnp.ones(3)]
  reductions = str(jax.make_jaxpr(order.all_finite)(tree)).count("reduce_and")
  assert reductions == 2, "of the floats, and of all flags"
  assert order.all_finite(tree)
  assert order.all_finite([*tree[:1], 1.0])
  assert not order.all_finite([tree[0], jnp.array([1.0, jnp.nan])])
