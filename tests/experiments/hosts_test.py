"""The first of several processes listens only where it was told."""

import os
import socket
import subprocess
import sys
import time

import jax
import pytest
from helpers.local_processes import free_port
from helpers.pages import ROOT

from experiments.trainer.runs.storage import storage_of
from experiments.trainer.runtime import hosts

# Joins a run of one process with a place for a second, which never comes.
_FIRST = """
import sys
from absl import flags
from experiments.trainer.runtime import hosts
address = sys.argv[1]
flags.FLAGS([
  "", f"--coordinator_address={address}", "--num_processes=2", "--process_id=0"
])
hosts.initialize()
"""


def own_address():
  """Returns an address of this host besides loopback; no packet is sent."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    try:
      probe.connect(("192.0.2.1", 9))  # reserved for documentation
    except OSError:
      return None
    return probe.getsockname()[0]


def answers(host, port):
  with socket.socket() as client:
    client.settimeout(1)
    return client.connect_ex((host, port)) == 0


@pytest.mark.slow
def test_the_coordinator_listens_on_its_address_alone():
  port = free_port()
  process = subprocess.Popen(
    [sys.executable, "-c", _FIRST, f"127.0.0.1:{port}"], cwd=ROOT
  )
  try:
    deadline = time.monotonic() + 60
    while not answers("127.0.0.1", port):
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.1)
    # All of 127.0.0.0/8 is this host: on all interfaces it would answer here.
    assert not answers("127.0.0.2", port)
    other = own_address()
    assert other is None or not answers(other, port)
  finally:
    process.kill()
    process.wait()


def test_a_run_on_loopback_that_is_open(monkeypatch, capsys):
  for coordinator, own, warns in (
    ("127.0.0.1:1", "127.0.1.1", False),
    ("127.0.0.1:1", "192.0.2.1", True),
    ("192.0.2.1:1", "192.0.2.1", False),
    ("[::1]:1", "192.0.2.1", True),
  ):
    monkeypatch.setattr(socket, "gethostbyname", lambda _, own=own: own)
    hosts._warn_of_gloo(coordinator)
    assert (f"connect at {own}" in capsys.readouterr().err) == warns


def test_local_copies_are_removed_if_all_end_together(monkeypatch):
  copy = storage_of("memory://runs/one").path
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(os, "_exit", sys.exit)  # this process goes on
  copied = copy.exists()
  with pytest.raises(SystemExit, match="1"), hosts.end_together():
    raise SystemExit("error: one of two has failed")
  assert copied and not copy.parent.exists()
