"""The state of the window mechanism, and what moves its references.

A reference entropy holds for gradients of one batch size: of half as many
sequences they are noisier, and their entropy is higher by more than all ranks
are worth. So when the batch of a replica changes, references move by what the
change did to the entropy: by the first whole window after it, less the last
one before it.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What `rebase` is made of: a mark in the running window, which counts only if
# all its samples are from before it; references that the next whole window
# moves. Both, where a batch changes again before the first change has counted.
MARKED, DUE = 1, 2
# Nats by which all matrices' entropies move when the scale jumps, and by which
# these moves may differ.
_JUMP, _SPREAD = 0.5, 0.3


class ControllerState(NamedTuple):
  """Window state; entropies in nats, all equal over the data axis.

  On pipeline stages each stage has its own, but for `lead_rung`.
  """

  lead_rung: jax.Array  # int32 [], that of stage 0, equal on all stages
  rung: jax.Array  # int32 []
  is_warm: jax.Array  # bool [], warm-up is over
  num_windows: jax.Array  # int32 [], closed so far, with a sample in them
  entropy: jax.Array  # float32 [], the newest sample
  entropy_sum: jax.Array  # float32 [], over this window's samples
  entropies: jax.Array  # float32 [K], of each matrix, the newest sample
  variance_sum: jax.Array  # float32 [K], over this window's samples
  num_samples: jax.Array  # float32 []
  window_entropy: jax.Array  # float32 [], mean of the last whole window
  first_entropy: jax.Array  # float32 [], mean of the first such window
  first_change: jax.Array  # float32 [], mean of the second less the first
  reference_entropy: jax.Array  # float32 [], H_ref
  reference_variance: jax.Array  # float32 [K], in that window
  window_variance: jax.Array  # float32 [K], in the last whole window
  rebase: jax.Array  # int32 [], of MARKED and DUE
  num_before: jax.Array  # float32 [], samples in the window before its mark
  scale_jumps: jax.Array  # int32 [], windows with a jump (`has_jumped`)


def first_state(warmup_rung: int, num_matrices: int) -> ControllerState:
  """The state before the first step: nothing measured."""
  # A new array for every field: one that served twice cannot be donated.
  zero = functools.partial(jnp.zeros, (), jnp.float32)
  integer = functools.partial(jnp.full, (), dtype=jnp.int32)
  per_matrix = functools.partial(jnp.zeros, num_matrices, jnp.float32)
  return ControllerState(
    lead_rung=integer(warmup_rung),
    rung=integer(warmup_rung),
    is_warm=jnp.zeros((), bool),
    num_windows=integer(0),
    entropy=zero(),
    entropy_sum=zero(),
    entropies=per_matrix(),
    variance_sum=per_matrix(),
    num_samples=zero(),
    window_entropy=zero(),
    first_entropy=zero(),
    first_change=zero(),
    reference_entropy=zero(),
    reference_variance=per_matrix(),
    window_variance=per_matrix(),
    rebase=integer(0),
    num_before=zero(),
    scale_jumps=integer(0),
  )


def has_jumped(variance: jax.Array, previous: jax.Array) -> jax.Array:
  """Whether the gradients of all matrices changed their scale at once; bool [].

  By more than half a nat from one window to the next, all by the same factor
  to a third: what a change of the loss's scale does, and learning hardly ever.

  Args:
    variance: float32 [K], of the newest window.
    previous: float32 [K], of the window before it; zeros if there is none.
  """
  if not variance.size:
    return jnp.array(False)
  is_known = (variance > 0) & (previous > 0)
  ratio = jnp.where(
    is_known, variance / jnp.where(is_known, previous, 1.0), 1.0
  )
  shifts = 0.5 * jnp.log(ratio)
  lowest, highest = jnp.min(shifts), jnp.max(shifts)
  is_one_way = (lowest > _JUMP) | (highest < -_JUMP)
  return jnp.all(is_known) & is_one_way & (highest - lowest < _SPREAD)


def rescaled(state: ControllerState, factor: float) -> ControllerState:
  """The state as if all gradients so far had been `factor` times as large."""
  shift, squared = math.log(factor), factor**2
  return state._replace(
    entropy=state.entropy + shift,
    entropy_sum=state.entropy_sum + shift * state.num_samples,
    entropies=state.entropies + shift,
    variance_sum=state.variance_sum * squared,
    window_entropy=state.window_entropy + shift,
    first_entropy=state.first_entropy + shift,
    reference_entropy=state.reference_entropy + shift,
    reference_variance=state.reference_variance * squared,
    window_variance=state.window_variance * squared,
  )


def mark_rebase(state: ControllerState) -> ControllerState:
  """The state from which on gradients are of another batch size.

  Works on any form of it: of one device, stacked by pmap, global, NumPy.
  """
  is_marked = (state.rebase & MARKED) > 0
  before = state.num_before * is_marked + state.num_samples * ~is_marked
  return state._replace(rebase=state.rebase | MARKED, num_before=before)


def rebased(
  state: ControllerState, entropy: jax.Array, has_sample: jax.Array
) -> ControllerState:
  """With references moved where that is due, by a window's mean `entropy`."""
  is_due = (state.rebase & DUE > 0) & has_sample
  shift = jnp.where(
    is_due & (state.num_windows > 0), entropy - state.window_entropy, 0.0
  )
  return state._replace(
    window_entropy=state.window_entropy + shift,
    first_entropy=state.first_entropy + shift,
    reference_entropy=state.reference_entropy + shift,
    rebase=jnp.where(is_due, state.rebase & ~DUE, state.rebase),
  )
