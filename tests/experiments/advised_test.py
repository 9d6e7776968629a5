"""Configurations whose reducer is chosen from measurements."""

from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

import edgc_jax
from configs import gpt2_tiny
from edgc_jax import CompressionModel, LinkModel
from experiments import tasks
from experiments.parallel import meshes
from experiments.training import advised, optimizer

pytestmark = pytest.mark.slow

SLOW, FAST = LinkModel(1e-4, 1e6), LinkModel(1e-6, 1e11)


def small(reducer="auto"):
  config = gpt2_tiny.get_config(reducer)
  config.model.update(width=64, num_layers=2, num_heads=2, context=32)
  return config


def advice(link):
  shapes = jax.eval_shape(tasks.make(small()).init, jax.random.key(0))
  return edgc_jax.advise(
    shapes, link, 0.1, 4, compression=CompressionModel(1e-3, 1e-4),
    coding_seconds=1e-3,
  )  # fmt: skip


def resolve(config, choice=None):
  return advised.resolve(
    config, tasks.make(config), meshes.make_mesh(4, 1), choice
  )


class AdvisedTest(parameterized.TestCase):
  def test_other_configurations_stay(self):
    config = small("powersgd")
    found, choice = resolve(config)
    self.assertIs(found, config)
    self.assertEmpty(choice)

  @parameterized.parameters((SLOW, "edgc"), (FAST, "allreduce"))
  def test_the_advice_is_taken(self, link, reducer):
    with mock.patch.object(advised, "measure", lambda *_: advice(link)):
      config, choice = resolve(small())
    self.assertEqual((config.reducer, choice["reducer"]), (reducer, reducer))
    for name, value in choice["options"].items():
      self.assertEqual(config[reducer][name], value)
    optimizer.make_reducer(config, tasks.make(config), {})

  def test_a_resumed_run_keeps_its_choice(self):
    before = {"reducer": "edgc", "options": {"rank_max": 16}}
    with mock.patch.object(advised, "measure", side_effect=AssertionError):
      config, choice = resolve(small(), before)
    self.assertEqual((config.reducer, config.edgc.rank_max), ("edgc", 16))
    self.assertEqual(choice, before)

  def test_table(self):
    lines = advised.table(advice(FAST), meshes.make_mesh(4, 1)).splitlines()
    self.assertEqual(lines[-1], "choice: dense")
    self.assertLen(lines, 2 + len(advice(FAST).methods))
    # Break-even of an uplink: 1.5 times the bytes of payload.
    method = advice(FAST).methods[-1]
    self.assertIn(f"{12e-6 * method.break_even:.4g} Mbit/s", lines[-2])

  @parameterized.parameters((1, 1, "pmap"), (2, 2, "jit"))
  def test_meshes_without_a_choice_raise(self, replicas, stages, backend):
    config = small()
    config.mesh.update(data=replicas, stage=stages, backend=backend)
    with self.assertRaisesRegex(ValueError, "`mesh` must be .*, got .*; "):
      resolve(config)
    # A resumed run may have another mesh.
    resolve(config, {"reducer": "allreduce", "options": {}})

  def test_a_given_link_is_not_measured(self):
    config = small()
    config.link.update(bandwidth=1e6, latency=1e-3)
    costs = advised.Costs(0.09, 0.01, CompressionModel(1e-3, 1e-4), 1e-3)
    with (
      mock.patch.object(advised, "measure_costs", lambda *_: costs),
      mock.patch.object(edgc_jax, "measure_link", side_effect=AssertionError),
    ):
      found = advised.measure(
        config, tasks.make(config), meshes.make_mesh(4, 1)
      )
    dense = found.methods[0]
    self.assertAlmostEqual(dense.seconds, 0.101 + dense.wire_bytes / 1e6)

  def test_costs_are_measured(self):
    config, mesh = small(), meshes.make_mesh(4, 1)
    seconds = {"float32": 0.25, "bfloat16": 0.5}
    compression = CompressionModel(1e-3, 1e-4)
    with (
      mock.patch.object(
        edgc_jax, "measure_coding", lambda _, dtype, **__: seconds[dtype]
      ),
      mock.patch.object(
        edgc_jax, "measure_compression", lambda *_, **__: compression
      ),
    ):
      costs = advised.measure_costs(
        config, tasks.make(config), mesh, lambda: None
      )
    self.assertEqual(costs[1:], (0.25, compression, 0.5))
    found = advised.advise(config, tasks.make(config), mesh, FAST, costs)
    dense, narrow, *_ = (method.seconds for method in found.methods)
    self.assertAlmostEqual(dense, costs.step + 0.25, places=3)
    self.assertAlmostEqual(narrow, costs.step + 0.75, places=3)

  def test_shards_share_the_uplink(self):
    config = small()
    config.mesh.update(data=2, fsdp=2, backend="jit")
    advised.require_choice(config)
    task, mesh = tasks.make(config), meshes.make_mesh(2, 1, 2)
    costs = advised.Costs(0.09, 0.01, CompressionModel(1e-3, 1e-4), 1e-3)
    found = advised.advise(config, task, mesh, SLOW, costs)
    whole = advised.advise(config, task, meshes.make_mesh(2, 1), SLOW, costs)
    dense, of_replica = found.methods[0], whole.methods[0]
    # Small parameters are whole on every shard.
    self.assertBetween(
      dense.wire_bytes, of_replica.wire_bytes / 2, of_replica.wire_bytes * 0.6
    )
    first = advised.table(found, mesh).splitlines()[1]
    self.assertIn(f"{2e-6 * dense.wire_bytes:.2f}", first)

  def test_costs_are_measured_on_shards(self):
    config = small()
    config.mesh.update(data=2, fsdp=2, backend="jit")
    mesh = meshes.make_mesh(2, 1, 2)
    seconds = advised.seconds_of(
      advised._plain_step(config, tasks.make(config), mesh), mesh
    )
    self.assertGreater(seconds, 0)

  def test_ranks_fit_the_ladder(self):
    config = small()
    config.edgc.rank_multiple = 16
    costs = advised.Costs(0.09, 0.01, CompressionModel(1e-3, 1e-4), 1e-3)
    found = advised.advise(
      config, tasks.make(config), meshes.make_mesh(4, 1), SLOW, costs
    )
    names = [method.name for method in found.methods[2:]]
    self.assertEqual(names, ["edgc, rank 16"])


if __name__ == "__main__":
  absltest.main()
