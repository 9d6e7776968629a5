"""A reference exchange of one matrix in NumPy, in float64."""

import numpy as np


class PowerSGD:
  """PowerSGD with error feedback; each replica keeps its own residual.

  P is on the smaller side.
  """

  def __init__(self, factor_q, replicas, rows, cols):
    """Starts from a factor Q [larger side, columns]."""
    self.q = np.asarray(factor_q, np.float64)
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
