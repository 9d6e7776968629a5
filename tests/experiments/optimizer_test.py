"""Reducers from configurations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.small_runs import small
from jax import lax
from jax.sharding import PartitionSpec as P

import edgc_jax
from configs import gpt2_tiny
from edgc_jax.budget import windows
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.measure import hlo
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.training import optimizer


@pytest.fixture
def given(monkeypatch):
  """The arguments that `edgc` is made with."""
  found = {}
  make = lambda **options: found.update(options)  # noqa: E731
  monkeypatch.setattr(edgc_jax, "REDUCERS", {"edgc": make})
  return found


@pytest.mark.parametrize("reducer", optimizer.LOW_RANK)
def test_allocation_of_a_configuration(reducer):
  config = gpt2_tiny.get_config(reducer)
  options = config[reducer]
  options.update(allocation="error", scale_exponent=2.0)
  expected = edgc_jax.ErrorAllocation(2.0)
  assert optimizer.allocation_of(options) == expected
  options.allocation = "uniform"
  assert optimizer.allocation_of(options) == "uniform"
  task = tasks.make(config)
  optimizer.make_reducer(config, task, {})
  options.allocation = "stage"
  with pytest.raises(ValueError, match="`allocation` must be one of"):
    optimizer.make_reducer(config, task, {})


def test_arguments_of_a_configuration(given):
  """The rule, its exponent, and what is left to it."""
  config = gpt2_tiny.get_config("edgc")
  config.edgc.update(
    rank_min=None, max_rank_step=None, exponent=1.0, window=None
  )
  optimizer.make_reducer(config, tasks.make(config), {})
  assert given["axis_name"] == "data" and given["rank_max"] == 28
  assert given["rank_min"] is given["max_rank_step"] is given["window"] is None
  assert given["rule"].keywords == {"exponent": 1.0}
  assert not {"exponent", "scale_exponent"} & set(given)
  for text, expected in (("max", "max"), ("dense", None), ("12", 12)):
    config.edgc.warmup_rank = text
    optimizer.make_reducer(config, tasks.make(config), {})
    assert given["warmup_rank"] == expected


def test_a_window_of_a_short_run_has_a_sample(given):
  config = gpt2_tiny.get_config("edgc")
  config.edgc.update(window=None, sampling={"step_rate": 0.1})
  for steps, expected in ((50, 10), (400, 10), (399, 10), (800, 20)):
    config.steps = steps
    optimizer.make_reducer(config, tasks.make(config), {})
    assert given["window"] is None and given["total_steps"] == steps
    own = edgc_jax.edgc(
      total_steps=steps, sampling=given["sampling"], min_ratio=1.5
    )
    state = own.init({"w": jnp.zeros((64, 64))})
    assert isinstance(state.budget, EntropyState)
    period = given["sampling"].period
    window, _ = windows.choose_windows(steps, None, None, period)
    assert window == expected


def test_a_reducer_counts_exchanges(given):
  config = gpt2_tiny.get_config("edgc")
  config.steps, config.edgc.window = 400, None
  for every, lookahead, *expected in (
    (0, False, 400, 100), (8, False, 50, 12), (300, False, 1, 1),
    (8, True, 400, 100),
  ):  # fmt: skip
    config.local.update(every=every, lookahead=lookahead)
    optimizer.make_reducer(config, tasks.make(config), {})
    assert [given["total_steps"], given["check_every"]] == expected


def test_a_fractional_rank_is_a_mean_over_the_run():
  assert optimizer._rank_schedule(11.3, 0, 1.0, 400) == {0: 12, 120: 11}
  assert optimizer._rank_schedule(8.0, 0, 1.0, 400) == {0: 8}
  # A share of less than half a step is dropped.
  assert optimizer._rank_schedule(8.02, 0, 1.0, 20) == {0: 8}
  assert optimizer._rank_schedule(8.99, 0, 1.0, 20) == {0: 9}
  for rank, final_rank, rule in (
    (0.5, 0, "at least 1, got 0.5; a larger"),
    (0.5, 5, "at least 1, got 0.5; a larger"),
    (11.3, 5, r"a whole number with a final_rank \(5\), got 11.3; use 11"),
  ):
    with pytest.raises(ValueError, match=f"`powersgd.rank` must be {rule}"):
      optimizer._rank_schedule(rank, final_rank, 1.0, 400)


@pytest.mark.parametrize("exponent, ranks", [
  (1.0, [32, 29, 26, 23, 21, 18, 15, 12]),
  (0.25, [32, 20, 17, 16, 15, 14, 13, 12]),  # most of it first
  (4.0, [32, 32, 32, 31, 30, 27, 21, 12]),  # most of it last
])  # fmt: skip
def test_a_rank_moves_in_eight_parts(exponent, ranks):
  """By hand: 32 - 20 (i / 7)^exponent."""
  found = optimizer._rank_schedule(32.0, 12, exponent, 800)
  assert found == {100 * i: rank for i, rank in enumerate(ranks)}
  with pytest.raises(ValueError, match=r"`powersgd.final_exponent` must"):
    optimizer._rank_schedule(32.0, 12, 0.0, 800)


def test_ranks_have_names():
  ranks = (("powersgd", 0), ("powersgd", 8.0), ("allreduce", 0), ("topk", 0))
  names = [optimizer.rank_name(*each) for each in ranks]
  assert names == ["dense", "8", "dense", "-"]


def test_a_schedule_moves_to_a_step():
  """Adam's own count, which corrects its bias, stays."""
  config = gpt2_tiny.get_config("allreduce")
  inner, params = optimizer.make_inner(config), {"w": jnp.ones((4, 4))}
  state = optimizer.at_step(inner.init(params), 7)
  found = optax.tree.get_all_with_path(state, "count")
  assert {path[-1].tuple_name: int(count) for path, count in found} == {
    "ScaleByAdamState": 0, "ScaleByScheduleState": 7,
  }  # fmt: skip


def test_muon_moves_kernels_and_adam_the_rest():
  """By steps with equal singular values, as long as those of AdamW."""
  config = gpt2_tiny.get_config("allreduce")
  config.optimizer.update(warmup_steps=0, lr=1.0, weight_decay=0.0)
  config.optimizer.update(final_lr_ratio=1.0, clip_norm=1e9)
  keys = iter(jax.random.split(jax.random.key(0), 8))
  grads = {
    "block": {"kernel": jax.random.normal(next(keys), (2, 64, 96))},
    "attention": {
      "query": {"kernel": jax.random.normal(next(keys), (64, 4, 24))},
    },
    "conv": {"kernel": jax.random.normal(next(keys), (3, 3, 8, 32))},
    "embedding": jax.random.normal(next(keys), (48, 64)),
    "norm": {"bias": jax.random.normal(next(keys), (64,))},
  }
  config.optimizer.name = "muon"
  inner = optimizer.make_inner(config)
  found, _ = inner.update(grads, inner.init(grads), grads)
  adam = optax.nadam(1.0, config.optimizer.b1, config.optimizer.b2)
  expected, _ = adam.update(grads, adam.init(grads))
  for part, shape in (
    ("block", (2, 64, 96)), ("attention", (64, 96)), ("conv", (72, 32)),
  ):  # fmt: skip
    (kernel,) = jax.tree.leaves(found[part])
    # Five steps of Newton and Schulz bring them to 0.7 to 1.2.
    values = jnp.linalg.svd(kernel.reshape(shape), compute_uv=False)
    values /= 0.2 * max(shape[-2:]) ** 0.5
    assert values.min() > 0.6 and values.max() < 1.3, part
  rest = ("embedding", "norm")
  for part in rest:
    chex.assert_trees_all_close(found[part], expected[part], rtol=1e-6)
  config.optimizer.weight_decay = 0.1  # of kernels alone
  inner, zeros = optimizer.make_inner(config), optax.tree.zeros_like(grads)
  found, _ = inner.update(zeros, inner.init(grads), grads)
  decayed = {
    k: optax.tree.scale(-0.1 * (k not in rest), grads[k]) for k in found
  }
  chex.assert_trees_all_close(found, decayed, rtol=1e-6)


def test_without_exchange_all_replicas_move_alike():
  """By the sum of all entries of their gradients."""
  config = gpt2_tiny.get_config("allreduce")
  config.mesh.backend = "jit"
  mesh = meshes.of_config(config)
  tx = optimizer.unaveraged(config, tasks.make(config), mesh)
  params = {"a": jnp.zeros((4, 3)), "b": jnp.zeros(5)}
  gradients = jax.tree.map(
    lambda p: jnp.arange(1.0, 5.0).reshape(4, *[1] * p.ndim) + p, params
  )  # of four replicas
  found, _ = tx.update(gradients, (), params)
  for name, updates in found.items():
    assert updates.shape == params[name].shape
    np.testing.assert_array_equal(updates, (12 + 5) * (1 + 2 + 3 + 4))


def test_without_exchange_all_stages_move_alike():
  """Of what each of two stages has for itself, and of what all have."""
  config = gpt2_tiny.get_config("allreduce")
  config.mesh.update(backend="jit", data=2, stage=2)
  mesh = meshes.of_config(config)
  tx = optimizer.unaveraged(config, tasks.make(config), mesh)
  params = {"own": jnp.zeros((2, 3)), "shared": jnp.zeros(5)}
  specs = {"own": P("stage"), "shared": P()}

  def update(params, factor):
    local = lax.pcast(params, "data", to="varying")
    own = jax.tree.map(lambda p: p + factor, local)
    return tx.update(own, (), params)[0]

  of = {"in_specs": (specs, P(("stage", "data"))), "out_specs": specs}
  update = jax.shard_map(update, mesh=mesh, **of)
  found = update(params, jnp.arange(1.0, 5.0))
  for name, updates in found.items():
    assert updates.shape == params[name].shape
    np.testing.assert_array_equal(updates, (3 + 5) * (1 + 2 + 3 + 4))


def test_a_step_without_exchange_sends_nothing(tmp_path):
  config = small(tmp_path, "allreduce")
  config.mesh.backend = "pmap"
  task, mesh = tasks.make(config), meshes.of_config(config)
  tx = optimizer.without_exchange(config, task, mesh)
  backend = backends.make(config, task, tx, mesh)
  state = backend.init(jax.random.key(0))
  text = backend.compile_step(*state, config.batch_size).as_text()
  assert not any(map(hlo.is_collective, text.splitlines()))
