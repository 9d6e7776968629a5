"""Results and pages of the network benchmark, and calls of its hosts."""

import dataclasses
import json
import subprocess
import sys

import pytest

from experiments.network import benchmark, calls, page, results
from experiments.network.results import ADVISED, Layout

# A host that fails, sleeps or ends on request.
HOST = """
import os, sys, time
from experiments.network import calls
def run(fails, sleeps, ends):
  index = int(sys.argv[1])
  time.sleep(0.5 * index if index in sleeps else 0.0)
  if index in ends: os._exit(3)
  if index in fails: raise ValueError(f"no {index}")
  print("something that a library prints")
  return index
calls.serve({"run": run})
"""


SHARDED = {"layout": "2 replicas of 4 shards", "shards": 4}


def run_of(layout, commit):
  return {
    "command": f"made {commit}", "layouts": [layout], "rounds": 3,
    "minutes": 12.3, "commit": commit, "machine": "m", "cores": 2,
    "versions": "v",
  }  # fmt: skip


def entry(row, part, seconds, framework="jax", **more):
  return {
    "layout": "2 replicas", "hosts": 2, "replicas": 2, "threads": 1,
    "rate": 100.0, "framework": framework, "row": row, "part": part,
    "seconds": seconds, "sent_bytes": [1e6],
  } | more  # fmt: skip


def measured(tmp_path):
  """Returns made-up results; 12.5 MB take one second on the link."""
  rows = [
    entry("no exchange", "step", [0.5, 0.45, 0.6]),
    entry("dense", "step", [2.5, 2.6, 2.7], wire_bytes=25e6),
    entry("dense", "compress", [0.0]),
    entry("dense", "communicate", [2.0]),
    entry("powersgd, rank 8", "step", [0.8, 0.7, 0.9], wire_bytes=1.25e6),
    entry("powersgd, rank 8", "compress", [0.1]),
    entry("powersgd, rank 8", "communicate", [0.15]),
    entry("edgc, rank 8", "step", [0.8]),
    entry("no exchange", "step", [0.3], "torch"),
    entry("dense", "step", [2.4], "torch"),
    entry("powersgd, rank 8", "step", [0.9], "torch"),
  ]
  advice = {
    "layout": "2 replicas", "rate": 100.0, "choice": "dense",
    "seconds": {"dense": 2.6, "edgc, rank 8": 1.0},
    "break_even": {}, "link": {},
  }  # fmt: skip
  rows += [
    entry("no exchange", "step", [0.5], **SHARDED, wire_bytes=0.0),
    entry("dense", "step", [2.5], **SHARDED, wire_bytes=0.8e6),
  ]
  runs = [run_of("2 replicas", "abc"), run_of(SHARDED["layout"], "def")]
  about = {"config": "c", "tokens": 8, "params": 10, "runs": runs}
  path = tmp_path / "network.json"
  failure = {
    "layout": "2 replicas", "framework": "torch", "row": "dense, bf16",
    "error": "refused",
  }  # fmt: skip
  path.write_text(
    json.dumps(
      about | {"rows": rows, "advice": [advice], "failures": [failure]}
    )
  )
  return results.load(path)


def test_numbers_by_hand(tmp_path):
  found = measured(tmp_path)
  (cell,) = found.of(framework="jax", row="powersgd, rank 8")
  assert found.run_of(cell.layout)["commit"] == "abc"
  assert cell.step == 0.8
  assert cell.without == 0.5
  assert cell.exchange == pytest.approx(0.3)
  assert cell.parts == pytest.approx(0.75)
  # A ring of two moves its payload once.
  assert cell.limit == pytest.approx(0.5 + 0.1 + 0.1)
  (theirs,) = found.of(framework="torch", row="powersgd, rank 8")
  assert theirs.exchange == pytest.approx(0.6)
  assert theirs.limit is None


def test_differences_within_noise_have_no_ratio(tmp_path):
  (cell,) = measured(tmp_path).of(framework="jax", row="powersgd, rank 8")
  # Half of 0.9 - 0.7 and of 0.6 - 0.45.
  assert cell.noise == pytest.approx(0.175)
  assert cell.clear_exchange == cell.exchange
  close = dataclasses.replace(cell, step=0.6)
  assert close.exchange == pytest.approx(0.1)
  assert close.clear_exchange is None


def test_page(tmp_path):
  path = tmp_path / "network.md"
  page.write(measured(tmp_path), path)
  text = path.read_text()
  for expected in (
    # Exchange 0.3 s in place of 2.1, and steps of 0.8 in place of 2.6.
    "| 100 | powersgd, rank 8 | 0.800 | 0.300 | 85.7% | - | 69.2% | - |",
    "| 100 | powersgd, rank 8 | 0.800 | 0.900 | 0.89 | 0.300 | 0.600 | 0.50 |",
    # Advice took dense for the best, and rank 8 was.
    "| 1.000 / 0.800 (+25%) | dense | edgc, rank 8 | 3.25 |",
    "Right: 0 of 1; errors: median 12%, largest 25%. Of 1 pairs",
    "- 2 replicas, torch, dense, bf16: refused",
    # Sections of two runs.
    "- 2 replicas: `made abc`, 12 minutes in all; v",
    "- 2 replicas of 4 shards: `made def`",
    "## 2 replicas of 4 shards\n\nCommit def. m, 2 cores",
    "1.25 to 1.25 times as many",
  ):
    assert expected in text
  for name in ("parts", "speeds"):
    assert (tmp_path / f"network-{name}.png").stat().st_size > 10_000


def test_the_page_reports_noise_and_missing_rows(tmp_path):
  path, found = tmp_path / "network.md", measured(tmp_path)
  page.write(found, path)
  assert "DistributedDataParallel" in path.read_text()
  assert "noise. Use more" not in path.read_text()
  alone = [
    dataclasses.replace(cell, step=min(cell.step, 0.4))
    for cell in found.of(framework="jax", shards=1)
  ]
  page.write(dataclasses.replace(found, cells=tuple(alone)), path)
  assert "DistributedDataParallel" not in path.read_text()
  assert "noise. Use more" in path.read_text()


@pytest.mark.parametrize(
  "rows, layout, asks",
  [
    ((), Layout(4), True),
    ((), Layout(4, stages=2), False),
    ((), Layout(2, shards=4), False),
    (ADVISED | {"no exchange"}, Layout(4), True),
    (("dense",), Layout(4), False),
  ],
)
def test_advice_is_asked_for_if_it_can_be_compared(rows, layout, asks):
  options = benchmark.Options(tuple(rows), 1, 0, False, True, False, None)
  assert options.asks_advice(layout) == asks


@pytest.fixture
def hosts():
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", HOST, str(index)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    for index in range(3)
  ]
  found = calls.Hosts("some", processes)
  yield found
  found.close()


def run(hosts, fails=(), sleeps=(), ends=(), timeout=20.0):
  return hosts.call(
    "run", timeout=timeout, fails=fails, sleeps=sleeps, ends=ends
  )


def test_hosts_may_answer_in_any_order(hosts):
  assert run(hosts) == [0, 1, 2]
  assert run(hosts, sleeps=[1]) == [0, 1, 2]


def test_an_error_leaves_calls_in_step(hosts):
  with pytest.raises(calls.HostError, match=r"some on host 0 .*no 0"):
    run(hosts, fails=[0, 2], sleeps=[1])
  assert run(hosts) == [0, 1, 2]


def test_a_host_that_ends(hosts):
  with pytest.raises(calls.HostError, match="host 1 has ended"):
    run(hosts, sleeps=[2], ends=[1])
  with pytest.raises(calls.HostError, match="failed before"):
    run(hosts)


def test_a_host_that_is_late(hosts):
  assert run(hosts) == [0, 1, 2]
  with pytest.raises(calls.HostError, match=r"host 2 did not .*host 0 failed"):
    run(hosts, fails=[0], sleeps=[2], timeout=0.2)
