"""`metrics` finds the reducer's state anywhere in a state."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import float32
from helpers.meshes import Pmap, gradients_like

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24))}
ALWAYS = {
  "rank", "wire_bytes", "dense_bytes", "compression_ratio",
  "relative_error", "residual_norm", "skipped_steps", "identical_gradients",
  "diverged_steps",
}  # fmt: skip
LOW_RANK = ALWAYS | {"matrix_rank", "matrix_error", "diverging_windows"}
EDGC = LOW_RANK | {
  "entropy", "predicted_error", "matrix_entropy", "matrix_predicted_error",
}  # fmt: skip


def test_keys():
  of = lambda tx: set(edgc_jax.metrics(tx.init(PARAMS)))  # noqa: E731
  assert of(edgc_jax.allreduce()) == ALWAYS
  assert of(float32.powersgd(2)) == LOW_RANK
  assert of(float32.edgc(rank_max=4)) == EDGC
  skipping = edgc_jax.skip_nonfinite(float32.powersgd(2))
  assert of(skipping) == LOW_RANK | {"consecutive_skips"}


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.chain(tx, optax.adam(1e-3)),
    lambda tx: optax.named_chain(("a", tx), ("b", optax.sgd(1.0))),
    lambda tx: optax.masked(tx, {"w": True}),
    lambda tx: optax.MultiSteps(tx, 2),
    lambda tx: edgc_jax.accumulate(tx, 2),
    lambda tx: edgc_jax.skip_nonfinite(optax.chain(tx)),
  ],
)
def test_found_inside(wrap):
  values = edgc_jax.metrics(wrap(float32.powersgd(2)).init(PARAMS))
  assert values["dense_bytes"] == 4 * 16 * 24


def test_python_scalars_from_a_stacked_state():
  run = Pmap(optax.chain(float32.powersgd(2), optax.sgd(1.0)), PARAMS)
  run.step(gradients_like(PARAMS, 0))
  values = edgc_jax.metrics(run.state)
  assert values.pop("matrix_rank") == {"w": [2]}
  assert values.pop("matrix_error")["w"][0] == pytest.approx(
    values["relative_error"], rel=0, abs=5e-8
  )
  for name, value in values.items():
    assert isinstance(value, int | float), name
  assert values["rank"] == 2
  assert 0.01 <= values["relative_error"] <= 1.0


def test_inside_a_compiled_function():
  state = float32.edgc(rank_max=4).init(PARAMS)
  inside = jax.jit(edgc_jax.metrics)(state)
  assert set(inside) == set(edgc_jax.metrics(state))
