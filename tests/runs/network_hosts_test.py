"""The network benchmark on two virtual hosts; needs root and iproute2."""

import pathlib
import subprocess
import sys

import pytest

from experiments.network import results, virtual_hosts

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 400


@pytest.fixture
def network():
  """Skips the test if virtual hosts cannot be made."""
  reason = virtual_hosts.why_not()
  if reason:
    pytest.skip(reason)


def test_two_hosts(tmp_path, network):
  """A small benchmark runs, and leaves no namespace on the machine."""
  output = tmp_path / "network.json"
  command = [
    sys.executable, "-m", "experiments.network",
    "--config=configs/gpt2_tiny.py", "--config.model.width=64",
    "--config.model.num_layers=2", "--config.model.num_heads=2",
    "--hosts=2", "--nostages", "--noshards", "--nopeer", "--noadvise",
    "--rates=20", "--rounds=2", "--row=no exchange", "--row=dense",
    "--row=powersgd, rank 8",
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
  (factors,) = found.of(row="powersgd, rank 8")
  # Sent bytes include headers, acknowledgements and the loss.
  assert 1.0 < dense.sent_bytes / dense.wire_bytes < 1.15
  assert factors.sent_bytes < dense.sent_bytes / 2
  # The uplink has the given rate, apart from the tokens in its bucket.
  assert dense.communicate > (dense.wire_bytes - 2**16) * 8 / 20e6
  assert factors.exchange < dense.exchange
  listed = subprocess.run(
    ["ip", "netns", "list"], capture_output=True, text=True, check=True
  )
  assert "edgc-host" not in listed.stdout
