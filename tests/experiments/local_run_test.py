"""Whole runs with local steps, and of the methods of others."""

import functools
import re

import jax
import numpy as np
import pytest
from helpers import cut_runs
from helpers.small_runs import small

import edgc_jax
import experiments.lab  # noqa: F401  (adds the methods of others)
from edgc_jax.measure import hlo
from experiments.trainer.reporting import key_numbers, logged_run
from experiments.trainer.training import checks, reducers
from experiments.trainer.training.trainer import Trainer, TrainingStopped

pytestmark = pytest.mark.slow
EVERY = 3


def config_of(folder, reducer="quantize", backend="vmap", **local):
  """Returns a run of two rounds of three steps, and two steps more."""
  config = cut_runs.config_of(folder, reducer, backend)
  config.log_every = 1
  config.local.update({"every": EVERY, "momentum": 0.5} | local)
  return config


def losses_of(trainer):
  return [line["loss"] for line in cut_runs.lines_of(trainer)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Returns a cache of uninterrupted runs by backend."""
  folder = tmp_path_factory.mktemp("whole")
  return functools.cache(
    lambda backend: cut_runs.run(config_of(folder / backend, backend=backend))
  )


@pytest.fixture(scope="module")
def simulated(whole):
  """An uninterrupted run on simulated replicas."""
  return whole("vmap")


@pytest.mark.parametrize("backend", ["pmap", "jit"])
def test_backends_agree(whole, simulated, backend):
  trainer = whole(backend)
  np.testing.assert_allclose(
    losses_of(trainer), losses_of(simulated), rtol=1e-5
  )
  assert trainer.parallel.traces == 1
  # Inner steps send nothing, neither the loss: each would wait for the link.
  state = trainer.parallel.init(jax.random.key(0))
  compiled = trainer.parallel.compile_step(*state, trainer.config.batch_size)
  text = compiled.as_text()
  for part, sends in ((text, True), (text[text.index("ENTRY") :], False)):
    assert any(map(hlo.is_collective, part.splitlines())) == sends


def test_bytes_are_sent_at_exchanges_alone(simulated):
  lines = cut_runs.lines_of(simulated)
  sent = [line["wire_bytes"][0] for line in lines]
  assert [step for step, n in enumerate(sent, 1) if n] == [3, 6]
  summary = simulated.folder.summary()
  assert summary["wire_bytes_per_step"] == [sum(sent) / len(sent)]
  assert summary["peak_wire_bytes_per_step"] == max(sent)
  assert lines[-1]["skipped_inner_steps"] == 0
  # Dense bytes are of every step, as without rounds.
  dense = 4 * simulated.parallel.num_params
  assert {line["dense_bytes"] for line in lines} == {dense}
  assert summary["versions"] == {
    "task": 1,
    **reducers.versions_of(simulated.config.reducer, simulated.config.local),
  }
  # The parameters of the state stay the same between two exchanges.
  found = {}
  for step in (2, 4, 6, 8):
    form = simulated.parallel.stored.template(4)
    trees = simulated.checkpoints.load(step, form)
    found[step] = jax.tree.map(np.asarray, trees["params"])
  same = lambda a, b: jax.tree.all(  # noqa: E731
    jax.tree.map(np.array_equal, found[a], found[b])
  )
  assert not same(2, 4) and not same(4, 6) and same(6, 8)


@pytest.mark.parametrize("backend", ["vmap", "pmap", "jit"])
def test_resumes_bit_for_bit_within_a_round(tmp_path, whole, backend):
  config = config_of(tmp_path / "cut", backend=backend)
  for step in (4, 6):  # goes on after step 2, and then after step 4
    cut_runs.run(config, cut_after=step)
  resumed = cut_runs.run(config, compiles=False)
  assert cut_runs.lines_of(resumed) == cut_runs.lines_of(whole(backend))
  for found, expected in zip(
    *(jax.tree.leaves(cut_runs.newest(t)) for t in (resumed, whole(backend))),
    strict=True,
  ):
    np.testing.assert_array_equal(found, expected)


def test_resumes_on_another_number_of_replicas(tmp_path, simulated, capsys):
  """Own parameters keep their mean, in the middle of a round."""
  config = config_of(tmp_path / "cut")
  cut_runs.run(config, cut_after=4)
  config.mesh.data = 2
  resumed = cut_runs.run(config)
  assert "on 2 replicas, 4 before" in capsys.readouterr().out
  np.testing.assert_allclose(
    losses_of(resumed)[-1], losses_of(simulated)[-1], rtol=0.01
  )


def test_an_overlap_applies_exchanges_later(tmp_path):
  config = config_of(tmp_path / "run", overlap=1)
  sent = [
    line["wire_bytes"][0] for line in cut_runs.lines_of(cut_runs.run(config))
  ]
  applied = [step for step, n in enumerate(sent, 1) if n]
  assert applied == [*range(EVERY + 1, len(sent) + 1, EVERY)]


@pytest.mark.parametrize("name", ["edgc", "topk"])
def test_any_reducer_exchanges_what_replicas_moved(tmp_path, name):
  config = config_of(tmp_path / "run", name)
  config.local.momentum = 0.0
  trainer = cut_runs.run(config)
  losses = losses_of(trainer)
  assert losses[-1] < losses[0] - 0.1
  assert trainer.folder.summary()["compression_ratio"] > EVERY


def test_a_run_may_end_before_its_first_exchange(tmp_path, capsys):
  trainer = cut_runs.run(config_of(tmp_path / "run", every=10_000))
  steps = trainer.config.steps
  said = capsys.readouterr().out
  assert f"note: no exchange includes the last {steps} of {steps} steps" in said
  assert "--config.steps=10000 ends" in said
  assert trainer.folder.summary()["wire_bytes_per_step"] == [0.0]
  lines = cut_runs.lines_of(trainer)
  assert all(line["total_wire_bytes"] == 0 for line in lines)
  assert set(logged_run.load(trainer.folder.path).lines["bytes"]) == {0}


def test_what_a_user_may_not_expect(tmp_path):
  for local, left, longer in (
    ({"every": 8}, "3", 24),
    ({"every": 19}, "", 0),
    ({"every": 1, "overlap": 1}, "1", 0),
    # An exchange after 16 is applied after 19 and 18; the first one after 20.
    ({"every": 8, "overlap": 3}, "3", 0),
    ({"every": 8, "overlap": 2}, "3", 26),
    ({"every": 10, "overlap": 10}, "19", 20),
    ({"every": 8, "lookahead": True}, "", 0),
    ({"every": 0}, "", 0),
  ):
    config = config_of(tmp_path, **local)
    config.steps, config.checkpoint.every = 19, 8
    said = checks.notes(config)
    assert len(said) == bool(left)
    if left:
      assert f"no exchange includes the last {left} of 19 steps" in said[0]
      assert ("--config.steps" in said[0]) == bool(longer)
      assert f"--config.steps={longer} " in said[0] or not longer
  config.checkpoint.every = 0
  assert "leaves numbers and no parameters" in checks.notes(config)[0]


@pytest.mark.parametrize(
  "reducer, changes, count",
  [
    ("powersgd", {"powersgd.warmup_steps": 19}, 19),
    ("powersgd", {"powersgd.warmup_steps": 18}, 0),
    ("powersgd", {"powersgd.warmup_steps": 6, "local.every": 3}, 6),
    ("powersgd", {"powersgd.warmup_steps": 6, "local.every": 20}, 0),
    ("edgc", {"edgc.warmup_rank": "dense", "edgc.warmup_steps": 19}, 19),
    ("edgc", {"edgc.warmup_rank": "max", "edgc.warmup_steps": 19}, 0),
    ("quantize", {}, 0),
  ],
)
def test_a_warmup_of_the_whole_run_is_named(tmp_path, reducer, changes, count):
  config = small(tmp_path, reducer)
  config.steps = 19
  config.update_from_flattened_dict(changes)
  said = [note for note in checks.notes(config) if "dense" in note]
  assert len(said) == bool(count)
  assert not said or f"all {count} exchanges are dense, since" in said[0]


def test_ranks_change_with_the_exchanges(tmp_path):
  """A rank of 4.5 is 5 in half of the exchanges, and 4 in the others."""
  config = config_of(tmp_path / "run", "powersgd", every=2)
  config.powersgd.update(rank=4.5, warmup_steps=0, min_ratio=1.0)
  trainer = cut_runs.run(config)
  history = trainer.folder.summary()["rank_history"]
  assert [rank for _, (rank,) in history] == [0, 5, 4]
  assert [step for step, _ in history] == [1, 2, 6]


def broken(monkeypatch, trainer, is_broken):
  """Makes losses NaN where a function of no arguments says so."""
  loss_of = trainer.task.loss

  def loss(*args):
    found, others = loss_of(*args)
    return found * jax.numpy.where(is_broken(), np.nan, 1.0), others

  monkeypatch.setattr(trainer.task, "loss", loss)
  return trainer


def test_the_summary_names_steps_that_replicas_skipped(tmp_path, monkeypatch):
  """One replica skips all of its steps: the run goes on without it."""
  trainer = Trainer(config_of(tmp_path / "run", backend="pmap"))
  broken(monkeypatch, trainer, lambda: jax.lax.axis_index("data") == 0)
  summary = trainer.run()
  assert summary["skipped_inner_steps"] == trainer.config.steps
  table = key_numbers.summary_table(summary)
  assert re.search(rf"skipped inner steps +{trainer.config.steps}\b", table)


def test_demo_descends_by_signs(tmp_path):
  config = small(tmp_path / "run", "demo")
  config.mesh.backend = "vmap"
  config.optimizer.update(name="sign", lr=3e-3)
  trainer = cut_runs.run(config)
  losses = losses_of(trainer)
  assert losses[-1] < losses[0] - 0.2
  assert trainer.folder.summary()["versions"] == {"task": 1, "method": 1}


def test_lookahead_without_momentum_is_the_run_itself(tmp_path):
  """An outer step of rate 1 goes where the inner steps went."""
  plain = small(tmp_path / "plain", "allreduce")
  ahead = config_of(tmp_path / "ahead", "allreduce", lookahead=True, momentum=0)
  moved = config_of(tmp_path / "moved", "allreduce", lookahead=True)
  plain.mesh.backend, plain.log_every = "vmap", 1
  plain, ahead, moved = (
    losses_of(cut_runs.run(each)) for each in (plain, ahead, moved)
  )
  np.testing.assert_allclose(ahead, plain, rtol=1e-5)
  # Momentum acts from the second outer step on, after step 6 (and Nesterov's
  # from the first).
  np.testing.assert_allclose(moved[:EVERY], plain[:EVERY], rtol=1e-5)
  assert abs(moved[-1] - plain[-1]) > 1e-3


@pytest.mark.filterwarnings("ignore:.*has one replica along")
@pytest.mark.parametrize(
  "local, mesh",
  [
    ({}, {}),
    ({"lookahead": True}, {}),
    ({}, {"data": 1, "backend": "jit"}),
  ],
  ids=["rounds", "lookahead", "alone"],
)
def test_stops_if_all_replicas_skip_all_steps(
  tmp_path, monkeypatch, local, mesh
):
  config = config_of(tmp_path / "run", **local)
  config.mesh.update(mesh)
  config.optimizer.max_consecutive_skips = 3
  trainer = broken(monkeypatch, Trainer(config), lambda: True)
  with pytest.raises(TrainingStopped, match=r"^3 steps in a row up to step 3"):
    trainer.run()


def test_versions_of_what_a_run_uses():
  local = {"every": 4, "lookahead": False}
  assert reducers.versions_of("demo", {}) == {"method": 1}
  versions = edgc_jax.METHOD_VERSIONS
  assert reducers.versions_of("edgc", local) == {
    "method": versions["edgc"], "local_steps": versions["local_steps"],
  }  # fmt: skip
  local["lookahead"] = True
  assert reducers.versions_of("gone", local) == {"method": None, "lookahead": 1}
  names = reducers.by_name().keys()
  peer_names = {"demo", "late", "sparse_loco"}
  assert edgc_jax.REDUCERS.keys() | peer_names == names
