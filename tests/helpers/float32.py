"""Low-rank methods and their bytes in float32, for tests of other things.

Results differ from others by the rounding of float32 alone, and programs
compile sooner.
"""

import functools

import edgc_jax

edgc = functools.partial(edgc_jax.edgc, wire_dtype="float32")
powersgd = functools.partial(edgc_jax.powersgd, wire_dtype="float32")
wire_bytes = functools.partial(edgc_jax.wire_bytes, wire_dtype="float32")
