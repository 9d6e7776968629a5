"""`describe` shows what the reducers plan, and its bytes are theirs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def described(tx, params=PARAMS, **options):
  """Returns the only part of a description, and its rows by the last key."""
  (part,) = describe(tx, params, **options).parts
  return part, {row.path.split("'")[1]: row for row in part.rows}


def test_rows_tell_matrices_or_why_dense():
  _, rows = described(float32.powersgd(4))
  assert rows["bias"].sent_as == "dense: no matrix"
  assert rows["small"].sent_as == "dense: 12 x 10 at rank 4 saves 1.4 times"
  assert rows["stack"].sent_as == "3 matrices of 48 x 40"
  assert rows["stack"].ranks == (4,)
  assert rows["stack"].wire_bytes == (4 * 3 * (4 * (48 + 40) + 17),)
  tiny = {"w": jnp.zeros((4, 4))}  # without a warning
  assert "saves 0.5 times" in str(describe(float32.powersgd(4), tiny))


@pytest.mark.slow
@pytest.mark.parametrize(
  "tx",
  [
    float32.edgc(rank_max=8), float32.powersgd({0: 0, 3: 4}),
    edgc_jax.powersgd(4, wire_dtype="bfloat16"), edgc_jax.allreduce(),
    edgc_jax.topk(0.1, min_size=200), edgc_jax.quantize(8, min_size=200),
  ],
  ids=range(6),
)  # fmt: skip
def test_bytes_are_the_ones_that_metrics_reports(tx):
  part, _ = described(tx, replicas=2)
  gradients = jax.tree.map(lambda p: jnp.ones((2, *p.shape)), PARAMS)
  update = jax.vmap(tx.update, axis_name="data", in_axes=(0, None))
  _, state = jax.jit(update)(gradients, tx.init(PARAMS))
  found = edgc_jax.metrics(jax.tree.map(lambda x: x[0], state))
  level = part.ladder.index(found["rank"])
  # Checks of the replicas, and samples of the entropy.
  assert 0 <= found["wire_bytes"] - part.wire_bytes[level] <= 400
  assert found["dense_bytes"] == part.dense_bytes
  # Codes pad all values together.
  rows = np.sum([row.wire_bytes for row in part.rows], axis=0)
  np.testing.assert_allclose(rows, part.wire_bytes, rtol=0.01)


def test_all_reducers_of_a_chain():
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
  matrices = ["['small']['kernel']", "['stack']['kernel']"]
  assert sorted(paths) == [["['bias']"], matrices]
  assert len(str(describe(tx, PARAMS)).split("\n\n")) == 2


def test_leaves_of_size_zero():
  params = {"w": jnp.zeros((0, 5))}
  view = lambda path, shape: (1, *shape)  # noqa: E731
  part, _ = described(float32.powersgd(3, matrix_view=view), params)
  assert part.dense_bytes == 0
  link = edgc_jax.LinkModel(1e-3, 1e8)
  advice = edgc_jax.advise(params, link, 1.0, 4)
  assert advice.choice.wire_bytes == 0


def test_the_table():
  found = describe(float32.edgc(rank_max=8, rank_min=4), PARAMS)
  lines = str(found).splitlines()
  assert lines[0].startswith("Over data, as factors of rank 4, 8 (")
  assert len(lines) == 2 + 3 + 1
  (part,) = found.parts
  least, most = min(part.wire_bytes), max(part.wire_bytes)
  assert f"{least:,} to {most:,}" in lines[-1]
  ratios = part.dense_bytes / most, part.dense_bytes / least
  assert "dense / {:.1f} to {:.1f}".format(*ratios) in lines[-1]
  # A dense warm-up does not hide the ranks.
  found = describe(float32.powersgd({0: 0, 3: 4}), PARAMS)
  *_, last = str(found).splitlines()
  dense, factors = found.parts[0].wire_bytes
  assert f"{factors:,}" in last and f"{dense:,}" not in last


def test_one_device_of_a_mesh():
  mesh = shard_runs.mesh_of(data=2, fsdp=2)
  split = {"kernel": P(None, None, "fsdp")}
  specs = {"bias": P(), "small": P(), "stack": split}
  tx = edgc_jax.on_mesh(float32.edgc(rank_max=8), param_specs=specs)
  how = {"mesh": mesh, "param_specs": specs}
  assert described(tx, **how)[1]["stack"].sent_as == "3 matrices of 48 x 20"
  words = "Over data, on each shard of fsdp, "
  assert str(describe(tx, PARAMS, **how)).startswith(words)


def test_stages():
  mesh = shard_runs.mesh_of(stage=2, data=2)
  stages = edgc_jax.Stages(
    "stage", lambda path, _: "own" if "stack" in path else "shared"
  )
  tx = float32.powersgd(4, stages=stages)
  specs = {"bias": P(), "small": P(), "stack": P("stage")}
  params = {**PARAMS, "stack": {"kernel": jnp.zeros((4, 48, 40))}}
  _, rows = described(tx, params, mesh=mesh, param_specs=specs)
  assert rows["bias"].sent_as == "dense: shared by all stages"
  assert rows["stack"].sent_as == "2 matrices of 48 x 40"


def test_names_of_methods():
  share = "(matrices share a rank's bytes: one may get up to 3 times the rank)"
  uniform = float32.edgc(rank_max=8, warmup_rank=None, allocation="uniform")
  for tx, words in (
    (edgc_jax.topk(0.1), "entry by entry"),
    (edgc_jax.quantize(8), "entry by entry in integers of 8 bits"),
    (
      edgc_jax.quantize(2, error_feedback=True),
      "entry by entry in 2 bits, rotated",
    ),
    (edgc_jax.allreduce(), "dense"),
    (edgc_jax.allreduce(wire_dtype="bfloat16"), "dense in bfloat16"),
    (float32.powersgd(4, allocation="error"), f"as factors of rank 4 {share}"),
    (uniform, "dense or as factors of rank 4, 8"),
  ):
    line, *_ = str(describe(tx, PARAMS)).splitlines()
    assert line == f"Over data, {words}:"


def test_columns_end_at_the_cap():
  """48 x 40 has at most 10 columns; wider matrices have the whole rank."""
  params = {**PARAMS, "wide": jnp.zeros((60, 200))}
  tx = float32.edgc(rank_max=16, rank_min=4, allocation="uniform")
  part, rows = described(tx, params)
  assert part.ladder == (4, 8, 12, 16)
  stack = rows["stack"]
  assert stack.ranks == (4, 8, 10, 10)
  assert stack.wire_bytes == tuple(4 * 3 * (r * 88 + 17) for r in stack.ranks)
  assert rows["wide"].ranks == part.ladder


def test_a_mesh_of_the_reducer_tells_the_replicas():
  """Codes fill as many equal parts as there are replicas."""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  free, tx = edgc_jax.powersgd(4), edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh)
  alone, eight = described(free)[0], described(free, replicas=8)[0]
  assert described(tx)[0].wire_bytes == eight.wire_bytes
  assert alone.wire_bytes < eight.wire_bytes
  assert described(tx, replicas=1)[0].wire_bytes == alone.wire_bytes


def test_a_mesh_has_the_axes_of_the_reducer():
  mesh = shard_runs.mesh_of(replica=2, fsdp=2)
  with pytest.raises(ValueError, match=r"`mesh` must be .*'data'"):
    describe(edgc_jax.allreduce(), PARAMS, mesh=mesh, param_specs=P())
