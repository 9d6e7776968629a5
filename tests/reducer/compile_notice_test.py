"""The message that XLA compiles."""

import time
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest

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


class CompileNoticeTest(absltest.TestCase):
  def test_it_comes_while_xla_compiles(self):
    with (
      mock.patch.object(compile_notice, "SECONDS", 0.1),
      self.assertLogs("edgc_jax", "WARNING") as logs,
    ):
      lowered().compile()
    self.assertIn("XLA has been compiling", logs.output[0])

  def test_lowering_alone_is_no_compilation(self):
    with (
      mock.patch.object(compile_notice, "SECONDS", 0.1),
      self.assertNoLogs("edgc_jax", "WARNING"),
    ):
      lowered()
      time.sleep(0.3)


if __name__ == "__main__":
  absltest.main()
