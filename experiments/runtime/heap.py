"""Memory that the C library keeps for the next step.

XLA's CPU backend allocates the buffers of every step anew, and glibc gives
large ones back to the kernel at once: the next step pays for each of their
pages again, a fifth of the time of a training step of `gpt2_tiny` on 2 cores
(medians 505, 523 and 408 ms without this, in turn with 464, 451 and 368).

Two calls, since each works at its own time:

- Threads get heaps of their own, which cannot hold a buffer above 64 MB nor
  grow; a thread that has one keeps it. So they share one from the start. An
  update of `powersgd` with 98 MB of temporary memory, one thread: 64 ms, with
  one heap 33.
- What a compiler leaves behind would lie between the buffers for good. So
  memory is kept from when programs are compiled: before, one with seven
  branches took 280 ms and not 122.
"""

import contextlib
import ctypes
import platform
from collections.abc import Iterator

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_LARGEST_INT = 2**31 - 1
# Those of glibc, which moves some of them until one is set.
_DEFAULTS = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 2**17, _TOP_PAD: 2**17}


def share_one_heap() -> bool:
  """One heap for all threads; to be called before JAX uses a device.

  Returns:
    Whether the C library is glibc and took it; nothing changes elsewhere.
  """
  return _set({_ARENA_MAX: 1})


def keep_freed_memory() -> bool:
  """Makes glibc reuse what was freed; to be called after compiling.

  The process holds on to the most memory that it ever used at one time.

  Returns:
    As `share_one_heap`.
  """
  _trim()
  return _set(
    {
      _MMAP_MAX: 0,  # large blocks come from the heap, too
      _TRIM_THRESHOLD: _LARGEST_INT,  # whose end is not given back
      _TOP_PAD: 64 * 2**20,  # and grows in such steps
    }
  )


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
  """`keep_freed_memory` for a while, where more will be compiled later.

  Afterwards glibc's defaults hold, also where memory was kept before.
  """
  keep_freed_memory()
  try:
    yield
  finally:
    _set(_DEFAULTS)
    _trim()


def _trim() -> None:
  """Gives back to the kernel what is free."""
  if platform.libc_ver()[0] == "glibc":
    ctypes.CDLL(None).malloc_trim(0)


def _set(wanted: dict[int, int]) -> bool:
  if platform.libc_ver()[0] != "glibc":
    return False
  libc = ctypes.CDLL(None)
  return all(libc.mallopt(name, value) == 1 for name, value in wanted.items())
