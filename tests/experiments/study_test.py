"""Studies: what runs next, how it runs, and what is made of it."""

import dataclasses
import json
import math
import pathlib
import re
import sys
import time

import jax
import numpy as np
import pandas as pd
import pytest

import edgc_jax
from configs import gpt2_tiny
from experiments import tasks
from experiments.parallel import meshes
from experiments.study import runner, statistics, study
from experiments.study.records import Records
from experiments.study.study import MATCHED, Study, Tuning
from experiments.training import optimizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "configs/gpt2_tiny.py")
TABLES = {
  "Every entry": {
    "dense": {"reducer": "allreduce"},
    "sparse": {"reducer": "topk", "topk.density": 0.05},
  },
  "Low rank": {
    "fixed": {"reducer": "powersgd", "powersgd.rank": 8.0,
              "powersgd.wire_dtype": "bfloat16"},
    "edgc": {"reducer": "edgc", "edgc.wire_dtype": "bfloat16"},
  },
}  # fmt: skip
PLAIN = Study("plain", CONFIG, TABLES, (0, 1))
TUNED = Study(
  "tuned", CONFIG, TABLES, (0, 1), more=(2, 3), best=1,
  tuning=Tuning("optimizer.lr", (1e-3, 2e-3), 2, 100, {"steps": 50}),
  matched={"edgc": "fixed"},
)  # fmt: skip
FLOAT32 = {"reducer": "powersgd", "powersgd.wire_dtype": "float32"}
SENT = 0.5e6  # bytes of a step of edgc
LONG = pytest.mark.soak("experiments/study", "configs/protocol")


@pytest.fixture
def records(tmp_path):
  return Records(tmp_path / "records")


def record(records, run, loss, curve=(), **more):
  """Records a finished run; curve has steps and held-out losses."""
  summary = {
    "reducer": run.config.reducer, "val_loss": loss, "steps": 400,
    "params": 4_000_000, "seconds": 1.0,
    "wire_bytes_per_step": [SENT], "versions": {"task": 1, "method": 1},
  } | more  # fmt: skip
  steps, losses = zip(*(curve or [(400, loss)]), strict=True)
  lines = {"step": list(steps), "val_loss": list(losses)}
  records.add(run.config, {"summary": summary, "lines": lines})


def tune(own, records, loss_of, arm=None):
  """Records tuning runs of an arm, or all, until none is planned."""
  tried = []
  while True:
    runs = [r for r in own.plan(records) if not r.is_judged]
    run = next((r for r in runs if arm in (None, r.arm)), None)
    if run is None:
      return tried
    value = run.config.optimizer.lr
    tried.append(value)
    loss = loss_of(value)
    if loss is None:
      records.add(run.config, {"error": "diverged"})
    else:
      record(records, run, loss)


def judge(own, records, loss_of):
  """Records judged runs until none is planned; returns (arm, seed) of all."""
  tried = []
  while run := next((r for r in own.plan(records) if r.is_judged), None):
    tried.append((run.arm, run.config.seed))
    record(records, run, loss_of(*tried[-1]))
  return tried


def near(best):
  """Returns a loss that is least at a value."""
  return lambda value: 2.0 + math.log(value / best) ** 2


# What runs next.


@pytest.mark.parametrize(
  "best, expected",
  [
    (1e-3, [1e-3, 2e-3, 5e-4]),
    (2e-3, [1e-3, 2e-3, 4e-3]),
    (8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]),
    (2.5e-4, [1e-3, 2e-3, 5e-4, 2.5e-4, 1.25e-4]),
  ],
)
def test_tuning_goes_on_until_the_best_value_is_inside(records, best, expected):
  assert TUNED.taken("fixed", records) is None
  tried = tune(TUNED, records, near(best), "fixed")
  assert tried == pytest.approx(expected)
  assert TUNED.taken("fixed", records) == (0, pytest.approx(best))
  (found,) = TUNED.tuned("fixed", records)
  assert list(found) == pytest.approx(expected)
  assert TUNED.taken("edgc", records) is None
  assert TUNED.tuned("edgc", records) == [{}]


def test_tuning_runs_have_their_own_settings(records):
  runs = [run for run in TUNED.plan(records) if run.arm == "fixed"]
  assert [run.config.optimizer.lr for run in runs] == [1e-3, 2e-3]
  for run in runs:
    assert not run.is_judged
    assert (run.config.seed, run.config.steps) == (100, 50)
    assert run.config.powersgd.wire_dtype == "bfloat16"
  # The next value is known only once all first ones are.
  record(records, runs[0], 2.0)
  (left,) = [run for run in TUNED.plan(records) if run.arm == "fixed"]
  assert left.config.optimizer.lr == 2e-3
  # Nothing is judged before its rate is known.
  assert TUNED.judged("fixed", 0, records) == (None, None)


def test_a_value_that_diverges_is_infinitely_bad(records):
  loss_of = lambda value: None if value > 1.5e-3 else near(1e-3)(value)  # noqa: E731
  assert tune(TUNED, records, loss_of, "dense") == [1e-3, 2e-3, 5e-4]
  assert TUNED.taken("dense", records) == (0, 1e-3)
  (found,) = TUNED.tuned("dense", records)
  losses = [study.loss_of(record) for record in found.values()]
  assert losses[1] == math.inf


def test_of_equally_good_values_the_lowest_is_taken(records):
  losses = {1e-3: 2.5, 2e-3: 2.02, 4e-3: 2.01, 8e-3: 2.0, 16e-3: 2.3}
  tried = tune(TUNED, records, losses.get, "fixed")
  assert tried == pytest.approx(list(losses))
  for tolerance, expected in ((0.0, 8e-3), (0.015, 4e-3), (0.025, 2e-3)):
    tuning = dataclasses.replace(TUNED.tuning, tolerance=tolerance)
    own = dataclasses.replace(TUNED, tuning=tuning)
    assert own.taken("fixed", records) == (0, expected)
    run, _ = own.judged("fixed", 0, records)
    assert run.config.optimizer.lr == expected


@pytest.mark.parametrize(
  "gains, taken, tried",
  [
    ((0.1, 0.2), 2, [1, 2, 4, 2, 2, 1, 4, 8]),
    ((-0.1, None), 0, [1, 2, 4, 2, 2]),
  ],
)
@LONG
def test_an_arm_takes_the_best_of_its_alternatives(
  records, gains, taken, tried
):
  """Each is tried at the best value; the winner is tuned again."""
  ranks = (16.0, 24.0)
  own = dataclasses.replace(
    TUNED,
    alternatives={"fixed": [{"powersgd.rank": rank} for rank in ranks]},
  )

  def loss_of(config):
    rank, value = config.powersgd.rank, config.optimizer.lr
    if rank not in ranks:
      return near(2e-3)(value)
    gain = gains[ranks.index(rank)]
    return None if gain is None else near(4e-3)(value) - gain - 0.48

  found = []
  while run := next((r for r in own.plan(records) if r.arm == "fixed"), None):
    if run.is_judged:
      break
    assert own.taken("fixed", records) is None
    found.append(1e3 * run.config.optimizer.lr)
    if (loss := loss_of(run.config)) is None:
      records.add(run.config, {"error": "diverged"})
    else:
      record(records, run, loss)
  assert found == pytest.approx(tried)
  assert own.taken("fixed", records) == (taken, 4e-3 if taken else 2e-3)
  assert run.config.powersgd.rank == (8.0, *ranks)[taken]
  assert run.config.optimizer.lr == (4e-3 if taken else 2e-3)
  # A matched arm keeps the settings of its own.
  tune(own, records, near(2e-3), "edgc")
  for seed in own.seeds:
    run, _ = own.judged("edgc", seed, records)
    record(records, run, 2.5)
  match, _ = own.judged("edgc" + MATCHED, 0, records)
  assert match.config.powersgd.rank not in (8.0, *ranks)


def test_judged_runs_take_the_best_value(records):
  tune(TUNED, records, near(4e-3))
  for arm in ("dense", "fixed", "edgc"):
    run, found = TUNED.judged(arm, 1, records)
    assert run.is_judged and found is None
    assert run.config.optimizer.lr == 4e-3
    assert (run.config.seed, run.config.steps) == (1, 400)
    assert run.config.reducer == TUNED.arms[arm]["reducer"]
  record(records, run, 2.5)
  assert TUNED.judged("edgc", 1, records)[1]["summary"]["val_loss"] == 2.5
  # Without tuning a judged run has the rate of its configuration.
  run, _ = PLAIN.judged("dense", 0, records)
  assert run.config.optimizer.lr == gpt2_tiny.get_config().optimizer.lr


def bytes_of(config, rank):
  """Returns the bytes of a step of a schedule of ranks, by its mean."""
  bytes_of_step = study._bytes_of_step(config.to_json())
  ranks = optimizer._rank_schedule(rank, 0, 1.0, 400)
  ends = [*ranks, 400][1:]
  return sum(
    bytes_of_step(rank, min(ranks.values())) * (end - start)
    for (start, rank), end in zip(ranks.items(), ends, strict=True)
  ) / 400  # fmt: skip


@LONG
def test_a_matched_arm_sends_the_bytes_of_its_partner(records):
  tune(TUNED, records, near(4e-3), "edgc")
  tune(TUNED, records, near(2e-3), "fixed")
  name = "edgc" + MATCHED
  assert TUNED.table_of("Low rank") == ["fixed", "edgc", name]
  assert TUNED.judged(name, 0, records) == (None, None)
  for seed, target in ((0, 0.5e6), (1, 0.62e6)):
    # Its rank is known once all first seeds of edgc are.
    assert TUNED.judged(name, 0, records) == (None, None)
    run, _ = TUNED.judged("edgc", seed, records)
    record(records, run, 2.5, wire_bytes_per_step=[target])
  for seed in (0, 1, 2):
    run, found = TUNED.judged(name, seed, records)
    assert found is None and run.arm == name and run.is_judged
    assert run.config.reducer == "powersgd" and run.config.seed == seed
    # Rate and other settings are those of the fixed arm.
    assert run.config.optimizer.lr == 2e-3
    assert run.config.powersgd.wire_dtype == "bfloat16"
    sent = bytes_of(run.config, run.config.powersgd.rank)
    assert sent == pytest.approx(0.56e6, rel=0.005)
  assert name in [run.arm for run in TUNED.plan(records)]


def test_runs_ahead(records):
  """A grid of an arm that is not tuned; all seeds of one that is."""
  ahead = [run for run in TUNED.ahead(records) if run.arm == "fixed"]
  rates = [run.config.optimizer.lr for run in ahead]
  assert rates == pytest.approx([5e-4, 1e-3, 2e-3, 4e-3])
  assert not any(run.is_judged for run in ahead)
  tune(TUNED, records, near(2e-3), "fixed")
  ahead = [run for run in TUNED.ahead(records) if run.arm == "fixed"]
  assert [run.config.seed for run in ahead] == [2, 3]
  assert all(run.is_judged for run in ahead)
  record(records, ahead[0], 2.0)
  (left,) = [run for run in TUNED.ahead(records) if run.arm == "fixed"]
  assert left.config.seed == 3


def test_the_partner_of_a_diverged_run_does_not_run(records):
  tune(TUNED, records, near(2e-3))
  run, _ = TUNED.judged("edgc", 0, records)
  records.add(run.config, {"error": "diverged"})
  assert TUNED.judged("edgc" + MATCHED, 0, records) == (None, None)


def test_an_arm_that_cannot_be_judged_holds_up_no_other(records):
  own = dataclasses.replace(PLAIN, matched={"edgc": "fixed"}, more=(2,), best=1)
  tried = []
  while run := next(own.plan(records), None):
    tried.append((run.arm, run.config.seed))
    if run.arm == "edgc" and run.config.seed == 0:
      records.add(run.config, {"error": "diverged"})
    else:
      record(records, run, 2.0)
  assert [arm for arm, seed in tried if seed == 2] == ["dense", "edgc", "fixed"]
  assert own.stuck(records) == ["edgc" + MATCHED]
  # Nor does a partner that no rank makes as cheap.
  records = Records(records.folder.parent / "others")
  for seed in own.seeds:
    run, _ = own.judged("edgc", seed, records)
    record(records, run, 2.0, wire_bytes_per_step=[1.0])
  assert own.judged("edgc" + MATCHED, 0, records) == (None, None)


def test_a_matched_arm_has_one_rank():
  for changes, message in (
    (
      {"powersgd.warmup_steps": 5},
      r"`MATCHED` .* got 'fixed' with {.*warmup_steps': 5}",
    ),
    ({"reducer": "topk"}, r"`MATCHED` .* 'fixed' with {'reducer': 'topk'"),
  ):
    low_rank = TABLES["Low rank"] | {"fixed": {"reducer": "powersgd"} | changes}
    own = dataclasses.replace(
      PLAIN, tables={"Low rank": low_rank}, matched={"edgc": "fixed"}
    )
    with pytest.raises(ValueError, match=message):
      own.require_settings()


def test_settings_of_the_tuning_are_checked_before_it_begins():
  tuning = dataclasses.replace(TUNED.tuning, settings={"stepps": 50})
  with pytest.raises(ValueError, match=r"An arm must .* 'stepps'; the nearest"):
    dataclasses.replace(TUNED, tuning=tuning).require_settings()


@LONG
def test_a_fixed_rank_of_the_same_bytes():
  config = PLAIN.configuration(FLOAT32)
  bytes_of_step = study._bytes_of_step(config.to_json())
  for target in (0.3e6, 0.62e6, 2e6):
    rank = study.equal_rank(bytes_of_step, target)
    assert bytes_of(config, rank) == pytest.approx(target, rel=0.005)
  for target in (1e4, 8e6):  # no rank below one, or above dense
    with pytest.raises(ValueError, match=r"bytes must be from .* got .*; set"):
      study.equal_rank(bytes_of_step, target)
  # A matrix is dense from rank 39 on, but not if the run's least rank is 38.
  assert bytes_of_step(39, 38) < bytes_of_step(39) - 40_000
  for target, expected in ((2.05e6, 38.4), (2.12e6, 39)):
    assert study.equal_rank(bytes_of_step, target) == expected
  # Factors of half the width have twice the rank.
  narrow = FLOAT32 | {"powersgd.wire_dtype": "bfloat16"}
  narrow = study._bytes_of_step(PLAIN.configuration(narrow).to_json())
  ranks = [study.equal_rank(x, 0.62e6) for x in (narrow, bytes_of_step)]
  assert 1.8 < ranks[0] / ranks[1] < 2.2


def test_a_rank_above_the_largest_of_all_matrices():
  """Of four ranks, the last of which no matrix exceeds; dense sends 100."""

  def bytes_of_step(rank, least=None):
    return 100 if rank == 0 else 10 * min(rank, 4)

  assert study.equal_rank(bytes_of_step, 25) == 2.5
  assert study.equal_rank(bytes_of_step, 35) == 3.5
  for target in (41, 99):
    with pytest.raises(ValueError, match=r"no more than those of the largest"):
      study.equal_rank(bytes_of_step, target)


@LONG
def test_bytes_of_all_shards_count():
  """As in the summary of a run on shards."""
  config = PLAIN.configuration(
    FLOAT32
    | {"powersgd.rank": 8, "mesh.data": 2, "mesh.fsdp": 4,
       "mesh.backend": "jit"}
  )  # fmt: skip
  bytes_of_step = study._bytes_of_step(config.to_json())
  task, mesh = tasks.make(config), meshes.make_mesh(2, 1, 4)
  params = task.layout(mesh.shape)
  (part,) = edgc_jax.describe(
    optimizer.make_reducer(config, task, {}), params.shapes, mesh=mesh,
    param_specs=params.specs,
  ).parts  # fmt: skip
  assert bytes_of_step(8) == 4 * part.wire_bytes[0]
  assert study.equal_rank(bytes_of_step, bytes_of_step(8)) == 8
  config.mesh.update(stage=2, fsdp=1)
  with pytest.raises(ValueError, match=r"`mesh.stage` must be 1 .* got 2; "):
    study._bytes_of_step(config.to_json())


@LONG
def test_more_seeds_are_for_dense_and_the_best(records):
  tune(TUNED, records, near(2e-3))
  name = "edgc" + MATCHED
  means = {"dense": 2.0, "sparse": 1.5, "fixed": 2.2, "edgc": 2.1, name: 2.3}
  loss_of = lambda arm, seed: means[arm] + 0.01 * seed  # noqa: E731
  tried = judge(TUNED, records, loss_of)
  first = [(arm, seed) for seed in (0, 1) for arm in means]
  assert sorted(tried[: len(first)]) == sorted(first)
  # The first table has dense alone; edgc and its partner belong together.
  leaders = ["dense", "edgc", name]
  assert TUNED.leaders(records) == leaders
  assert tried[len(first) :] == [
    (arm, seed) for seed in (2, 3) for arm in leaders
  ]
  assert list(TUNED.plan(records)) == TUNED.stuck(records) == []
  alone = dataclasses.replace(TUNED, matched={})
  assert alone.leaders(records) == ["dense", "edgc"], "the best of its table"


def test_a_plan_without_tuning(records):
  arms = ["dense", "sparse", "fixed", "edgc"]
  assert [run.arm for run in PLAIN.plan(records)] == arms * 2
  tried = judge(PLAIN, records, lambda arm, seed: 2.0)
  assert tried == [(arm, seed) for seed in (0, 1) for arm in arms]


# Files of studies.

FILE = "CONFIG = 'c.py'\nSEEDS = (0,)\nTABLES = {'one': {'a b': {'x': 1}}"


MISTAKES = {
  FILE + "}\nTUNNING = {}":
    r"must set no other names than ALTERNATIVES, BEST, .*, got TUNNING in",
  FILE + ", 'two': {'a b': {'x': 2}}}":
    r"`TABLES` must have one arm of each name, got 'a b' .*; rename one",
  "SEEDS = (0,)": r"must set CONFIG, .* no CONFIG and no TABLES in .*; add",
  FILE + "}\nMATCHED = {'a b': 'c'}":
    r"`MATCHED` must name arms of TABLES, got c in .*; rename or remove",
  FILE + "}\nALTERNATIVES = {'c': [{}]}":
    r"`ALTERNATIVES` must name arms of TABLES, got c in .*; rename or",
  FILE + "}\nTUNING = {'key': 'k', 'start': (1,), 'factor': 2, 'seed': 1,"
  " 'settings': {}, 'arms': {'c': {}}}":
    r"`TUNING` must name arms of TABLES, got c in .*; rename or",
}  # fmt: skip


def test_mistakes_in_a_file(tmp_path):
  file = tmp_path / "some.py"
  for text, message in MISTAKES.items():
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
      study.load(str(file))


def test_a_file_is_loaded(tmp_path):
  file = tmp_path / "configs" / "mine" / "some.py"
  file.parent.mkdir(parents=True)
  file.write_text(FILE + ", 'two': {'a b': {'x': 1}}}\n_LIST = ()\nx = 1")
  found = study.load(str(file))
  assert found.name == "mine-some"
  assert found.arms == {"a b": {"x": 1}} and found.dense == "a b"
  assert found.seeds == (0,) and found.tuning is None
  outside = tmp_path / "other.py"
  outside.write_text(file.read_text())
  assert study.load(str(outside)).name == "other"


STUDIES = [
  path for path in (ROOT / "configs").rglob("*.py")
  if "\nTABLES = " in path.read_text()
]  # fmt: skip


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_settings_of_the_studies_are_valid(path, records, monkeypatch):
  monkeypatch.chdir(ROOT)
  own = study.load(str(path))
  own.require_settings()
  assert own.arms[own.dense]["reducer"] == "allreduce"
  for settings in own.arms.values():
    config = own.configuration(settings)
    task = tasks.make(config)
    tx = optimizer.make_reducer(config, task, {})
    jax.eval_shape(tx.init, task.layout({"data": 4}).shapes)
  arms = {run.arm for run in own.plan(records)}
  assert arms == set(own.arms)


@LONG
def test_budgets_of_the_protocol(monkeypatch):
  """Fixed ranks send what the name of their table says."""
  monkeypatch.chdir(ROOT)
  own = study.load("configs/protocol/table.py")
  checked = 0
  for table, arms in own.tables.items():
    for settings in arms.values():
      if settings["reducer"] != "powersgd":
        continue
      config = own.configuration(settings)
      shapes = tasks.make(config).layout({"data": 4}).shapes
      params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
      bits = 8 * bytes_of(config, config.powersgd.rank) / params
      assert bits == pytest.approx(float(table.split()[1]), rel=0.01)
      checked += 1
  assert checked == 18


# Statistics.


@pytest.fixture
def judged(records):
  """Returns the frame of dense losses of 2 and 3, and of arms above them."""
  own = Study("own", CONFIG, TABLES, (0, 1), matched={"edgc": "fixed"})
  above = {
    "dense": (0.0, 0.0), "sparse": (-0.5, 0.0), "fixed": (0.2, 0.3),
    "edgc": (0.1, 0.2), "edgc" + MATCHED: (0.2, 0.4),
  }  # fmt: skip
  while run := next(own.plan(records), None):
    seed = run.config.seed
    loss = 2.0 + seed + above[run.arm][seed]
    curve = [(1, None), (100, loss + 2), (200, loss + 1), (400, loss)]
    record(records, run, loss, curve, wire_bytes_per_step=[0.5e6])
  return statistics.judged(own, records)


def test_gaps_are_seed_by_seed(judged):
  assert len(judged) == 10
  found = statistics.by_arm(judged)
  assert list(found.index) == [
    ("Every entry", "dense"), ("Every entry", "sparse"),
    ("Low rank", "fixed"), ("Low rank", "edgc"),
    ("Low rank", "edgc" + MATCHED),
  ]  # fmt: skip
  fixed = found.loc[("Low rank", "fixed")]
  assert fixed["seeds"] == 2 and fixed["is_current"]
  assert fixed["loss"] == pytest.approx((2.2 + 3.3) / 2)
  assert fixed["bits"] == 8 * 0.5e6 / 4e6
  assert fixed["gap"] == pytest.approx(0.25)
  # Deviations are 0.354, 0.071, 0.071 and 0.141; no arm has eight seeds, so
  # the least is their median, divided by the root of 2.
  assert fixed["gap_error"] == pytest.approx(0.075)
  assert math.isnan(fixed["beside"])
  dense = found.loc[("Every entry", "dense")]
  assert dense["gap"] == dense["gap_error"] == dense["saved"] == 0
  edgc = found.loc[("Low rank", "edgc")]
  assert edgc["beside"] == pytest.approx((-0.1 - 0.2) / 2)
  assert edgc["beside_error"] == pytest.approx(0.075)
  unpaired = judged.assign(beside=judged["beside"].where(judged["seed"] == 0))
  found = statistics.by_arm(unpaired).loc[("Low rank", "edgc")]
  assert found["seeds"] == 2 and found["pairs"] == 1
  # Seed 1 alone has no standard error.
  alone = statistics.by_arm(judged[judged["seed"] == 1])
  fixed = alone.loc[("Low rank", "fixed")]
  assert fixed["gap"] == pytest.approx(0.3) and math.isnan(fixed["gap_error"])


def test_arms_are_compared_seed_by_seed(judged):
  found = statistics.beside(judged, "edgc", "sparse")
  # Differences of 0.6 and 0.2.
  assert found == pytest.approx((0.4, 0.2, 2))
  # Equal differences have the least scatter.
  found = statistics.beside(judged, "edgc", "fixed")
  assert found == pytest.approx((-0.1, 0.075, 2))
  *nothing, pairs = statistics.beside(judged, "edgc", "other")
  assert np.isnan(nothing).all() and pairs == 0


def test_few_seeds_scatter_as_many_do():
  """The arm of two seeds agrees with itself by chance."""
  gaps = {"dense": [0.0] * 8, "many": [0.1, 0.2] * 4, "few": [0.3, 0.3002],
          "wild": [0.1, 0.9], "alone": [0.2]}  # fmt: skip
  frame = pd.DataFrame(
    {"table": "one", "arm": arm, "gap": gap, "beside": math.nan,
     "is_current": True, **dict.fromkeys(("loss", "bits", "saved", "value"), 1)}
    for arm, own in gaps.items() for gap in own
  )  # fmt: skip
  found = statistics.by_arm(frame).droplevel("table")["gap_error"]
  scatter = np.std([0.1, 0.2] * 4, ddof=1)
  assert found["dense"] == 0
  assert found["many"] == pytest.approx(scatter / 8**0.5)
  assert found["few"] == pytest.approx(scatter / 2**0.5)
  assert found["wild"] == pytest.approx(0.4)
  assert found["alone"] == pytest.approx(scatter)
  frame["seed"] = frame.groupby("arm").cumcount()
  found = statistics.beside(frame, "alone", "wild")
  assert found == pytest.approx((0.1, scatter, 1))
  # Of an arm of many seeds, a partner may have few.
  beside = [0.01, 0.0102, *[math.nan] * 6]
  frame.loc[frame["arm"] == "many", "beside"] = beside
  found = statistics.by_arm(frame).droplevel("table").loc["many"]
  assert found["beside_error"] == pytest.approx(scatter / 2**0.5)


def test_saved_steps_are_interpolated(judged):
  fixed = judged[judged["arm"] == "fixed"].set_index("seed")
  # Dense loses 1 in the last 200 steps: 0.2 above its end is at step 360.
  np.testing.assert_allclose(fixed["saved"], [0.1, 0.15])
  sparse = judged[judged["arm"] == "sparse"].set_index("seed")
  np.testing.assert_allclose(sparse["saved"], [0, 0])
  dense = judged[judged["arm"] == "dense"]["record"].iloc[0]
  for loss, expected in ((3.0, 0.5), (3.5, 0.625), (4.0, 0.75), (9.0, 0.75)):
    assert statistics.saved(dense, loss) == pytest.approx(expected)


def test_runs_that_are_not_finished_have_no_line(records):
  assert len(statistics.judged(PLAIN, records)) == 0
  run, _ = PLAIN.judged("fixed", 0, records)
  record(records, run, 2.5)
  run, _ = PLAIN.judged("dense", 0, records)
  records.add(run.config, {"error": "diverged"})
  (line,) = statistics.judged(PLAIN, records).to_dict("records")
  assert line["arm"] == "fixed" and math.isnan(line["gap"])
  assert math.isnan(line["saved"]) and math.isnan(line["value"])


def test_records_of_older_versions_are_marked(records):
  for seed in (0, 1):
    run, _ = PLAIN.judged("fixed", seed, records)
    record(records, run, 2.5, versions={"task": 1, "method": 1 - seed})
  frame = statistics.judged(PLAIN, records)
  assert frame["is_current"].tolist() == [True, False]
  assert not statistics.by_arm(frame)["is_current"].any()


def test_a_difference_of_three_standard_errors_is_one():
  for difference, error, expected in (
    (-0.31, 0.1, "ahead"), (-0.29, 0.1, "open"), (0.31, 0.1, "behind"),
    (0.29, 0.1, "open"), (0.0, 0.1, "open"), (0.3, math.nan, "open"),
    (-0.1, 0.0, "ahead"),
  ):  # fmt: skip
    assert statistics.verdict(difference, error) == expected


# Runs.

# Waits until another one has started, too.
TOGETHER = """
touch "$0.started"
for i in $(seq 500); do
  [ "$(ls "$(dirname "$0")" | grep -c started)" -ge 2 ] && exit 0
  sleep 0.02
done
echo alone >&2
exit 9
"""


@pytest.fixture
def commands(monkeypatch):
  """Makes runs end at once; returns what each arm does instead of training."""
  sleep = time.sleep
  monkeypatch.setattr(runner.time, "sleep", lambda _: sleep(0.01))
  instead = {}

  def command_of(own, run, path):
    del own
    path.mkdir(parents=True)
    if run.arm != "lost":
      line = {"step": 400, "loss": 2.0, "val_loss": 2.5}
      (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
      (path / "summary.json").write_text(json.dumps({"val_loss": 2.5}))
    return ["sh", "-c", instead.get(run.arm, "true"), str(path)]

  monkeypatch.setattr(runner, "command_of", command_of)
  return instead


def run_all(records, folder, **options):
  tables = {"one": {
    "dense": {"reducer": "allreduce"}, "other": {"reducer": "powersgd"},
    "lost": {"reducer": "quantize"},
  }}  # fmt: skip
  own = Study("runs", CONFIG, tables, (0,))
  failed = runner.run_all([own], records, folder, **options)
  found = {run.arm: run.config for run in own.plan(records)}
  return failed, {
    arm: own.judged(arm, 0, records)[1] for arm in tables["one"]
  }, list(found)  # fmt: skip


def test_two_runs_at_once_and_failures(records, tmp_path, commands, capsys):
  commands["dense"] = commands["other"] = TOGETHER
  folder = tmp_path / "runs"
  failed, found, left = run_all(records, folder, jobs=2, arms="^o|dense")
  assert (failed, left) == (0, ["lost"]), "the only arm not asked for"
  assert found["lost"] is None
  failed, found, left = run_all(records, folder)
  assert failed == 1 and left == ["lost"]
  for arm in ("dense", "other"):
    assert found[arm].is_finished, found[arm]
    assert found[arm]["lines"]["val_loss"] == [2.5]
  shown = capsys.readouterr().out
  assert "--- run 1, judged: dense, allreduce-" in shown
  assert "    other: 2.5000" in shown
  assert re.search("    lost: not recorded: .*summary.json", shown)


@pytest.mark.parametrize("code", ["kill -9 $$", "exit 1"])
def test_a_run_that_failed_is_not_recorded(
  records, tmp_path, commands, code, capsys
):
  """It would count as diverged, and decide a learning rate."""
  commands["dense"] = (
    f'rm "$0/summary.json"; echo 1 >&2; echo no room >&2; {code}'
  )
  failed, found, left = run_all(records, tmp_path / "runs", limit=1)
  assert failed == 1
  assert re.search(
    r"    dense: not recorded: exit code -?\d+: no room",
    capsys.readouterr().out,
  )
  # A limit leaves the rest for another time.
  assert set(found.values()) == {None}
  assert left == ["dense", "other", "lost"]
  del commands["dense"]
  (tmp_path / "runs").rename(tmp_path / "before")
  failed, found, _ = run_all(records, tmp_path / "runs")
  assert failed == 1 and found["dense"].is_finished


def test_a_run_that_diverged_is_recorded(records, tmp_path, commands, capsys):
  commands["dense"] = (
    'rm "$0/summary.json"; echo 9 steps were not finite > "$0/stopped.txt";'
    " exit 1"
  )
  failed, found, left = run_all(records, tmp_path / "runs", limit=1)
  assert (failed, left) == (0, ["other", "lost"])
  assert dict(found["dense"])["error"] == "9 steps were not finite"
  assert "    dense: 9 steps were not finite" in capsys.readouterr().out
  records.forget_diverged()
  assert "dense" in run_all(records, tmp_path / "runs", limit=0)[2]


def test_a_run_that_has_ended_counts_whatever_its_process_did_next(
  records, tmp_path, commands
):
  """Writing its report may fail."""
  commands["dense"] = "exit 3"
  failed, found, _ = run_all(records, tmp_path / "runs", limit=1)
  assert failed == 0 and found["dense"].is_finished


def test_a_job_that_raises_ends_its_own_run_alone(
  records, tmp_path, commands, monkeypatch, capsys
):
  commands["dense"] = "raise"

  def execute(command, cores=None):
    if command[2] == "raise":
      (pathlib.Path(command[3]) / "summary.json").unlink()
      raise TimeoutError("the job's time is over")
    return ""

  monkeypatch.setattr(runner, "_execute", execute)
  failed, found, _ = run_all(records, tmp_path / "runs")
  assert failed == 2 and found["other"].is_finished
  assert found["dense"] is None
  shown = capsys.readouterr().out
  assert "dense: not recorded: the job ended with TimeoutError" in shown


def test_studies_share_a_pool_and_runs(records, tmp_path, commands, capsys):
  """A run of two studies runs once, in the folder of the first."""
  del commands
  dense, other = {"reducer": "allreduce"}, {"reducer": "powersgd"}
  studies = [
    Study("first", CONFIG, {"one": {"dense": dense}}, (0,)),
    Study("second", CONFIG, {"one": {"dense": dense, "other": other}}, (0,)),
  ]
  folder = tmp_path / "runs"
  assert runner.run_all(studies, records, folder, jobs=2, minutes=0) == 0
  assert not folder.exists(), "no time to start a run"
  assert runner.run_all(studies, records, folder, jobs=2) == 0
  assert capsys.readouterr().out.count("--- run ") == 2
  assert [
    len(list((folder / name).iterdir())) for name in ("first", "second")
  ] == [1, 1]
  assert not any(list(own.plan(records)) for own in studies)


@LONG
def test_runs_share_a_program_where_they_can(records, tmp_path, monkeypatch):
  """Two seeds of each arm, but no runs of two arms; at most 3 of tuning."""
  groups = []

  def command(own, runs, path_of):
    del own
    groups.append([(run.arm, run.is_judged) for run in runs])
    for run in runs:
      path_of(run).mkdir(parents=True)
      rate = run.config.optimizer.lr
      loss = {"val_loss": near(2e-3)(rate), "step": 1}
      (path_of(run) / "metrics.jsonl").write_text(json.dumps(loss) + "\n")
      loss["wire_bytes_per_step"] = [SENT]
      (path_of(run) / "summary.json").write_text(json.dumps(loss))
    return ["true"]

  monkeypatch.setattr(runner, "_command", command)
  simulated = {"mesh.backend": "vmap"}
  tables = {"one": {
    "dense": {**TABLES["Every entry"]["dense"], **simulated},
    "fixed": {**TABLES["Low rank"]["fixed"], **simulated},
  }}  # fmt: skip
  own = Study("runs", CONFIG, tables, (0, 1), tuning=TUNED.tuning)
  assert runner.run_all([own], records, tmp_path / "runs", together=3) == 0
  assert list(own.plan(records)) == []
  # Four rates of each arm; the seeds of a tuned arm come first.
  expected = [3, 1, 2, 3, 1, 2]
  assert [len(group) for group in groups] == expected
  assert all(len(set(group)) == 1 for group in groups)
  assert [group[0][1] for group in groups] == [False, False, True] * 2
  assert own.taken("dense", records) == (0, 2e-3)


def test_a_run_that_loads_parameters_shares_no_program():
  settings = {"reducer": "allreduce", "mesh.backend": "vmap"}
  for more, count in (({}, 2), ({"init_from": "runs/other"}, 1)):
    runs = [
      study.Run("dense", PLAIN.configuration(
        {**settings, **more, "seed": seed}), is_judged=True)
      for seed in (0, 1)
    ]  # fmt: skip
    assert len(runner._sharing(runs, 3)) == count


def test_what_ended_before_a_shared_program_failed_counts(
  records, tmp_path, monkeypatch, capsys
):
  def command(own, runs, path_of):
    del own
    for run in runs:
      path_of(run).mkdir(parents=True)
    first = path_of(runs[0])
    line = json.dumps({"step": 1, "val_loss": 2.5})
    (first / "metrics.jsonl").write_text(line + "\n")
    (first / "summary.json").write_text(line)
    return ["sh", "-c", "echo no memory >&2; exit 3"]

  monkeypatch.setattr(runner, "_command", command)
  settings = {"reducer": "allreduce", "mesh.backend": "vmap"}
  tables = {"one": {"dense": settings}}
  own = Study("runs", CONFIG, tables, (0, 1, 2))
  assert runner.run_all([own], records, tmp_path / "runs", together=3) == 2
  found = [own.judged("dense", seed, records)[1] for seed in (0, 1, 2)]
  assert found[0].is_finished and found[1] is found[2] is None
  assert capsys.readouterr().out.count("exit code 3: no memory") == 2


def test_the_command_of_a_shared_program(tmp_path):
  """The file holds whole configurations, each with its folder."""
  runs = [
    study.Run("dense", PLAIN.configuration(
      {"reducer": "allreduce", "seed": seed}), is_judged=True)
    for seed in (0, 1)
  ]  # fmt: skip
  path_of = lambda run: tmp_path / f"runs/{run.config.seed}"  # noqa: E731
  _, script, file = runner._command(PLAIN, runs, path_of)
  assert script.endswith("train_together.py")
  found = json.loads(pathlib.Path(file.removeprefix("--runs=")).read_text())
  for run, config in zip(runs, found, strict=True):
    assert config.pop("run_dir") == str(path_of(run))
    whole = json.loads(run.config.to_json())
    whole.pop("run_dir")
    assert config == whole


def test_commands_set_what_differs_from_the_file(tmp_path):
  for arm in PLAIN.arms:
    settings = {**PLAIN.arms[arm], "seed": 7, "optimizer.lr": 4e-3}
    run = study.Run(arm, PLAIN.configuration(settings), is_judged=True)
    first, script, file, folder, *changes = runner.command_of(
      PLAIN, run, tmp_path / "run"
    )
    assert first == sys.executable and script.endswith("train_gpt2.py")
    assert file == f"--config={CONFIG}:{run.config.reducer}"
    assert folder == f"--config.run_dir={tmp_path / 'run'}"
    expected = {f"--config.{key}={value}" for key, value in settings.items()}
    assert set(changes) == expected - {f"--config.reducer={run.config.reducer}"}


def test_a_configuration_is_found_where_the_study_was_started(
  tmp_path, monkeypatch
):
  text = (ROOT / "configs/gpt2_tiny.py").read_text()
  (tmp_path / "mine.py").write_text(text)
  monkeypatch.chdir(tmp_path)
  own = dataclasses.replace(PLAIN, config="mine.py")
  config = own.configuration(TABLES["Every entry"]["dense"])
  command = runner.command_of(own, study.Run("dense", config, True), tmp_path)
  assert command[2] == f"--config={tmp_path / 'mine.py'}:allreduce"
