"""The address of the first of several processes, at which it listens."""

import ipaddress
import os
import socket

# JAX's variable: where the first process listens if not on its own address.
BIND = "JAX_COORDINATOR_BIND_ADDRESS"


def bind_address(address: str, index: int) -> str | None:
  """Checks HOST:PORT, and returns where the first process has to listen.

  JAX would listen on all interfaces, and end without a word if it cannot.

  Args:
    address: HOST:PORT, at which the processes reach the first one.
    index: Of this process.

  Returns:
    NUMBER:PORT of one interface of this host, loopback only if the user names
    it; what `JAX_COORDINATOR_BIND_ADDRESS` says, if it is set; None for all
    processes but the first.

  Raises:
    ValueError: if the address is not HOST:PORT. In the first process also if it
      is none of this host, or all of them, or its name leads to loopback, as
      the host's own name does in many a hosts file.

  >>> bind_address("127.0.0.1:1234", 0), bind_address("node0:1234", 1)
  ('127.0.0.1:1234', None)
  """
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ValueError(
      "`--coordinator_address` must be HOST:PORT with a port from 1 to 65535,"
      f" got {address!r}; name the first host and a free port of it."
    )
  if index:
    return None
  if BIND in os.environ:
    return os.environ[BIND]
  host = host.strip("[]")
  try:
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    family, kind, _, _, (number, *_) = found[0]
    with socket.socket(family, kind) as own:
      own.bind((number, 0))  # any free port
  except (OSError, ValueError) as error:
    here = f"which is none ({error})"
  else:
    interface = ipaddress.ip_address(number)
    if interface.is_unspecified:
      here = "which is all of them, open to every network"
    elif interface.is_loopback and host not in (number, "localhost"):
      here = f"which is {number}, where no other host reaches it"
    else:  # the number: a name may have further addresses
      is_ipv6 = interface.version == 6
      return f"[{number}]:{port}" if is_ipv6 else f"{number}:{port}"
  raise ValueError(
    "`--coordinator_address` must be HOST:PORT of an address of process 0, got"
    f" {address}, {here}; give an address that `ip address` lists there. If the"
    f" others reach it by another one, set {BIND}=ADDRESS:PORT there."
  )
