"""Rank ladders, given or found, and ceilings against a search of all ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from numpy.testing import assert_allclose

import edgc_jax
from edgc_jax.budget.ladder import (
  Ladder,
  equal_steps,
  exchange_seconds,
  rank_ceiling,
)
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer.rounds import count_bytes
from edgc_jax.wire.link_model import CompressionModel, LinkModel

FREE = CompressionModel(0.0, 0.0)
LINK = LinkModel(latency=1e-4, bandwidth=1e7)
COMPRESSIONS = (FREE, CompressionModel(1e-5, 1e-6), CompressionModel(0, 3e-3))
LINKS = (
  LinkModel(0.0, 1e9), LinkModel(1e-5, 1e8), LinkModel(2e-4, 1e9),
  LinkModel(1e-6, 1e11),
)  # fmt: skip
NUM_REDUCES = 2  # of factors in float32


def shaped(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {"w": shaped(768, 3072), "b": shaped(3072)}
TREES = {
  "one": {"w": shaped(256, 256)},
  "mixed": {
    "bias": shaped(3000), "large": shaped(96, 160), "small": shaped(20, 20),
    "stack": shaped(3, 40, 64),
  },
  "vectors": {"bias": shaped(100), "scale": shaped(7)},
  "empty": {},
}  # fmt: skip


@functools.cache
def sizes_of(name, least=4, min_ratio=2.0):
  """Returns the largest cap of a tree, and its bytes by rank."""
  tree = TREES[name] if isinstance(name, str) else dict(name)
  leaves = with_factors(leaves_in(tree), (least, 999), min_ratio, None)
  cap = max((leaf.cap for leaf in leaves), default=0)

  @functools.cache
  def counted(ranks):
    return count_bytes(leaves, ranks, None)

  return cap, lambda ranks: counted(tuple(ranks))


def ceiling(name, link, compression=FREE, multiple=4, min_ratio=2.0):
  """Returns the rank ceiling of a tree."""
  cap, bytes_at = sizes_of(name, multiple, min_ratio)
  candidates = range(multiple, cap + 1, multiple)
  return rank_ceiling(
    link, compression, candidates, bytes_at, min_ratio, NUM_REDUCES
  )


def ladder_of(rank_max=None, rank_min=None, multiple=4, link=None, cap=None):
  """Returns the ladder of `PARAMS`, or of leaves with a given cap."""
  ladder = Ladder(rank_max, rank_min, multiple, link, FREE)
  found, bytes_at = sizes_of(tuple(PARAMS.items()), ladder.least)
  cap = found if cap is None else cap
  return ladder.ranks(cap, bytes_at, 2.0, NUM_REDUCES)


def brute_force(name, link, compression, multiple, min_ratio):
  """Finds the rank ceiling by trying all ranks, with bytes leaf by leaf."""

  def cap_of(m, n):
    cap = min(m, n)
    while min_ratio and m * n < min_ratio * cap * (m + n):
      cap -= 1
    return cap if cap >= min(multiple, m, n) else 0

  leaves = leaves_in(TREES[name])
  caps = [cap_of(*leaf.view[1:]) if leaf.view else 0 for leaf in leaves]

  def sent(rank):
    total = 0
    for leaf, cap in zip(leaves, caps, strict=True):
      size = int(np.prod(leaf.shape))
      if cap and rank:
        count, m, n = leaf.view
        size = count * (min(rank, cap) * (m + n) + 17)
      total += 4 * size
    return total

  dense = link.latency + sent(0) / link.bandwidth
  best = 0
  for rank in range(multiple, max(caps, default=0) + 1, multiple):
    time = 2 * link.latency + sent(rank) / link.bandwidth
    time += compression.base + compression.per_rank * rank
    if time <= dense and sent(0) / sent(rank) >= min_ratio:
      best = rank
  return best


@pytest.mark.parametrize(
  "options, expected",
  [
    ((None, None), (8, 12, 16, 20, 24, 28, 32)), ((16, None), (4, 8, 12, 16)),
    ((8, 8), (8,)), ((24, 12, 6), (12, 18, 24)),
    ((None, None, 10), (10, 20, 30)), ((None, None, 64), (64,)),
  ],
)  # fmt: skip
def test_given(options, expected):
  """The least rank is known before the ladder: leaves follow from it."""
  assert ladder_of(*options) == expected
  ladder = Ladder(*options[:2], *(options[2:] or (4,)), None, FREE)
  assert ladder.least == expected[0]
  # Ranks above the largest cap are left out, but the least.
  for cap in (31, 13, 8, 7, 0):
    found = ladder_of(*options, cap=cap)
    assert found == tuple(r for r in expected if r <= max(cap, expected[0]))


def test_found_from_the_link():
  """There are at most 16 ranks, up to the rank ceiling."""
  found = ladder_of(link=LINK)
  assert found[-1] == ceiling(tuple(PARAMS.items()), LINK)
  assert len(found) <= 16
  assert set(np.diff(found)) == {16}
  assert found[0] >= found[-1] // 4
  # A given least rank is less than a step below the first.
  for rank_min in (4, 24, 100, 304):
    own = ladder_of(rank_min=rank_min, link=LINK)
    assert own[-1] == found[-1]
    step = (own[-1] - own[0]) // max(1, len(own) - 1) or 1
    assert rank_min <= own[0] <= rank_min + step - 1
  assert ladder_of(16, link=LINK) == ladder_of(16)
  (part,) = edgc_jax.describe(float32.edgc(link=LINK), PARAMS).parts
  assert part.ladder == found


def test_without_a_useful_rank_it_is_dense():
  """`init` warns, and the update is dense."""
  far = LinkModel(latency=10.0, bandwidth=1e9)
  with pytest.warns(RuntimeWarning, match=r"dense exchange .* no slower"):
    assert ladder_of(link=far) == ()
  with pytest.warns(RuntimeWarning, match="Use allreduce"):
    state = jax.eval_shape(float32.edgc(link=far).init, PARAMS)
  assert not state.budget
  assert not state.allocation
  # At ratio 2, 20 x 20 has at most 5 columns.
  with pytest.warns(RuntimeWarning, match="No leaf saves `min_ratio`"):
    tx = float32.edgc(rank_max=8, rank_min=8)
    state = jax.eval_shape(tx.init, {"w": shaped(20, 20)})
  assert not state.budget
  assert state.leaves["w"].factor_q is None


def test_errors():
  """A found ladder may have wider steps than the default limit."""
  float32.edgc(min_ratio=0)  # is allowed
  edgc = functools.partial(float32.edgc, link=LINK)
  top = ladder_of(link=LINK)[-1]
  for make, message in (
    (lambda: Ladder(None, 36, 4, None, FREE), r"`rank_min` .* at most.*32"),
    (lambda: Ladder(30, None, 4, None, FREE), "`rank_max` .* a multiple"),
    (
      lambda: edgc(rank_min=top + 4).init(PARAMS),
      rf"`rank_min` must be at most the largest rank.*\({top}\)",
    ),
    (
      lambda: edgc(max_rank_step=4).init(PARAMS),
      "`max_rank_step` must be at least the step of the ladder",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      make()


def seconds(name, ranks, link, compression=FREE, min_ratio=2.0):
  _, bytes_at = sizes_of(name, 4, min_ratio)
  sizes = bytes_at(ranks)
  return exchange_seconds(ranks, sizes, link, compression, NUM_REDUCES)


def test_seconds_by_hand():
  """256 x 256: dense 262144 bytes, rank r 4 (512 r + 17)."""
  link, compression = LinkModel(1.0, 1000.0), CompressionModel(3.0, 0.5)
  found = seconds("one", (0, 4, 8), link, compression)
  expected = [1 + 262.144, 2 + 8.26 + 3 + 2, 2 + 16.452 + 3 + 4]
  assert_allclose(found, expected, rtol=1e-12)
  # Encoded factors take one reduce more.
  encoded = exchange_seconds((0, 4), np.array([3000, 500]), link, FREE, 3)
  assert_allclose(encoded, [2 + 3.0, 3 + 0.5], rtol=1e-12)


def test_never_falls_with_the_rank():
  """A matrix at its cap sends what it sends at its cap, and no less."""
  ranks = tuple(range(4, 140, 4))
  for min_ratio in (0.51, 0.0):
    _, bytes_at = sizes_of("mixed", 4, min_ratio)
    assert np.all(np.diff(bytes_at(ranks)) >= 0)
    for compression in COMPRESSIONS:
      found = seconds("mixed", ranks, LINK, compression, min_ratio)
      assert np.all(np.diff(found) >= 0)


@pytest.mark.parametrize(
  "tree, setting",
  [
    ("one", (1, 2.0)), ("mixed", (4, 2.0)), ("mixed", (1, 0.0)),
    ("vectors", (4, 2.0)), ("empty", (4, 2.0)), ("mixed", (8, 1.0)),
  ],
)  # fmt: skip
def test_brute_force(tree, setting):
  for link in LINKS:
    for compression in COMPRESSIONS:
      found = ceiling(tree, link, compression, *setting)
      expected = brute_force(tree, link, compression, *setting)
      assert found == expected, (link, compression)
      assert isinstance(found, int)


def test_properties():
  random = np.random.default_rng(0)
  for _ in range(500):
    low = int(random.integers(1, 100))
    high = low + int(random.integers(0, 300))
    multiple, most = (int(x) for x in random.integers(1, (9, 21)))
    ranks = equal_steps(low, high, multiple, most)
    assert ranks[-1] == high
    assert ranks[0] >= low
    assert len(ranks) <= most
    steps = set(np.diff(ranks))
    assert len(steps) <= 1
    for step in steps:
      assert step % multiple == 0
      assert ranks[0] - step < low
      # A finer step would give too many.
      finer = step - multiple
      assert finer == 0 or (high - low) // finer + 1 > most
      assert (ranks[0] == low) == ((high - low) % step == 0)
