"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import os

# Programs here run a few steps only: compile them quickly. XLA's emitters for
# fusions take two thirds of the time of a compilation; without them fusions
# are emitted as everything else is. Collectives are the same in either case.
_QUICK = "--xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{_QUICK} {os.environ.get('XLA_FLAGS', '')}"

import edgc_jax  # noqa: E402, F401

import jax  # isort: skip # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Passes over the HLO are not left out by this.
jax.config.update("jax_disable_most_optimizations", True)
