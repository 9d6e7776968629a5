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
def test_it_is_silent_of_other_programs(monkeypatch, caplog):
  """`eval_shape` of an update compiles nothing."""
  monkeypatch.setattr(compile_notice, "SECONDS", 0.0)
  monkeypatch.setattr(compile_notice, "_is_compiling", lambda thread: True)
  tx = edgc_jax.allreduce()

  def update(g):
    return jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(g)

  shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
  jax.eval_shape(update, shape)
  jax.jit(lambda x: x + 1)(jnp.ones(3))
  time.sleep(0.2)
  assert not caplog.records
  jax.jit(update).lower(shape)
  time.sleep(0.2)
  assert "XLA has been compiling" in caplog.text


@pytest.mark.usefixtures("without_cache")
def test_it_comes_while_xla_compiles_alone(monkeypatch, caplog):
  monkeypatch.setattr(compile_notice, "SECONDS", 0.3)
  lowered()
  time.sleep(0.5)
  assert not caplog.records  # lowering is no compilation
  monkeypatch.setattr(compile_notice, "SECONDS", 0.1)
  lowered().compile()
  assert "XLA has been compiling" in caplog.text
