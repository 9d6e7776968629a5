"""Rules that turn a change of entropy into a rank.

Two rules, `cqm_rank` and `linear_rank`, return a real-valued rank, and
`round_to_ladder` returns a rank of the ladder. The reference window is the last
window of the warm-up. Pure functions of scalars, equal on all replicas.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation

RULES = ("cqm", "linear")
_MAX_RANK_STEP = 4  # default, from one window to the next


@dataclasses.dataclass(frozen=True)
class RankRule:
  """Options of the rule that chooses the rank of a stage.

  Attributes:
    name: "cqm", the model of `error_model`, or "linear", the heuristic of
      public code: a rank in proportion to the last change of entropy.
    exponent: Exponent of e^(H_ref - H) on the squared error T; 2 keeps the
      absolute error constant.
    rank_multiple: Ranks are multiples of this.
    max_rank_step: Largest change of rank from one window to the next; None for
      4, or the step of the ladder if that is more.
    warmup_rank: Rank of the warm-up, rounded down to a rank of the ladder;
      "max" for the largest rank, None for dense.
    max_warmup_steps: Steps after which the warm-up ends even if the model
      expects the smallest rank to lose too much; None for twice the warm-up.

  Raises:
    TypeError: if an attribute is not a Python number.
    ValueError: if an attribute is out of range.
  """

  name: str = "cqm"
  exponent: float = 2.0
  rank_multiple: int = 4
  max_rank_step: int | None = None
  warmup_rank: int | str | None = "max"
  max_warmup_steps: int | None = None

  def __post_init__(self) -> None:
    validation.require_one_of("rule.name", self.name, RULES)
    validation.require_number("exponent", self.exponent)
    validation.require(
      self.exponent > 0, "exponent", self.exponent, "positive", "use 2"
    )
    validation.require_int("rank_multiple", self.rank_multiple, 1)
    if self.max_rank_step is not None:
      validation.require_int(
        "max_rank_step", self.max_rank_step, self.rank_multiple
      )
    if isinstance(self.warmup_rank, str):
      validation.require(
        self.warmup_rank == "max",
        "warmup_rank",
        self.warmup_rank,
        '"max", a rank or None',
        "use None for dense",
      )
    elif self.warmup_rank is not None:
      validation.require_int("warmup_rank", self.warmup_rank, 1)
    if self.max_warmup_steps is not None:
      validation.require_int("max_warmup_steps", self.max_warmup_steps, 0)

  def warmup_rung(self, ranks: Sequence[int]) -> int:
    """Returns the rung of the warm-up, 0 for dense.

    Args:
      ranks: The ladder without dense, rising.

    Raises:
      ValueError: if `warmup_rank` is below the smallest rank.
    """
    if self.warmup_rank is None:
      return 0
    if self.warmup_rank == "max":
      return len(ranks)
    validation.require(
      self.warmup_rank >= ranks[0],
      "warmup_rank",
      self.warmup_rank,
      f"at least the smallest rank ({ranks[0]})",
      'pass "max" for the largest, or None for a dense warm-up',
    )
    return sum(rank <= self.warmup_rank for rank in ranks)

  def rank_step(self, ranks: Sequence[int]) -> int:
    """Returns the largest change of rank in one window.

    Args:
      ranks: The ladder without dense, rising in equal steps.

    Raises:
      ValueError: if `max_rank_step` is less than the step of the ladder.
    """
    spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if self.max_rank_step is None:
      return max(_MAX_RANK_STEP, spacing)
    validation.require(
      self.max_rank_step >= spacing,
      "max_rank_step",
      self.max_rank_step,
      f"at least the step of the ladder ({spacing})",
      "raise it, or leave it None",
    )
    return self.max_rank_step


def cqm_rank(
  errors: jax.Array,
  rank_max: int,
  entropy: jax.Array,
  reference: jax.Array,
  exponent: float = 2.0,
) -> jax.Array:
  """Returns the rank that keeps the modelled absolute error constant.

  The standard deviation of a gradient's entries is in proportion to e^H, with H
  their entropy. So the absolute error equals the one of `rank_max` in the
  reference window if

    T(r) = e^(exponent (H_ref - H)) T(rank_max),

  with exponent 2 for the squared error T. Lower entropy gives a lower rank.

  Args:
    errors: float32 [rank_max + 1], ln of the squared error by rank, from
      `log_error`.
    rank_max: The rank used at the reference entropy.
    entropy: float32 [], H, mean of the newest window, nats.
    reference: float32 [], H_ref, mean of the reference window, nats.
    exponent: 2, or 1 to read the g of the paper's text as a squared error.

  Returns:
    float32 [], in [0, rank_max].

  Source: arXiv:2511.10333, r = g^-1(e^(H_ref - H) g(r_ref)) with g = sqrt(T).
  """
  # ln T(r) = ln T(rank_max) + exponent (H_ref - H), solved by interpolation.
  target = errors[rank_max] + exponent * (reference - entropy)
  ranks = jnp.arange(rank_max + 1, dtype=jnp.float32)
  return jnp.interp(-target, -errors[: rank_max + 1], ranks)


def linear_rank(
  rank_min: int,
  rank_max: int,
  entropy: jax.Array,
  previous: jax.Array,
  first_change: jax.Array,
) -> jax.Array:
  """Returns a rank in proportion to the last change of entropy.

    r = rank_min + (rank_max - rank_min) |H_k - H_(k-1)| / |H_1 - H_0|

  Args:
    rank_min: Rank if the entropy does not change.
    rank_max: Rank if it changes as much as between the first two windows.
    entropy: float32 [], H_k, mean of the newest window, nats.
    previous: float32 [], H_(k-1), mean of the window before it, nats.
    first_change: float32 [], H_1 - H_0, nats.

  Returns:
    float32 [], at least rank_min; rank_max if `first_change` is zero.

  Source: the heuristic of the public code of arXiv:2511.10333.
  """
  reference = jnp.abs(first_change)
  share = jnp.abs(entropy - previous) / jnp.where(reference > 0, reference, 1)
  share = jnp.where(reference > 0, share, 1.0)
  return rank_min + (rank_max - rank_min) * share


def round_to_ladder(
  target: jax.Array,
  current: jax.Array,
  ranks: Sequence[int],
  max_rank_step: int,
) -> jax.Array:
  """Chooses the rank of the ladder to use next.

  Clamps `target` to the ladder, rounds it down to a rank, and limits the change
  to `max_rank_step`. A lower rank replaces the current one only if `target` is
  below the current rank by more than half a step of the ladder: rounding down
  alone would change the rank at every other window while the entropy stays
  near the bound between two ranks.

  Args:
    target: float32 [], the rank that the rule returns.
    current: int32 [], index of the rank in use.
    ranks: The ladder without dense, rising in equal steps.
    max_rank_step: Largest change of rank in one window.

  Returns:
    int32 [], an index into `ranks`.

  >>> [int(round_to_ladder(jnp.float32(w), jnp.int32(3), (8, 12, 16, 20), 4))
  ...  for w in (0, 15.9, 16, 99)]
  [2, 2, 2, 3]
  >>> [int(round_to_ladder(jnp.float32(14.5), jnp.int32(i), (8, 12, 16, 20), 4))
  ...  for i in (1, 2, 3)]
  [1, 2, 2]
  """
  ladder = np.asarray(ranks, np.float32)
  # The tolerance keeps a target that float32 put just below its rank.
  index = jnp.searchsorted(ladder, target + 1e-3, side="right") - 1
  spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
  is_near = target >= jnp.asarray(ladder)[current] - 0.5 * spacing
  index = jnp.where(is_near, jnp.maximum(index, current), index)
  limit = max_rank_step // spacing
  lowest = jnp.maximum(current - limit, 0)
  highest = jnp.minimum(current + limit, len(ranks) - 1)
  return jnp.clip(index, lowest, highest).astype(jnp.int32)
