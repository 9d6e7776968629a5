"""References in NumPy: an exchange of one matrix in float64, and codes."""

import ml_dtypes
import numpy as np


class PowerSGD:
  """PowerSGD with error feedback; each replica keeps its own residual.

  P is on the smaller side.
  """

  def __init__(self, factor_q, replicas, rows, cols):
    """Starts from the columns of Q as rows [columns, larger side]."""
    self.q = np.asarray(factor_q, np.float64).T
    self.residual = np.zeros((replicas, rows, cols))

  def step(self, gradients, rank):
    """Returns the update for gradients [replicas, rows, cols]."""
    rows, cols = self.residual.shape[1:]
    if rows <= cols:
      return self._step(gradients, rank)
    self.residual = np.swapaxes(self.residual, 1, 2)
    update = self._step(np.swapaxes(gradients, 1, 2), rank).T
    self.residual = np.swapaxes(self.residual, 1, 2)
    return update

  def _step(self, gradients, rank):
    m = gradients + self.residual
    basis, _ = np.linalg.qr(self.q[:, :rank])
    p, _, _ = np.linalg.svd(m.mean(0) @ basis, full_matrices=False)
    local_q = np.swapaxes(m, 1, 2) @ p
    self.q = np.concatenate([local_q.mean(0), self.q[:, rank:]], axis=1)
    update, sent = p @ local_q.mean(0).T, p @ np.swapaxes(local_q, 1, 2)
    self.residual = m - sent
    return update


def through_bfloat16(x):
  """Returns float32 rounded to the nearest bfloat16."""
  return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def through_blocks(x, bits, block, offset=0.5):
  """Returns float32 as integers with a scale for each block, and back.

  Args:
    x: float32 [..., n], n a multiple of `block`.
    bits: 8 or 4.
    block: Values that share a scale, the largest magnitude, rounded up.
    offset: Added before rounding down; [..., n / block, block], or a number.
  """
  levels = 2 ** (bits - 1) - 1
  blocks = x.reshape(*x.shape[:-1], -1, block)
  largest = np.abs(blocks).max(-1, keepdims=True)
  scale = through_bfloat16(largest)
  infinite = ml_dtypes.bfloat16(np.inf)
  above = np.nextafter(scale.astype(ml_dtypes.bfloat16), infinite)
  scale = np.where(scale >= largest, scale, above.astype(np.float32))
  integers = np.floor(blocks / np.where(scale > 0, scale, 1) * levels + offset)
  integers = np.clip(integers, -levels, levels).astype(np.float32)
  return (integers * (scale / levels).astype(np.float32)).reshape(x.shape)
