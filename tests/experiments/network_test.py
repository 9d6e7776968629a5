"""Results and tables of the network benchmark, and calls of its hosts."""

import json
import math
import os
import sys

import numpy as np
import pandas as pd
import pytest

from configs import gpt2_tiny
from experiments.network import calls, results
from experiments.network.benchmark import Benchmark
from experiments.network.results import Layout, Results
from experiments.pages import network as pages

# A host that fails, sleeps or ends on request.
HOST = """
import dataclasses, os, time
from experiments.network import calls
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


def run_of(layout, commit):
  return {
    "command": f"made {commit}", "layouts": [layout], "rounds": 3,
    "minutes": 12.3, "commit": commit, "machine": "m", "cores": 2,
    "versions": "v",
  }  # fmt: skip


def entry(row, part, seconds, framework="jax", **more):
  return {
    "layout": "2 replicas", "threads": 1, "rate": 100.0,
    "framework": framework, "row": row, "part": part,
    "seconds": seconds, "sent_bytes": [1e6],
  } | more  # fmt: skip


def measured(folder, factors=(0.8, 0.7, 0.9), dense=(2.5, 2.6, 2.7)):
  """Returns a file of made-up results; 12.5 MB take one second on the link.

  Args:
    folder: Where to write the file.
    factors: Seconds of steps of powersgd.
    dense: Seconds of dense steps.
  """
  rows = [
    entry("no exchange", "step", [0.5, 0.45, 0.6]),
    entry("dense", "step", dense, wire_bytes=25e6),
    entry("dense", "compress", [0.0]),
    entry("dense", "communicate", [2.0]),
    entry("powersgd, rank 8", "step", factors, wire_bytes=1.25e6),
    entry("powersgd, rank 8", "compress", [0.1]),
    entry("powersgd, rank 8", "communicate", [0.15]),
    entry("edgc, rank 8", "step", [0.8]),
    entry("no exchange", "step", [0.3], "torch"),
    entry("dense", "step", [2.4], "torch"),
    entry("powersgd, rank 8", "step", [0.9], "torch"),
    entry("dense, bf16", "step", [1.5], "torch"),  # not measured here
    entry("dense", "step", [9.0], rate=20.0),
    entry("no exchange", "step", [0.5], **SHARDED, wire_bytes=0.0),
    entry("dense", "step", [2.5], **SHARDED, wire_bytes=0.8e6),
  ]
  runs = [run_of("2 replicas", "abc"), run_of(SHARDED["layout"], "def")]
  about = {"config": "c", "tokens": 8, "params": 10, "runs": runs}
  path = folder / "network.json"
  found = about | {"rows": rows, "advice": [], "failures": []}
  path.write_text(json.dumps(found))
  return path


def cell_of(path, row, framework="jax", layout="2 replicas"):
  """Returns a cell at 100 Mbit/s."""
  cells = results.cells_of(path)
  keys = ["layout", "rate", "framework", "row"]
  return cells.set_index(keys).loc[(layout, 100.0, framework, row)]


def test_numbers_by_hand(tmp_path):
  path = measured(tmp_path)
  cell = cell_of(path, "powersgd, rank 8")
  assert cell["step"] == 0.8
  assert cell["without"] == 0.5
  assert cell["exchange"] == pytest.approx(0.3)
  assert cell["compress"] + cell["communicate"] == pytest.approx(0.25)
  # A ring of two moves its payload once.
  assert cell["ring_bytes"] == cell["wire_bytes"] == 1.25e6
  assert cell["link_alone"] == pytest.approx(0.1)
  assert cell["limit"] == pytest.approx(0.5 + 0.1 + 0.1)
  assert cell["sent_bytes"] == 1e6
  theirs = cell_of(path, "powersgd, rank 8", "torch")
  assert theirs["exchange"] == pytest.approx(0.6)
  assert math.isnan(theirs["limit"])
  nothing = cell_of(path, "no exchange")
  assert nothing["step"] == nothing["without"] == 0.5
  assert nothing["compress"] == nothing["communicate"] == 0
  assert nothing["wire_bytes"] == 0
  # Without the row that has no exchange there is nothing to subtract.
  cells = results.cells_of(path)
  (alone,) = cells[cells["rate"] == 20].to_dict("records")
  assert math.isnan(alone["without"]) and math.isnan(alone["limit"])
  # Shards have numbers of their own.
  cell = cell_of(path, "dense", layout=SHARDED["layout"])
  assert cell["wire_bytes"] == 0.8e6
  assert cell["sent_bytes"] / cell["ring_bytes"] == 1.25
  assert math.isnan(cell["compress"])
  assert cell["limit"] == pytest.approx(0.5 + 0.064)


def test_differences_within_noise_have_no_ratio(tmp_path):
  cell = cell_of(measured(tmp_path), "powersgd, rank 8")
  # Half of 0.9 - 0.7 and of 0.6 - 0.45.
  assert cell["noise"] == pytest.approx(0.175)
  assert cell["clear"] == cell["exchange"]
  close = cell_of(measured(tmp_path, (0.6, 0.5, 0.7)), "powersgd, rank 8")
  assert close["exchange"] == pytest.approx(0.1)
  assert math.isnan(close["clear"])


@pytest.fixture
def tables(tmp_path, monkeypatch):
  """Returns a function for the lines of a table of made-up results."""

  def forget():
    pages._found.cache_clear()
    pages._cells.cache_clear()

  def lines(name, *argument, **options):
    forget()
    monkeypatch.setattr(pages, "_FILE", measured(tmp_path, **options))
    return [" ".join(line.split()) for line in pages.TABLES[name](*argument)]

  yield lines
  forget()


def test_times_to_a_loss(tables, tmp_path, monkeypatch):
  """Steps times measured seconds, as shares of dense's."""
  steps = {"dense": 1.0, "powersgd, rank 8": 1.2, "edgc, rank 8": 1.3}
  seconds = {"dense": 2.6, "powersgd, rank 8": 1.0, "edgc, rank 8": 0.9}
  steps["not measured"], seconds["not measured"] = 1.1, 0.1
  advice = {
    "layout": "2 replicas", "rate": 100.0, "round_trip": 0.0, "link": {},
    "choice": "powersgd, rank 8", "seconds": seconds, "steps": steps,
  }  # fmt: skip
  path = tmp_path / "advice.json"
  found = json.loads(measured(tmp_path).read_text())
  path.write_text(json.dumps(found | {"advice": [advice]}))
  monkeypatch.setattr(pages, "_ROOT", tmp_path)
  pages._times.cache_clear()
  lines = tables("time to loss", "advice.json")
  monkeypatch.setattr(pages, "_WITH_LOSS", ("advice.json",))
  (panel,) = pages.draw_times().axes
  assert [line.get_label() for line in panel.lines[::2]] == [*steps][:3]
  np.testing.assert_allclose(panel.lines[2].get_ydata(), 1.2 * 0.8 / 2.6)
  pages._times.cache_clear()
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
    run("dense", 6, [2.0, 1.0]),
    run("SparseLoCo, every 2", 3, [2.2, 1.5]),
    run("8 bits", 3, [2.2, 0.5]),
    run("8 bits", 3, [2.2, 1.5], rate=10.0),
    run("8 bits", 3, [2.2, 1.5], seed=1),
  ]
  (tmp_path / "docs").mkdir()
  (tmp_path / "docs/whole_runs.json").write_text(json.dumps({"runs": runs}))
  monkeypatch.setattr(pages, "_ROOT", tmp_path)
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
  for name, hosts, sizes in (
    ("3 replicas", 3, (3, 1, 1)),
    ("2 stages of 3 replicas", 6, (3, 2, 1)),
    ("2 replicas of 4 shards", 2, (2, 1, 4)),
  ):
    layout = Layout.of(name)
    assert (layout.replicas, layout.stages, layout.shards) == sizes
    assert layout.hosts == hosts and layout.name == name
  for name in (
    "replicas", "2 replica", "2 stages of 2 replicas of 4 shards", "0 replicas",
    "1 replicas", "2 stages of 1 replicas", "1 replicas of 4 shards",
    "0 stages of 2 replicas", "2 replicas of 0 shards",
  ):  # fmt: skip
    with pytest.raises(ValueError, match=f"`--layout` must .* got '{name}'"):
      Layout.of(name)


MODEL = {"config": "c", "tokens": 8}


def test_layouts_that_are_not_measured_again_are_kept(tmp_path):
  path = measured(tmp_path)
  found = Results(path, MODEL, {"commit": "new"})
  found.begin("2 replicas")
  found.add("failures", row="dense")
  found.write()
  found = json.loads(path.read_text())
  assert {row["layout"] for row in found["rows"]} == {SHARDED["layout"]}
  assert found["advice"] == []
  assert found["failures"] == [{"layout": "2 replicas", "row": "dense"}]
  # A run of which nothing is left is gone.
  assert [(run["commit"], run["layouts"]) for run in found["runs"]] == [
    ("def", [SHARDED["layout"]]), ("new", ["2 replicas"]),
  ]  # fmt: skip
  assert found["params"] == 10
  before = path.read_text()
  with pytest.raises(ValueError, match="`--output` must be a new file or one"):
    Results(path, MODEL | {"tokens": 16}, {})
  assert path.read_text() == before


def test_a_new_file(tmp_path):
  found = Results(tmp_path / "new" / "network.json", MODEL, {"commit": "a"})
  found.begin("2 replicas")
  found.add("rows", row="dense")
  found.write()
  text = (tmp_path / "new" / "network.json").read_text()
  assert json.loads(text) == MODEL | {
    "runs": [{"commit": "a", "layouts": ["2 replicas"],
              "minutes": pytest.approx(0, abs=1)}],
    "rows": [{"layout": "2 replicas", "row": "dense"}],
    "advice": [],
    "failures": [],
  }  # fmt: skip


@pytest.fixture
def hosts(tmp_path):
  command = [sys.executable, "-c", HOST]
  found = calls.Hosts("some", [command] * 3, "", os.environ, tmp_path)
  yield found
  found.close()


def run(hosts, fails=(), sleeps=(), ends=(), timeout=20.0):
  return hosts.call(
    "run", timeout=timeout, fails=fails, sleeps=sleeps, ends=ends
  )


@pytest.mark.soak("experiments/network")
def test_calls_stay_in_step(hosts, tmp_path):
  """Hosts answer in any order, fail, and one is late in the end."""
  assert run(hosts) == [0, 1, 2]
  assert run(hosts, sleeps=[1]) == [0, 1, 2]
  assert "a library prints" in (tmp_path / "some-0.log").read_text()
  with pytest.raises(calls.HostError, match=r"some on host 0 .*no 0"):
    run(hosts, fails=[0, 2], sleeps=[1])
  assert run(hosts) == [0, 1, 2]
  with pytest.raises(calls.HostError, match=r"host 2 did not .*host 0 failed"):
    run(hosts, fails=[0], sleeps=[2], timeout=0.2)


@pytest.mark.soak("experiments/network")
def test_a_host_that_ends(hosts):
  with pytest.raises(calls.HostError, match=r"host 1 has ended; see .*-1\.log"):
    run(hosts, sleeps=[2], ends=[1])
  with pytest.raises(calls.HostError, match="failed before"):
    run(hosts)


@pytest.mark.parametrize(
  ("seconds", "transfers"),
  [
    ([5.7, 3.7, 3.5, 3.3, 3.5, 0.1], 5),  # 3.3 is not a tenth below 3.5
    ([1.0, 1.0, 1.0, 0.1], 3),
    ([0.8**i for i in range(20)], 10),
  ],
)
def test_connections_settle(seconds, transfers, monkeypatch, tmp_path):
  """Transfers go on until they get no faster."""
  benchmark = Benchmark(
    gpt2_tiny.get_config(), (), "", 1, 1, False, tmp_path, None
  )
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
  monkeypatch.setattr(
    benchmark, "_call", lambda *args, **kwargs: sizes.clear() or []
  )
  benchmark._settle(rate=100.0, round_trip=50.0)  # ends at a failure
  assert not sizes
