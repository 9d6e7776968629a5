"""Methods that compress a gradient entry by entry, not as matrices.

With M_i the gradient of replica i plus its residual:

  update = mean_i sent_i,    residual_i = M_i - sent_i

A residual that decays is multiplied by a number below 1 before it is added.
`entrywise` makes a method of a function that averages an array; it measures the
error, and feeds it back.
"""

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.leaves.leaf import Leaf, LeafState
from edgc_jax.methods import linear_algebra, sketches
from edgc_jax.reducer.reducer import Plan, by_exchange, make_reducer
from edgc_jax.reducer.rounds import (
  DENSE,
  DENSE_AT_ONCE,
  Draws,
  Energies,
  Method,
  Outcome,
  Rounds,
  added,
  is_encoded,
)
from edgc_jax.wire.codes import Code, name_of
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Reply, Send

MIN_SIZE = 1024  # entries; smaller leaves are sent dense
_MOST_ENTRIES = 2**31 - 1  # the largest size that int32 indices cover

Round = Generator[Send | None, Reply, tuple[jax.Array, jax.Array]]
Average = Callable[[jax.Array, jax.Array], Round]


def entrywise(
  average: Average, residual_decay: float = 1.0, code: Code | None = None
) -> Method:
  """Makes a method of a function that averages the entries of an array.

  Wire: what `average` sends, and 18 values for each matrix.

  Args:
    average: From the matrices M_i, float32 [k, m, n], and a key that is equal
      on all replicas, to one round that returns mean_i sent_i and sent_i, of
      any shape.
    residual_decay: Multiplies the residual before it is added.
    code: Encoding of the entries, for the method's name.
  """

  def rounds(
    leaf: Leaf, gradient: jax.Array, state: LeafState, ranks: Any, draws: Draws
  ) -> Rounds:
    del ranks
    kept = state.residual
    if kept is not None and residual_decay < 1:
      kept = residual_decay * kept
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
  return Method(rounds, f"entry by entry{in_code}", measures=True)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns the products <a, b> of matrices [k, m, n].

  As a product of arrays, whose operands the compiler computes once.
  """
  exact = jax.lax.Precision.HIGHEST
  return jnp.einsum("kmn,kmn->k", a, b, precision=exact)


def make_entrywise(
  average: Average,
  axis_name: AxisName,
  *,
  error_feedback: bool = True,
  residual_decay: float = 1.0,
  min_size: int = MIN_SIZE,
  code: Code | None = None,
  entries_code: Code | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a reducer that sends the entries of large leaves.

  Args:
    average: As for `entrywise`.
    axis_name: As for `edgc`.
    error_feedback: Whether replicas keep a residual.
    residual_decay: As for `entrywise`; in (0, 1].
    min_size: Leaves of fewer entries, and without matrices, are sent dense.
    code: Encoding of leaves that are sent dense, which needs feedback, and of
      values that `average` sends without one; None is float32.
    entries_code: Encoding that `average` uses, for `describe`.
    **options: As for `make_reducer`.
  """
  validation.require_int("min_size", min_size, 1)
  validation.require_flag("error_feedback", error_feedback)
  validation.require_share("residual_decay", residual_decay)
  validation.require(
    error_feedback or residual_decay == 1,
    "residual_decay",
    residual_decay,
    "1 without error feedback, which has no residual to decay",
    "leave it out, or pass error_feedback=True",
  )
  method = entrywise(average, residual_decay, entries_code)

  def plan_for(leaves: tuple[Leaf, ...]) -> Plan:
    found = []
    for leaf in leaves:
      encoded = is_encoded(leaf, code, has_ranks=False)
      facts: dict[str, Any] = {"method": DENSE}
      if encoded:
        facts = {"method": DENSE_AT_ONCE} | dict.fromkeys(
          ("is_encoded", "has_residual"), True
        )
      if leaf.view is not None and leaf.size >= min_size:
        facts = {"method": method, "has_residual": error_feedback}
      found.append(dataclasses.replace(leaf, **facts))
    return Plan(by_exchange(found), FixedBudget())

  return make_reducer(axis_name, plan_for, code=code, **options)


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
