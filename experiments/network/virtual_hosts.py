"""Virtual hosts with links of a chosen speed, on one Linux machine.

Each host is a network namespace with a virtual cable to a bridge, which has a
namespace of its own. A host's outgoing packets pass a token bucket (`tc ...
tbf`), which limits the bandwidth of its uplink. The kernel's latency is about
0.05 ms. All hosts share the machine's cores and memory.

Nothing of this has a name on the machine: a namespace lasts as long as a
process in it, and the kernel removes its cables with it. So nothing is left
behind, however the program ends, and several programs can have virtual hosts.
"""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

_SUBNET = "10.99.0"
# A bucket must hold as much as the link carries in a tick of the kernel's
# clock, or it slows the link down. An idle link passes a full bucket at once.
_TICK = 0.001
_LEAST_BURST = 64 * 1024
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "hostname")
_NEW = ("unshare", "--net", "--uts")


def why_not() -> str:
  """Returns why this machine cannot have virtual hosts; empty if it can."""
  missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
  if missing:
    return f"{' and '.join(missing)} not found (iproute2, util-linux)"
  if os.geteuid() != 0:
    return "network namespaces need root"
  try:
    _run(*_NEW, "ip", "link", "add", "trial", "type", "bridge")
  except OSError as error:
    return f"a network bridge cannot be created: {error}"
  return ""


class VirtualHosts:
  """Network namespaces on a bridge; a context manager.

  Processes that were started on the hosts have to end before it is left.
  """

  def __init__(self, count: int):
    """Creates nothing yet.

    Args:
      count: Number of hosts, 2 to 200.
    """
    if not 2 <= count <= 200:
      raise ValueError(
        f"`count` must be between 2 and 200, got {count}; choose another."
      )
    self._count = count

  def __enter__(self) -> "VirtualHosts":
    reason = why_not()
    if reason:
      raise OSError(f"Virtual hosts are not possible here: {reason}.")
    with contextlib.ExitStack() as stack:
      self._bridge, *self._hosts = (
        stack.enter_context(_Namespace()) for _ in range(1 + self._count)
      )
      self._bridge.run("ip", "link", "add", "bridge", "type", "bridge")
      self._bridge.run("ip", "link", "set", "bridge", "up")
      for index in range(self._count):
        self._connect(index)
      self._stack = stack.pop_all()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    self._stack.close()

  def inside(self, index: int) -> Sequence[str]:
    """Returns the start of a command that runs on a host.

    Its process ends when this one does.
    """
    return "setpriv", "--pdeathsig", "KILL", *self._hosts[index].enter

  def shape(self, bits_per_second: float) -> None:
    """Limits the bandwidth of every uplink."""
    burst = max(_LEAST_BURST, int(bits_per_second / 8 * _TICK))
    for host in self._hosts:
      host.run(
        "tc", "qdisc", "replace", "dev", "eth0", "root",
        "tbf", "rate", f"{bits_per_second:.0f}bit",
        "burst", str(burst), "latency", "100ms",
      )  # fmt: skip

  def sent_bytes(self, index: int) -> int:
    """Returns the bytes that a host has sent, including packet headers."""
    command = ("ip", "-json", "-stats", "link", "show", "eth0")
    found = self._hosts[index].run(*command)
    return json.loads(found)[0]["stats64"]["tx"]["bytes"]

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
    self.stdin.write("in place\n")
    self.stdin.flush()
    if not self.stdout.readline():  # otherwise the namespace exists
      raise OSError(f"{' '.join(_NEW)} failed; it needs root and util-linux")

  def run(self, *command: str) -> str:
    """Runs a command in the namespace, and returns its output."""
    return _run(*self.enter, *command)


def _run(*command: str) -> str:
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode:
    raise OSError(
      f"`{' '.join(command)}` failed ({done.stderr.strip()}); virtual hosts"
      " need root and iproute2 on Linux."
    )
  return done.stdout
