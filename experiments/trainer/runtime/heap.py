"""Settings of glibc's malloc that make it reuse memory between steps.

XLA's CPU backend allocates the buffers of every step again, and glibc returns
large buffers to the kernel at once. The next step then faults in each of their
pages again, which takes a tenth of a training step of `gpt2_tiny` on 2 cores:
medians 505, 523 and 408 ms without these settings, alternating with 464, 451
and 368 ms with them.

There are two calls, because each works only at its own time:

- `share_one_heap`, before the first thread starts: glibc gives each thread its
  own heap, which can neither hold a buffer above 64 MB nor grow, and a thread
  keeps its heap. An update of `powersgd` with 98 MB of temporary memory on one
  thread took 64 ms, and 33 ms with one shared heap.
- `keep_freed_memory`, after compiling: otherwise memory that the compiler
  leaves behind would lie between the buffers permanently. A program with seven
  branches took 280 ms if memory was kept earlier, and 122 ms otherwise.
"""

import contextlib
import ctypes
import platform
from collections.abc import Iterator

# Parameters of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_LARGEST_INT = 2**31 - 1
# Glibc's defaults. It adapts some of them until one is set.
_DEFAULTS = {_MMAP_MAX: 65536, _TRIM_THRESHOLD: 2**17, _TOP_PAD: 2**17}


def share_one_heap() -> None:
  """Makes all threads share one heap; call it before JAX uses a device."""
  _set({_ARENA_MAX: 1})


def keep_freed_memory() -> None:
  """Makes glibc reuse freed memory; call it after compiling.

  The process then stays at its peak memory.
  """
  _set(
    {
      _MMAP_MAX: 0,  # large blocks come from the heap, too
      _TRIM_THRESHOLD: _LARGEST_INT,  # the heap never shrinks
      _TOP_PAD: 64 * 2**20,  # and grows in steps of 64 MiB
    }
  )


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
  """Keeps freed memory inside a `with`, if more will be compiled afterwards.

  On exit it restores glibc's defaults, even if memory was kept before.
  """
  keep_freed_memory()
  try:
    yield
  finally:
    _set(_DEFAULTS)


def _set(wanted: dict[int, int]) -> None:
  """Sets parameters, and returns free memory to the kernel."""
  if platform.libc_ver()[0] == "glibc":  # other C libraries have no mallopt
    libc = ctypes.CDLL(None)
    for name, value in wanted.items():
      libc.mallopt(name, value)
    libc.malloc_trim(0)
