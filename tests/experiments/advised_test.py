"""Configurations whose reducer is chosen from measurements."""

from unittest import mock

import jax
import pytest
from absl.testing import absltest, parameterized

import edgc_jax
from configs import gpt2_tiny
from edgc_jax import LinkModel
from edgc_jax.measure.evidence import of_protocol
from experiments import tasks
from experiments.parallel import meshes
from experiments.training import advised, checks, optimizer

pytestmark = pytest.mark.slow

SLOW, FAST = LinkModel(1e-4, 1e6), LinkModel(1e-6, 1e11)


def small(reducer="auto"):
  config = gpt2_tiny.get_config(reducer)
  config.model.update(width=64, num_layers=2, num_heads=2, context=32)
  return config


def advice(link):
  shapes = jax.eval_shape(tasks.make(small()).init, jax.random.key(0))
  return edgc_jax.advise(shapes, link, 0.1, 4, most_steps=1)


class Free(dict):
  """Any exchange takes this many seconds to compute."""

  def __missing__(self, name):
    return self["all"]

  def __contains__(self, name):
    return True


COSTS = advised.Costs(0.09, Free(all=0.01))


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

  @parameterized.parameters(SLOW, FAST)
  def test_the_advice_is_taken(self, link):
    expected = advice(link).choice
    self.assertEqual(expected.name == "dense", link == FAST)
    with mock.patch.object(advised, "measure", lambda *_, **__: advice(link)):
      config, choice = resolve(small())
    reducer = expected.reducer
    self.assertEqual((config.reducer, choice["reducer"]), (reducer, reducer))
    for name, value in expected.options.items():
      self.assertEqual(config[reducer][name], value)
    optimizer.make_reducer(config, tasks.make(config), {})

  def test_all_that_the_protocol_has_judged_can_be_taken(self):
    judged = [one for one in of_protocol() if one.every == 1]
    self.assertNotEmpty(judged)
    for one in judged:
      choice = {"reducer": one.reducer, "options": dict(one.options)}
      config, _ = resolve(small(), choice)
      optimizer.make_reducer(config, tasks.make(config), {})

  def test_a_resumed_run_keeps_its_choice(self):
    before = {"reducer": "edgc", "options": {"rank_max": 16}}
    with mock.patch.object(advised, "measure", side_effect=AssertionError):
      config, choice = resolve(small(), before)
    self.assertEqual((config.reducer, config.edgc.rank_max), ("edgc", 16))
    self.assertEqual(choice, before)

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
    with (
      mock.patch.object(advised, "measure_costs", lambda *_: COSTS),
      mock.patch.object(edgc_jax, "measure_link", side_effect=AssertionError),
    ):
      found = advised.measure(
        config, tasks.make(config), meshes.make_mesh(4, 1)
      )
    dense = found.methods[0]
    self.assertAlmostEqual(dense.seconds, 0.101 + dense.wire_bytes / 1e6)

  def test_costs_are_measured(self):
    config, mesh = small(), meshes.make_mesh(4, 1)
    shapes = []

    def measure(params, replicas, mesh, most_steps):
      shapes.append((params, replicas, most_steps))
      return Free(all=0.5)

    task = tasks.make(config)
    with mock.patch.object(edgc_jax, "measure_computing", measure):
      costs = advised.measure_costs(config, task, mesh, 1, lambda: None)
    self.assertEqual(shapes, [(task.layout({"data": 4}).shapes, 4, 1)])
    found = advised.advise(task, mesh, FAST, costs)
    dense = found.methods[0]
    self.assertAlmostEqual(dense.seconds, costs.step + 0.5, places=3)

  def test_shards_share_the_uplink(self):
    config = small()
    config.mesh.update(data=2, fsdp=2, backend="jit")
    advised.require_choice(config)
    task, mesh = tasks.make(config), meshes.make_mesh(2, 1, 2)
    found = advised.advise(task, mesh, SLOW, COSTS)
    whole = advised.advise(task, meshes.make_mesh(2, 1), SLOW, COSTS)
    dense, of_replica = found.methods[0], whole.methods[0]
    # Small parameters are whole on every shard.
    self.assertBetween(
      dense.wire_bytes, of_replica.wire_bytes / 2, of_replica.wire_bytes * 0.6
    )
    first = str(found).splitlines()[2]
    self.assertIn(f"{2e-6 * dense.wire_bytes:.2f}", first)

  def test_simulated_replicas_have_no_link(self):
    config = small()
    config.mesh.backend = "vmap"
    with self.assertRaisesRegex(ValueError, "`mesh` .* devices .*'vmap'"):
      advised.require_choice(config)
    config.reducer, config.edgc.rank_max = "edgc", 0
    with self.assertRaisesRegex(ValueError, "`mesh.data` .* devices .*'vmap'"):
      checks.task_of(config)

  def test_costs_are_measured_on_shards(self):
    config = small()
    config.mesh.update(data=2, fsdp=2, backend="jit")
    mesh = meshes.make_mesh(2, 1, 2)
    seconds = advised.seconds_of(
      advised._plain_step(config, tasks.make(config), mesh), mesh
    )
    self.assertGreater(seconds, 0)


if __name__ == "__main__":
  absltest.main()
