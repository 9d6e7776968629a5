"""Methods that compress a gradient entry by entry, not as matrices.

With M_i the gradient of replica i plus its residual:

  update = mean_i sent_i,    residual_i = M_i - sent_i

A residual that decays is multiplied by a number below 1 before it is added.
`entrywise` makes a method of a function that averages an array; it measures the
error, and feeds it back.
"""

from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax import validation
from edgc_jax.leaves.leaf import Leaf, LeafState
from edgc_jax.methods import linear_algebra, sketches
from edgc_jax.reducer.rounds import (
  Draws,
  Energies,
  Method,
  Outcome,
  Rounds,
  added,
)
from edgc_jax.wire.codes import Code, name_of
from edgc_jax.wire.wire import Reply, Send

_MOST_ENTRIES = 2**31 - 1  # the largest size that int32 indices cover

Round = Generator[Send | None, Reply, tuple[jax.Array, jax.Array]]
Average = Callable[[jax.Array, jax.Array], Round]


def entrywise(
  average: Average,
  *,
  error_feedback: bool = True,
  residual_decay: float = 1.0,
  code: Code | None = None,
) -> Method:
  """Makes a method of a function that averages the entries of an array.

  Wire: what `average` sends, and 18 values for each matrix.

  Args:
    average: From the matrices M_i, float32 [k, m, n], and a key that is equal
      on all replicas, to one round that returns mean_i sent_i and sent_i, of
      any shape.
    error_feedback: Whether replicas keep a residual.
    residual_decay: Multiplies the residual before it is added; in (0, 1].
    code: Encoding of the entries, for the method's name.

  Raises:
    TypeError: if an option is no flag or no number.
    ValueError: if the decay is out of range, or there is nothing to decay.
  """
  validation.require_flag("error_feedback", error_feedback)
  validation.require_share("residual_decay", residual_decay)
  validation.require(
    error_feedback or residual_decay == 1,
    "residual_decay",
    residual_decay,
    "1 without error feedback, which has no residual to decay",
    "leave it out, or pass error_feedback=True",
  )

  def rounds(
    leaf: Leaf, gradient: jax.Array, state: LeafState, ranks: Any, draws: Draws
  ) -> Rounds:
    del ranks
    kept = state.residual
    if kept is not None and residual_decay < 1:
      kept *= residual_decay
    m = added(gradient, kept)
    matrices = m.reshape(leaf.view)
    mean, sent = yield from average(matrices, draws.key)
    # residual_i = M_i - sent_i
    residual = m - sent.reshape(m.shape)
    left = residual.reshape(leaf.view)
    unit = linear_algebra.unit_of(mean)
    scale = 1 / unit
    means = scale * mean.reshape(leaf.view)
    reply = yield Send(
      # Not finite if an entry that was not sent is not.
      exact=sketches.sketch(leaf, left, draws),
      measured=(
        linear_algebra.energy(left, unit),
        _product(means, means + 2 * scale * left),
      ),
    )
    energy, rest = reply.measured
    # |mean M|^2 = |mean E|^2 + <update, update + 2 mean E>
    lost = sketches.squared(reply.exact, unit)
    total = jnp.maximum(lost + rest, lost)
    return Outcome(
      mean,
      residual,
      energies=Energies(lost, total, energy, unit),
    )

  in_code = f" in {name_of(code)}" if code else ""
  name = f"entry by entry{in_code}"
  return Method(rounds, name, measures=True, feeds_back=error_feedback)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the products <a, b> of matrices [k, m, n].

  As a product of arrays, whose operands the compiler computes once.
  """
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum("kmn,kmn->k", a, b, precision=exact)


def count_of(density: float, size: int) -> int:
  """Returns k = max(1, round(density n)), the entries sent of n.

  Raises:
    ValueError: if the array is too large for int32 indices.
  """
  if size > _MOST_ENTRIES:
    raise ValueError(
      f"`updates` must have leaves of at most {_MOST_ENTRIES:,} entries, the"
      f" range of int32 indices, got one of {size:,}; split it, or send it"
      " dense with a `matrix_view` that returns None for it."
    )
  return max(1, round(density * size))
