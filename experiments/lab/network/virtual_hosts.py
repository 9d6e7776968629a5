"""Virtual hosts with links of a chosen speed, on one Linux machine.

Each host is a network namespace with a virtual cable to a bridge, which has a
namespace of its own. A host's outgoing packets pass a token bucket (`tc ...
tbf`), which limits the bandwidth of its uplink. The kernel's latency is about
0.05 ms. All hosts share the machine's cores and memory.

A further host may be an object store, which sends to each host at the speed of
that host's link.

A round-trip time can be added. Packets then take another way, through TUN
devices and a process that holds them back (`delay`); the connections of
programs on the hosts go on over either.

Nothing of this has a name on the machine: a namespace lasts as long as a
process in it, and the kernel removes its cables with it. So nothing is left
behind, however the program ends, and several programs can have virtual hosts.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from experiments.lab.network import delay
from experiments.lab.network.calls import Hosts

# Environment of a host's program: one device and one thread of XLA, since the
# hosts share the cores.
ONE_THREAD = {
  "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "1",
}  # fmt: skip
_NEAR, _FAR = "eth0", "tun0"  # devices of a host: without and with a delay
_SUBNET = "10.99.0"
# A bucket must hold as much as the link carries in a tick of the kernel's
# clock, or it slows the link down. An idle link passes a full bucket at once.
_TICK = 0.001
_LEAST_BURST = 64 * 1024
_UNLIMITED = 1e11  # bits per second; more than a host can send
# Largest buffers of a connection, which must hold what is under way: 64 MiB are
# 1000 Mbit/s for half a second. A system's own may be a few MiB.
_BUFFERS = {
  "tcp_rmem": "4096 131072 67108864",
  "tcp_wmem": "4096 16384 67108864",
}
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "hostname", "sysctl")
_NEW = ("unshare", "--net", "--uts")


def why_not() -> str:
  """Returns why this machine cannot have virtual hosts; empty if it can."""
  missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
  if missing:
    return f"{' and '.join(missing)} not found (iproute2, util-linux, procps)"
  if os.geteuid() != 0:
    return "network namespaces need root"
  try:
    _run(*_NEW, "ip", "link", "add", "trial", "type", "bridge")
  except OSError as error:
    return f"a network bridge cannot be created: {error}"
  return ""


def why_no_delay() -> str:
  """Returns why these hosts cannot be far apart; empty if they can."""
  try:
    os.close(delay.create(""))
  except OSError as error:
    return f"a TUN device cannot be created at {delay.DEVICE}: {error}"
  return ""


def exit_unless_possible(round_trips: Sequence[float] = ()) -> None:
  """Ends the program unless there can be hosts with these round trips."""
  if reason := why_not() or (any(round_trips) and why_no_delay()):
    sys.exit(f"error: virtual hosts are not possible here: {reason}.")


class VirtualHosts:
  """Network namespaces on a bridge; a context manager.

  Processes that were started on the hosts have to end before it is left.
  """

  def __init__(self, count: int, has_store: bool = False):
    """Creates nothing yet.

    Args:
      count: Number of hosts, 2 to 200.
      has_store: Whether there is one more, an object store.
    """
    if not 2 <= count <= 200:
      raise ValueError(
        f"`count` must be between 2 and 200, got {count}; choose another."
      )
    self._count, self._has_store = count, has_store
    self._forwarder: _Forwarder | None = None

  def __enter__(self) -> "VirtualHosts":
    reason = why_not()
    if reason:
      raise OSError(f"Virtual hosts are not possible here: {reason}.")
    with contextlib.ExitStack() as stack:
      self._bridge, *self._hosts = (
        stack.enter_context(_Namespace())
        for _ in range(1 + self._count + self._has_store)
      )
      self._bridge.run("ip", "link", "add", "bridge", "type", "bridge")
      self._bridge.run("ip", "link", "set", "bridge", "up")
      for index in range(len(self._hosts)):
        self._connect(index)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *error: object) -> None:
    self._stack.close()

  def inside(self, index: int) -> Sequence[str]:
    """Returns the start of a command that runs on a host; the store is last.

    Its process ends when this one does.
    """
    return self._hosts[index].inside

  def start(
    self,
    name: str,
    environment: Mapping[str, str],
    logs: pathlib.Path,
    port: int = 12345,
  ) -> Hosts:
    """Starts NAME_host.py on all hosts but the store; see `Hosts`."""
    program = (sys.executable, "-m", f"experiments.lab.network.{name}_host")
    return Hosts(
      name,
      [(*self.inside(index), *program) for index in range(self._count)],
      f"{address(0)}:{port}",
      os.environ | environment,
      logs,
    )

  def run(
    self,
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    logs: Sequence[pathlib.Path],
  ) -> list[int]:
    """Runs a program on each host, and ends all if one fails.

    Args:
      commands: The program of each host.
      environment: Environment variables beside those of this process.
      logs: The file of each host's log.

    Returns:
      The exit codes; all are zero if none has failed.
    """
    with contextlib.ExitStack() as stack:
      processes = []
      for i, (command, log) in enumerate(zip(commands, logs, strict=True)):
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
          [*self.inside(i), *command],
          stdin=subprocess.DEVNULL, stdout=output, stderr=output,
          env=os.environ | environment,
        )  # fmt: skip
        processes.append(process)
        stack.callback(process.wait)
        stack.callback(process.kill)
      codes: list[int | None] = [None]
      while None in codes and not any(codes):
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
      return [-1 if code is None else code for code in codes]

  def shape(self, bits_per_second: float, round_trip: float = 0.0) -> None:
    """Sets the speed of every link, and the time of a round trip.

    Links are those to the store, too, in both directions; between hosts it is
    their uplinks. Takes effect at once for all connections, existing ones, too.

    Args:
      bits_per_second: Speed of each link; infinity for that of the machine.
      round_trip: Seconds from one host to another and back, in addition to the
        kernel's; each way takes half of it. Hosts without it are connected by
        the kernel alone. `delay` says what the process that adds it can carry.

    Raises:
      ValueError: if the round trip is negative or not finite.
      OSError: if the round trip is above 0 and `why_no_delay` has a reason.
    """
    if not 0 <= round_trip < math.inf:
      raise ValueError(
        "`round_trip` must be seconds, at least 0 and finite, got"
        f" {round_trip!r}; give 0.02 for 20 ms."
      )
    if round_trip and not self._forwarder:
      self._forwarder = self._stack.enter_context(
        _Forwarder(self._bridge, self._hosts)
      )
    if self._forwarder:
      self._forwarder.delay(round_trip / 2)
    bits_per_second = min(bits_per_second, _UNLIMITED)
    burst = max(_LEAST_BURST, int(bits_per_second / 8 * _TICK))
    rate = f"{bits_per_second:.0f}bit"
    queue = ("tbf", "rate", rate, "burst", str(burst), "latency", "100ms")
    device = _FAR if round_trip else _NEAR
    for index, host in enumerate(self._hosts):
      if index < self._count:
        host.run("tc", "qdisc", "replace", "dev", device, "root", *queue)
      else:
        self._shape_store(host, device, rate, burst)
      if self._forwarder:
        host.run(
          "ip", "route", "replace", f"{_SUBNET}.0/24",
          "dev", device, "src", address(index),
        )  # fmt: skip

  def _shape_store(
    self, store: "_Namespace", device: str, rate: str, burst: int
  ) -> None:
    """Limits what the store sends to each host, in a queue of the device."""
    at = ("dev", device, "parent", "1:")
    # Another kind of queue removes what an earlier call has set.
    store.run("tc", "qdisc", "replace", "dev", device, "root", "pfifo")
    store.run(
      "tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb"
    )
    for index in range(self._count):
      flow, bytes_ = f"1:{index + 1:x}", str(burst)
      store.run(
        "tc", "class", "add", *at, "classid", flow,
        "htb", "rate", rate, "burst", bytes_, "cburst", bytes_,
      )  # fmt: skip
      store.run(
        "tc", "filter", "add", *at, "protocol", "ip",
        "u32", "match", "ip", "dst", f"{address(index)}/32", "flowid", flow,
      )  # fmt: skip

  def sent_bytes(self, index: int) -> int:
    """Returns the bytes that a host has sent, including packet headers."""
    command = ("ip", "-json", "-stats", "link", "show")
    found = json.loads(self._hosts[index].run(*command))
    return sum(
      device["stats64"]["tx"]["bytes"]
      for device in found
      if device["ifname"] in (_NEAR, _FAR)
    )

  def _connect(self, index: int) -> None:
    """Connects a host to the bridge, and gives it its address."""
    host, cable = self._hosts[index], f"cable{index}"
    self._bridge.run(
      "ip", "link", "add", cable, "type", "veth",
      "peer", "name", "eth0", "netns", str(host.pid),
    )  # fmt: skip
    self._bridge.run("ip", "link", "set", cable, "master", "bridge", "up")
    host.run("ip", "addr", "add", f"{address(index)}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "link", "set", "lo", "up")
    for name, sizes in _BUFFERS.items():
      host.run("sysctl", "-q", "-w", f"net.ipv4.{name}={sizes}")
    # Gloo listens on the address of the machine's name, so the name is one.
    host.run("hostname", address(index))


def address(index: int) -> str:
  """Returns the address of a host."""
  return f"{_SUBNET}.{index + 1}"


class _Namespace(subprocess.Popen):
  """A process with network devices and a host name of its own.

  A context manager, which ends it; it also ends when this process does.
  """

  def __init__(self):
    super().__init__(
      [*_NEW, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    self.enter = ("nsenter", f"--target={self.pid}", "--net", "--uts")
    # Begins a command that ends with ours.
    self.inside = ("setpriv", "--pdeathsig", "KILL", *self.enter)
    self.stdin.write("in place\n")
    self.stdin.flush()
    if not self.stdout.readline():  # otherwise the namespace exists
      raise OSError(f"{' '.join(_NEW)} failed; it needs root and util-linux")

  def run(self, *command: str) -> str:
    """Runs a command in the namespace, and returns its output."""
    return _run(*self.enter, *command)


class _Forwarder(subprocess.Popen):
  """A process that delays what hosts send each other; a context manager.

  It ends when the context does, and also when this process does.
  """

  def __init__(self, bridge: _Namespace, hosts: Sequence[_Namespace]):
    """Starts it next to the bridge, and gives every host a device.

    Raises:
      OSError: if there can be no such devices.
    """
    addresses = [address(index) for index in range(len(hosts))]
    super().__init__(
      [*bridge.inside, sys.executable, delay.__file__, *addresses],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if not self.stdout.readline():
      raise OSError(f"Hosts cannot be far apart here: {why_no_delay()}.")
    for index, host in enumerate(hosts):
      bridge.run(
        "ip", "link", "set", f"far{index}", "netns", str(host.pid), "name", _FAR
      )
      host.run("ip", "link", "set", _FAR, "up")

  def delay(self, seconds: float) -> None:
    """Sets the time that a packet takes from host to host."""
    self.stdin.write(f"{seconds}\n")
    self.stdin.flush()


def _run(*command: str) -> str:
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    raise OSError(
      f"`{' '.join(command)}` failed ({done.stderr.strip()}); virtual hosts"
      " need root and iproute2 on Linux."
    )
  return done.stdout
