"""The reducers that all tests over all reducers try, from the one registry.

A reducer of the registry without options in `variants` is tested with its
defaults.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import optax

import edgc_jax
from experiments.trainer.training.rules import linear

# These send less than they got, and have no residual for the rest.
WITHOUT_RESIDUAL = (
  "allreduce_bfloat16", "randomk_unbiased", "quantize_unbiased",
)  # fmt: skip


def moving(rank: int, window: int = 2) -> dict[str, Any]:
  """Returns options of `edgc` with which few steps see two ranks.

  Every step is sampled, and all entries. The larger rank is even; the warm-up
  takes a window.
  """
  return {
    "rank_min": rank // 2, "rank_max": rank, "rank_multiple": rank // 2,
    "window": window, "warmup_steps": window, "max_warmup_steps": window,
    "sampling": edgc_jax.Sampling(step_rate=1.0, entry_rate=1.0),
    "min_ratio": 1.2,
  }  # fmt: skip


def variants(rank: int = 4, window: int = 2) -> Mapping[str, dict[str, dict]]:
  """Returns options by variant, by reducer; "" is the plain one."""
  factors = {"rank": rank, "min_ratio": 1.2, "wire_dtype": "float32"}
  warm = {**factors, "rank": {0: 0, window: rank}}
  falling = {**factors, "rank": {0: rank, 2 * window: rank // 2}}
  adaptive = {**moving(rank, window), "wire_dtype": "float32"}
  uniform = {**adaptive, "allocation": "uniform", "warmup_rank": None}
  histogram = edgc_jax.Sampling(1.0, 1.0, "histogram", 100)
  return {
    "allreduce": {"": {}, "bfloat16": {"wire_dtype": "bfloat16"}},
    "powersgd": {
      "": factors,
      "error": {**falling, "allocation": "error", "window": window},
      "bfloat16": {**warm, "wire_dtype": "bfloat16"},
      "int8": {**factors, "wire_dtype": "int8"},
      "int4": {**warm, "wire_dtype": "int4"},
    },
    "edgc": {
      "": adaptive,
      "published": {**uniform, "rule": linear, "sampling": histogram},
      "bfloat16": {**adaptive, "wire_dtype": "bfloat16"},
      "int4": {**adaptive, "wire_dtype": "int4"},  # as by default
      "one_rank": {**adaptive, "rank_min": rank},
    },
    "topk": {"": {"density": 0.1, "min_size": 1}},
    "randomk": {
      "": {"density": 0.1, "min_size": 1},
      "unbiased": {"density": 0.1, "min_size": 1, "error_feedback": False},
    },
    "quantize": {
      "": {"bits": 4, "block": 16, "min_size": 1, "error_feedback": True},
      "unbiased": {"block": 16, "min_size": 1},
    },
  }


def reducers(
  rank: int = 4, window: int = 2
) -> dict[str, Callable[[], optax.GradientTransformationExtraArgs]]:
  """Returns functions that make all reducers and their variants, by name.

  Names are as "edgc_int4"; the rank, or the larger of two, is even.
  """
  options = variants(rank, window)
  assert set(options) <= set(edgc_jax.REDUCERS), "options of no reducer"
  return {
    f"{name}_{variant}" if variant else name: functools.partial(make, **own)
    for name, make in edgc_jax.REDUCERS.items()
    for variant, own in options.get(name, {"": {}}).items()
  }


def is_plain(name: str) -> bool:
  """Returns whether a name of `reducers` is a reducer, not a variant."""
  return name in edgc_jax.REDUCERS
