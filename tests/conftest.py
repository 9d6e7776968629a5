"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import atexit
import os
import shutil
import tempfile

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
# The same run, trained anew by many tests, is compiled once in a process.
_compiled = tempfile.mkdtemp()
atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", _compiled)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
