"""`describe` shows what the reducers plan, and its bytes are theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers import float32, shard_runs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax import describe

PARAMS = {
  "bias": jnp.zeros(40),
  "small": {"kernel": jnp.zeros((12, 10))},
  "stack": {"kernel": jnp.zeros((3, 48, 40))},
}


def rows_of(part):
  return {row.path: row for row in part.rows}


class DescriptionTest(parameterized.TestCase):
  def test_rows_tell_matrices_or_why_dense(self):
    (part,) = describe(float32.powersgd(4), PARAMS).parts
    rows = rows_of(part)
    self.assertEqual(rows["['bias']"].sent_as, "dense: no matrix")
    self.assertEqual(
      rows["['small']['kernel']"].sent_as,
      "dense: 12 x 10 at rank 4 saves 1.4 times",
    )
    stack = rows["['stack']['kernel']"]
    self.assertEqual(stack.sent_as, "3 matrices of 48 x 40")
    self.assertEqual(stack.ranks, (4,))
    self.assertEqual(stack.wire_bytes, (4 * 3 * (4 * (48 + 40) + 17),))

  @parameterized.named_parameters(
    ("edgc", lambda: float32.edgc(rank_max=8)),
    ("powersgd", lambda: float32.powersgd(4, warmup_steps=3)),
    ("bf16", lambda: edgc_jax.powersgd(4, wire_dtype="bfloat16")),
    ("allreduce", edgc_jax.allreduce),
    ("topk", lambda: edgc_jax.topk(0.1, min_size=200)),
    ("quantize", lambda: edgc_jax.quantize(8, min_size=200)),
  )
  @pytest.mark.slow
  def test_bytes_are_the_ones_that_metrics_reports(self, make):
    tx = make()
    (part,) = describe(tx, PARAMS, replicas=2).parts
    spread = lambda p: jnp.ones((2, *p.shape), p.dtype)  # noqa: E731
    gradients = jax.tree.map(spread, PARAMS)
    update = jax.vmap(tx.update, axis_name="data", in_axes=(0, None))
    _, state = jax.jit(update)(gradients, tx.init(PARAMS))
    found = edgc_jax.metrics(jax.tree.map(lambda x: x[0], state))
    level = part.ladder.index(found["rank"])
    # Checks of the replicas, and samples of the entropy.
    self.assertAlmostEqual(
      found["wire_bytes"], part.wire_bytes[level], delta=400
    )
    self.assertGreaterEqual(found["wire_bytes"], part.wire_bytes[level])
    self.assertEqual(found["dense_bytes"], part.dense_bytes)
    # Codes pad all values together.
    rows = np.sum([row.wire_bytes for row in part.rows], axis=0)
    np.testing.assert_allclose(rows, part.wire_bytes, rtol=0.01)

  def test_all_reducers_of_a_chain(self):
    tx = optax.chain(
      optax.partition(
        {"matrix": float32.powersgd(4), "rest": edgc_jax.allreduce()},
        lambda tree: jax.tree.map(
          lambda p: "matrix" if p.ndim > 1 else "rest", tree
        ),
      ),
      optax.adam(1e-3),
    )
    parts = describe(tx, PARAMS).parts
    paths = [[row.path for row in part.rows] for part in parts]
    self.assertCountEqual(
      paths, [["['bias']"], ["['small']['kernel']", "['stack']['kernel']"]]
    )
    tables = str(describe(tx, PARAMS)).split("\n\n")
    self.assertLen(tables, 2)

  def test_leaves_of_size_zero(self):
    params = {"w": jnp.zeros((0, 5))}
    view = lambda path, shape: (1, *shape)  # noqa: E731
    (part,) = describe(float32.powersgd(3, matrix_view=view), params).parts
    self.assertEqual(part.dense_bytes, 0)
    link = edgc_jax.LinkModel(1e-3, 1e8)
    advice = edgc_jax.advise(params, link, 1.0, 4)
    self.assertEqual(advice.choice.wire_bytes, 0)

  def test_the_table(self):
    tx = float32.edgc(rank_max=8, rank_min=4)
    found = describe(tx, PARAMS)
    lines = str(found).splitlines()
    self.assertStartsWith(lines[0], "Over data, as factors of rank 4, 8 (")
    self.assertLen(lines, 2 + 3 + 1)
    (part,) = found.parts
    least, most = min(part.wire_bytes), max(part.wire_bytes)
    self.assertIn(f"{least:,} to {most:,}", lines[-1])
    ratios = part.dense_bytes / most, part.dense_bytes / least
    self.assertIn("dense / {:.1f} to {:.1f}".format(*ratios), lines[-1])

  def test_one_device_of_a_mesh(self):
    mesh = shard_runs.mesh_of(data=2, fsdp=2)
    specs = {
      "bias": P(),
      "small": P(),
      "stack": {"kernel": P(None, None, "fsdp")},
    }
    tx = edgc_jax.over_shards(float32.edgc(rank_max=8), specs)
    found = describe(tx, PARAMS, mesh=mesh, param_specs=specs)
    stack = rows_of(found.parts[0])["['stack']['kernel']"]
    self.assertEqual(stack.sent_as, "3 matrices of 48 x 20")
    self.assertStartsWith(str(found), "Over data, on each shard of fsdp, ")

  def test_stages(self):
    mesh = shard_runs.mesh_of(stage=2, data=2)
    stages = edgc_jax.Stages(
      "stage", lambda path, _: "own" if "stack" in path else "shared"
    )
    tx = float32.powersgd(4, stages=stages)
    specs = {"bias": P(), "small": P(), "stack": P("stage")}
    params = {**PARAMS, "stack": {"kernel": jnp.zeros((4, 48, 40))}}
    (part,) = describe(tx, params, mesh=mesh, param_specs=specs).parts
    rows = rows_of(part)
    self.assertEqual(rows["['bias']"].sent_as, "dense: shared by all stages")
    stack = rows["['stack']['kernel']"]
    self.assertEqual(stack.sent_as, "2 matrices of 48 x 40")

  def test_names_of_methods(self):
    share = (
      "(matrices share a rank's bytes: one may get up to 3 times the rank)"
    )
    for tx, words in (
      (edgc_jax.topk(0.1), "entry by entry"),
      (edgc_jax.quantize(8), "entry by entry in integers of 8 bits"),
      (edgc_jax.allreduce(), "dense"),
      (edgc_jax.allreduce(wire_dtype="bfloat16"), "dense in bfloat16"),
      (
        edgc_jax.powersgd(4, wire_dtype="bfloat16"),
        "as factors of rank 4 in bfloat16",
      ),
      (
        float32.powersgd(4, allocation="error"),
        f"as factors of rank 4 {share}",
      ),
      (
        float32.edgc(rank_max=8, warmup_rank=None, allocation="uniform"),
        "dense or as factors of rank 4, 8",
      ),
    ):
      line, *_ = str(describe(tx, PARAMS)).splitlines()
      self.assertEqual(line, f"Over data, {words}:")

  def test_columns_end_at_the_cap(self):
    """48 x 40 has at most 10 columns; wider matrices have the whole rank."""
    params = {**PARAMS, "wide": jnp.zeros((60, 200))}
    tx = float32.edgc(rank_max=16, rank_min=4, allocation="uniform")
    (part,) = describe(tx, params).parts
    self.assertEqual(part.ladder, (4, 8, 12, 16))
    stack = rows_of(part)["['stack']['kernel']"]
    self.assertEqual(stack.ranks, (4, 8, 10, 10))
    self.assertEqual(
      stack.wire_bytes, tuple(4 * 3 * (r * 88 + 17) for r in stack.ranks)
    )
    self.assertEqual(rows_of(part)["['wide']"].ranks, part.ladder)

  def test_vectors_in_integers(self):
    tx = edgc_jax.powersgd(4, wire_dtype="int8")
    (part,) = describe(tx, {**PARAMS, "bias": jnp.zeros(300)}).parts
    self.assertIn("rank 4 in int8", part.method)
    bias = rows_of(part)["['bias']"]
    self.assertEqual(bias.sent_as, "dense in int8: no matrix")
    # Three blocks of 128 values and 16 bits.
    self.assertEqual(bias.wire_bytes, (3 * (128 + 2),))

  def test_a_dense_warm_up_does_not_hide_the_ranks(self):
    tx = float32.powersgd(4, warmup_steps=3)
    found = describe(tx, PARAMS)
    lines = str(found).splitlines()
    self.assertIn("dense or as factors of rank 4", lines[0])
    dense, factors = found.parts[0].wire_bytes
    self.assertIn(f"{factors:,}", lines[-1])
    self.assertNotIn(f"{dense:,}", lines[-1])

  def test_a_mesh_of_the_reducer_tells_the_replicas(self):
    """Codes fill as many equal parts as there are replicas."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    (bound,) = describe(edgc_jax.powersgd(4, mesh=mesh), PARAMS).parts
    alone, eight = (
      describe(edgc_jax.powersgd(4), PARAMS, replicas=n).parts[0]
      for n in (None, 8)
    )
    self.assertEqual(bound.wire_bytes, eight.wire_bytes)
    self.assertLess(alone.wire_bytes, eight.wire_bytes)
    (other,) = describe(
      edgc_jax.powersgd(4, mesh=mesh), PARAMS, replicas=1
    ).parts
    self.assertEqual(other.wire_bytes, alone.wire_bytes)

  def test_another_mesh(self):
    mesh = shard_runs.mesh_of(replica=2, fsdp=2)
    with self.assertRaisesRegex(ValueError, "`mesh` must be .*'data'"):
      describe(edgc_jax.allreduce(), PARAMS, mesh=mesh, param_specs=P())

  def test_nothing_to_describe(self):
    with self.assertRaisesRegex(ValueError, "`tx` must be .* reducer"):
      describe(optax.adam(1e-3), PARAMS)
    with self.assertRaisesRegex(ValueError, "`mesh` must be given"):
      describe(edgc_jax.allreduce(), PARAMS, param_specs=P())

  def test_a_plan_that_saves_nothing_is_shown_without_a_warning(self):
    tiny = {"w": jnp.zeros((4, 4))}
    self.assertIn("saves 0.5 times", str(describe(float32.powersgd(4), tiny)))


if __name__ == "__main__":
  absltest.main()
