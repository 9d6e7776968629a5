"""Workarounds for collectives on XLA's CPU backend.

Several CPU devices in one process share a thread pool: it must be large enough
for all of them to wait in a collective, and programs read from JAX's persistent
cache can mix their collectives up.

Several CPU hosts communicate through Gloo. XLA reduces the operands of one
all-reduce one after the other, so small leaves are joined to one array. Two
hosts that send to each other use a link one way at a time; an all-gather
suffers least from this, so they swap parts by it (`exchange_parts` of
`collectives`). A reduce-scatter goes both ways at once, but XLA (of JAX 0.10.2)
frees its buffer while Gloo still sends from it: once in some hundred steps the
first of two busy hosts received zeros, and no error said so
(https://github.com/jax-ml/jax/issues/40830).
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from edgc_jax.wire.order import varying_axes

_POOL = 32  # threads that the import asks for: enough for 16 devices
# Holds the value of NPROC that this module has set; child processes inherit
# both variables, and so can tell it from a value of the user.
_OWN_NPROC = "EDGC_JAX_NPROC"
_LAPACK_THREADS = "OPENBLAS_NUM_THREADS"
# Bytes; for larger leaves a copy takes longer than a round trip.
_SMALL_LEAF = 2**20
_config: Any = jax.config  # its type leaves out the options


# Several devices in one process.


def widen_thread_pool() -> None:
  """Widens XLA's thread pool for up to 16 CPU devices in this process.

  Each replica that waits in a collective holds a thread of the pool. If the
  pool is as small as the number of cores, work that another replica queues may
  never run, and all replicas hang. Has no effect once JAX has used a device.
  """
  _set_pool(max(_POOL, os.cpu_count() or 1))


def fit_thread_pool(num_devices: int) -> None:
  """Sets XLA's thread pool to the smallest size for `num_devices` CPU devices.

  XLA cuts every operation into as many parts as there are threads: on 2 cores
  a training step took 1.3 times as long with 32 threads as with 8 on 4 devices,
  and 1.4 times as long as with 2 on one device. Keeps a pool that the user has
  set, and has no effect once JAX has used a device.

  Args:
    num_devices: CPU devices that this process will have.
  """
  needed = 2 * num_devices if num_devices > 1 else 1
  _set_pool(max(needed, os.cpu_count() or 1))


def prepare() -> None:
  """Checks and limits the threads of this process, when `update` is traced.

  Raises:
    RuntimeError: as `require_threads`.
  """
  require_threads()
  limit_lapack_threads()


def limit_lapack_threads() -> None:
  """Limits OpenBLAS to one thread per call on the CPU backend.

  XLA calls LAPACK from every thread of its pool, and OpenBLAS starts threads in
  each call, which wait busily for each other: an update of `edgc` with 25 Gram
  matrices of 96 x 96 took 80 ms on 2 cores, or any time up to 1500.

  OpenBLAS reads the limit once, when SciPy is loaded, which JAX does for its
  first decomposition. So this loads SciPy, and has no effect if SciPy is loaded
  already or if the user has set a number of threads.
  """
  is_set = _LAPACK_THREADS in os.environ or "OMP_NUM_THREADS" in os.environ
  if is_set or "scipy.linalg" in sys.modules or jax.default_backend() != "cpu":
    return
  os.environ[_LAPACK_THREADS] = "1"
  try:
    importlib.import_module("scipy.linalg")
  finally:
    del os.environ[_LAPACK_THREADS]


def require_threads(*, beside: bool = False) -> None:
  """Raises if CPU devices share too small a thread pool.

  Args:
    beside: Whether a program computes beside one that waits in collectives,
      for which a single device, too, needs two threads.

  Raises:
    RuntimeError: if the pool has fewer than two threads per local device.
  """
  if not _are_several() and not (beside and jax.default_backend() == "cpu"):
    return
  needed = 2 * jax.local_device_count()
  if thread_pool_size() < needed:
    raise RuntimeError(
      f"The environment variable NPROC must be at least {needed}, two threads"
      f" per CPU device, got a pool of {thread_pool_size()}, with which"
      f" collectives would hang. Set NPROC={needed} before Python starts;"
      " importing edgc_jax before JAX uses a device sets it to"
      f" {_POOL} if it is unset."
    )


def require_no_cached_programs() -> None:
  """Raises if CPU devices may run programs from JAX's persistent cache.

  On this backend all collectives of a program share one channel, and only
  their order distinguishes them. A program with collectives over several axes
  that is read from the cache (JAX 0.10.2) has lost this order: collectives over
  one axis then take the operands of others, and overwrite memory.

  Raises:
    RuntimeError: if the cache is on and there are several local devices.
  """
  if not _are_several():
    return
  path = _config.jax_compilation_cache_dir
  if path and _config.jax_enable_compilation_cache:
    raise RuntimeError(
      "The persistent compilation cache must be off if CPU devices are"
      f" pipeline stages or shards, got jax_compilation_cache_dir={path!r}:"
      " programs read from the cache mix up their collectives. Set"
      " JAX_ENABLE_COMPILATION_CACHE=false before Python starts."
    )


def thread_pool_size() -> int:
  """Returns the threads of XLA's CPU backend: `NPROC`, or else the cores."""
  try:
    return int(os.environ.get("NPROC", ""))
  except ValueError:
    return os.cpu_count() or 1


def _set_pool(threads: int) -> None:
  """Sets NPROC, unless the user has set it or a device was used."""
  is_ours = os.environ.get("NPROC") in (None, os.environ.get(_OWN_NPROC))
  if is_ours and not _a_device_was_used():
    os.environ["NPROC"] = os.environ[_OWN_NPROC] = str(threads)


def _are_several() -> bool:
  """Returns whether this process has more than one CPU device."""
  return jax.default_backend() == "cpu" and jax.local_device_count() > 1


def _a_device_was_used() -> bool:
  """Returns whether JAX's backend is initialised, and NPROC has no effect.

  `jax_num_cpu_devices` can be changed until then, and JAX has no other public
  sign of it.
  """
  devices = _config.jax_num_cpu_devices
  try:
    jax.config.update("jax_num_cpu_devices", 2 if devices == 1 else 1)
  except RuntimeError:
    return True
  jax.config.update("jax_num_cpu_devices", devices)
  return False


# Several hosts.


def spans_hosts() -> bool:
  """Returns whether several processes run on CPUs, over whichever axis."""
  return jax.default_backend() == "cpu" and jax.process_count() > 1


def reduce_joined(reduce: Callable[[Any], Any], tree: Any) -> Any:
  """Reduces all leaves, joining small ones of the same kind to one array.

  A kind is a dtype and the axes that JAX tracks the leaf to vary over, since
  joined leaves would share both.

  Args:
    reduce: An elementwise reduction of a list of arrays.
    tree: The leaves.

  Returns:
    The reduced tree.
  """
  leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
  kinds: dict[Any, list[int]] = {}
  for index, leaf in enumerate(leaves):
    is_small = leaf.nbytes < _SMALL_LEAF
    kind = (leaf.dtype, varying_axes(leaf)) if is_small else index
    kinds.setdefault(kind, []).append(index)
  arrays = [
    ravel_pytree([leaves[i] for i in indices]) for indices in kinds.values()
  ]
  reduced = reduce([flat for flat, _ in arrays])
  for indices, (_, unravel), flat in zip(
    kinds.values(), arrays, reduced, strict=True
  ):
    for index, leaf in zip(indices, unravel(flat), strict=True):
      leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)
