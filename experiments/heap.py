"""Memory that the C library keeps for the next step.

XLA's CPU backend allocates the buffers of every step anew. glibc gives those
above a threshold back to the kernel at once, and the next step pays for each
of their pages again: a tenth of a training step of `gpt2_tiny` on 2 cores
(medians 505, 523 and 408 ms without this, in turn with 464, 451 and 368).

Only once programs are compiled: what a compiler leaves behind would lie
between the buffers for good. Set before, a program with seven branches took
280 ms and not 122.
"""

import ctypes
import platform

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
  """Makes glibc reuse what was freed; to be called after compiling.

  The process holds on to the most memory that it ever used at one time.

  Returns:
    Whether the C library is glibc and took it; nothing changes elsewhere.
  """
  if platform.libc_ver()[0] != "glibc":
    return False
  libc = ctypes.CDLL(None)
  libc.malloc_trim(0)
  wanted = {
    _MMAP_MAX: 0,  # large blocks come from the heap, too
    _TRIM_THRESHOLD: _LARGEST_INT,  # whose end is not given back
    _TOP_PAD: 64 * 2**20,  # and grows in such steps
    _ARENA_MAX: 1,  # one heap for all threads: others cannot grow so
  }
  return all(libc.mallopt(name, value) == 1 for name, value in wanted.items())
