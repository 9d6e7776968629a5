"""Products of stacks of matrices, [k, rows, cols], where layout decides.

What is written as A^T B reads A along its columns. XLA's CPU backend has a
kernel for it that is two to four times slower than its others, so the factor,
which is small beside the gradient, is what gets transposed.
"""

import jax
import jax.numpy as jnp


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
  """A^T B, as (B^T A)^T.

  Args:
    a: float32 [k, m, n].
    b: float32 [k, m, r], the smaller.

  Returns:
    float32 [k, n, r].

  >>> a = jnp.arange(6.0).reshape(1, 3, 2)
  >>> transposed_product(a, jnp.ones((1, 3, 1)))[0]
  Array([[6.],
         [9.]], dtype=float32)
  """
  # Else the compiler sees that both are the same, and takes the slower.
  across = jax.lax.optimization_barrier(jnp.swapaxes(b, 1, 2))
  product = jax.lax.optimization_barrier(across @ a)
  return jnp.swapaxes(product, 1, 2)


def transposed_products(
  a: jax.Array, b: jax.Array, row: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A^T B and, in the same pass over A, the product of a row with A.

  Args:
    a: float32 [k, m, n].
    b: float32 [k, m, r].
    row: float32 [k, 1, m].

  Returns:
    float32 [k, n, r] and [k, 1, n].

  >>> a = jnp.arange(6.0).reshape(1, 3, 2)
  >>> b, row = jnp.ones((1, 3, 1)), jnp.array([[[1.0, 0.0, 0.0]]])
  >>> transposed_products(a, b, row)[1][0]
  Array([[0., 1.]], dtype=float32)
  """
  both = transposed_product(a, jnp.append(b, jnp.swapaxes(row, 1, 2), axis=2))
  return both[:, :, :-1], jnp.swapaxes(both[:, :, -1:], 1, 2)


def outer_product(p: jax.Array, q: jax.Array) -> jax.Array:
  """P Q^T; float32 [k, m, n] of [k, m, r] and [k, n, r]."""
  return p @ jnp.swapaxes(q, 1, 2)
