"""The compiled program sends the predicted bytes."""

import math

import jax.numpy as jnp
from absl.testing import absltest, parameterized
from helpers.meshes import BACKENDS, PARTED_BYTES, gradients_like, window_bytes

import edgc_jax
from edgc_jax.adaptation import entropy
from edgc_jax.comm import agreement
from edgc_jax.comm.codes import code_of
from edgc_jax.measure import hlo
from edgc_jax.plan.plan import make_plan

# The small matrix saves bytes up to rank 5; above that it is dense.
PARAMS = {
  "bfloat16": jnp.zeros((64, 48), jnp.bfloat16),
  "bias": jnp.zeros((30,)),
  "large": jnp.zeros((96, 160)),
  "scalar": jnp.zeros(()),
  "small": jnp.zeros((20, 20)),
  "stack": jnp.zeros((3, 40, 64)),
}


class WireBytesTest(parameterized.TestCase):
  @parameterized.parameters(
    ({"rank": -1}, ValueError), ({"rank": "4"}, TypeError),
    ({"rank": 4, "replicas": 0}, ValueError),
    ({"rank": 4, "lead_rank": -2}, ValueError),
  )  # fmt: skip
  def test_arguments_are_checked(self, options, error):
    name = list(options)[-1]
    with self.assertRaisesRegex(error, f"`{name}` must be"):
      edgc_jax.wire_bytes(PARAMS, **options)

  @parameterized.parameters(
    ("pmap", "stage", "gaussian", None),
    ("pmap", "matrix", "gaussian", "max"),
    ("shard_map", "matrix", "histogram", None),
    ("shard_map", "stage", "gaussian", "max"),
  )
  def test_every_rung_of_edgc(self, backend, granularity, estimator, warmup):
    """Ranks of a stage and of any matrices send the same bytes.

    Dense is compiled only if the warm-up is dense.
    """
    sampling = edgc_jax.Sampling(estimator=estimator, bins=100)
    tx = edgc_jax.edgc(
      rank_max=12,
      rank_min=4,
      window=10,
      sampling=sampling,
      rule=edgc_jax.RankRule(warmup_rank=warmup),
      allocation=edgc_jax.Allocation(granularity=granularity),
    )
    run = BACKENDS[backend](tx, PARAMS)
    text = run.compiled(gradients_like(PARAMS, seed=0))
    ranks = (4, 8, 12) if warmup else (0, 4, 8, 12)
    predicted = [edgc_jax.wire_bytes(PARAMS, rank) for rank in ranks]
    self.assertEqual(hlo.wire_bytes_by_rung(text), [predicted])
    for rung, expected in enumerate(predicted):
      found = hlo.collectives_in_order(text, rung)
      self.assertEqual({one.kind for one in found}, {"all-reduce"})
      self.assertLen(found, 2 if ranks[rung] else 1)
      sent = sum(
        4 * math.prod(shape) for one in found for _, shape in one.results
      )
      self.assertEqual(sent, expected)
    # All P and every dense leaf are in one all-reduce, all Q in another. The
    # dense rung has one, the entropy two; one compares gradients of replicas,
    # one their parameters. Two at a window's end, of integers and of floats,
    # broadcast the decisions of the first replica.
    dense = 0 if warmup else 1
    self.assertEqual(text.count(" all-reduce("), dense + 2 * 3 + 2 + 1 + 1 + 2)
    self.assertEqual(hlo.wire_bytes_outside_branches(text), 0)
    # All other branches are rarely taken.
    num_matrices = len(make_plan(PARAMS, (4,)).matrices)
    others = [
      branches
      for branches in hlo.wire_bytes_of_branches(text)
      if any(branches) and not all(branches)
    ]
    rare = sorted(map(sum, others))
    sample = entropy.sample_bytes(num_matrices, sampling)
    decided = window_bytes(run.first_state, run.replicas)
    check = [agreement.CHECK_BYTES, PARTED_BYTES]
    self.assertEqual(rare, sorted([*check, sample, decided]))

  @parameterized.product(rank=[0, 4, 8], backend=list(BACKENDS))
  def test_fixed_ranks_and_dense(self, rank, backend):
    tx = edgc_jax.powersgd(rank) if rank else edgc_jax.allreduce()
    text = BACKENDS[backend](tx, PARAMS).compiled(
      gradients_like(PARAMS, seed=0)
    )
    self.assertEqual(
      hlo.wire_bytes_outside_branches(text), edgc_jax.wire_bytes(PARAMS, rank)
    )

  def test_bfloat16(self):
    """A value of a matrix or factor has two bytes, one of a vector four."""
    matrices = 64 * 48 + 96 * 160 + 20 * 20 + 3 * 40 * 64
    dense = edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="bfloat16", replicas=4)
    self.assertEqual(dense, 2 * matrices + 4 * 31)
    low = 3 * 4 * (40 + 64) + 4 * (96 + 160) + 4 * (64 + 48) + 4 * (20 + 20)
    factors = edgc_jax.wire_bytes(PARAMS, 4, wire_dtype=jnp.bfloat16)
    self.assertEqual(factors, 2 * low + 4 * (31 + 17 * 6))
    for backend, tx, expected, trips in (
      ("pmap", edgc_jax.allreduce(wire_dtype="bfloat16"), dense, 1),
      ("shard_map", edgc_jax.powersgd(4, wire_dtype="bfloat16"), factors, 2),
    ):
      run = BACKENDS[backend](tx, PARAMS)
      text = run.compiled(gradients_like(PARAMS, seed=0))
      sent = hlo.wire_bytes_outside_branches(text)
      self.assertEqual(sent, expected)
      kinds = [one.kind for one in hlo.collectives_in_order(text)]
      encoded = [kind for kind in kinds if kind != "all-reduce"]
      self.assertEqual(encoded, ["all-to-all", "all-gather"] * trips)

  def test_native_bfloat16_is_as_wide_as_float32_on_cpus(self):
    """Predicted and sent bytes are both as for float32."""
    run = BACKENDS["pmap"](
      edgc_jax.allreduce(wire_dtype="native_bfloat16"), PARAMS
    )
    text = run.compiled(gradients_like(PARAMS, seed=0))
    self.assertEqual(
      hlo.wire_bytes_outside_branches(text),
      edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="native_bfloat16"),
    )

  @parameterized.parameters("int8", "int4")
  def test_integers(self, name):
    """A value has one byte or half a byte, in blocks, unless blocks waste."""
    code = code_of(name)

    def padded(size, parts=1):
      return -(-size // (parts * code.granule)) * parts * code.granule

    p = sum(map(padded, (12 * 40, 4 * 96, 4 * 48, 4 * 20)))
    q = sum(map(padded, (12 * 64, 4 * 160, 4 * 64, 4 * 20, 300)))
    params = {**PARAMS, "bias": jnp.zeros(300)}
    found = edgc_jax.wire_bytes(params, 4, wire_dtype=name, replicas=4)
    # The scalar would take a block.
    exact = 4 * (17 * 6 + 1)
    encoded = sum(code.num_bytes(padded(size, 4), 4) for size in (p, q))
    self.assertEqual(found, encoded + exact)
    run = BACKENDS["pmap"](edgc_jax.powersgd(4, wire_dtype=name), params)
    text = run.compiled(gradients_like(params, seed=0))
    self.assertEqual(hlo.wire_bytes_outside_branches(text), found)

  def test_encoded_factors_at_every_rung(self):
    options = {"wire_dtype": "int8"}
    rule = edgc_jax.RankRule(warmup_rank=None)
    tx = edgc_jax.edgc(rank_max=8, rank_min=4, window=10, rule=rule, **options)
    text = BACKENDS["pmap"](tx, PARAMS).compiled(gradients_like(PARAMS, seed=0))
    plan = make_plan(PARAMS, (0, 4, 8), code=code_of("int8"))
    expected = [plan.wire_bytes(rank, replicas=4) for rank in plan.ladder]
    self.assertEqual(hlo.wire_bytes_by_rung(text), [expected])
    for rank, own in zip(plan.ladder, expected, strict=True):
      found = edgc_jax.wire_bytes(
        PARAMS, rank, rank_min=4, replicas=4, **options
      )
      self.assertEqual(found, own)

  def test_rungs_of_one_group_share_a_program(self):
    """P and Q are sent in two conditionals; a single rung has none."""
    params = {"w": jnp.zeros((96, 160))}
    for ranks in ((4, 8, 12), (8,)):
      tx = edgc_jax.edgc(rank_max=ranks[-1], rank_min=ranks[0], window=10)
      text = BACKENDS["pmap"](tx, params).compiled(gradients_like(params, 0))
      predicted = [edgc_jax.wire_bytes(params, rank) for rank in ranks]
      ladders = hlo.wire_bytes_by_rung(text)
      outside = hlo.wire_bytes_outside_branches(text)
      if len(ranks) > 1:
        self.assertLen(ladders, 2)
        self.assertEqual(
          [sum(x) for x in zip(*ladders, strict=True)], predicted
        )
        self.assertEqual(outside, 0)
      else:
        self.assertEqual(ladders, [])
        self.assertEqual([outside], predicted)

  def test_prediction_by_hand(self):
    low = 3 * 4 * (40 + 64) + 4 * (96 + 160) + 4 * (64 + 48) + 4 * (20 + 20)
    dense = 30 + 1
    errors = 17 * (3 + 1 + 1 + 1)
    self.assertEqual(edgc_jax.wire_bytes(PARAMS, 4), 4 * (low + dense + errors))
    sizes = 64 * 48 + 30 + 96 * 160 + 1 + 20 * 20 + 3 * 40 * 64
    self.assertEqual(edgc_jax.wire_bytes(PARAMS, 0), 4 * sizes)

  def test_small_matrices_are_dense_at_high_ranks(self):
    small = {"w": jnp.zeros((20, 20))}
    self.assertEqual(edgc_jax.wire_bytes(small, 5), 4 * (5 * 40 + 17))
    self.assertEqual(edgc_jax.wire_bytes(small, 6), 4 * 400)
    self.assertEqual(
      edgc_jax.wire_bytes(small, 6, min_ratio=1.5), 4 * (6 * 40 + 17)
    )

  def test_other_collectives_count_as_their_share_of_an_all_reduce(self):
    text = """
HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %e = f32[2]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add
  %b = f32[8]{0} all-gather(%a), replica_groups={{0,1,2,3}}
  %c = bf16[8]{0} all-to-all(%p), replica_groups={{0,1,2,3}}
  ROOT %d = (f32[8]{0}, s8[4]{0}) all-reduce(%p, %q), to_apply=%add
}
"""
    expected = 2 * (32 // 2) + 32 // 2 + 16 // 2 + (32 + 4)
    text = text.replace(", to_apply=%add", "")
    self.assertEqual(hlo.wire_bytes_outside_branches(text), expected)

  def test_metrics_add_up(self):
    """The state counts warm-up, ranks, samples and checks."""
    tx = edgc_jax.edgc(
      rank_max=4,
      rank_min=4,
      window=2,
      warmup_steps=2,
      sampling=edgc_jax.Sampling(step_rate=0.5),
      rule=edgc_jax.RankRule(warmup_rank=None),
    )
    run = BACKENDS["pmap"](tx, PARAMS)
    num_matrices = len(make_plan(PARAMS, (4,)).matrices)
    sample = entropy.sample_bytes(num_matrices, entropy.Sampling())
    decided = window_bytes(run.state, run.replicas)
    total = 0
    for step in range(5):
      run.step(gradients_like(PARAMS, seed=step))
      values = edgc_jax.metrics(run.state)
      expected = edgc_jax.wire_bytes(PARAMS, 0 if step < 2 else 4)
      expected += sample * (step % 2 == 0)
      expected += (agreement.CHECK_BYTES + PARTED_BYTES) * (step == 0)
      expected += decided * (step > 0 and step % 2 == 0)
      self.assertEqual(values["wire_bytes"], expected)
      total += expected
    dense = 5 * edgc_jax.wire_bytes(PARAMS, 0)
    self.assertAlmostEqual(values["compression_ratio"], dense / total, 5)
    self.assertEqual(values["dense_bytes"], dense / 5)


if __name__ == "__main__":
  absltest.main()
