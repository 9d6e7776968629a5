"""Holds back the packets between network devices, as a long cable does.

  python experiments/lab/network/delay.py 10.99.0.1 10.99.0.2

Creates a TUN device for each address, `far0` and so on, in its own network
namespace; the caller may move them to others. A packet that leaves through one
of them for one of the addresses arrives at the device of that address after the
delay. Packets for other addresses are lost. A line is printed once the devices
exist; each line on the standard input sets the delay of later packets, in
seconds. All ends with that input.

One Python process carries all packets. Devices segment and check nothing
(TUNSETOFFLOAD), so that a packet of a busy connection has up to 64 KiB, which
the process only copies.
"""

import collections
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping

DEVICE = "/dev/net/tun"
# From linux/if_tun.h. Packets have no Ethernet header; before each there are
# ten bytes, struct virtio_net_hdr, that say how the kernel has to cut it into
# segments and where its checksum goes. They are handed on as they are.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS = 0x1, 0x2  # TUN_F_CSUM, TUN_F_TSO4
_HEADER = 10
_TARGET = slice(_HEADER + 16, _HEADER + 20)  # the target's address in IPv4
_LONGEST = _HEADER + 2**16
# Packets that are read from a device before others have their turn.
_BATCH = 32
# Bytes that are held back at most. Above that nothing is read, and the devices
# drop what they cannot queue. 2 Gbit/s for a second.
_MOST = 2**28


def create(name: str) -> int:
  """Creates a TUN device, which lasts as long as its file is open.

  Args:
    name: Its name, of at most 15 bytes.

  Returns:
    The descriptor of its file: reads do not wait.
  """
  device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
  flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
  request = struct.pack("16sH22x", name.encode(), flags)
  fcntl.ioctl(device, _TUNSETIFF, request)
  fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUM | _SEGMENTS)
  return device


def forward(devices: Mapping[bytes, int], orders: int) -> None:
  """Forwards packets, in order, until the orders end.

  Args:
    devices: The devices' descriptors by the address of their host, 4 bytes.
    orders: A descriptor to read delays from, a line of seconds each.
  """
  delay, held = 0.0, 0
  # Later packets are due later, unless the delay was shortened: then they wait
  # for those before them. So the first one is always the next.
  waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
  while True:
    while waiting and waiting[0][0] <= time.monotonic():
      _, target, packet = waiting.popleft()
      held -= len(packet)
      with contextlib.suppress(OSError):  # its host is down: it is lost
        os.write(target, packet)
    pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
    sources = devices.values() if held < _MOST else ()
    ready, _, _ = select.select([orders, *sources], [], [], pause)
    if orders in ready:
      lines = os.read(orders, 4096).split()
      if not lines:
        return
      delay = float(lines[-1])
      ready.remove(orders)
    for source in ready:
      for _ in range(_BATCH):
        try:
          packet = os.read(source, _LONGEST)
        except BlockingIOError:
          break
        if (target := devices.get(packet[_TARGET])) is not None:
          waiting.append((time.monotonic() + delay, target, packet))
          held += len(packet)


def main() -> None:
  """Forwards between the addresses that the command line names."""
  devices = {
    socket.inet_aton(address): create(f"far{index}")
    for index, address in enumerate(sys.argv[1:])
  }
  # A cable does not wait for the hosts' computation.
  with contextlib.suppress(OSError):  # not allowed: packets may be late
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
  print("ready", flush=True)
  with contextlib.suppress(OSError):  # a host has ended, and its device with it
    forward(devices, sys.stdin.fileno())


if __name__ == "__main__":
  main()
