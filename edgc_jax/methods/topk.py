"""Defines `topk`: sends the largest entries of every tensor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.entrywise import MIN_SIZE, Round, count_of, make_entrywise
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send


def topk(
  density: float = 0.01,
  axis_name: AxisName = "data",
  *,
  residual_decay: float = 1.0,
  min_size: int = MIN_SIZE,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  mesh: Mesh | None = None,
  param_specs: Any = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries of every tensor, with error feedback.

    k = max(1, round(density n)),    sent_i = the k largest |M_i| of n entries,
    update = mean_i sent_i,          residual_i = M_i - sent_i

  Wire, N replicas: 4 N k bytes for each tensor, since values and int32 indices
  are gathered (half of 8 N k: an all-gather counts as half an all-reduce). It
  grows with N: at N density = 1 it equals dense.

  Args:
    density: Share of the entries that is sent, in (0, 1].
    axis_name: As for `edgc`.
    residual_decay: As for `quantize`.
    min_size: Leaves of fewer entries are sent dense.
    matrix_view, stages, mesh, param_specs, check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599.

  >>> tx = optax.chain(topk(density=0.01), optax.adam(1e-3))
  """
  validation.require_share("density", density)

  def average(m: jax.Array, key: jax.Array) -> Round:
    del key
    m = m.ravel()
    # Non-finite entries are sent, so that all replicas detect them.
    magnitude = jnp.where(jnp.isfinite(m), jnp.abs(m), jnp.inf)
    index = jax.lax.top_k(magnitude, count_of(density, m.size))[1]
    reply = yield Send(gathered=(m[index], index))
    values, places = reply.gathered
    # mean = sum_i sent_i / N
    mean = _total(values, places, m.size) / len(values)
    return mean, jnp.zeros_like(m).at[index].set(m[index])

  return make_entrywise(
    average,
    axis_name,
    residual_decay=residual_decay,
    min_size=min_size,
    matrix_view=matrix_view,
    stages=stages,
    mesh=mesh,
    param_specs=param_specs,
    check_every=check_every,
  )


def _total(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
  """Adds up the values [N, k] of N replicas at their places; float32 [size].

  Replicas are added one after the other. The places of one replica differ, so
  every entry is summed in the same order on all devices, even if a device
  scatters with atomics.
  """

  def add(j: int, total: jax.Array) -> jax.Array:
    return total.at[places[j]].add(values[j])

  zeros = jnp.zeros_like(values, shape=(size,))
  return jax.lax.fori_loop(0, len(values), add, zeros)
