"""Packets that a process holds back; needs root and /dev/net/tun."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from experiments.lab.network import delay, virtual_hosts
from experiments.lab.network.virtual_hosts import VirtualHosts, address

HEADER = bytes(delay._HEADER)
ADDRESSES = [socket.inet_aton(f"10.0.0.{host}") for host in (1, 2, 3)]


def packet(target, text):
  """Returns an IPv4 packet as a device gives it, with nothing but a target."""
  return HEADER + bytes(16) + target + text


@pytest.fixture
def ends():
  """The hosts' ends of sockets, in place of devices, with the forwarder."""
  pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in ADDRESSES]
  for own, theirs in pairs:
    theirs.setblocking(False)
    own.settimeout(20.0)
  numbers = [theirs.fileno() for _, theirs in pairs]
  devices = dict(zip(ADDRESSES, numbers, strict=True))
  ordered, orders = os.pipe()
  thread = threading.Thread(
    target=delay.forward, args=(devices, ordered), daemon=True
  )
  thread.start()
  yield [own for own, _ in pairs], orders
  os.close(orders)
  thread.join(20.0)
  os.close(ordered)
  for one in itertools.chain(*pairs):
    one.close()
  assert not thread.is_alive(), "it ends with its orders"


def order(orders, seconds):
  """Sets the delay, once packets that were sent before are read."""
  time.sleep(0.1)
  os.write(orders, f"{seconds}\n".encode())
  time.sleep(0.1)


def test_packets_arrive_late_and_in_order(ends):
  (first, second, third), orders = ends
  order(orders, 0.3)
  start = time.monotonic()
  for number in range(50):
    first.send(packet(ADDRESSES[1], b"a%d" % number))
    third.send(packet(ADDRESSES[1], b"b%d" % number))
  found = [second.recv(99)]
  assert time.monotonic() - start >= 0.3
  found += [second.recv(99) for _ in range(99)]
  # Those of each host are in order, whole, and of nobody else.
  for host in (b"a", b"b"):
    expected = [packet(ADDRESSES[1], host + b"%d" % n) for n in range(50)]
    place = len(expected[0]) - 2
    assert [x for x in found if x[place : place + 1] == host] == expected


def test_a_shorter_delay_overtakes_nothing(ends):
  (first, second, _), orders = ends
  order(orders, 0.8)
  start = time.monotonic()
  first.send(packet(ADDRESSES[1], b"slow"))
  order(orders, 0.0)
  first.send(packet(ADDRESSES[1], b"fast"))
  assert [second.recv(99)[-4:] for _ in range(2)] == [b"slow", b"fast"]
  assert time.monotonic() - start >= 0.8
  # Packets for nobody are lost.
  first.send(packet(socket.inet_aton("10.0.0.9"), b"lost"))
  first.send(b"short")
  first.send(packet(ADDRESSES[1], b"there"))
  assert second.recv(99).endswith(b"there")


def test_what_is_held_is_bounded(ends, monkeypatch):
  """Above the bound nothing is read until packets have left."""
  monkeypatch.setattr(delay, "_MOST", 1)
  (first, second, _), orders = ends
  order(orders, 0.4)
  start = time.monotonic()
  first.send(packet(ADDRESSES[1], b"one"))
  time.sleep(0.1)  # it is read, and another is not
  first.send(packet(ADDRESSES[1], b"two"))
  for seconds in (0.4, 0.8):
    second.recv(99)
    assert time.monotonic() - start >= seconds


# Hosts that are far apart until the program is killed.
HOLDER = """
from experiments.lab.network.virtual_hosts import VirtualHosts
with VirtualHosts(2) as network:
  network.shape(1e8, 0.02)
  print(network._forwarder.pid, flush=True)
  input()
"""

# Prints the seconds of single round trips, as many as there are arguments.
PING = """
import socket, sys, time
server, *counts = sys.argv[1:]
with socket.create_connection((server, 7000)) as own:
  for _ in counts:
    start = time.monotonic()
    own.sendall(b"?")
    own.recv(1)
    print(time.monotonic() - start)
"""
ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
  print("listens", flush=True)
  while True:
    peer, _ = server.accept()
    while received := peer.recv(1):
      peer.sendall(received)
"""


@pytest.fixture
def far():
  """Skips the test if hosts cannot be far apart."""
  reason = virtual_hosts.why_not() or virtual_hosts.why_no_delay()
  if reason:
    pytest.skip(reason)


def test_a_round_trip_takes_what_was_asked(far):
  with contextlib.ExitStack() as stack:
    network = stack.enter_context(VirtualHosts(2))
    command = [sys.executable, "-c", ECHO, address(1)]
    echo = stack.enter_context(
      subprocess.Popen([*network.inside(1), *command], stdout=subprocess.PIPE)
    )
    stack.callback(echo.kill)
    assert echo.stdout.readline()

    def fastest(*link):
      network.shape(*link)
      done = subprocess.run(
        [*network.inside(0), sys.executable, "-c", PING, address(1), *"12345"],
        capture_output=True, text=True, timeout=60, check=True,
      )  # fmt: skip
      return min(map(float, done.stdout.split()))

    assert fastest(1e9) < 0.02
    assert network._forwarder is None, "nothing is slower without a delay"
    before = network.sent_bytes(0)
    assert 0.05 <= fastest(1e9, 0.05) < 0.15
    assert network.sent_bytes(0) > before, "what goes the other way counts"
    assert fastest(1e9) < 0.02


@pytest.mark.parametrize("round_trip", [-1e-3, float("inf"), float("nan")])
def test_round_trips_are_checked(round_trip):
  with pytest.raises(ValueError, match="`round_trip` must be seconds, at"):
    VirtualHosts(2).shape(1e8, round_trip)


@pytest.mark.soak("experiments/lab/network")
def test_the_process_ends_with_the_program(far):
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
  command = [sys.executable, "-c", HOLDER]
  with subprocess.Popen(command, text=True, **pipes) as program:
    pid = int(program.stdout.readline())
    os.kill(pid, 0)  # it runs
    program.kill()
  for _ in range(100):
    try:
      os.kill(pid, 0)
    except ProcessLookupError:
      return
    time.sleep(0.1)
  pytest.fail(f"process {pid} is left")
