"""Builds a reducer from one method, which sends all leaves that are large."""

import dataclasses
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.reducer.reducer import Plan, by_exchange, make_reducer
from edgc_jax.reducer.rounds import DENSE, DENSE_AT_ONCE, Method, is_encoded
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.order import AxisName

MIN_SIZE = 1024  # entries; smaller leaves are sent dense


def reducer(
  method: Method,
  axis_name: AxisName = "data",
  *,
  min_size: int = MIN_SIZE,
  wire_dtype: str = "float32",
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a reducer that sends all large leaves by one method.

  Wire: what the method sends, and 8 bytes for all if it has error feedback.
  Other leaves take 4 bytes a value, or what the code of `wire_dtype` takes.

  Args:
    method: Sends the leaves that have a matrix and enough entries.
    axis_name: As for `edgc`.
    min_size: Leaves of fewer entries, and without a matrix, are sent dense.
    wire_dtype: Code of what the method sends as `values` without a code of its
      own, and of leaves that are sent dense, as for `powersgd`.
    **options: `matrix_view`, `stages`, `seed` and `check_every`, as for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if `method` is no `Method`, or `min_size` no integer.
    ValueError: if an argument is out of range.

  >>> def plain_mean(leaf, gradient, state, ranks, draws):
  ...   m = added(gradient, state.residual)
  ...   reply = yield Send(m)
  ...   return Outcome(reply.mean, m - reply.sent)
  >>> tx = optax.chain(reducer(Method(plain_mean)), optax.sgd(0.1))
  """
  if not isinstance(method, Method):
    raise TypeError(
      "`method` must be an edgc_jax.extend.Method, got"
      f" {validation.shown(method)}; wrap the function of rounds,"
      " Method(rounds)."
    )
  validation.require_int("min_size", min_size, 1)
  code = code_of(wire_dtype)

  def plan_for(leaves: tuple[Leaf, ...]) -> Plan:
    found = []
    for leaf in leaves:
      facts: dict[str, Any] = {"method": DENSE}
      if leaf.view is not None and leaf.size >= min_size:
        facts = {"method": method, "has_residual": method.feeds_back}
      elif is_encoded(leaf, code, has_ranks=False):
        facts = {"method": DENSE_AT_ONCE} | dict.fromkeys(
          ("is_encoded", "has_residual"), True
        )
      found.append(dataclasses.replace(leaf, **facts))
    return Plan(by_exchange(found), FixedBudget())

  return make_reducer(axis_name, plan_for, code=code, **options)
