"""What several CPU devices in one process need to work together."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from edgc_jax.comm.dataflow import in_turn, varying_axes

# Threads asked for by the import: enough for 16 devices.
_POOL = 32
# NPROC as it was set here; processes that this one starts see both.
_OWN = "EDGC_JAX_NPROC"
_LAPACK_THREADS = "OPENBLAS_NUM_THREADS"
# Bytes; of a smaller leaf the round trip weighs more than a copy does.
_SMALL = 2**20
# Bytes of a message, if that is not too often. Each waits for the one before
# it: on a link of long latency that takes longer than one way after the other.
# Parts of more than 12 MiB are cut less finely, and gain less.
_MESSAGE, _MOST_MESSAGES = 3 * 2**15, 128


def widen_thread_pool() -> None:
  """Makes room for fake devices; works until JAX first uses a device.

  Replicas that wait in a collective hold a thread of XLA's CPU pool each. On
  a pool as small as the machine's cores, work that another replica hands to
  the pool then never runs, and all wait for ever.
  """
  _set_pool(max(_POOL, os.cpu_count() or 1))


def fit_thread_pool(num_devices: int) -> None:
  """Makes the pool as small as so many CPU devices in this process allow.

  XLA cuts every operation into as many parts as there are threads: on 2 cores
  a training step took 1.3 times as long with 32 threads as with 8, on 4
  devices, and 1.4 times as with 2, on one. A pool of the user's stays as it
  is. Works until JAX first uses a device.

  Args:
    num_devices: How many there will be.
  """
  needed = 2 * num_devices if num_devices > 1 else 1
  _set_pool(max(needed, os.cpu_count() or 1))


def _set_pool(threads: int) -> None:
  is_ours = os.environ.get("NPROC") in (None, os.environ.get(_OWN))
  if is_ours and not _a_device_was_used():
    os.environ["NPROC"] = os.environ[_OWN] = str(threads)


def prepare() -> None:
  """Checks and settles the threads of this process, when an update is traced.

  Raises:
    RuntimeError: as `require_threads`.
  """
  require_threads()
  limit_lapack_threads()


def limit_lapack_threads() -> None:
  """Leaves decompositions to the threads of XLA's pool, on CPUs.

  XLA calls LAPACK from all of them, and OpenBLAS starts threads of its own in
  every call, which wait busily for each other: an update of `edgc` with 25
  Gram matrices of 96 x 96 took 80 ms on 2 cores, or any time up to 1500.

  OpenBLAS reads the number once, when SciPy is loaded, and that is what JAX
  does for its first decomposition. So it has no effect after that, nor where
  the user has set a number.
  """
  is_set = _LAPACK_THREADS in os.environ or "OMP_NUM_THREADS" in os.environ
  if is_set or "scipy.linalg" in sys.modules or jax.default_backend() != "cpu":
    return
  os.environ[_LAPACK_THREADS] = "1"
  try:
    importlib.import_module("scipy.linalg")
  finally:
    del os.environ[_LAPACK_THREADS]


def require_threads() -> None:
  """Raises where several CPU devices share too small a thread pool.

  Raises:
    RuntimeError: if the pool has fewer than two threads per local device.
  """
  if not _are_several():
    return
  needed = 2 * jax.local_device_count()
  if _thread_pool_size() < needed:
    raise RuntimeError(
      f"The environment variable NPROC must be at least {needed}, two threads"
      f" per CPU device, got a pool of {_thread_pool_size()}; collectives would"
      f" hang for ever. Set NPROC={needed} before Python starts; importing"
      f" edgc_jax before JAX uses a device sets it to {_POOL} if it is unset."
    )


def require_no_cached_programs() -> None:
  """Raises where CPU devices may run programs from JAX's persistent cache.

  All collectives of a program have one channel on this backend and are told
  apart by their order. A program that is read from the cache (JAX 0.10.2) has
  lost it where there are collectives over several axes: those over one then
  take the operands of others, and overwrite memory.

  Raises:
    RuntimeError: if the cache is on and there are several local devices.
  """
  if not _are_several():
    return
  path = jax.config.jax_compilation_cache_dir
  if path and jax.config.jax_enable_compilation_cache:
    raise RuntimeError(
      "The persistent compilation cache must be off where CPU devices are"
      f" pipeline stages, got jax_compilation_cache_dir={path!r}: collectives"
      " of programs that are read from it get mixed up. Set"
      " JAX_ENABLE_COMPILATION_CACHE=false before Python starts."
    )


def _are_several() -> bool:
  """Whether this process has more than one CPU device."""
  return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _thread_pool_size() -> int:
  """Threads XLA's CPU backend works with: `NPROC`, or else the cores."""
  try:
    return int(os.environ.get("NPROC", ""))
  except ValueError:
    return os.cpu_count() or 1


def _a_device_was_used() -> bool:
  """Whether JAX's backend is up, and NPROC read for good.

  This option can be changed until then; JAX has no other public sign of it.
  """
  devices = jax.config.jax_num_cpu_devices
  try:
    jax.config.update("jax_num_cpu_devices", 2 if devices == 1 else 1)
  except RuntimeError:
    return True
  jax.config.update("jax_num_cpu_devices", devices)
  return False


def spans_hosts() -> bool:
  """Whether several processes run on CPUs, wherever an axis lies."""
  return jax.default_backend() == "cpu" and jax.process_count() > 1


def is_mutual(shift: int, devices: int) -> bool:
  """Whether pairs send to each other where all send so many devices further."""
  return 2 * shift == devices


def num_messages(num_bytes: int) -> int:
  """Into how many messages so many bytes are cut (`in_messages`)."""
  return min(max(1, num_bytes // _MESSAGE), _MOST_MESSAGES)


def more_trips(num_bytes: int, devices: int) -> float:
  """Latencies of an exchange and a gathering of parts, in all-reduces' worth.

  Beyond those of a single all-reduce, which is 2 (N - 1) messages, one after
  the other. About: parts are cut one exchange at a time.

  Args:
    num_bytes: Of all parts together.
    devices: N, how many there are.

  Returns:
    0 where they are not CPU hosts.
  """
  if not spans_hosts() or devices % 2:
    return 0.0
  halves = 2 if devices == 2 else 1  # a ring of two is mutual, too
  more = halves * (num_messages(num_bytes // devices) - 1)
  return more / (2 * (devices - 1))


def in_messages(
  send: Callable[[jax.Array], jax.Array], values: jax.Array
) -> jax.Array:
  """A collective of [n] to [..., n], in short messages, one after the other."""
  count = num_messages(values.nbytes)
  if count == 1:
    return send(values)
  length = -(-values.size // count)
  whole = values.size // length * length
  _, results = lax.scan(
    lambda carry, part: (carry, send(part)),
    None,
    values[:whole].reshape(-1, length),
  )
  done = jnp.moveaxis(results, 0, -2)
  done = done.reshape(*done.shape[:-2], whole)
  if whole == values.size:
    return done
  rest = in_turn(values[whole:], done)
  return jnp.concatenate([done, send(rest)], axis=-1)


def reduce_joined(reduce: Callable[[Any], Any], tree: Any) -> Any:
  """Reduces all leaves, small ones of a kind as one array.

  A kind is a dtype and the axes that JAX tracks values to vary over, which
  joined values would share.
  """
  leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
  kinds: dict[Any, list[int]] = {}
  for index, leaf in enumerate(leaves):
    is_small = leaf.nbytes < _SMALL
    kind = (leaf.dtype, varying_axes(leaf)) if is_small else index
    kinds.setdefault(kind, []).append(index)
  arrays = [
    ravel_pytree([leaves[i] for i in indices]) for indices in kinds.values()
  ]
  reduced = reduce([flat for flat, _ in arrays])
  for indices, (_, cut), flat in zip(
    kinds.values(), arrays, reduced, strict=True
  ):
    for index, leaf in zip(indices, cut(flat), strict=True):
      leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)
