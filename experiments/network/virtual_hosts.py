"""Virtual hosts with links of a chosen speed, on one Linux machine.

Each host is a network namespace with a virtual cable to a common bridge. Its
outgoing packets pass a token bucket (`tc ... tbf`), which limits the bandwidth
of its uplink. The kernel's latency is about 0.05 ms. All hosts share the
machine's cores and memory.
"""

import fcntl
import os
import pathlib
import platform
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType

_NAME = "edgc"  # of namespaces, cables and the bridge
_BRIDGE = f"{_NAME}-bridge"
_SUBNET = "10.99.0"
# A bucket must hold as much as the link carries in a tick of the kernel's
# clock, or it slows the link down. An idle link passes a full bucket at once.
_TICK = 0.001
_LEAST_BURST = 64 * 1024
_TOOLS = ("ip", "tc", "setpriv")
_LOCK = pathlib.Path(tempfile.gettempdir(), f"{_NAME}-virtual-hosts.lock")
_FILES = pathlib.Path("/etc/netns")  # where `ip netns exec` looks for them


def why_not() -> str:
  """Returns why this machine cannot have virtual hosts; empty if it can."""
  missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
  if missing:
    return f"{' and '.join(missing)} not found (iproute2, util-linux)"
  if os.geteuid() != 0:
    return "network namespaces need root"
  trial = f"{_NAME}-{os.getpid()}"
  attempt = _run("ip", "link", "add", trial, "type", "bridge", check=False)
  if attempt.returncode:
    return f"a network bridge cannot be created ({attempt.stderr.strip()})"
  _run("ip", "link", "delete", trial)
  return ""


class VirtualHosts:
  """Network namespaces on a bridge; a context manager.

  Entering first removes hosts of a process that ended without cleaning up.
  Leaving removes all hosts, and the processes in their namespaces. Only one
  process of a machine can have virtual hosts.
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
    self._lock = _LOCK.open("w")
    try:
      # The kernel releases the lock whenever this process ends.
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      self._lock.close()
      raise OSError(
        "Another process on this machine has virtual hosts, which would be"
        " removed; wait until it has ended."
      ) from error
    remove_all()
    try:
      _run("ip", "link", "add", _BRIDGE, "type", "bridge")
      _run("ip", "link", "set", _BRIDGE, "up")
      for index in range(self._count):
        self._add(index)
    except BaseException:
      self.__exit__(None, None, None)
      raise
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    remove_all()
    self._lock.close()

  def shape(self, bits_per_second: float) -> None:
    """Limits the bandwidth of every uplink; 0 removes the limit."""
    for index in range(self._count):
      command = ["tc", "qdisc", "replace", "dev", "eth0", "root"]
      if bits_per_second:
        burst = max(_LEAST_BURST, int(bits_per_second / 8 * _TICK))
        command += [
          "tbf", "rate", f"{bits_per_second:.0f}bit",
          "burst", str(burst), "latency", "100ms",
        ]  # fmt: skip
      else:
        command += ["pfifo_fast"]
      _run("ip", "netns", "exec", _host(index), *command)

  def start(
    self,
    index: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    errors: pathlib.Path,
  ) -> subprocess.Popen:
    """Starts a process on a host; it ends when this process does.

    Args:
      index: Index of the host.
      command: Program and arguments.
      environment: All of its environment variables.
      errors: The file for its standard error.

    Returns:
      The process; its input and output are pipes of text.
    """
    with errors.open("w") as stderr:
      return subprocess.Popen(
        [
          *("setpriv", "--pdeathsig", "KILL"),
          *("ip", "netns", "exec", _host(index)),
          *command,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=dict(environment),
        text=True,
      )

  def sent_bytes(self, index: int) -> int:
    """Returns the bytes that a host has sent, including packet headers."""
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(
      _run("ip", "netns", "exec", _host(index), "cat", path).stdout.strip()
    )

  def _add(self, index: int) -> None:
    host, cable = _host(index), f"{_NAME}-{index}"
    _run("ip", "netns", "add", host)
    _run(
      "ip", "link", "add", cable, "type", "veth",
      "peer", "name", "eth0", "netns", host,
    )  # fmt: skip
    _run("ip", "link", "set", cable, "master", _BRIDGE, "up")
    inside = ("ip", "-n", host)
    _run(*inside, "addr", "add", f"{address(index)}/24", "dev", "eth0")
    _run(*inside, "link", "set", "eth0", "up")
    _run(*inside, "link", "set", "lo", "up")
    # Gloo listens on the address of the machine's name, so it must not be
    # loopback here.
    folder = _hosts_folder(index)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ("127.0.0.1 localhost", f"{address(index)} {socket.gethostname()}")
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def processor() -> str:
  """Returns the name of the processor, which all hosts share."""
  for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
    if line.startswith("model name"):
      return line.split(":", 1)[1].strip()
  return platform.machine()


def address(index: int) -> str:
  """Returns the address of a host."""
  return f"{_SUBNET}.{index + 1}"


def remove_all() -> None:
  """Removes all virtual hosts and kills their processes."""
  listed = _run("ip", "netns", "list").stdout.splitlines()
  names = [line.split()[0] for line in listed if line]
  for name in names:
    if not name.startswith(f"{_NAME}-host-"):
      continue
    for pid in _run("ip", "netns", "pids", name).stdout.split():
      _run("kill", "-KILL", pid, check=False)
    _run("ip", "netns", "delete", name, check=False)
  for folder in _FILES.glob(f"{_NAME}-host-*"):
    shutil.rmtree(folder, ignore_errors=True)
  # The kernel removes the cables of a namespace some time later.
  listed = _run("ip", "-o", "link", "show", "type", "veth").stdout
  for line in listed.splitlines():
    cable = line.split(": ")[1].split("@")[0]
    if cable.startswith(f"{_NAME}-"):
      _run("ip", "link", "delete", cable, check=False)
  _run("ip", "link", "delete", _BRIDGE, check=False)


def _host(index: int) -> str:
  return f"{_NAME}-host-{index}"


def _hosts_folder(index: int) -> pathlib.Path:
  return _FILES / _host(index)


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess:
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if check and done.returncode:
    raise OSError(
      f"`{' '.join(command)}` failed ({done.stderr.strip()}); virtual hosts"
      " need root and iproute2 on Linux."
    )
  return done
