"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import os

import quick_compile

os.environ["XLA_FLAGS"] = " ".join(
  (quick_compile.XLA_FLAGS, os.environ.get("XLA_FLAGS", ""))
)

import edgc_jax  # noqa: F401

import jax  # isort: skip

jax.config.update("jax_num_cpu_devices", 8)
# Passes over the HLO are not left out by this.
jax.config.update("jax_disable_most_optimizations", True)
