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
from experiments.lab.study import runner, statistics, study
from experiments.lab.study.records import Records
from experiments.lab.study.study import MATCHED, Study, Tuning
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.training import optimizer

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
PAIR = "edgc" + MATCHED
FLOAT32 = {"reducer": "powersgd", "powersgd.wire_dtype": "float32"}
VMAP = {"reducer": "allreduce", "mesh.backend": "vmap"}
LONG = pytest.mark.soak("experiments/lab/study", "configs/protocol")


@pytest.fixture
def records(tmp_path):
  return Records(tmp_path / "records")


def record(records, run, loss, curve=(), **more):
  """Records a run that finished, or diverged; curve has steps and losses."""
  version = edgc_jax.METHOD_VERSIONS.get(run.config.reducer, 1)
  summary = {
    "reducer": run.config.reducer, "val_loss": loss, "steps": 400,
    "params": 4_000_000, "seconds": 1.0,
    "wire_bytes_per_step": [0.5e6], "versions": {"task": 1, "method": version},
  } | more  # fmt: skip
  steps, losses = zip(*(curve or [(400, loss)]), strict=True)
  lines = {"step": list(steps), "val_loss": list(losses)}
  found = {"summary": summary, "lines": lines}
  records.add(run.config, {"error": "diverged"} if loss is None else found)


def tune(own, records, loss_of, arm=None):
  """Records tuning runs of an arm, or all; returns their values."""
  tried = []
  is_due = lambda run: not run.is_judged and arm in (None, run.arm)  # noqa: E731
  while run := next(filter(is_due, own.plan(records)), None):
    assert own.taken(run.arm, records) is None
    record(records, run, loss_of(run.config))
    tried.append(run.config.optimizer.lr)
  return tried


def near(best, most=math.inf):
  """Returns a loss that is least at a rate; above another one runs diverge."""
  return lambda config: (
    2.0 + math.log(config.optimizer.lr / best) ** 2
    if config.optimizer.lr < most else None
  )  # fmt: skip


def planned(own, records, loss_of):
  """Records judged runs; returns the arm and seed of each."""
  tried = []
  while run := next((r for r in own.plan(records) if r.is_judged), None):
    tried.append((run.arm, run.config.seed))
    record(records, run, loss_of(*tried[-1]))
  return tried


# What runs next.


@pytest.mark.parametrize("best, most, expected", [
  (2.5e-4, math.inf, [1e-3, 2e-3, 5e-4, 2.5e-4, 1.25e-4]),
  (1e-3, 1.5e-3, [1e-3, 2e-3, 5e-4]),
])  # fmt: skip
def test_tuning_goes_on_until_the_best_value_is_inside(
  records, best, most, expected
):
  runs = [run for run in TUNED.plan(records) if run.arm == "fixed"]
  for run in runs:
    assert not run.is_judged
    assert (run.config.seed, run.config.steps) == (100, 50)
    assert run.config.powersgd.wire_dtype == "bfloat16"
  assert TUNED.judged("fixed", 0, records) == (None, None)
  # The next value is known only once all first ones are.
  record(records, runs[0], near(best, most)(runs[0].config))
  (left,) = [run for run in TUNED.plan(records) if run.arm == "fixed"]
  assert [run.config.optimizer.lr for run in (runs[0], left)] == [1e-3, 2e-3]
  tried = tune(TUNED, records, near(best, most), "fixed")
  assert tried == pytest.approx(expected[1:])
  assert TUNED.taken("fixed", records) == (0, pytest.approx(best))
  (found,) = TUNED.tuned("fixed", records)
  assert list(found) == pytest.approx(expected)
  assert TUNED.taken("edgc", records) is None
  assert TUNED.tuned("edgc", records) == [{}]


def test_of_equally_good_values_the_lowest_is_taken(records):
  losses = {1e-3: 2.5, 2e-3: 2.02, 4e-3: 2.01, 8e-3: 2.0, 16e-3: 2.3}
  tried = tune(TUNED, records, lambda c: losses[c.optimizer.lr], "fixed")
  assert tried == pytest.approx([*losses])
  for tolerance, expected in ((0.0, 8e-3), (0.015, 4e-3), (0.025, 2e-3)):
    tuning = dataclasses.replace(TUNED.tuning, tolerance=tolerance)
    own = dataclasses.replace(TUNED, tuning=tuning)
    assert own.taken("fixed", records) == (0, expected)
    run, _ = own.judged("fixed", 1, records)
    assert run.is_judged and run.config.optimizer.lr == expected
    assert (run.config.seed, run.config.steps) == (1, 400)


@pytest.mark.parametrize("gains, taken, tried", [
  ((0.1, 0.2), 2, [1, 2, 4, 2, 2, 1, 4, 8]), ((-0.1, None), 0, [1, 2, 4, 2, 2])
])  # fmt: skip
@LONG
def test_an_arm_takes_its_best_alternative(records, gains, taken, tried):
  """Each is tried at the best value; the winner is tuned again."""
  ranks = (16.0, 24.0)
  others = {"fixed": [{"powersgd.rank": rank} for rank in ranks]}
  own = dataclasses.replace(TUNED, alternatives=others)

  def loss_of(config):
    if config.powersgd.rank not in ranks:
      return near(2e-3)(config)
    gain = gains[ranks.index(config.powersgd.rank)]
    return None if gain is None else near(4e-3)(config) - gain - 0.48

  found = tune(own, records, loss_of, "fixed")
  assert [1e3 * value for value in found] == pytest.approx(tried)
  value = 4e-3 if taken else 2e-3
  assert own.taken("fixed", records) == (taken, value)
  run = next(run for run in own.plan(records) if run.arm == "fixed")
  assert run.is_judged and run.config.optimizer.lr == value
  assert run.config.powersgd.rank == (8.0, *ranks)[taken]
  # A matched arm keeps the settings of its own.
  tune(own, records, near(2e-3), "edgc")
  for seed in own.seeds:
    record(records, own.judged("edgc", seed, records)[0], 2.5)
  match, _ = own.judged(PAIR, 0, records)
  assert match.config.powersgd.rank not in (8.0, *ranks)


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
  assert TUNED.table_of("Low rank") == ["fixed", "edgc", PAIR]
  for seed, target in ((0, 0.5e6), (1, 0.62e6)):
    # Its rank is known once all first seeds of edgc are.
    assert TUNED.judged(PAIR, 0, records) == (None, None)
    run, _ = TUNED.judged("edgc", seed, records)
    assert run.config.reducer == "edgc" and run.config.optimizer.lr == 4e-3
    record(records, run, 2.5, wire_bytes_per_step=[target])
  for seed in (0, 1, 2):
    run, found = TUNED.judged(PAIR, seed, records)
    assert found is None and run.arm == PAIR and run.is_judged
    assert run.config.reducer == "powersgd" and run.config.seed == seed
    # Rate and other settings are those of the fixed arm.
    assert run.config.optimizer.lr == 2e-3
    assert run.config.powersgd.wire_dtype == "bfloat16"
    sent = bytes_of(run.config, run.config.powersgd.rank)
    assert sent == pytest.approx(0.56e6, rel=0.005)
  assert PAIR in [run.arm for run in TUNED.plan(records)]


def test_runs_ahead(records):
  """A grid of an arm that is not tuned; all seeds of one that is."""
  ahead_of = lambda: [x for x in TUNED.ahead(records) if x.arm == "fixed"]  # noqa: E731
  rates = [run.config.optimizer.lr for run in ahead_of()]
  assert rates == pytest.approx([5e-4, 1e-3, 2e-3, 4e-3])
  assert not any(run.is_judged for run in ahead_of())
  tune(TUNED, records, near(2e-3), "fixed")
  ahead = ahead_of()
  assert [run.config.seed for run in ahead] == [2, 3]
  assert all(run.is_judged for run in ahead)
  record(records, ahead[0], 2.0)
  (left,) = ahead_of()
  assert left.config.seed == 3


def test_an_arm_that_cannot_be_judged_holds_up_no_other(records):
  own = dataclasses.replace(PLAIN, matched={"edgc": "fixed"}, more=(2,), best=1)
  arms = ["dense", "sparse", "fixed", "edgc"]
  assert [run.arm for run in own.plan(records)] == arms * 2
  diverged = ("edgc", 0)
  tried = planned(own, records, lambda *run: None if run == diverged else 2.0)
  first = [(arm, seed) for seed in (0, 1) for arm in arms]
  assert tried == [*first, ("dense", 2), ("edgc", 2), ("fixed", 2)]
  assert own.stuck(records) == [PAIR]
  # Nor does a partner that no rank makes as cheap.
  records = Records(records.folder.parent / "others")
  for seed in own.seeds:
    run, _ = own.judged("edgc", seed, records)
    record(records, run, 2.0, wire_bytes_per_step=[1.0])
  assert own.judged(PAIR, 0, records) == (None, None)


def test_settings_are_checked_before_a_study_begins():
  """Of its tuning, and of matched arms, which have one rank."""
  wrong = dataclasses.replace(TUNED.tuning, settings={"stepps": 50})
  for settings, tuning, message in (
    ({"powersgd.warmup_steps": 5}, None, "`MATCHED` .*'fixed' .*_steps': 5}"),
    ({"reducer": "topk"}, None, "`MATCHED` .*'fixed' with {'reducer': 'topk'"),
    ({}, wrong, "An arm must .* 'stepps'; the nearest"),
  ):  # fmt: skip
    arms = {**TABLES["Low rank"], "fixed": {"reducer": "powersgd"} | settings}
    own = dataclasses.replace(TUNED, tables={"one": arms}, tuning=tuning)
    with pytest.raises(ValueError, match=message):
      own.require_settings()


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
  bytes_of_step = lambda rank, _=None: 10 * min(rank, 4) if rank else 100  # noqa: E731
  assert study.equal_rank(bytes_of_step, 25) == 2.5
  assert study.equal_rank(bytes_of_step, 35) == 3.5
  for target in (41, 99):
    with pytest.raises(ValueError, match=r"no more than those of the largest"):
      study.equal_rank(bytes_of_step, target)


@LONG
def test_bytes_of_all_shards_count():
  """As in the summary of a run on shards."""
  mesh = {"mesh.data": 2, "mesh.fsdp": 4, "mesh.backend": "jit"}
  config = PLAIN.configuration(FLOAT32 | mesh | {"powersgd.rank": 8})
  bytes_of_step = study._bytes_of_step(config.to_json())
  task, mesh = tasks.make(config), meshes.make_mesh(2, 1, 4)
  params = task.layout(mesh.shape)
  tx = optimizer.make_reducer(config, task, {})
  specs = {"mesh": mesh, "param_specs": params.specs}
  (part,) = edgc_jax.describe(tx, params.shapes, **specs).parts
  assert bytes_of_step(8) == 4 * part.wire_bytes[0]
  assert study.equal_rank(bytes_of_step, bytes_of_step(8)) == 8
  config.mesh.update(stage=2, fsdp=1)
  with pytest.raises(ValueError, match=r"`mesh.stage` must be 1 .* got 2; "):
    study._bytes_of_step(config.to_json())


@LONG
def test_more_seeds_are_for_dense_and_the_best(records):
  tune(TUNED, records, near(2e-3))
  means = {"dense": 2.0, "sparse": 1.5, "fixed": 2.2, "edgc": 2.1, PAIR: 2.3}
  tried = planned(TUNED, records, lambda arm, seed: means[arm] + 0.01 * seed)
  first = [(arm, seed) for seed in (0, 1) for arm in means]
  assert sorted(tried[: len(first)]) == sorted(first)
  # The first table has dense alone; edgc and its partner belong together.
  leaders = ["dense", "edgc", PAIR]
  assert TUNED.leaders(records) == leaders
  assert tried[len(first) :] == [(a, seed) for seed in (2, 3) for a in leaders]
  assert list(TUNED.plan(records)) == TUNED.stuck(records) == []
  alone = dataclasses.replace(TUNED, matched={})
  assert alone.leaders(records) == ["dense", "edgc"], "the best of its table"


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


def test_a_file_is_loaded_and_its_mistakes_are_found(tmp_path):
  file, outside = tmp_path / "configs/mine/some.py", tmp_path / "other.py"
  file.parent.mkdir(parents=True)
  for path, name in ((file, "mine-some"), (outside, "other")):
    path.write_text(FILE + ", 'two': {'a b': {'x': 1}}}\n_LIST = ()\nx = 1")
    found = study.load(str(path))
    assert found.name == name
    assert found.arms == {"a b": {"x": 1}} and found.dense == "a b"
    assert found.seeds == (0,) and found.tuning is None
  for text, message in MISTAKES.items():
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
      study.load(str(file))


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
  assert {run.arm for run in own.plan(records)} == set(own.arms)


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


def test_differences_are_seed_by_seed(records):
  """Dense losses of 2 and 3, and arms above them."""
  own = dataclasses.replace(PLAIN, matched={"edgc": "fixed"})
  above = {
    "dense": (0.0, 0.0), "sparse": (-0.5, 0.0), "fixed": (0.2, 0.3),
    "edgc": (0.1, 0.2), PAIR: (0.2, 0.4),
  }  # fmt: skip
  while run := next(own.plan(records), None):
    loss = 2.0 + run.config.seed + above[run.arm][run.config.seed]
    curve = [(1, None), (100, loss + 2), (200, loss + 1), (400, loss)]
    record(records, run, loss, curve)
  judged = statistics.judged(own, records)
  assert len(judged) == 10
  tables = ["Every entry"] * 2 + ["Low rank"] * 3
  by_table = statistics.by_arm(judged).index
  assert [*by_table] == [*zip(tables, above, strict=True)]

  of = lambda arm, some: statistics.by_arm(some).droplevel("table").loc[arm]  # noqa: E731
  fixed, dense = of("fixed", judged), of("dense", judged)
  assert fixed["seeds"] == 2 and fixed["is_current"]
  assert fixed["bits"] == 8 * 0.5e6 / 4e6 and math.isnan(fixed["beside"])
  # Deviations are 0.354, 0.071, 0.071 and 0.141; no arm has eight seeds, so
  # the least is their median, divided by the root of 2.
  found = fixed[["loss", "gap", "gap_error"]].tolist()
  assert found == pytest.approx([2.75, 0.25, 0.075])
  assert dense["gap"] == dense["gap_error"] == dense["saved"] == 0
  found = of("edgc", judged)[["beside", "beside_error"]].tolist()
  assert found == pytest.approx([-0.15, 0.075])
  first = judged["seed"] == 0
  edgc = of("edgc", judged.assign(beside=judged["beside"].where(first)))
  assert edgc["seeds"] == 2 and edgc["pairs"] == 1
  fixed = of("fixed", judged[~first])  # one seed has no standard error
  assert fixed["gap"] == pytest.approx(0.3) and math.isnan(fixed["gap_error"])

  # Differences of 0.6 and 0.2; equal ones have the least scatter.
  beside = lambda other: statistics.beside(judged, "edgc", other)  # noqa: E731
  assert beside("sparse") == pytest.approx((0.4, 0.2, 2))
  assert beside("fixed") == pytest.approx((-0.1, 0.075, 2))
  np.testing.assert_array_equal(beside("other"), (np.nan, np.nan, 0))

  # Dense loses 1 in the last 200 steps: 0.2 above its end is at step 360.
  saved = judged.set_index(["arm", "seed"])["saved"]
  np.testing.assert_allclose(saved["fixed"], [0.1, 0.15])
  np.testing.assert_allclose(saved["sparse"], [0, 0])
  dense = judged[judged["arm"] == "dense"]["record"].iloc[0]
  for loss, expected in ((3.0, 0.5), (3.5, 0.625), (4.0, 0.75), (9.0, 0.75)):
    assert statistics.saved(dense, loss) == pytest.approx(expected)


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
  assert found.to_dict() == pytest.approx({
    "dense": 0, "many": scatter / 8**0.5, "few": scatter / 2**0.5,
    "wild": 0.4, "alone": scatter,
  })  # fmt: skip
  frame["seed"] = frame.groupby("arm").cumcount()
  found = statistics.beside(frame, "alone", "wild")
  assert found == pytest.approx((0.1, scatter, 1))
  # Of an arm of many seeds, a partner may have few.
  beside = [0.01, 0.0102, *[math.nan] * 6]
  frame.loc[frame["arm"] == "many", "beside"] = beside
  found = statistics.by_arm(frame).droplevel("table").loc["many"]
  assert found["beside_error"] == pytest.approx(scatter / 2**0.5)


def test_runs_that_are_not_finished_or_of_older_versions(records):
  assert len(statistics.judged(PLAIN, records)) == 0
  record(records, PLAIN.judged("dense", 0, records)[0], None)
  for seed in (0, 1):
    run, _ = PLAIN.judged("fixed", seed, records)
    version = edgc_jax.METHOD_VERSIONS[run.config.reducer] - seed
    record(records, run, 2.5, versions={"task": 1, "method": version})
  frame = statistics.judged(PLAIN, records)
  assert frame["arm"].tolist() == ["fixed", "fixed"]
  assert frame[["gap", "saved", "value"]].isna().all(axis=None)
  assert frame["is_current"].tolist() == [True, False]
  assert not statistics.by_arm(frame)["is_current"].any()


def test_a_difference_of_three_standard_errors_is_one():
  for difference, error, expected in (
    (-0.31, 0.1, "ahead"), (-0.29, 0.1, "open"), (0.31, 0.1, "behind"),
    (0.29, 0.1, "open"), (0.3, math.nan, "open"), (-0.1, 0.0, "ahead"),
  ):  # fmt: skip
    assert statistics.verdict(difference, error) == expected


# Runs.

# Waits until another one has started, too.
TOGETHER = """
touch "$0/started"
for i in $(seq 500); do
  [ "$(echo "$0"/../../*/*/started | wc -w)" -ge 2 ] && exit 0
  sleep 0.02
done
rm "$0/summary.json"
"""
RM = 'rm "$0/summary.json"; '
# What arms do instead of training, and what is shown of each.
ENDS = {
  "fine": ("true", "2.5000"),
  "reports": ("exit 3", "2.5000"),  # fails once it has ended
  "diverges": (RM + 'echo 9 were bad > "$0/stopped.txt"; exit 1', "9 were bad"),
  "lost": (RM, "not recorded: .*summary.json"),
  "fails": (RM + "echo 1 >&2; echo no room >&2; exit 1",
            "not recorded: exit code 1: no room"),
  "killed": (RM + "kill -9 $$", "not recorded: exit code -9"),
  "raises": (None, "not recorded: the job ended with FileNotFoundError"),
}  # fmt: skip


def write_run(path, loss=2.5, reducer="powersgd", older=0):
  """Writes the folder of a run that finished, maybe with an older version."""
  path.mkdir(parents=True)
  line = {"step": 400, "val_loss": loss}
  (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
  version = edgc_jax.METHOD_VERSIONS[reducer] - older
  summary = {
    "val_loss": loss, "wire_bytes_per_step": [0.5e6], "reducer": reducer,
    "versions": {"task": 1, "method": version},
  }  # fmt: skip
  (path / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def commands(monkeypatch):
  """Makes runs end at once; returns what each arm does instead of training."""
  sleep = time.sleep
  monkeypatch.setattr(runner.time, "sleep", lambda _: sleep(0.01))
  instead = {}

  def command_of(own, run, path):
    del own
    if instead.get(run.arm, "true") is None:
      return [str(path / "nothing")]  # which raises
    write_run(path)
    return ["sh", "-c", instead.get(run.arm, "true"), str(path)]

  monkeypatch.setattr(runner, "command_of", command_of)
  return instead


def study_of(*arms, name="runs"):
  """Returns a study of arms with one seed, none of which trains."""
  tables = {"one": {
    arm: {"reducer": "powersgd", "powersgd.rank": float(rank)}
    for rank, arm in enumerate(arms, 1)
  }}  # fmt: skip
  return Study(name, CONFIG, tables, (0,))


def test_what_is_recorded_of_runs(records, tmp_path, commands, capsys):
  """A failure would count as diverged, and decide a learning rate."""
  commands |= {arm: command for arm, (command, _) in ENDS.items()}
  own, folder = study_of(*ENDS), tmp_path / "runs"
  found = lambda arm: own.judged(arm, 0, records)[1]  # noqa: E731
  left = lambda: [run.arm for run in own.plan(records)]  # noqa: E731
  assert runner.run_all([own], records, folder, limit=1) == 0
  assert left() == [*ENDS][1:], "a limit leaves the rest for another time"
  assert runner.run_all([own], records, folder) == 4
  assert left() == ["lost", "fails", "killed", "raises"]
  shown = capsys.readouterr().out
  assert "--- run 1, judged: fine, powersgd-" in shown
  for arm, (_, text) in ENDS.items():
    assert re.search(f"^    {arm}: {text}", shown, re.MULTILINE), arm
  for arm in ("fine", "reports"):
    assert found(arm).is_finished and found(arm)["lines"]["val_loss"] == [2.5]
  assert dict(found("diverges"))["error"] == "9 were bad"
  records.forget_diverged()
  assert "diverges" in left()
  folder.rename(tmp_path / "before")
  del commands["fails"]
  assert runner.run_all([own], records, folder, arms="^f|x") == 0
  assert found("fails").is_finished and "lost" in left()


def test_runs_of_an_older_version_are_repeated(records, tmp_path, commands):
  """But not the tuning, and not from a folder of that version."""
  del commands
  own, folder = dataclasses.replace(study_of("one"), seeds=(0, 1)), tmp_path
  settings = lambda seed: own.judged("one", seed, records)  # noqa: E731
  for seed, older in ((0, 1), (1, 0)):
    run, _ = settings(seed)
    version = edgc_jax.METHOD_VERSIONS["powersgd"] - older
    record(records, run, 2.0, versions={"task": 1, "method": version})
  assert list(own.plan(records)) == []
  (left,) = own.plan(records, renew=True)
  assert left.config.seed == 0
  assert runner.run_all([own], records, folder, renew=True) == 0
  assert settings(0)[1]["summary"]["val_loss"] == 2.5
  assert settings(1)[1]["summary"]["val_loss"] == 2.0
  assert list(own.plan(records, renew=True)) == []


def test_a_new_record_takes_the_place_of_one_of_other_defaults(records):
  """Whose file has another name; a diverged run, too."""
  run = next(PLAIN.plan(records))
  old = records.folder / "old"
  record(records, run, 2.0)
  (file,) = records.folder.rglob("*.json")
  old.mkdir()
  file.rename(old / "another-name.json")
  again = Records(records.folder)
  record(again, run, 2.5)
  (found,) = records.folder.rglob("*.json")
  assert found == file
  assert again.find(run.config)["summary"]["val_loss"] == 2.5


def test_a_matched_rank_waits_for_its_renewed_partner(records):
  tune(TUNED, records, near(2e-3))
  planned(TUNED, records, lambda arm, seed: 2.0)
  partners = [TUNED.judged("edgc", seed, records)[0] for seed in (0, 1)]
  for run in partners:
    record(records, run, 2.0, versions={"task": 1, "method": 0})
  for seed in (0, 1):
    pair, _ = TUNED.judged(PAIR, seed, records)
    record(records, pair, 2.0, versions={"task": 1, "method": 0})
  left = [run.arm for run in TUNED.plan(records, renew=True)]
  assert left == ["edgc", "edgc"]
  for run in partners:
    record(records, run, 2.0)
  left = [run.arm for run in TUNED.plan(records, renew=True)]
  assert left == [PAIR, PAIR]


def test_tuning_of_an_older_version_stays(records):
  old = {"versions": {"task": 1, "method": 0}}
  for run in iter(lambda: next(TUNED.plan(records), None), None):
    if run.is_judged:
      break
    record(records, run, near(2e-3)(run.config), **old)
  assert all(run.is_judged for run in TUNED.plan(records, renew=True))


def test_a_folder_of_an_older_version_is_not_recorded(
  records, tmp_path, monkeypatch, capsys
):
  def command_of(own, run, path):
    del own, run
    write_run(path, older=1)
    return ["true"]

  monkeypatch.setattr(runner, "command_of", command_of)
  assert runner.run_all([study_of("one")], records, tmp_path) == 1
  assert "-seed0 is of an older version; remove it" in capsys.readouterr().out


def test_studies_share_a_pool_and_runs(records, tmp_path, commands, capsys):
  """A run of two studies runs once, in the folder of the first."""
  commands |= dict.fromkeys(("one", "other"), TOGETHER)
  studies = [study_of("one", name="first"), study_of("one", "other")]
  folder = tmp_path / "runs"
  assert runner.run_all(studies, records, folder, jobs=2, minutes=0) == 0
  assert not folder.exists(), "no time to start a run"
  assert runner.run_all(studies, records, folder, jobs=2) == 0
  assert capsys.readouterr().out.count("--- run ") == 2
  for own in studies:
    assert len([*(folder / own.name).glob("*/summary.json")]) == 1
  assert not any(list(own.plan(records)) for own in studies)


@LONG
def test_runs_share_a_program_where_they_can(records, tmp_path, monkeypatch):
  """Two seeds of each arm, but no runs of two arms; at most 3 of tuning."""
  groups = []

  def command(own, runs, path_of):
    del own
    groups.append([(run.arm, run.is_judged) for run in runs])
    for run in runs:
      write_run(path_of(run), near(2e-3)(run.config), run.config.reducer)
    return ["true"]

  monkeypatch.setattr(runner, "_command", command)
  arms = {"dense": VMAP, "fixed": VMAP | TABLES["Low rank"]["fixed"]}
  own = Study("runs", CONFIG, {"": arms}, (0,), (1,), tuning=TUNED.tuning)
  assert runner.run_all([own], records, tmp_path / "runs", together=3) == 0
  assert list(own.plan(records)) == []
  # Four rates of each arm; the seeds of a tuned arm come first.
  assert [len(group) for group in groups] == [3, 1, 2, 3, 1, 2]
  assert all(len(set(group)) == 1 for group in groups)
  assert [group[0][1] for group in groups] == [False, False, True] * 2
  assert own.taken("dense", records) == (0, 2e-3)


def test_what_ended_before_a_shared_program_failed_counts(
  records, tmp_path, monkeypatch, capsys
):
  def command(own, runs, path_of):
    del own
    write_run(path_of(runs[0]))
    for run in runs[1:]:
      path_of(run).mkdir()
    return ["sh", "-c", "echo no memory >&2; exit 3"]

  monkeypatch.setattr(runner, "_command", command)
  own = Study("runs", CONFIG, {"": {"dense": VMAP}}, (0, 1, 2))
  assert runner.run_all([own], records, tmp_path / "runs", together=3) == 2
  found = [own.judged("dense", seed, records)[1] for seed in (0, 1, 2)]
  assert found[0].is_finished and found[1] is found[2] is None
  assert capsys.readouterr().out.count("exit code 3: no memory") == 2


def test_the_command_of_a_shared_program(tmp_path):
  """The file holds whole configurations; none that loads parameters shares."""
  for more, count in (({"init_from": "runs/other"}, 1), ({}, 2)):
    configs = [
      PLAIN.configuration({**VMAP, **more, "seed": seed}) for seed in (0, 1)
    ]
    runs = [study.Run("dense", config, is_judged=True) for config in configs]
    assert len(runner._sharing(runs, 3)) == count
  path_of = lambda run: tmp_path / f"runs/{run.config.seed}"  # noqa: E731
  _, script, file = runner._command(PLAIN, runs, path_of)
  assert script.endswith("lab/train_together.py")
  found = json.loads(pathlib.Path(file.removeprefix("--runs=")).read_text())
  for run, config in zip(runs, found, strict=True):
    whole = json.loads(run.config.to_json())
    assert config == whole | {"run_dir": str(path_of(run))}


def test_commands_set_what_differs_from_the_file(tmp_path, monkeypatch):
  """The file is found where the study was started."""
  (tmp_path / "mine.py").write_text(pathlib.Path(CONFIG).read_text())
  monkeypatch.chdir(tmp_path)
  own = dataclasses.replace(PLAIN, config="mine.py")
  for arm in own.arms:
    settings = {**own.arms[arm], "seed": 7, "optimizer.lr": 4e-3}
    run = study.Run(arm, own.configuration(settings), is_judged=True)
    name = settings.pop("reducer")
    first, script, *given = runner.command_of(own, run, tmp_path / "run")
    assert first == sys.executable and script.endswith("lab/train.py")
    assert given[:2] == [
      f"--config={tmp_path / 'mine.py'}:{name}",
      f"--config.run_dir={tmp_path / 'run'}",
    ]
    changes = {f"--config.{key}={value}" for key, value in settings.items()}
    assert set(given[2:]) == changes
