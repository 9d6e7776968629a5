"""Results and tables of the network benchmark, and calls of its hosts."""

import contextlib
import json
import math
import os
import sys

import numpy as np
import pandas as pd
import pytest

from configs import gpt2_tiny
from experiments.lab.network import calls, results
from experiments.lab.network.benchmark import Benchmark
from experiments.lab.network.results import Layout, Results
from experiments.lab.pages import network as pages

# A host that fails, sleeps or ends on request.
HOST = """
import dataclasses, os, time
from experiments.lab.network import calls
@dataclasses.dataclass
class Host:
  index: int
  count: int
  address: str
  def run(self, fails, sleeps, ends):
    index = self.index
    time.sleep(0.5 * index if index in sleeps else 0.0)
    if index in ends: os._exit(3)
    if index in fails: raise ValueError(f"no {index}")
    print("something that a library prints", flush=True)
    return index
calls.serve(Host)
"""


SHARDED = {"layout": "2 replicas of 4 shards"}
MODEL = {"config": "c", "tokens": 8}


def entry(row, part, seconds, framework="jax", **more):
  return {
    "layout": "2 replicas", "threads": 1, "rate": 100.0,
    "framework": framework, "row": row, "part": part,
    "seconds": seconds, "sent_bytes": [1e6],
  } | more  # fmt: skip


def measured(folder, factors=(0.8, 0.7, 0.9), **more):
  """Returns a file of made-up results; 12.5 MB take one second on the link.

  Args:
    folder: Where to write the file.
    factors: Seconds of steps of powersgd.
    **more: More of the file.
  """
  rows = [
    entry("no exchange", "step", [0.5, 0.45, 0.6]),
    entry("dense", "step", [2.5, 2.6, 2.7], wire_bytes=25e6),
    entry("powersgd, rank 8", "step", factors, wire_bytes=1.25e6),
    entry("powersgd, rank 8", "compress", [0.1]),
    entry("powersgd, rank 8", "communicate", [0.15]),
    entry("edgc, rank 8", "step", [0.8]),
    entry("no exchange", "step", [0.3], "torch"),
    entry("powersgd, rank 8", "step", [0.9], "torch"),
    entry("dense", "step", [9.0], rate=20.0),
    entry("no exchange", "step", [0.5], **SHARDED, wire_bytes=0.0),
    entry("dense", "step", [2.5], **SHARDED, wire_bytes=0.8e6),
  ]
  runs = [
    {"layouts": [layout], "minutes": 12.3, "commit": commit}
    for layout, commit in (("2 replicas", "abc"), (SHARDED["layout"], "def"))
  ]
  path = folder / "network.json"
  found = MODEL | {"params": 10, "runs": runs, "advice": [], "failures": []}
  path.write_text(json.dumps(found | {"rows": rows} | more))
  return path


def test_numbers_by_hand(tmp_path):
  path = measured(tmp_path)
  cells = results.cells_of(path).query("rate == 100")
  cells = cells.set_index(["layout", "framework", "row"])
  for key, expected in {
    # A ring of two moves its payload once. Noise is half of 0.9 - 0.7 and of
    # 0.6 - 0.45.
    ("2 replicas", "jax", "powersgd, rank 8"): {
      "step": 0.8, "without": 0.5, "exchange": 0.3, "clear": 0.3,
      "compress": 0.1, "communicate": 0.15, "ring_bytes": 1.25e6,
      "wire_bytes": 1.25e6, "link_alone": 0.1, "limit": 0.5 + 0.1 + 0.1,
      "sent_bytes": 1e6, "noise": 0.175,
    },
    ("2 replicas", "torch", "powersgd, rank 8"):
      {"exchange": 0.6, "limit": math.nan},
    ("2 replicas", "jax", "no exchange"): {
      "step": 0.5, "without": 0.5, "compress": 0, "communicate": 0,
      "wire_bytes": 0,
    },
    (SHARDED["layout"], "jax", "dense"): {
      "wire_bytes": 0.8e6, "sent_bytes": 1e6, "ring_bytes": 0.8e6,
      "compress": math.nan, "limit": 0.5 + 0.064,
    },
  }.items():  # fmt: skip
    found = cells.loc[key, [*expected]].to_dict()
    assert found == pytest.approx(expected, nan_ok=True), key
  # Without the row that has no exchange there is nothing to subtract.
  (alone,) = results.cells_of(path).query("rate == 20").to_dict("records")
  assert math.isnan(alone["without"]) and math.isnan(alone["limit"])
  # A difference within noise has no ratio.
  close = results.cells_of(measured(tmp_path, (0.6, 0.5, 0.7)))
  (close,) = close.query(
    "framework == 'jax' and row == 'powersgd, rank 8'"
  ).iloc
  assert close["exchange"] == pytest.approx(0.1) and math.isnan(close["clear"])


@pytest.fixture
def tables(tmp_path, monkeypatch):
  """Returns a function for the lines of a table of files in this folder."""
  monkeypatch.setattr(pages, "ROOT", tmp_path)
  kept = tmp_path / "results/data/whole_runs.json"
  monkeypatch.setattr(results, "WHOLE_RUNS", kept)
  for name in ("_found", "_cells", "_times"):
    uncached = getattr(pages, name).__wrapped__
    monkeypatch.setattr(pages, name, uncached)
  return lambda name, *file: [
    " ".join(line.split()) for line in pages.TABLES[name](*file)
  ]


def test_times_to_a_loss(tables, tmp_path, monkeypatch):
  """Steps times measured seconds, as shares of dense's."""
  steps = {"dense": 1.0, "powersgd, rank 8": 1.2, "edgc, rank 8": 1.3}
  advice = {
    "layout": "2 replicas", "rate": 100.0, "round_trip": 0.0, "link": {},
    "choice": "powersgd, rank 8", "steps": steps | {"not measured": 1.1},
    "seconds": {"dense": 2.6, "powersgd, rank 8": 1.0, "edgc, rank 8": 0.9,
                "not measured": 0.1},
  }  # fmt: skip
  measured(tmp_path, advice=[advice])
  monkeypatch.setattr(pages, "_WITH_LOSS", ("network.json",))
  (panel,) = pages.draw_times().axes
  assert [line.get_label() for line in panel.lines[::2]] == [*steps]
  np.testing.assert_allclose(panel.lines[2].get_ydata(), 1.2 * 0.8 / 2.6)
  lines = tables("time to loss", "network.json")
  # 1.2 steps of 0.8 s beside 2.6 s, and 1.3 of 0.8.
  assert lines[0] == "| method | steps | 100 Mbit/s |"
  assert "| powersgd, rank 8 | 1.20 | **0.369** ← |" in lines
  assert "| edgc, rank 8 | 1.30 | 0.400 |" in lines
  assert not any("not measured" in line for line in lines)
  assert lines[-1].startswith("The choice (←) takes at most 0% longer")
  # Predicted 1.2 * 1.0 and 1.3 * 0.9 of 2.6.
  assert "by 12% in the median and 25% at most." in lines[-1]


def test_whole_runs(tables, tmp_path, monkeypatch):
  """Minutes to the end beside dense's to that loss, without compiling."""

  def run(arm, a_step, losses, **more):
    lines = {
      "step": [50, 100, 150, 200, 300],
      "seconds": [500, 600, *(1000 + a_step * n for n in (0, 50, 150))],
      "val_loss": [None, 3.0, None, *losses],
    }
    which = {"rate": 100.0, "round_trip": 0.0, "seed": 0, "arm": arm}
    return {**which, "lines": lines, **more}

  runs = [
    run("dense", 6, [2.0, 1.0]), run("SparseLoCo, every 2", 3, [2.2, 1.5]),
    run("8 bits", 3, [2.2, 0.5]), run("8 bits", 3, [2.2, 1.5], rate=10.0),
    run("8 bits", 3, [2.2, 1.5], seed=1),
  ]  # fmt: skip
  (tmp_path / "results/data").mkdir(parents=True)
  (tmp_path / "results/data/whole_runs.json").write_text(
    json.dumps({"runs": runs})
  )
  expected = pd.DataFrame(
    {"link": ["100 Mbit/s"], "method": [runs[1]["arm"]], "measured": [0.5]}
  )
  monkeypatch.setattr(pages, "_times", lambda file: expected)
  # 300 steps of 6 s, and of 3 s; dense is at a loss of 1.5 after 250.
  assert tables("whole runs")[2:] == [
    "| 100 Mbit/s | dense | 0 | 1.0000 | 30.0 | 30.0 | 1.00 | - |",
    "| 100 Mbit/s | SparseLoCo, every 2 | 0 | 1.5000 | 15.0 | 25.0 | 0.60"
    " | 0.50 |",
    # A lower loss than dense has, and no dense run of that link or seed.
    "| 100 Mbit/s | 8 bits | 0 | 0.5000 | 15.0 | - | - | - |",
    "| 10 Mbit/s | 8 bits | 0 | 1.5000 | 15.0 | - | - | - |",
    "| 100 Mbit/s | 8 bits | 1 | 1.5000 | 15.0 | - | - | - |",
  ]


def test_layouts_by_name():
  for name, *sizes in (
    ("3 replicas", 3, 1, 1, 3), ("2 stages of 3 replicas", 3, 2, 1, 6),
    ("2 replicas of 4 shards", 2, 1, 4, 2),
  ):  # fmt: skip
    own = Layout.of(name)
    assert [own.replicas, own.stages, own.shards, own.hosts] == sizes
    assert own.name == name
  for name in (
    "replicas", "2 replica", "2 stages of 2 replicas of 4 shards", "0 replicas",
    "1 replicas", "2 stages of 1 replicas", "1 replicas of 4 shards",
    "0 stages of 2 replicas", "2 replicas of 0 shards",
  ):  # fmt: skip
    with pytest.raises(ValueError, match=f"`--layout` must .* got '{name}'"):
      Layout.of(name)


def test_layouts_that_are_not_measured_again_are_kept(tmp_path):
  path, new = measured(tmp_path), tmp_path / "new/network.json"
  for file in (path, new):
    found = Results(file, MODEL, {"commit": "new"})
    found.begin("2 replicas")
    found.add("failures", row="dense")
    found.write()
  own = {
    "commit": "new", "layouts": ["2 replicas"],
    "minutes": pytest.approx(0, abs=1),
  }  # fmt: skip
  failures = [{"layout": "2 replicas", "row": "dense"}]
  assert json.loads(new.read_text()) == MODEL | {
    "runs": [own], "rows": [], "advice": [], "failures": failures,
  }  # fmt: skip
  found = json.loads(path.read_text())
  assert {row["layout"] for row in found["rows"]} == {SHARDED["layout"]}
  assert found["failures"] == failures and found["params"] == 10
  # A run of which nothing is left is gone.
  assert [run["commit"] for run in found["runs"]] == ["def", "new"]
  assert found["runs"][1] == own
  before = path.read_text()
  with pytest.raises(ValueError, match="`--output` must be a new file or one"):
    Results(path, MODEL | {"tokens": 16}, {})
  assert path.read_text() == before


@pytest.mark.soak("experiments/lab/network")
def test_calls_stay_in_step(tmp_path):
  """Hosts answer in any order, fail, and one is late, or ends."""
  command = [sys.executable, "-c", HOST]

  def start():
    return calls.Hosts("some", [command] * 3, "", os.environ, tmp_path)

  def run(fails=(), sleeps=(), ends=(), timeout=20.0):
    given = {"fails": fails, "sleeps": sleeps, "ends": ends}
    return hosts.call("run", timeout=timeout, **given)

  with contextlib.closing(start()) as hosts:
    assert run() == [0, 1, 2]
    assert run(sleeps=[1]) == [0, 1, 2]
    assert "a library prints" in (tmp_path / "some-0.log").read_text()
    with pytest.raises(calls.HostError, match=r"some on host 0 .*no 0"):
      run(fails=[0, 2], sleeps=[1])
    assert run() == [0, 1, 2]
    with pytest.raises(
      calls.HostError, match=r"host 2 did not .*host 0 failed"
    ):
      run(fails=[0], sleeps=[2], timeout=0.2)
  with contextlib.closing(start()) as hosts:
    with pytest.raises(
      calls.HostError, match=r"host 1 has ended; see .*-1\.log"
    ):
      run(sleeps=[2], ends=[1])
    with pytest.raises(calls.HostError, match="failed before"):
      run()


@pytest.mark.parametrize("seconds, transfers", [
  ([5.7, 3.7, 3.5, 3.3, 3.5, 0.1], 5),  # 3.3 is not a tenth below 3.5
  ([1.0, 1.0, 1.0, 0.1], 3),
  ([0.8**i for i in range(20)], 10),
])  # fmt: skip
def test_connections_settle(seconds, transfers, monkeypatch, tmp_path):
  """Transfers go on until they get no faster, or fail."""
  config = gpt2_tiny.get_config()
  benchmark = Benchmark(config, (), "", 1, 1, False, tmp_path, None)
  benchmark._layout = Layout.of("4 replicas")
  benchmark._hosts = {"jax": None}
  sizes = []

  def call(framework, row, function, num_bytes):
    assert (framework, function) == ("jax", "settle")
    sizes.append(num_bytes)
    return [seconds[len(sizes) - 1], 0.0]

  monkeypatch.setattr(benchmark, "_call", call)
  benchmark._settle(rate=100.0, round_trip=0.0)
  assert not sizes
  benchmark._settle(rate=100.0, round_trip=50.0)
  # Each of 4 parts takes 10 round trips: half a second at 12.5 MB/s.
  assert sizes == transfers * [4 * 6_250_000]
  monkeypatch.setattr(benchmark, "_call", lambda *_, **__: sizes.clear() or [])
  benchmark._settle(rate=100.0, round_trip=50.0)
  assert not sizes
