"""Temporary memory of updates, as the compiler reports it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import edgc_jax

pytestmark = pytest.mark.slow

PARAMS = {
  "layers": jnp.zeros((6, 768, 1536)),
  "embedding": jnp.zeros((1024, 768)),
  "bias": jnp.zeros(768),
}


def temporary_share(tx):
  """Compiles an update with a donated state; its memory over the gradient's."""
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  on_device = lambda fn: jax.shard_map(  # noqa: E731
    fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.eval_shape(on_device(tx.init), PARAMS)
  # The state first, or JAX lends its memory to the updates.
  update = lambda *args: on_device(tx.update)(*args)[::-1]  # noqa: E731
  compiled = jax.jit(update, donate_argnums=1).lower(PARAMS, state).compile()
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(PARAMS))
  return compiled.memory_analysis().temp_size_in_bytes / size


@pytest.fixture(scope="module", autouse=True)
def optimizations():
  """Compiles as users do: the memory of a program depends on its fusions."""
  jax.config.update("jax_disable_most_optimizations", False)
  yield
  jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize(
  "tx", [edgc_jax.powersgd(32), edgc_jax.edgc()], ids=("powersgd", "7_ranks")
)
def test_memory_is_about_one_gradient(tx):
  """It is more if a single matrix is a large part of the gradient."""
  assert temporary_share(tx) < 1.3


def num_operations(leaves):
  """Returns the operations of a compiled update of leaves of other shapes."""
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  tx = edgc_jax.randomk(0.01, mesh=mesh)
  params = {f"w{i}": jnp.zeros((300, 300 + i)) for i in range(leaves)}
  gradients = jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), params)
  state = jax.eval_shape(tx.init, params)
  return (
    jax.jit(tx.update).lower(gradients, state).compile().as_text().count("=")
  )


def test_a_program_grows_with_its_leaves_and_no_faster():
  """No flag of all leaves is computed again for each of them (`together`)."""
  few, many = num_operations(3), num_operations(12)
  assert many < 3.6 * few
