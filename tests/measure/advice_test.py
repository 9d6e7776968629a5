"""Advice follows the models of time, and prefers faithful methods."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized

import edgc_jax
from edgc_jax import CompressionModel, LinkModel
from edgc_jax.measure import advice

PARAMS = {
  "bias": jax.ShapeDtypeStruct((512,), "float32"),
  "kernel": jax.ShapeDtypeStruct((4, 512, 1024), "float32"),
}
DENSE = 4 * (512 + 4 * 512 * 1024)


def advise(link, step_seconds=0.1, replicas=4, params=PARAMS, **options):
  costs = {"compression": CompressionModel(0.02, 1e-4), "coding_seconds": 0.01}
  return advice.advise(params, link, step_seconds, replicas, **costs | options)


class AdviceTest(parameterized.TestCase):
  def test_seconds_by_hand(self):
    found = advise(LinkModel(1e-3, 1e7), ranks=(8, 32))
    names = ["dense", "dense, bf16", "edgc, rank 32", "edgc, rank 8"]
    self.assertEqual([method.name for method in found.methods], names)
    dense, narrow, *factors = found.methods
    self.assertEqual(dense.wire_bytes, DENSE)
    self.assertAlmostEqual(dense.seconds, 0.1 + 1e-3 + DENSE / 1e7)
    # Vectors are sent as float32.
    sent = edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="bfloat16", replicas=4)
    self.assertEqual(narrow.wire_bytes, sent)
    self.assertAlmostEqual(narrow.seconds, 0.1 + 2e-3 + 0.01 + sent / 1e7)
    for method, rank in zip(factors, (32, 8), strict=True):
      sent = edgc_jax.wire_bytes(PARAMS, rank)
      self.assertEqual(method.wire_bytes, sent)
      seconds = 0.1 + 2e-3 + 0.02 + 1e-4 * rank + sent / 1e7
      self.assertAlmostEqual(method.seconds, seconds)
      options = {"rank_max": rank, "wire_dtype": "float32"}
      self.assertEqual((method.reducer, method.options), ("edgc", options))

  def test_encoded_factors(self):
    link, sent = LinkModel(1e-3, 1e7), {}
    for wire_dtype in ("float32", "bfloat16"):
      (*_, method) = advise(link, ranks=(32,), wire_dtype=wire_dtype).methods
      options = {"rank": 32, "wire_dtype": wire_dtype, "replicas": 4}
      sent[wire_dtype] = edgc_jax.wire_bytes(PARAMS, **options)
      self.assertEqual(method.wire_bytes, sent[wire_dtype])
      self.assertEqual(method.options["wire_dtype"], wire_dtype)
    self.assertLess(sent["bfloat16"], 0.6 * sent["float32"])

  @parameterized.product(
    bandwidth=[1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11], tolerance=[0.0, 0.1, 0.5]
  )
  def test_the_choice_is_the_most_faithful_fast_method(
    self, bandwidth, tolerance
  ):
    found = advise(LinkModel(1e-4, bandwidth), tolerance=tolerance)
    seconds = [method.seconds for method in found.methods]
    chosen = found.methods.index(found.choice)
    limit = (1 + tolerance) * min(seconds)
    self.assertLessEqual(seconds[chosen], limit)
    for better in seconds[:chosen]:
      self.assertGreater(better, limit)

  def test_the_choice_is_dense_on_a_fast_link(self):
    self.assertEqual(advise(LinkModel(1e-5, 1e10)).choice.name, "dense")
    self.assertEqual(advise(LinkModel(1e-5, 1e5)).choice.name, "edgc, rank 8")

  def test_break_even(self):
    """At the break-even bandwidth a method takes as long as dense."""
    found = advise(LinkModel(1e-3, 1e7))
    for method in found.methods[1:]:
      again = advise(LinkModel(1e-3, method.break_even))
      (other,) = (m for m in again.methods if m.name == method.name)
      np.testing.assert_allclose(other.seconds, again.methods[0].seconds, 1e-9)
    self.assertEqual(found.methods[0].break_even, 0.0)

  def test_dense_is_never_faster_than_free_compression(self):
    free = {"compression": CompressionModel(0.0, 0.0), "coding_seconds": 0.0}
    found = advise(LinkModel(0.0, 1e12), **free)
    self.assertEqual([m.break_even for m in found.methods[1:]], [np.inf] * 4)

  def test_ranks_that_save_nothing_are_left_out(self):
    found = advise(LinkModel(1e-3, 1e7), ranks=(8, 400))
    names = ["dense", "dense, bf16", "edgc, rank 8"]
    self.assertEqual([method.name for method in found.methods], names)

  def test_the_choice_can_be_built(self):
    for method in advise(LinkModel(1e-3, 1e7)).methods:
      getattr(edgc_jax, method.reducer)(**method.options)

  def test_cannot_be_changed(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      advise(LinkModel(1e-3, 1e7)).choice = None

  @parameterized.parameters(
    ("step_seconds", {"step_seconds": -1.0}),
    ("replicas", {"replicas": 0}),
    ("coding_seconds", {"coding_seconds": float("inf")}),
    ("tolerance", {"tolerance": -0.1}),
    ("ranks", {"ranks": (8, 0)}),
  )
  def test_errors(self, name, options):
    with self.assertRaisesRegex(ValueError, f"`{name}` must be .*, got .*; "):
      advise(LinkModel(1e-3, 1e7), **options)


if __name__ == "__main__":
  absltest.main()
