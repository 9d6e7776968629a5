"""The network benchmark: on two real hosts, and what is made of its numbers."""

import json
import pathlib
import subprocess
import sys

import pytest

from experiments.network import page, results, virtual_hosts

ROOT = pathlib.Path(__file__).resolve().parents[1]
SECONDS = 240


def entry(row, part, seconds, framework="jax", **more):
  return {
    "layout": "2 replicas", "hosts": 2, "replicas": 2, "rate": 100.0,
    "framework": framework, "row": row, "part": part, "seconds": seconds,
    "sent_bytes": [1e6],
  } | more  # fmt: skip


def measured(tmp_path):
  """By hand: 12.5 MB take one second on this link."""
  rows = [
    entry("no exchange", "step", [0.5, 0.4, 0.9]),
    entry("dense", "step", [2.5, 2.6, 2.7], wire_bytes=25e6),
    entry("dense", "compress", [0.0]),
    entry("dense", "communicate", [2.0]),
    entry("powersgd 8", "step", [0.8, 0.7, 0.9], wire_bytes=1.25e6),
    entry("powersgd 8", "compress", [0.1]),
    entry("powersgd 8", "communicate", [0.15]),
    entry("no exchange", "step", [0.3], "torch"),
    entry("dense", "step", [2.4], "torch"),
    entry("powersgd 8", "step", [0.9], "torch"),
  ]
  advice = {
    "layout": "2 replicas", "rate": 100.0, "choice": "dense",
    "seconds": {"dense": 2.6, "rank 8": 1.0},
    "break_even": {}, "link": {},
  }  # fmt: skip
  about = {
    "config": "c", "tokens": 8, "rounds": 3, "commit": "abc", "machine": "m",
    "cores": 2, "versions": "v", "params": 10,
  }  # fmt: skip
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
  (cell,) = found.of(framework="jax", row="powersgd 8")
  assert cell.step == 0.8
  assert cell.without == 0.5
  assert cell.exchange == pytest.approx(0.3)
  assert cell.parts == pytest.approx(0.75)
  # A ring of two moves its payload once.
  assert cell.limit == pytest.approx(0.5 + 0.1 + 0.1)
  (theirs,) = found.of(framework="torch", row="powersgd 8")
  assert theirs.exchange == pytest.approx(0.6)
  assert theirs.limit is None


def test_page(tmp_path):
  path = tmp_path / "network.md"
  page.write(measured(tmp_path), path, "the command")
  text = path.read_text()
  for expected in (
    # Exchange 0.3 s in place of 2.1, and steps of 0.8 in place of 2.6.
    "| 100 | powersgd 8 | 0.800 | 0.300 | 85.7% | 69.2% | 0.500 | 0.100 |",
    "| 100 | powersgd 8 | 0.800 | 0.900 | 0.300 | 0.600 | 0.50 |",
    "| 2 replicas | 100 | dense | 2.600 | 2.600 | +0% | chosen |",
    "- 2 replicas, torch, dense, bf16: refused",
  ):
    assert expected in text
  for name in ("parts", "speeds"):
    assert (tmp_path / f"network-{name}.png").stat().st_size > 10_000


@pytest.mark.skipif(
  bool(virtual_hosts.why_not()), reason=virtual_hosts.why_not()
)
def test_two_hosts(tmp_path):
  """A whole benchmark, small; nothing of it is left on the machine."""
  output = tmp_path / "network.json"
  command = [
    sys.executable, str(ROOT / "experiments" / "bench_network.py"),
    "--config=configs/gpt2_tiny.py", "--config.model.width=64",
    "--config.model.num_layers=2", "--config.model.num_heads=2",
    "--hosts=2", "--nostages", "--nopeer", "--noadvise", "--rates=20",
    "--rounds=2", "--rows=no exchange,dense,powersgd 8",
    f"--output={output}", f"--folder={tmp_path / 'logs'}",
  ]  # fmt: skip
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS,
    check=False,
  )  # fmt: skip
  logs = "".join(p.read_text()[-2000:] for p in (tmp_path / "logs").iterdir())
  assert done.returncode == 0, done.stdout + done.stderr + logs
  found = results.load(output)
  assert not found.failures
  (dense,) = found.of(row="dense")
  (factors,) = found.of(row="powersgd 8")
  # Headers of packets and acknowledgements come on top, and the loss.
  assert 1.0 < dense.sent_bytes / dense.wire_bytes < 1.15
  assert factors.sent_bytes < dense.sent_bytes / 2
  # The uplink is what it is said to be.
  assert dense.communicate > 0.9 * dense.wire_bytes * 8 / 20e6
  assert factors.exchange < dense.exchange
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  )
  assert "edgc-host" not in listed.stdout
