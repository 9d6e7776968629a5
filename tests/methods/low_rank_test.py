"""The low-rank exchange against NumPy, and across rank changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.meshes import (
  Pmap,
  assert_replicas_equal,
  factors,
  gradients_like,
  with_field,
)
from helpers.reference import PowerSGD

import edgc_jax

ROWS, COLS, REPLICAS = 48, 80, 4
PARAMS = {"w": jnp.zeros((ROWS, COLS))}


def spectral_gradient(values, seed=0):
  """Returns a matrix of given singular values, scaled by replica."""
  random = np.random.default_rng(seed)
  u, _ = np.linalg.qr(random.standard_normal((ROWS, len(values))))
  v, _ = np.linalg.qr(random.standard_normal((COLS, len(values))))
  w = jnp.asarray((u * values) @ v.T, jnp.float32)
  return {"w": jnp.stack([0.5 * w, w, 1.5 * w, w])}


def lost_share(gradients, update):
  """Returns the share of the mean gradient's energy that an update lacks."""
  mean = np.asarray(gradients["w"], np.float64).mean(0)
  return np.sum((mean - update["w"][0]) ** 2) / np.sum(mean**2)


def clear_residual(run):
  """Makes the steps of a run steps without error feedback."""
  zeros = {"w": jnp.zeros_like(run.state.leaves["w"].residual.values)}
  run.state = with_field(run.state, "residual", zeros)


@functools.cache
def run_of(rank):
  return Pmap(float32.powersgd(rank, min_ratio=0), PARAMS)


@pytest.mark.parametrize("rank", [1, 8])
def test_agrees_with_numpy(rank):
  run = run_of(rank).restart()
  first_q = np.asarray(factors(run.state)["w"])[0, 0]
  reference = PowerSGD(first_q, REPLICAS, ROWS, COLS)
  for step in range(5):
    gradients = gradients_like(PARAMS, seed=step)
    expected = reference.step(np.asarray(gradients["w"], np.float64), rank)
    updates = run.step(gradients)
    np.testing.assert_allclose(updates["w"][0], expected, 1e-3, 1e-5)
    np.testing.assert_allclose(
      run.residual()["w"], reference.residual, 1e-3, 1e-4
    )


def test_leaves_of_unlike_shapes_share_their_factorisations():
  """Padded to one shape they get the updates that each would get alone."""
  shapes = {"a": (48, 80), "b": (40, 70), "c": (2, 33, 70), "tall": (90, 41)}
  params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
  tx = float32.powersgd(4, min_ratio=0)
  run = Pmap(tx, params)
  steps = [gradients_like(params, seed=seed) for seed in range(3)]
  # Two for all four leaves: of Q, and of P.
  assert run.compiled(steps[0]).count("lapack_spotrf") == 2
  together = [run.step(gradients) for gradients in steps]
  for name in ("c", "tall"):
    alone = Pmap(tx, {name: params[name]})
    for gradients, updates in zip(steps, together, strict=True):
      found = alone.step({name: gradients[name]})
      np.testing.assert_allclose(found[name], updates[name], 1e-3, 1e-5)


def test_warm_start_finds_the_best_subspace():
  """With the same gradient each step, the update tends to the best."""
  values = 2.0 ** -np.arange(12)
  gradients = spectral_gradient(values)
  run = run_of(4).restart()
  lost = []
  for _ in range(8):
    lost.append(lost_share(gradients, run.step(gradients)))
    clear_residual(run)
  best = np.sum(values[4:] ** 2) / np.sum(values**2)
  assert abs(lost[-1] - best) <= 1e-4
  assert lost[-1] < lost[0]


@pytest.mark.slow
def test_error_is_of_the_mean_and_norm_of_one_replica():
  """One step's estimate is rough, the mean of many is not biased."""
  run = run_of(4).restart()
  estimated, exact = [], []
  for step in range(60):
    gradients = gradients_like(PARAMS, seed=step)
    m = (np.asarray(gradients["w"]) + run.residual()["w"]).mean(0)
    run.step(gradients)
    residual, values = run.residual()["w"], edgc_jax.metrics(run.state)
    exact.append(np.sum(residual.mean(0) ** 2) / np.sum(m**2))
    estimated.append(values["relative_error"])
    norm = np.sqrt(np.mean(np.sum(residual**2, axis=(1, 2))))
    assert abs(values["residual_norm"] / norm - 1) < 0.5e-4
  assert 0.3 <= np.mean(exact) <= 0.95
  # 60 steps of (2 / 16)^(1/2) each: 4.6 % of the error.
  ratio = np.divide(estimated, exact)
  assert abs(np.mean(ratio) - 1) <= 0.05
  assert np.std(ratio) < (2 / 16) ** 0.5


@pytest.mark.slow
def test_residual_does_not_pile_up():
  """Differences between replicas are sent in the end too."""
  run = run_of(8).restart()
  norms = []
  for step in range(120):
    run.step(gradients_like(PARAMS, seed=step))
    norms.append(edgc_jax.metrics(run.state)["residual_norm"])
  assert norms[119] < 1.25 * norms[39]


@pytest.mark.slow
def test_a_spectrum_wider_than_a_float_is_exact():
  """8 singular values are 1e4 and 24 are 1: each column matters."""
  rows, cols, rank = 128, 256, 32
  values = np.r_[np.full(8, 1e4), np.ones(24)]
  params = {"w": jnp.zeros((rows, cols))}
  run = Pmap(float32.powersgd(rank, min_ratio=0), params, replicas=1)
  for noise, turns in ((0.0, False), (0.0, True), (0.05, False)):
    q = np.float32(factors(run.restart().state)["w"])[0, 0].T
    residual = np.zeros((rows, cols), np.float32)
    for step in range(30):
      random = np.random.default_rng(step if turns else 0)
      u, _ = np.linalg.qr(random.standard_normal((rows, rank)))
      v, _ = np.linalg.qr(random.standard_normal((cols, rank)))
      more = np.random.default_rng(step).standard_normal((rows, cols))
      gradient = np.float32((u * values) @ v.T + noise * more)
      run.step({"w": jnp.asarray(gradient)[None]})
      # PowerSGD with Householder QR, in float32 as well.
      m = gradient + residual
      p, _ = np.linalg.qr(m @ q)
      q = m.T @ p
      residual = m - p @ q.T
    ours = np.linalg.norm(run.residual()["w"])
    assert ours <= 1.2 * np.linalg.norm(residual), (noise, turns)
    kept = np.asarray(factors(run.state)["w"])[0, 0]
    assert np.linalg.norm(kept, axis=1).min() > 0.3


def test_dead_directions_come_back_equal_on_all_replicas():
  """After gradients of rank one, all directions are used again."""
  run = run_of(8).restart()
  for _ in range(4):
    updates = run.step(spectral_gradient(np.array([1.0])))
  assert_replicas_equal((factors(run.state), updates))
  for seed in range(2):
    run.step(gradients_like(PARAMS, seed))
  q = np.asarray(factors(run.state)["w"])[0, 0]
  lengths = np.linalg.norm(q, axis=1)
  assert lengths.min() > 0.1 * lengths.max()


@functools.cache
def changing():
  """Returns a run whose rank a test sets, compiled once for all tests."""
  tx = float32.edgc(
    rank_max=16, rank_min=8, rank_multiple=8, max_rank_step=8,
    warmup_rank=None, window=1000, warmup_steps=1000, min_ratio=0,
    sampling=edgc_jax.Sampling(step_rate=1.0), allocation="uniform",
  )  # fmt: skip
  return Pmap(tx, PARAMS)


def step_at(run, gradients, rank):
  budget = run.state.budget
  ranks = jnp.full_like(budget.decision.rank, rank)
  decision = budget.decision._replace(rank=ranks)
  run.state = run.state._replace(budget=budget._replace(decision=decision))
  updates = run.step(gradients)
  assert edgc_jax.metrics(run.state)["rank"] == rank
  return updates


@pytest.mark.slow
def test_nothing_is_lost_when_the_rank_changes():
  """Updates and residuals add up to the gradients at any rank."""
  run, owed = changing().restart(), np.zeros((ROWS, COLS))
  for step, rank in enumerate((0, 16, 16, 8, 8, 16, 8, 0)):
    gradients = gradients_like(PARAMS, seed=step)
    owed += np.asarray(gradients["w"], np.float64).mean(0)
    owed -= step_at(run, gradients, rank)["w"][0]
    kept = run.residual()["w"].mean(0)
    np.testing.assert_allclose(kept, owed, 1e-4, 1e-5)
  np.testing.assert_array_equal(run.residual()["w"], 0)


def lost_after(ranks, gradients):
  """Returns the share that the last step of a run loses.

  Steps of these ranks have no error feedback.
  """
  run = changing().restart()
  for rank in ranks:
    update = step_at(run, gradients, rank)
    clear_residual(run)
  return lost_share(gradients, update)


@pytest.mark.slow
def test_slicing_keeps_the_best_columns():
  """At the change from rank 16 to 8, the 8 strongest directions stay."""
  values = 1.15 ** -np.arange(40)
  gradients = spectral_gradient(values)
  best = np.sum(values[8:] ** 2) / np.sum(values**2)
  warm = lost_after((16, 16, 16, 16, 8), gradients)
  cold = lost_after((8,), gradients)
  assert cold > best + 0.05
  assert warm - best < 0.1 * (cold - best)


@pytest.mark.slow
def test_columns_are_used_again_when_the_rank_grows_back():
  values = 1.5 ** -np.arange(20)
  best = np.sum(values[16:] ** 2) / np.sum(values**2)
  lost = lost_after((16, 16, 16, 8, 8, 16), spectral_gradient(values))
  assert lost < best + 1e-4


@pytest.mark.slow
def test_scale_does_not_matter_when_the_rank_grows():
  """New columns of Q must not make warm ones look like rounding noise."""
  values, ranks = 0.85 ** np.arange(40), (8, 8, 8, 8, 8, 16)
  lost = [
    lost_after(ranks, spectral_gradient(x * values)) for x in (1.0, 1e-5, 1e5)
  ]
  assert np.ptp(lost) < 0.5e-4


def test_factors_of_more_values_than_int32_counts_are_refused():
  params = {"w": jax.ShapeDtypeStruct((560, 8192, 8192), jnp.float32)}
  with pytest.raises(ValueError, match=r"`rank` must be small enough .* 2,34"):
    edgc_jax.describe(edgc_jax.powersgd(512), params)
