"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import edgc_jax  # noqa: F401

import jax  # isort: skip

jax.config.update("jax_num_cpu_devices", 8)
# Most programs here run a few steps only: compile them quickly. Collectives
# are the same, since passes over the HLO are not left out.
jax.config.update("jax_disable_most_optimizations", True)
