"""Tests the benchmark of cost by model size, without its timings."""

from unittest import mock

from absl.testing import absltest, parameterized

from experiments.benchmarks import growth
from experiments.models.gpt2 import GPT2Config

MODEL = GPT2Config(64, 32, 16, 1, 2)


class GrowthTest(parameterized.TestCase):
  @parameterized.parameters(([8],), ([32],), ([8, 32],))
  def test_every_reducer_has_a_line(self, ranks):
    """Also the default ladder, whose rank need not be asked for."""
    nothing = lambda: ()  # noqa: E731
    with (
      mock.patch.object(growth, "_update", return_value=(nothing, 1, 1.0)),
      mock.patch.object(growth, "_products", return_value=nothing),
      mock.patch.object(growth.heap, "keep_freed_memory"),
    ):
      lines = growth.measure(MODEL, ranks, rounds=1)
    names = [line[1] for line in lines]
    self.assertEqual(names[0], "allreduce, bf16")
    self.assertEqual(names[-1], "edgc, defaults, at rank 32")
    for rank in ranks:
      for method in ("powersgd", "edgc", "edgc by matrix"):
        self.assertIn(f"{method}, rank {rank}", names)
    self.assertLen(names, 2 + 3 * len(ranks))


if __name__ == "__main__":
  absltest.main()
