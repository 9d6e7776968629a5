"""Tells what is installed and seen, and what is known to go wrong there."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata

import jax

from edgc_jax.wire import cpu_backend

_LIBRARIES = ("jax", "jaxlib", "optax", "numpy")
# Environment variables that change what JAX, XLA and their libraries do.
_SETTINGS = ("GLOO_", "JAX_", "NCCL_", "OMP_", "OPENBLAS_", "XLA_")
_TRAPS: Mapping[str, tuple[str, ...]] = {
  "cpu": (
    "Collectives of several devices in a process hang if XLA's thread pool is"
    " small: import edgc_jax before JAX uses a device, or set NPROC to twice"
    " the number of devices.",
    "Devices of one process share its cores, so their times mean nothing:"
    " measure with one process on each host.",
    "XLA widens bfloat16 to float32 in collectives: a psum of your own in"
    " bfloat16 saves nothing. Reducers send it as integers of 16 bits.",
    "A process runs one program at a time, so an exchange hides behind nothing:"
    " split_local_steps sends from a second thread.",
    "Programs from JAX's cache may mix up collectives over several axes: set"
    " JAX_ENABLE_COMPILATION_CACHE=false for pipeline stages and shards.",
    "Between hosts Gloo listens on the address of the host's own name, and"
    " GLOO_SOCKET_IFNAME has no effect: let /etc/hosts lead the name to an"
    " address that the other hosts reach.",
  ),
  "gpu": (
    "The project has trained simulated replicas on one GPU, and nothing on"
    " several: neither step times nor NCCL's collectives were measured. Time"
    ' allreduce(wire_dtype="bfloat16") beside your choice on your own devices.',
  ),
}
_UNTRIED = (
  "The project has not been run on this backend: no step time was measured, and"
  " pipeline stages of different ranks were not tried. Time"
  ' allreduce(wire_dtype="bfloat16") beside your choice on your own devices.',
)


def traps() -> tuple[str, ...]:
  """Returns what is known to go wrong on this backend, with the remedies."""
  return _TRAPS.get(jax.default_backend(), _UNTRIED)


def report() -> str:
  """Returns versions, devices and settings, in some lines of text."""
  devices = jax.devices()
  kinds = " and ".join(sorted({device.device_kind for device in devices}))
  versions = [f"{name} {metadata.version(name)}" for name in _LIBRARIES]
  rows = {
    "libraries": ", ".join(versions),
    "python": f"{platform.python_version()}, {platform.platform()}",
    "backend": f"{jax.default_backend()} ({kinds}), devices: {len(devices)},"
    f" processes: {jax.process_count()}",
    "cores": f"{_cores()}, threads of XLA on CPUs: "
    f"{cpu_backend.thread_pool_size()}",
    "settings": " ".join(
      f"{name}={value}"
      for name, value in sorted(os.environ.items())
      if name.startswith(_SETTINGS)
    )
    or "none",
  }
  return "\n".join(f"{name:10} {value}" for name, value in rows.items())


def _cores() -> int:
  """Returns the cores that this process may use."""
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
