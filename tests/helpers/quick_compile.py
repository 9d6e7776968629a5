"""XLA flags of tests: quick compilation for programs of a few steps."""

import importlib.metadata

# XLA's emitters for fusions take two thirds of the compile time; without them
# XLA emits fusions like all else, and collectives stay the same. Newer versions
# have no such flag, and an unknown flag ends the process.
_version = importlib.metadata.version("jaxlib").split(".")
_HAS_CHOICE = tuple(map(int, _version[:2])) < (0, 11)
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false" if _HAS_CHOICE else ""
