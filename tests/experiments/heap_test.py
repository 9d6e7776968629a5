"""Freed memory is kept inside `freed_memory_kept` only."""

import platform
import subprocess
import sys

import pytest

_SCRIPT = """
import os
import numpy as np
from experiments.trainer.runtime import heap

def held():  # MB that stay with the process after an array of 200 MB
  np.ones(25 * 10**6)
  pages = open("/proc/self/statm").read().split()[1]
  return int(pages) * os.sysconf("SC_PAGE_SIZE") // 10**6

heap.share_one_heap()
before = held()
with heap.freed_memory_kept():
  within = held()
after = held()
print(before, within, after)
"""


@pytest.mark.skipif(
  platform.libc_ver()[0] != "glibc", reason="this C library has no mallopt"
)
def test_freed_memory_is_kept_for_a_while_only():
  run = subprocess.run(
    [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
  )
  before, within, after = map(int, run.stdout.split())
  assert within > before + 180
  assert after < before + 20
