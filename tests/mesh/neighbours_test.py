"""Models and optimisers of neighbouring libraries, as they are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers import float32
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.leaves.leaf import leaves_in


def nnx_optimizer():
  model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
  tx = optax.chain(float32.powersgd(4), optax.adam(1e-3))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def test_metrics():
  _, optimizer = nnx_optimizer()
  for state in (optimizer, optimizer.opt_state):
    found = edgc_jax.metrics(state)
    assert found["matrix_rank"] == {"kernel": [0]}
    assert found["dense_bytes"] == 4 * (64 * 128 + 128)


def test_specs_have_the_tree_of_the_optimizer():
  model, optimizer = nnx_optimizer()
  specs = edgc_jax.state_specs(optimizer, nnx.state(model, nnx.Param))
  assert jax.tree.structure(specs) == jax.tree.structure(optimizer)
  assert P(("data",)) in jax.tree.leaves(specs.opt_state[0].leaves)
  expected = edgc_jax.state_specs(optimizer.tx, nnx.state(model, nnx.Param))
  assert jax.tree.leaves(specs.opt_state) == jax.tree.leaves(expected)


def test_paths_are_the_same_with_and_without_variables():
  """A view sees one path in `init` and in `update`."""
  params = nnx.state(nnx_optimizer()[0], nnx.Param)
  for tree in (params, nnx.as_pure(params)):
    paths = [leaf.path for leaf in leaves_in(tree)]
    assert paths == ["['bias']", "['kernel']"]


MODEL = eqx.nn.MLP(8, 1, 64, 2, key=jax.random.key(0))
ARRAYS = eqx.filter(MODEL, eqx.is_array)
TX = optax.chain(float32.powersgd(4), optax.adam(1e-3))


def test_a_whole_model_is_taken_for_its_arrays():
  for tell in (
    lambda params: edgc_jax.state_specs(TX, params),
    lambda params: float32.wire_bytes(params, 4),
    lambda params: edgc_jax.describe(TX, params),
  ):
    assert tell(MODEL) == tell(ARRAYS)
  found = edgc_jax.metrics(TX.init(ARRAYS))
  assert found["matrix_rank"] == {"layers/1/weight": [0]}


def test_update_takes_the_whole_model():
  state = TX.init(ARRAYS)

  def updates_of(params):
    update = lambda g: TX.update(g, state, params)[0]  # noqa: E731
    gradients = jax.tree.map(lambda x: jnp.stack([x, -2 * x]), ARRAYS)
    return jax.jit(jax.vmap(update, axis_name="data"))(gradients)

  expected = updates_of(ARRAYS)
  assert jnp.abs(expected.layers[1].weight).max() > 0
  jax.tree.map(np.testing.assert_array_equal, updates_of(MODEL), expected)
