"""Defines `randomk`: sends random entries, the same on all replicas."""

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.entrywise import Round, count_of, entrywise
from edgc_jax.reducer.of_method import MIN_SIZE, reducer
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send


def randomk(
  density: float = 0.05,
  axis_name: AxisName = "data",
  *,
  error_feedback: bool = True,
  min_size: int = MIN_SIZE,
  seed: int = 714,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages random entries of every tensor, the same on all replicas.

  A tensor of n entries is cut into k = max(1, round(density n)) runs of equal
  length, up to one entry. At each step one entry of each run is drawn:

    with error feedback   update = mean_i M_i at these entries, 0 elsewhere
    without               update = mean_i M_i times the length of the run at
                          these entries, 0 elsewhere: unbiased

  Wire: 4 k bytes for each tensor, in one all-reduce; and 72 bytes for each
  matrix, of which the error is read, and 8 for all with feedback.

  Args:
    density: Share of the entries that is sent, in (0, 1].
    axis_name: As for `edgc`.
    error_feedback: Whether entries that were not sent are added to the next
      gradient. Without it the true error may exceed 1, but `relative_error` is
      at most 1.
    min_size: Leaves of fewer entries are sent dense, and so are those without
      a matrix, such as vectors.
    seed: Seed of the entries.
    matrix_view, stages, check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599. Departure: the paper draws entries
    from the whole tensor, not from runs.

  >>> tx = optax.chain(randomk(density=0.1), optax.adam(1e-3))
  """
  validation.require_share("density", density)

  def average(m: jax.Array, key: jax.Array) -> Round:
    m = m.ravel()
    place, lengths = _one_of_each_run(m.size, count_of(density, m.size), key)
    scale = 1.0 if error_feedback else lengths.astype(jnp.float32)
    reply = yield Send(m[place])

    def in_place(values: jax.Array) -> jax.Array:
      # As JAX's types tell, the mean is equal on all replicas; M is not.
      zeros = jnp.zeros_like(values, shape=m.shape)
      return zeros.at[place].set(values * scale)

    return in_place(reply.mean), in_place(m[place])

  return reducer(
    entrywise(average, error_feedback=error_feedback),
    axis_name,
    min_size=min_size,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )


def _one_of_each_run(
  size: int, count: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Draws one position from each of `count` runs.

  Returns:
    The positions and the lengths of the runs, int32 [count] each.
  """
  shorter, longer = divmod(size, count)
  i = jnp.arange(count, dtype=jnp.int32)
  lengths = shorter + (i < longer).astype(jnp.int32)
  starts = i * shorter + jnp.minimum(i, longer)
  # Integer arithmetic only: it gives the same result on every platform.
  return starts + jax.random.randint(key, (count,), 0, lengths), lengths
