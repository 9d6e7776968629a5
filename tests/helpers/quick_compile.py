"""How tests have XLA compile: quickly, for programs that run a few steps."""

import importlib.metadata

# XLA's emitters for fusions take two thirds of the time of a compilation;
# without them fusions are emitted as everything else is. Collectives are the
# same in either case. Newer versions cannot do without: there the flag is
# unknown, and an unknown flag ends the process.
_version = importlib.metadata.version("jaxlib").split(".")
_HAS_CHOICE = tuple(map(int, _version[:2])) < (0, 11)
XLA_FLAGS = "--xla_cpu_use_fusion_emitters=false" if _HAS_CHOICE else ""
