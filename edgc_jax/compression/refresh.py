"""Factors of a matrix that all replicas have, from scratch.

A warm start follows the gradient by half an iteration of the power method a
step. Where it has lost a direction for long, as it can (PowerSGD+, arXiv:
2509.11254, has an example that never converges), the mean gradient itself,
sent dense once in a while, finds it again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from edgc_jax.compression.linear_algebra import (
  orthonormalize,
  transposed_product,
)

_ITERATIONS = 2


def leading_factors(
  stacks: Sequence[jax.Array], columns: Sequence[int], key: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
  """P and Q of every matrix M: P orthonormal, Q = M^T P, P Q^T near M.

  Randomised subspace iteration (Halko et al. 2011, arXiv:0909.4061) instead of
  a singular value decomposition: P = orth((M M^T)^2 M G), G Gaussian. Its
  columns are sorted by energy.

  Args:
    stacks: float32 [k, m, n] each.
    columns: Of the factors of each.
    key: Draws G.

  Returns:
    Lists of float32 [k, m, columns] and [k, n, columns].
  """
  q = [
    jax.random.normal(
      jax.random.fold_in(key, i), (len(m), m.shape[2], width), jnp.float32
    )
    for i, (m, width) in enumerate(zip(stacks, columns, strict=True))
  ]
  p = q
  for _ in range(1 + _ITERATIONS):
    p = orthonormalize([m @ x for m, x in zip(stacks, q, strict=True)]).columns
    q = [transposed_product(m, x) for m, x in zip(stacks, p, strict=True)]
  return p, q
