"""Tests the benchmark of cost by model size, without its timings."""

from unittest import mock

import jax.numpy as jnp
from absl.testing import absltest, parameterized

import edgc_jax
from experiments.benchmarks import cost
from experiments.models.gpt2 import GPT2Config

MODEL = GPT2Config(64, 32, 16, 1, 2)


class CostTest(parameterized.TestCase):
  @parameterized.parameters(([8],), ([32],), ([8, 32],))
  def test_every_reducer_has_a_line(self, ranks):
    """Also the default ladder, whose rank need not be asked for."""
    nothing = lambda: ()  # noqa: E731
    with (
      mock.patch.object(cost, "_update", return_value=(nothing, 1, 1.0)),
      mock.patch.object(cost, "_products", return_value=nothing),
      mock.patch.object(cost.heap, "keep_freed_memory"),
    ):
      lines = cost.measure(MODEL, ranks, rounds=1)
    names = [line[1] for line in lines]
    self.assertEqual(names[0], "allreduce, bf16")
    self.assertEqual(names[-1], "edgc, defaults, at rank 32")
    for rank in ranks:
      for method in ("powersgd", "edgc", "edgc by matrix"):
        self.assertIn(f"{method}, rank {rank}", names)
    self.assertLen(names, 2 + 3 * len(ranks))

  def test_ranks_by_matrix_send_the_same_bytes(self):
    """A quarter of the four matrices has twice the rank, others less."""
    params = {"a": jnp.zeros((4, 64, 64)), "b": jnp.zeros((64, 96)),
              "bias": jnp.zeros(64)}  # fmt: skip
    tx = edgc_jax.edgc(rank_max=8, rank_min=8)
    state = cost._by_matrix(tx.init(params))
    ranks = state.allocation.ranks.tolist()
    self.assertEqual(ranks, [16, 5, 5, 5, 8])


if __name__ == "__main__":
  absltest.main()
