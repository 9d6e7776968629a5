"""Times by hand, and the rank ceiling against a search over all ranks."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.plan.ladder import rank_ceiling, spread_ranks
from edgc_jax.plan.link_model import (
  CompressionModel,
  LinkModel,
  exchange_seconds,
)
from edgc_jax.plan.plan import make_plan

FREE = CompressionModel(0.0, 0.0)
COMPRESSIONS = (FREE, CompressionModel(1e-5, 1e-6), CompressionModel(0, 3e-3))
LINKS = (
  LinkModel(0.0, 1e9),
  LinkModel(1e-5, 1e8),
  LinkModel(2e-4, 1e9),
  LinkModel(1e-6, 1e11),
)
KERNELS = {"attention_in": 3, "attention_out": 1, "mlp_in": 4, "mlp_out": 4}


def shaped(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def gpt2_124m():
  """Returns parameters of GPT-2 124M, scanned: 12 layers of width 768."""
  tree = {"tokens": shaped(50257, 768), "positions": shaped(1024, 768)}
  for name, factor in KERNELS.items():
    sides = (768, factor * 768)
    tree[name] = shaped(12, *(sides[::-1] if name == "mlp_out" else sides))
  return tree | {"norms": [shaped(768)] * 2, "biases": shaped(12 * 9 * 768)}


TREES = {
  "one": {"w": shaped(256, 256)},
  "mixed": {
    "bias": shaped(3000),
    "large": shaped(96, 160),
    "small": shaped(20, 20),
    "stack": shaped(3, 40, 64),
  },
  "vectors": {"bias": shaped(100), "scale": shaped(7)},
  "empty": {},
  "gpt2": gpt2_124m(),
}


def plan_of(name, ladder=(0, 4), min_ratio=2.0):
  return make_plan(TREES[name], ladder, min_ratio)


def brute_force(plan, link, compression, multiple):
  """Finds the rank ceiling by trying all ranks, with bytes leaf by leaf."""

  def sent(rank):
    total, factors = 0, False
    for leaf in plan.leaves:
      size = int(np.prod(leaf.shape))
      if leaf.view and rank:
        count, m, n = leaf.view
        r = min(rank, m, n)
        if m * n >= plan.min_ratio * r * (m + n):
          size, factors = count * r * (m + n), True
      total += 4 * size
    return total + 8 * factors, factors

  dense = link.latency + sent(0)[0] / link.bandwidth
  best = 0
  sides = [min(f.view.rows, f.view.cols) for f in plan.leaves if f.view]
  for rank in range(multiple, 1000, multiple):
    num_bytes, factors = sent(rank)
    time = 2 * link.latency + num_bytes / link.bandwidth
    time += compression.base + compression.per_rank * rank
    if (
      factors
      and rank <= max(sides)
      and time <= dense
      and sent(0)[0] / num_bytes >= plan.min_ratio
    ):
      best = rank
  return best


class ModelTest(parameterized.TestCase):
  def test_seconds(self):
    link = LinkModel(latency=0.5, bandwidth=100.0)
    self.assertEqual(link.seconds(300), 3.5)
    self.assertEqual(link.seconds(300, num_collectives=3), 4.5)
    compression = CompressionModel(base=2.0, per_rank=0.25)
    self.assertEqual([compression.seconds(r) for r in (0, 1, 8)], [0, 2.25, 4])

  def test_static_arguments(self):
    self.assertEqual(LinkModel(0.5, 9.0, r_squared=0.9), LinkModel(0.5, 9.0))
    self.assertEqual(
      hash(LinkModel(0.5, 9.0, r_squared=0.9)), hash(LinkModel(0.5, 9.0))
    )
    self.assertNotEqual(LinkModel(0.5, 9.0), LinkModel(0.5, 8.0))
    self.assertEqual(hash(FREE), hash(CompressionModel(0.0, 0.0)))
    LinkModel(0, 1)  # an ideal link

  @parameterized.parameters(
    (LinkModel, "latency", (-1.0, 1.0)),
    (LinkModel, "latency", (float("nan"), 1.0)),
    (LinkModel, "latency", (float("inf"), 1.0)),
    (LinkModel, "bandwidth", (0.0, 0.0)),
    (LinkModel, "bandwidth", (0.0, -5.0)),
    (LinkModel, "bandwidth", (0.0, float("inf"))),
    (LinkModel, "bandwidth", (0.0, float("nan"))),
    (CompressionModel, "base", (-1e-9, 0.0)),
    (CompressionModel, "base", (float("inf"), 0.0)),
    (CompressionModel, "per_rank", (0.0, -1e-9)),
    (CompressionModel, "per_rank", (0.0, float("nan"))),
  )
  def test_out_of_range(self, model, name, values):
    with self.assertRaisesRegex(ValueError, f"`{name}` must be .*, got .*; "):
      model(*values)

  @parameterized.parameters(LinkModel, CompressionModel)
  def test_no_number(self, model):
    with self.assertRaisesRegex(TypeError, "must be a Python number"):
      model(1.0, "fast")
    with self.assertRaisesRegex(TypeError, "must be a Python number"):
      model(jnp.ones(()), 1.0)


class ExchangeTest(parameterized.TestCase):
  def test_by_hand(self):
    """256 x 256: dense 262144 bytes, rank r 4 (512 r + 17)."""
    link, compression = LinkModel(1.0, 1000.0), CompressionModel(3.0, 0.5)
    found = exchange_seconds(plan_of("one", (0, 4, 8)), link, compression)
    expected = [1 + 262.144, 2 + 8.26 + 3 + 2, 2 + 16.452 + 3 + 4]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    free = exchange_seconds(plan_of("one", (0, 4, 8)), link)
    np.testing.assert_allclose(free, [263.144, 10.26, 18.452], rtol=1e-12)

  def test_without_a_dense_rung(self):
    link = LinkModel(1.0, 1000.0)
    found = exchange_seconds(plan_of("one", (4, 8)), link)
    np.testing.assert_allclose(found, [10.26, 18.452], rtol=1e-12)

  def test_a_rank_that_compresses_nothing_is_dense(self):
    plan = make_plan({"w": shaped(20, 20)}, (0, 8))
    found = exchange_seconds(
      plan, LinkModel(1.0, 1000.0), CompressionModel(3.0, 0.5)
    )
    np.testing.assert_allclose(found, [2.6, 2.6])

  def test_dips_are_levelled(self):
    """At ratio 0.51, 90 x 90 sends more at rank 88 than dense at 92."""
    tree = {"a": shaped(512, 4), "b": shaped(90, 90)}
    plan = make_plan(tree, (0, 88, 92), 0.51)
    dense, high, low = (plan.wire_bytes(rank) for rank in plan.ladder)
    self.assertLess(low, high)
    found = exchange_seconds(plan, LinkModel(0.0, 1.0))
    np.testing.assert_array_equal(found, [dense, high, high])


class CeilingTest(parameterized.TestCase):
  @parameterized.product(
    tree=list(TREES),
    setting=[(4, 2.0), (1, 2.0), (8, 1.0), (4, 0.5), (1, 0.0)],
  )
  def test_brute_force(self, tree, setting):
    multiple, min_ratio = setting
    plan = plan_of(tree, min_ratio=min_ratio)
    for link in LINKS:
      for compression in COMPRESSIONS:
        found = rank_ceiling(plan, link, compression, rank_multiple=multiple)
        expected = brute_force(plan, link, compression, multiple)
        self.assertEqual(found, expected, (link, compression))
        self.assertIsInstance(found, int)

  def test_the_ratio_binds(self):
    """On a slow link any saving counts; m n / (r (m + n)) = 2 at r = 64."""
    slow = LinkModel(0.0, 1.0)
    self.assertEqual(rank_ceiling(plan_of("one"), slow, FREE), 60)
    # Without the two scalars it would be rank 64.
    found = rank_ceiling(plan_of("one", min_ratio=1.9), slow, FREE)
    self.assertEqual(found, 64)
    # The leaf alone has ratio 2 up to rank 307; the dense rest does not shrink.
    plan = make_plan(
      {"w": shaped(768, 3072), "b": shaped(768 * 3072 // 3)}, (0,)
    )
    rank = rank_ceiling(plan, slow, FREE)
    self.assertEqual(rank, 204)
    self.assertGreaterEqual(plan.dense_bytes / plan.wire_bytes(204), 2)
    self.assertLess(plan.dense_bytes / plan.wire_bytes(208), 2)

  def test_the_time_binds(self):
    """Seconds: dense 263.1, rank r 2 + 2.048 r + 0.068 + r."""
    found = rank_ceiling(
      plan_of("one", min_ratio=1.0),
      LinkModel(1.0, 1000.0),
      CompressionModel(0.0, 1.0),
    )
    self.assertEqual(found, 84)  # (263.144 - 2.068) / 3.048 = 85.7

  def test_the_second_all_reduce_counts(self):
    """Rank 4 saves 253.884 ms of sending and adds one latency."""
    plan = plan_of("one")
    link = lambda latency: LinkModel(latency, 1e6)  # noqa: E731
    self.assertEqual(rank_ceiling(plan, link(0.2538), FREE), 4)
    self.assertEqual(rank_ceiling(plan, link(0.2539), FREE), 0)

  def test_nothing_to_gain(self):
    fast = LinkModel(1e-3, 1e12)
    for name in TREES:
      self.assertEqual(rank_ceiling(plan_of(name), fast, FREE), 0)

  def test_the_ladder_does_not_matter(self):
    link = LinkModel(1e-4, 1e9)
    found = {
      rank_ceiling(plan_of("gpt2", ladder), link, FREE)
      for ladder in ((0,), (0, 4), (8,), (0, 400))
    }
    self.assertLen(found, 1)

  def test_gpt2(self):
    plan = plan_of("gpt2")
    rank = rank_ceiling(plan, LinkModel(1e-4, 1e9), FREE)
    # The square kernels are dense above 192; the others are not.
    self.assertBetween(rank, 200, 307)

  def test_bad_multiple(self):
    with self.assertRaisesRegex(ValueError, "`rank_multiple`"):
      rank_ceiling(plan_of("one"), LinkModel(0, 1), FREE, rank_multiple=0)


class SpreadTest(parameterized.TestCase):
  def test_properties(self):
    random = np.random.default_rng(0)
    for _ in range(500):
      low = int(random.integers(1, 100))
      high = low + int(random.integers(0, 300))
      multiple, most = (int(x) for x in random.integers(1, (9, 21)))
      ranks = spread_ranks(low, high, multiple, most)
      self.assertEqual(ranks[-1], high)
      self.assertGreaterEqual(ranks[0], low)
      self.assertLessEqual(len(ranks), most)
      steps = set(np.diff(ranks))
      self.assertLessEqual(len(steps), 1)
      for step in steps:
        self.assertEqual(step % multiple, 0)
        self.assertLess(ranks[0] - step, low)
        # A finer step would give too many.
        finer = step - multiple
        self.assertTrue(finer == 0 or (high - low) // finer + 1 > most)
        self.assertEqual(ranks[0] == low, (high - low) % step == 0)

  def test_by_hand(self):
    self.assertEqual(spread_ranks(4, 64, 4), tuple(range(4, 65, 4)))
    self.assertEqual(spread_ranks(4, 68, 4), tuple(range(4, 69, 8)))
    self.assertEqual(spread_ranks(16, 16), (16,))
    self.assertEqual(spread_ranks(4, 288, most=1), (288,))
    self.assertEqual(spread_ranks(4, 288, most=2), (144, 288))

  @parameterized.parameters(
    ("rank_min", (0, 8)),
    ("rank_min", (12, 8)),
    ("rank_multiple", (4, 8, 0)),
    ("most", (4, 8, 4, 0)),
  )
  def test_errors(self, name, arguments):
    with self.assertRaisesRegex(ValueError, f"`{name}` must be"):
      spread_ranks(*arguments)
    with self.assertRaisesRegex(TypeError, "Python integer"):
      spread_ranks(4.0, 8)


if __name__ == "__main__":
  absltest.main()
