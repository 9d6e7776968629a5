"""The message that XLA compiles."""

import time
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import absltest

import edgc_jax
from edgc_jax.reducer import compile_notice


def lowered():
  tx = edgc_jax.powersgd(4, wire_dtype="float32")
  gradients = {"w": jnp.ones((2, 64, 96))}
  state = tx.init({"w": gradients["w"][0]})
  update = jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")
  return jax.jit(update).lower(gradients)


class CompileNoticeTest(absltest.TestCase):
  def test_it_comes_while_xla_compiles(self):
    with (
      mock.patch.object(compile_notice, "SECONDS", 0.1),
      self.assertLogs("edgc_jax", "WARNING") as logs,
    ):
      lowered().compile()
    self.assertLen(logs.output, 1)
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
