"""The advice is what the models of time say, and faithful where it may be."""

import dataclasses

import jax
import numpy as np
from absl.testing import absltest, parameterized
from helpers.meshes import between_hosts

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
  @parameterized.parameters((2, 2 * 127 / 2), (4, 84 / 6), (3, 0))
  def test_between_cpu_hosts_messages_are_latencies(self, replicas, more):
    """Parts of 16 MiB and less are cut, those of dense float32 are not."""
    params = jax.ShapeDtypeStruct((4096, 4096), "float32")  # 32 MiB coded
    link = LinkModel(0.5, 1e9)
    plain = advise(link, params=params, replicas=replicas, ranks=())
    with between_hosts():
      cut = advise(link, params=params, replicas=replicas, ranks=())
    dense, narrow = (
      b.seconds - a.seconds
      for a, b in zip(plain.methods, cut.methods, strict=True)
    )
    self.assertEqual(dense, 0)
    self.assertAlmostEqual(narrow, 0.5 * more)

  def test_seconds_by_hand(self):
    found = advise(LinkModel(1e-3, 1e7), ranks=(8, 32))
    names = ["dense", "dense, bf16", "edgc, rank 32", "edgc, rank 8"]
    self.assertEqual([way.name for way in found.methods], names)
    dense, narrow, *factors = found.methods
    self.assertEqual(dense.wire_bytes, DENSE)
    self.assertAlmostEqual(dense.seconds, 0.1 + 1e-3 + DENSE / 1e7)
    # Vectors travel exact, beside what is coded.
    sent = edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="bfloat16", replicas=4)
    self.assertEqual(narrow.wire_bytes, sent)
    self.assertAlmostEqual(narrow.seconds, 0.1 + 2e-3 + 0.01 + sent / 1e7)
    for way, rank in zip(factors, (32, 8), strict=True):
      sent = edgc_jax.wire_bytes(PARAMS, rank)
      self.assertEqual(way.wire_bytes, sent)
      seconds = 0.1 + 2e-3 + 0.02 + 1e-4 * rank + sent / 1e7
      self.assertAlmostEqual(way.seconds, seconds)
      options = {"rank_max": rank, "wire_dtype": "float32"}
      self.assertEqual((way.reducer, way.options), ("edgc", options))

  def test_factors_that_travel_coded(self):
    link, sent = LinkModel(1e-3, 1e7), {}
    for wire_dtype in ("float32", "bfloat16"):
      (*_, way) = advise(link, ranks=(32,), wire_dtype=wire_dtype).methods
      options = {"rank": 32, "wire_dtype": wire_dtype, "replicas": 4}
      sent[wire_dtype] = edgc_jax.wire_bytes(PARAMS, **options)
      self.assertEqual(way.wire_bytes, sent[wire_dtype])
      self.assertEqual(way.options["wire_dtype"], wire_dtype)
    self.assertLess(sent["bfloat16"], 0.6 * sent["float32"])

  @parameterized.parameters(1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11)
  def test_the_choice_is_the_most_faithful_of_the_fast(self, bandwidth):
    for tolerance in (0.0, 0.1, 0.5):
      found = advise(LinkModel(1e-4, bandwidth), tolerance=tolerance)
      seconds = [way.seconds for way in found.methods]
      chosen = found.methods.index(found.choice)
      limit = (1 + tolerance) * min(seconds)
      self.assertLessEqual(seconds[chosen], limit)
      for better in seconds[:chosen]:
        self.assertGreater(better, limit)

  def test_fast_links_are_told_to_send_dense(self):
    self.assertEqual(advise(LinkModel(1e-5, 1e10)).choice.name, "dense")
    self.assertEqual(advise(LinkModel(1e-5, 1e5)).choice.name, "edgc, rank 8")

  def test_break_even(self):
    """Where the bandwidth is that of the break-even, both take as long."""
    found = advise(LinkModel(1e-3, 1e7))
    for way in found.methods[1:]:
      again = advise(LinkModel(1e-3, way.break_even))
      (other,) = (w for w in again.methods if w.name == way.name)
      np.testing.assert_allclose(other.seconds, again.methods[0].seconds, 1e-9)
    self.assertEqual(found.methods[0].break_even, 0.0)

  def test_never_and_always(self):
    free = {"compression": CompressionModel(0.0, 0.0), "coding_seconds": 0.0}
    found = advise(LinkModel(0.0, 1e12), **free)
    self.assertEqual([w.break_even for w in found.methods[1:]], [np.inf] * 4)

  def test_ranks_that_save_nothing_are_left_out(self):
    found = advise(LinkModel(1e-3, 1e7), ranks=(8, 400))
    names = ["dense", "dense, bf16", "edgc, rank 8"]
    self.assertEqual([way.name for way in found.methods], names)

  def test_the_choice_can_be_built(self):
    for way in advise(LinkModel(1e-3, 1e7)).methods:
      getattr(edgc_jax, way.reducer)(**way.options)

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
