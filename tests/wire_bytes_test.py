"""The compiled program sends the bytes that the library counts."""

import math

import jax.numpy as jnp
import pytest
from helpers import float32
from helpers.meshes import (
  BACKENDS,
  CHECK_BYTES,
  DIVERGED_BYTES,
  gradients_like,
  sample_bytes,
  window_bytes,
)

import edgc_jax
from edgc_jax import allreduce, powersgd, quantize, randomk, topk
from edgc_jax.budget import entropy
from edgc_jax.diagnosis import self_test
from edgc_jax.measure import hlo
from edgc_jax.wire.codes import code_of

pytestmark = pytest.mark.slow

REPLICAS = 4
CHECKS = CHECK_BYTES + DIVERGED_BYTES
# Factors of the small matrix save half of its bytes at up to 5 columns, which
# are its cap at higher ranks.
PARAMS = {
  "bfloat16": jnp.zeros((64, 48), jnp.bfloat16),
  "bias": jnp.zeros((30,)),
  "large": jnp.zeros((96, 160)),
  "scalar": jnp.zeros(()),
  "small": jnp.zeros((20, 20)),
  "stack": jnp.zeros((3, 40, 64)),
}
MATRICES = 6
LONGER = PARAMS | {"bias": jnp.zeros(300)}  # so long that it is encoded, too
FEWER = {name: PARAMS[name] for name in ("bias", "large", "small")}


NORMS = 2  # values of residual and gradient, of an exchange


def counted(tx, params=PARAMS):
  """Returns the ladder of a reducer, and the bytes at each rank."""
  (part,) = edgc_jax.describe(tx, params, replicas=REPLICAS).parts
  return part.ladder, list(part.wire_bytes)


def test_ranks_whose_parts_have_as_many_blocks(monkeypatch):
  """They send the same, without a branch; the self-test knows of it."""
  monkeypatch.setattr(self_test, "_SHAPES", {"w": (20, 24)})
  tx = edgc_jax.edgc(rank_max=8, rank_min=4, rank_multiple=4, min_ratio=1.0)
  params = {"w": jnp.zeros((20, 24))}
  text = BACKENDS["pmap"](tx, params).compiled(gradients_like(params, seed=0))
  ladder, predicted = counted(tx, params)
  assert ladder == (4, 8) and len({*predicted}) == 1
  assert hlo.wire_bytes_by_rank(text) == []
  assert hlo.wire_bytes_of_step(text, 2) == predicted
  assert "bytes a step" in self_test._checked_bytes(tx, text, REPLICAS)


@pytest.mark.parametrize(
  ("backend", "allocation", "estimator", "warmup"),
  [
    ("pmap", "uniform", "gaussian", "max"),
    ("shard_map", "error", "histogram", None),
  ],
)
def test_every_rank(backend, allocation, estimator, warmup):
  """Ranks of a stage and of any matrices send the same bytes.

  Dense is compiled only if the warm-up is dense.
  """
  sampling = edgc_jax.Sampling(estimator=estimator, bins=100)
  tx = float32.edgc(
    rank_max=12, rank_min=4, window=10, warmup_rank=warmup, sampling=sampling,
    allocation=allocation,
  )  # fmt: skip
  run = BACKENDS[backend](tx, PARAMS)
  text = run.compiled(gradients_like(PARAMS, seed=0))
  ranks = (4, 8, 12) if warmup else (0, 4, 8, 12)
  predicted = [float32.wire_bytes(PARAMS, rank, rank_min=4) for rank in ranks]
  assert counted(tx) == (ranks, predicted)
  assert hlo.wire_bytes_of_step(text, len(predicted)) == predicted
  # Around P and Q one conditional each, or around both one for dense.
  assert len(hlo.wire_bytes_by_rank(text)) == (2 if warmup else 1)
  for level, expected in enumerate(predicted):
    found = hlo.collectives_in_order(text, level)
    assert {one.kind for one in found} == {"all-reduce"}
    assert len(found) == (2 if ranks[level] else 1)
    sent = sum(
      4 * math.prod(shape) for one in found for _, shape in one.results
    )
    assert sent == expected
  # All P are in one all-reduce, all Q and every dense leaf in another. The
  # dense branch has one, the entropy two; one compares gradients of replicas,
  # one their parameters. One at a window's end broadcasts the ranks that the
  # first replica chose.
  dense = 0 if warmup else 1
  assert text.count(" all-reduce(") == dense + 2 * 3 + 2 + 1 + 1 + 1
  assert hlo.wire_bytes_outside_branches(text) == 0
  # All other branches are rarely taken.
  others = [
    branches
    for branches in hlo.wire_bytes_of_branches(text)
    if any(branches) and not all(branches)
  ]
  rare = sorted(map(sum, others))
  sample = sample_bytes(MATRICES, sampling)
  decided = window_bytes(run.first_state, run.replicas)
  check = [CHECK_BYTES, DIVERGED_BYTES]
  assert rare == sorted([*check, sample, decided])


@pytest.mark.parametrize(
  ("name", "backend", "allocation", "warmup"),
  [
    ("bfloat16", "pmap", "error", "max"),
    ("int8", "shard_map", "uniform", None),
    ("int4", "pmap", "error", None),
  ],
)
def test_every_rank_in_fewer_bits(name, backend, allocation, warmup):
  tx = edgc_jax.edgc(
    rank_max=12, rank_min=4, window=10, warmup_rank=warmup,
    allocation=allocation, wire_dtype=name,
  )  # fmt: skip
  ladder, predicted = counted(tx, FEWER)
  run = BACKENDS[backend](tx, FEWER)
  text = run.compiled(gradients_like(FEWER, seed=0))
  assert hlo.wire_bytes_of_step(text, len(predicted)) == predicted
  for rank, expected in zip(ladder, predicted, strict=True):
    if rank != 4:  # alone, factors of rank 4 are not packed
      found = edgc_jax.wire_bytes(
        FEWER, rank, rank_min=4, wire_dtype=name, replicas=REPLICAS
      )
      assert found == expected


def test_metrics_add_up():
  """The state counts warm-up, ranks, samples and checks."""
  sampling = edgc_jax.Sampling(step_rate=0.5)
  tx = float32.edgc(
    rank_max=4, rank_min=4, window=2, warmup_steps=2, warmup_rank=None,
    sampling=sampling,
  )  # fmt: skip
  run = BACKENDS["pmap"](tx, PARAMS)
  sample = sample_bytes(MATRICES, entropy.Sampling())
  decided = window_bytes(run.state, run.replicas)
  total = 0
  for step in range(5):
    run.step(gradients_like(PARAMS, seed=step))
    values = edgc_jax.metrics(run.state)
    expected = float32.wire_bytes(PARAMS, 0 if step < 2 else 4)
    expected += 4 * NORMS * (step < 2)  # in dense steps, too
    expected += sample * (step % 2 == 0)
    expected += CHECKS * (step == 0)
    expected += decided * (step > 0 and step % 2 == 0)
    assert values["wire_bytes"] == expected
    total += expected
  dense = 5 * float32.wire_bytes(PARAMS, 0)
  assert abs(values["compression_ratio"] - (dense / total)) < 0.5e-5
  assert values["dense_bytes"] == dense / 5


def test_one_rank_needs_no_branches():
  tx = float32.edgc(rank_max=8, rank_min=8, window=10)
  run = BACKENDS["pmap"](tx, FEWER)
  text = run.compiled(gradients_like(FEWER, seed=0))
  assert hlo.wire_bytes_by_rank(text) == []
  assert hlo.wire_bytes_of_step(text, 1) == counted(tx, FEWER)[1]


SWITCHED = {0: 4, 1: 12, 2: 0}
SWAPS = ["all-to-all", "all-gather"]  # of encoded values
SPARSE = ["all-gather", *SWAPS]  # and of vectors beside sparse entries


@pytest.mark.parametrize(
  ("tx", "backend", "params", "ranks", "encoded"),
  [
    (allreduce(), "pmap", PARAMS, [0], []),
    (allreduce(), "shard_map", PARAMS, [0], []),
    (allreduce(wire_dtype="bfloat16"), "pmap", PARAMS, [0], SWAPS),
    (float32.powersgd(4), "shard_map", PARAMS, [4], []),
    (float32.powersgd(8), "pmap", PARAMS, [8], []),
    (powersgd(4, wire_dtype="bfloat16"), "shard_map", PARAMS, [4], 2 * SWAPS),
    (powersgd(4, wire_dtype="int8"), "pmap", LONGER, [4], 2 * SWAPS),
    (powersgd(4, wire_dtype="int4"), "pmap", LONGER, [4], 2 * SWAPS),
    (float32.powersgd(SWITCHED, allocation="error"), "shard_map", PARAMS,
     [4, 12, 0], []),
    (powersgd(SWITCHED, wire_dtype="int4"), "pmap", PARAMS, [4, 12, 0], SWAPS),
    (float32.powersgd({0: 12, 1: 4}), "pmap", FEWER, [12, 4], []),
    (topk(0.05), "pmap", PARAMS, [0], SPARSE),
    (topk(0.05, chunk=1024), "shard_map", PARAMS, [0], SPARSE),
    (topk(1 / 64, chunk=4096, bits=2), "pmap", PARAMS, [0], SPARSE),
    (randomk(0.05), "shard_map", PARAMS, [0], []),
    (randomk(error_feedback=False), "pmap", PARAMS, [0], []),
    (quantize(8), "shard_map", PARAMS, [0], SWAPS),
    (quantize(4, block=64, error_feedback=True), "pmap", PARAMS, [0], SWAPS),
  ],
)  # fmt: skip
def test_each_step_sends_what_is_counted(tx, backend, params, ranks, encoded):
  """The compiled program does, and the state reports it."""
  run, gradients = BACKENDS[backend](tx, params), gradients_like(params, seed=0)
  text = run.compiled(gradients)
  ladder, predicted = counted(tx, params)
  assert ladder == tuple(sorted(ranks))
  assert hlo.wire_bytes_of_step(text, len(predicted)) == predicted
  # Around P and Q a conditional each, two if they are encoded; or around both
  # one for dense.
  halves = 4 if encoded else 2
  conditionals = 0 if len(ranks) == 1 else 1 if 0 in ranks else halves
  assert len(hlo.wire_bytes_by_rank(text)) == conditionals
  kinds = [one.kind for one in hlo.collectives_in_order(text)]
  assert [kind for kind in kinds if kind != "all-reduce"] == encoded
  for step, rank in enumerate(ranks):
    run.step(gradients)
    sent = edgc_jax.metrics(run.state)["wire_bytes"] - CHECKS * (step == 0)
    assert sent == predicted[ladder.index(rank)]


def test_by_hand():
  """A value has four bytes, two, one or half a byte."""
  matrices = 64 * 48 + 96 * 160 + 20 * 20 + 3 * 40 * 64
  low = 3 * 4 * (40 + 64) + 4 * (96 + 160) + 4 * (64 + 48) + 4 * (20 + 20)
  errors = 17 * (3 + 1 + 1 + 1) + NORMS
  assert float32.wire_bytes(PARAMS, 0) == 4 * (matrices + 31)
  assert float32.wire_bytes(PARAMS, 4) == 4 * (low + 31 + errors)
  dense = edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="bfloat16", replicas=4)
  assert [dense] == counted(allreduce(wire_dtype="bfloat16"))[1]
  assert dense == 2 * matrices + 4 * 31
  low_bytes = edgc_jax.wire_bytes(PARAMS, 4, wire_dtype=jnp.bfloat16)
  assert [low_bytes] == counted(powersgd(4, wire_dtype="bfloat16"))[1]
  assert low_bytes == 2 * low + 4 * (31 + errors)
  for name in ("int8", "int4"):  # in blocks
    code = code_of(name)
    padded = lambda size, unit: -(-size // unit) * unit  # noqa: E731
    block = lambda size: padded(size, code.granule)  # noqa: B023, E731
    p = sum(map(block, (12 * 40, 4 * 96, 4 * 48, 4 * 20)))
    q = sum(map(block, (12 * 64, 4 * 160, 4 * 64, 4 * 20, 300)))
    sent = [code.num_bytes(padded(x, 4 * code.granule), 4) for x in (p, q)]
    found = edgc_jax.wire_bytes(LONGER, 4, wire_dtype=name, replicas=4)
    assert found == sum(sent) + 4 * (errors + 1)  # blocks would waste a scalar
    assert [found] == counted(powersgd(4, wire_dtype=name), LONGER)[1]
  sizes = [PARAMS[name].size for name in ("bfloat16", "large", "stack")]
  others = 4 * (30 + 1 + 20 * 20) + 4 * 5 * 18  # with errors of 5 matrices
  entries = sum(round(0.05 * size) for size in sizes)
  assert counted(randomk(0.05))[1] == [4 * (entries + NORMS) + others]
  blocks = sum(-(-size // 256) for size in sizes)
  blocks += -blocks % REPLICAS  # an equal number for each
  assert counted(quantize(8))[1] == [blocks * (256 + 2) + others]


def test_small_matrices_have_at_most_their_cap():
  """And are dense only if even the smallest rank saves too little."""
  small = {"w": jnp.zeros((20, 20))}
  capped = 4 * (5 * 40 + 17 + NORMS)
  assert float32.wire_bytes(small, 5) == capped
  assert float32.wire_bytes(small, 12, rank_min=4) == capped
  assert float32.wire_bytes(small, 6) == 4 * 400
  assert float32.wire_bytes(small, 6, min_ratio=1.5) == 4 * (
    6 * 40 + 17 + NORMS
  )
  # A ladder ends at the largest cap. 4 x 4 at rank 2 saves nothing.
  tx = float32.edgc(rank_max=8, rank_min=2, rank_multiple=2)
  sent = [4 * (r * 40 + 17 + 16 + NORMS) for r in (2, 4)]
  assert counted(tx, small | {"v": jnp.zeros((4, 4))}) == ((2, 4), sent)


def test_bytes_grow_with_the_replicas_that_gather():
  params = {name: PARAMS[name] for name in ("bfloat16", "large", "stack")}
  (two,), (eight,) = (
    edgc_jax.describe(topk(0.05), params, replicas=n).parts for n in (2, 8)
  )
  counts = [round(0.05 * x.size) for x in params.values()]
  assert eight.wire_bytes[0] - two.wire_bytes[0] == 6 * 4 * sum(counts)


@pytest.mark.parametrize("name", ["first_rank", "rank_min"])
def test_ranks_of_others_are_checked(name):
  with pytest.raises((TypeError, ValueError), match=f"`{name}` must be"):
    float32.wire_bytes(PARAMS, 4, **{name: -2})


def test_other_collectives_count_as_their_share_of_an_all_reduce():
  text = """
HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {
%p = f32[8]{0} parameter(0)
%a = f32[2]{0} reduce-scatter(%p), replica_groups={{0,1,2,3}}
%e = f32[2]{0} reduce-scatter(%p), replica_groups=[1,4]<=[4]
%b = f32[8]{0} all-gather(%a), replica_groups={{0,1,2,3}}
%c = bf16[8]{0} all-to-all(%p), replica_groups={{0,1,2,3}}
ROOT %d = (f32[8]{0}, s8[4]{0}) all-reduce(%p, %q)
}
"""
  expected = 2 * (32 // 2) + 32 // 2 + 16 // 2 + (32 + 4)
  assert hlo.wire_bytes_outside_branches(text) == expected


def test_ranks_inside_a_conditional_of_dense():
  """Dense is the first rank; a check that sends in one branch is none."""
  text = """
HloModule m

%d (p: f32[8]) -> f32[8] {
ROOT %a = f32[8]{0} all-reduce(%p)
}

%low (p: f32[8]) -> f32[8] {
ROOT %a = f32[2]{0} all-reduce(%p)
}

%high (p: f32[8]) -> f32[8] {
ROOT %a = f32[4]{0} all-reduce(%p)
}

%each (p: f32[8]) -> f32[8] {
%a = f32[1]{0} all-reduce(%p)
%b = f32[8]{0} conditional(%i, %p, %p), branch_computations={%low, %high}
ROOT %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%low, %high}
}

%none (p: f32[8]) -> f32[8] {
ROOT %p = f32[8]{0} parameter(0)
}

ENTRY %main (p: f32[8]) -> f32[8] {
%a = f32[8]{0} conditional(%i, %p, %p), branch_computations={%d, %none}
ROOT %b = f32[8]{0} conditional(%i, %p, %p), branch_computations={%d, %each}
}
"""
  assert hlo.wire_bytes_by_rank(text) == [[32, 4 + 16, 4 + 32]]
  sizes = [
    [4 * math.prod(shape) for x in found for _, shape in x.results]
    for found in (hlo.collectives_in_order(text, i) for i in (0, 1, -1))
  ]
  assert sizes == [[32], [4, 8, 8], [4, 16, 16]]
