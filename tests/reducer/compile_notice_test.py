"""The message that XLA compiles."""

import time

import jax
import jax.numpy as jnp
import pytest

import edgc_jax
from edgc_jax.reducer import compile_notice


def lowered():
  """Returns a program with a reducer, and compiles nothing."""
  tx = edgc_jax.powersgd(4, wire_dtype="float32")
  weight = jax.ShapeDtypeStruct((64, 96), jnp.float32)
  gradient = jax.ShapeDtypeStruct((2, 64, 96), jnp.float32)
  update = jax.vmap(
    lambda g, state: tx.update(g, state)[0], (0, None), axis_name="data"
  )
  return jax.jit(update).lower(gradient, jax.eval_shape(tx.init, weight))


@pytest.mark.usefixtures("without_cache")
def test_it_comes_while_xla_compiles_alone(monkeypatch, caplog):
  monkeypatch.setattr(compile_notice, "SECONDS", 0.3)
  lowered()
  time.sleep(0.5)
  assert not caplog.records  # lowering is no compilation
  monkeypatch.setattr(compile_notice, "SECONDS", 0.1)
  lowered().compile()
  assert "XLA has been compiling" in caplog.text
