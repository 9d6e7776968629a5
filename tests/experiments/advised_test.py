"""Configurations whose reducer is chosen from measurements."""

import jax
import pytest

import edgc_jax
from configs import gpt2_tiny
from edgc_jax import LinkModel
from edgc_jax.measure.evidence import of_protocol
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.training import advised, checks, optimizer

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


def test_other_configurations_stay():
  config = small("powersgd")
  found, choice = resolve(config)
  assert found is config and not choice


@pytest.mark.parametrize("link", [SLOW, FAST])
def test_the_advice_is_taken(link, monkeypatch):
  expected = advice(link).choice
  assert (expected.name == "dense") == (link == FAST)
  monkeypatch.setattr(advised, "measure", lambda *_, **__: advice(link))
  config, choice = resolve(small())
  assert config.reducer == choice["reducer"] == expected.reducer
  for name, value in expected.options.items():
    assert config[expected.reducer][name] == value
  optimizer.make_reducer(config, tasks.make(config), {})


def test_all_that_the_protocol_has_judged_can_be_taken():
  judged = [one for one in of_protocol()["adamw"] if one.every == 1]
  assert judged
  for one in judged:
    choice = {"reducer": one.reducer, "options": dict(one.options)}
    config, _ = resolve(small(), choice)
    optimizer.make_reducer(config, tasks.make(config), {})


def test_a_resumed_run_keeps_its_choice(monkeypatch):
  monkeypatch.delattr(advised, "measure")
  before = {"reducer": "edgc", "options": {"rank_max": 16}}
  config, choice = resolve(small(), before)
  assert (config.reducer, config.edgc.rank_max) == ("edgc", 16)
  assert choice == before


@pytest.mark.parametrize("mesh", [
  {"data": 1, "backend": "pmap"}, {"data": 2, "stage": 2, "backend": "jit"}
])  # fmt: skip
def test_meshes_without_a_choice_raise(mesh):
  config = small()
  config.mesh.update(mesh)
  with pytest.raises(ValueError, match=r"`mesh` must be .*, got .*; "):
    resolve(config)
  # A resumed run may have another mesh.
  resolve(config, {"reducer": "allreduce", "options": {}})


def test_an_optimizer_without_judged_methods_has_no_choice():
  config = small()
  config.optimizer.name = "muon"
  advised.require_choice(config)
  config.optimizer.name = "sign"
  with pytest.raises(ValueError, match=r"`optimizer.name` .*muon.*'sign'; set"):
    advised.require_choice(config)


def test_simulated_replicas_have_no_link():
  config = small()
  config.mesh.backend = "vmap"
  with pytest.raises(ValueError, match=r"`mesh` .* devices .*'vmap'"):
    advised.require_choice(config)
  config.reducer, config.edgc.rank_max = "edgc", None
  with pytest.raises(ValueError, match=r"`mesh.data` .* devices .*'vmap'"):
    checks.task_of(config)


def test_a_given_link_is_not_measured(monkeypatch):
  config = small()
  config.link.update(bandwidth=1e6, latency=1e-3)
  monkeypatch.setattr(advised, "measure_costs", lambda *_: COSTS)
  monkeypatch.delattr(edgc_jax, "measure_link")
  found = advised.measure(config, tasks.make(config), meshes.make_mesh(4, 1))
  dense = found.methods[0]
  assert dense.seconds == pytest.approx(
    0.101 + dense.wire_bytes / 1e6, rel=0, abs=5e-8
  )


def test_costs_are_measured(monkeypatch):
  config, mesh = small(), meshes.make_mesh(4, 1)
  task, shapes = tasks.make(config), []

  def measure(params, replicas, mesh, most_steps, optimizer):
    shapes.append((params, replicas, most_steps, optimizer))
    return Free(all=0.5)

  monkeypatch.setattr(edgc_jax, "measure_computing", measure)
  costs = advised.measure_costs(config, task, mesh, 1, lambda: None)
  assert shapes == [(task.layout({"data": 4}).shapes, 4, 1, "adamw")]
  dense = advised.advise(config, task, mesh, FAST, costs).methods[0]
  assert dense.seconds == pytest.approx(costs.step + 0.5, rel=0, abs=5e-4)


def test_shards_share_the_uplink():
  config = small()
  config.mesh.update(data=2, fsdp=2, backend="jit")
  advised.require_choice(config)
  task, mesh = tasks.make(config), meshes.make_mesh(2, 1, 2)
  found = advised.advise(config, task, mesh, SLOW, COSTS)
  whole = advised.advise(config, task, meshes.make_mesh(2, 1), SLOW, COSTS)
  dense, of_replica = found.methods[0], whole.methods[0]
  # Small parameters are whole on every shard.
  assert 0.5 <= dense.wire_bytes / of_replica.wire_bytes <= 0.6
  assert f"{2e-6 * dense.wire_bytes:.2f}" in str(found).splitlines()[2]
  # Steps can be timed there.
  step = advised._plain_step(config, task, mesh)
  assert advised.seconds_of(step, mesh) > 0
