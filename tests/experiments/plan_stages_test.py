"""Tables of the ranks of aligned stages."""

import pytest

import edgc_jax
from configs import gpt2_tiny_pipeline
from experiments.lab import plan_stages
from experiments.trainer import tasks
from experiments.trainer.training import optimizer

GIVEN = {
  "compression": edgc_jax.CompressionModel(7.5e-3, 2.4e-4),
  "backward_seconds": 15e-3,
}


def table(bandwidth):
  """Returns the lines of the table of a link."""
  config = gpt2_tiny_pipeline.get_config("edgc")
  task, mesh_shape = tasks.make(config), {"stage": 4, "data": 2}
  params = task.layout(mesh_shape).of_one_device(mesh_shape)
  link = {"link": edgc_jax.LinkModel(0.5e-3, bandwidth)}
  tx = optimizer.make_reducer(config, task, GIVEN | link)
  return plan_stages._table(config, params, tx, GIVEN).split("\n")


def test_later_stages_send_more():
  head, _, *lines = table(12.5e6)
  # By hand: the 12 weights and 13 vectors of a stage's only block.
  dense = 0.5 + 1e3 * 4 * (12 * 192 + 13) * 192 / 12.5e6
  assert head == f"dense {dense:.1f} ms, a microbatch's backward pass 15.0 ms"
  assert [int(line.split()[0]) for line in lines] == [8, 16, 24, 32, 40, 48]
  for line in lines:
    ranks, ends = line.split("/"), line.split()[-4:]
    ranks = [int(text.split()[-1 if i == 0 else 0])
             for i, text in enumerate(ranks)]  # fmt: skip
    assert ranks == sorted(ranks) and len(ranks) == 4
    assert max(map(float, ends)) == float(ends[0]), "stage 0 ends last"


def test_fast_links_need_no_ranks():
  assert "dense / dense / dense" in table(125e6)[-1], "with time to spare"
  with pytest.warns(RuntimeWarning, match="no slower than any rank"):
    found = table(1e12)
  assert found == ["no rank is faster than dense; use allreduce or quantize"]
