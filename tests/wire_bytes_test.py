"""The bytes of the compiled program are the bytes that were predicted."""

import math

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from helpers.flat_options import edgc
from helpers.meshes import BACKENDS, PARTED_BYTES, gradients_like, window_bytes

import edgc_jax
from edgc_jax.adaptation import entropy
from edgc_jax.comm import agreement
from edgc_jax.comm.codes import code_of
from edgc_jax.measure import hlo
from edgc_jax.plan.plan import make_plan

# The small matrix pays at ranks up to 5 only: from then on it goes dense.
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
    ("pmap", "stage", "gaussian"),
    ("pmap", "matrix", "gaussian"),
    ("shard_map", "matrix", "histogram"),
  )
  def test_every_rung_of_edgc(self, backend, granularity, estimator):
    """The same for ranks of a stage and of matrices, whatever these are."""
    bins = 100
    tx = edgc(
      rank_max=12, rank_min=4, window=10, estimator=estimator, bins=bins,
      granularity=granularity,
    )  # fmt: skip
    run = BACKENDS[backend](tx, PARAMS)
    text = run.compiled(gradients_like(PARAMS, seed=0))
    rungs, *others = hlo.wire_bytes_of_branches(text)
    predicted = [edgc_jax.wire_bytes(PARAMS, rank) for rank in (0, 4, 8, 12)]
    self.assertEqual(rungs, predicted)
    for rung, expected in enumerate(predicted):
      found = hlo.collectives_in_order(text, rung)
      self.assertEqual({one.kind for one in found}, {"all-reduce"})
      self.assertLen(found, 2 if rung else 1)
      sent = sum(
        4 * math.prod(shape) for one in found for _, shape in one.results
      )
      self.assertEqual(sent, expected)
    # All P and every dense leaf in one all-reduce, all Q in another; one for
    # the dense rung, two for the entropy, one compares the replicas.
    # One more compares what replicas hold; at a window's end two, of integers
    # and of floats, tell them what the first one decided.
    self.assertEqual(text.count(" all-reduce("), 1 + 2 * 3 + 2 + 1 + 1 + 2)
    self.assertEqual(hlo.wire_bytes_outside_branches(text), 0)
    # Whatever is not a rung is a branch that is rarely taken.
    num_matrices = len(make_plan(PARAMS, (4,)).matrices)
    rare = sorted(sum(branches) for branches in others if sum(branches))
    sampling = entropy.Sampling(estimator=estimator, bins=bins)
    sample = entropy.sample_bytes(num_matrices, sampling)
    told = window_bytes(run.first_state, run.replicas)
    check = [agreement.CHECK_BYTES, PARTED_BYTES]
    self.assertEqual(rare, sorted([*check, sample, told]))

  @parameterized.parameters(*BACKENDS)
  def test_fixed_ranks_and_dense(self, backend):
    for rank, tx in (
      (0, edgc_jax.allreduce()),
      (4, edgc_jax.powersgd(4)),
      (8, edgc_jax.powersgd(8)),
    ):
      run = BACKENDS[backend](tx, PARAMS)
      text = run.compiled(gradients_like(PARAMS, seed=0))
      self.assertEqual(
        hlo.wire_bytes_outside_branches(text),
        edgc_jax.wire_bytes(PARAMS, rank),
      )

  def test_bfloat16(self):
    """Matrices, as factors or dense, in two bytes a value; vectors in four."""
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
      coded = [kind for kind in kinds if kind != "all-reduce"]
      self.assertEqual(coded, ["all-to-all", "all-gather"] * trips)

  def test_native_bfloat16_is_as_wide_as_the_platform_makes_it(self):
    """On CPUs as wide as float32: so it is said, and so it is sent."""
    run = BACKENDS["pmap"](
      edgc_jax.allreduce(wire_dtype="native_bfloat16"), PARAMS
    )
    text = run.compiled(gradients_like(PARAMS, seed=0))
    self.assertEqual(
      hlo.wire_bytes_outside_branches(text),
      edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="native_bfloat16"),
    )

  def test_encoded_factors_at_every_rung(self):
    options = {"wire_dtype": "bfloat16"}
    tx = edgc(rank_max=8, rank_min=4, window=10, **options)
    text = BACKENDS["pmap"](tx, PARAMS).compiled(gradients_like(PARAMS, seed=0))
    rungs, *_ = hlo.wire_bytes_of_branches(text)
    plan = make_plan(PARAMS, (0, 4, 8), code=code_of("bfloat16"))
    expected = [plan.wire_bytes(rank, replicas=4) for rank in plan.ladder]
    self.assertEqual(rungs, expected)
    for rank, own in zip(plan.ladder, expected, strict=True):
      found = edgc_jax.wire_bytes(
        PARAMS, rank, rank_min=4, replicas=4, **options
      )
      self.assertEqual(found, own)

  def test_prediction_by_hand(self):
    low = 3 * 4 * (40 + 64) + 4 * (96 + 160) + 4 * (64 + 48) + 4 * (20 + 20)
    dense = 30 + 1
    errors = 17 * (3 + 1 + 1 + 1)
    self.assertEqual(edgc_jax.wire_bytes(PARAMS, 4), 4 * (low + dense + errors))
    sizes = 64 * 48 + 30 + 96 * 160 + 1 + 20 * 20 + 3 * 40 * 64
    self.assertEqual(edgc_jax.wire_bytes(PARAMS, 0), 4 * sizes)

  def test_small_matrices_stop_paying(self):
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
    """Warm-up, ranks, samples and checks, as counted by the state itself."""
    tx = edgc(
      rank_max=4, rank_min=4, window=2, warmup_steps=2, step_rate=0.5,
      warmup_rank=None,
    )  # fmt: skip
    run = BACKENDS["pmap"](tx, PARAMS)
    num_matrices = len(make_plan(PARAMS, (4,)).matrices)
    sample = entropy.sample_bytes(num_matrices, entropy.Sampling())
    told = window_bytes(run.state, run.replicas)
    total = 0
    for step in range(5):
      run.step(gradients_like(PARAMS, seed=step))
      values = edgc_jax.metrics(run.state)
      expected = edgc_jax.wire_bytes(PARAMS, 0 if step < 2 else 4)
      expected += sample * (step % 2 == 0)
      expected += (agreement.CHECK_BYTES + PARTED_BYTES) * (step == 0)
      expected += told * (step > 0 and step % 2 == 0)
      self.assertEqual(values["wire_bytes"], expected)
      total += expected
    dense = 5 * edgc_jax.wire_bytes(PARAMS, 0)
    self.assertAlmostEqual(values["compression_ratio"], dense / total, 5)
    self.assertEqual(jax.tree.leaves(values["dense_bytes"])[0], dense / 5)


if __name__ == "__main__":
  absltest.main()
