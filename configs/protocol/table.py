"""The arms of the protocol's table, each at a budget of bits a parameter.

Ranks are those at which the whole run sends the bits, of 445,952 parameters.
"""

from collections.abc import Mapping
from typing import Any

CONFIG = "configs/protocol/gpt.py"

# {bits: {wire: rank}}, from the bytes that the package predicts.
_RANKS = {
  2: {"bfloat16": 10.2, "int8": 22.2, "int4": 44.6},
  1: {"bfloat16": 4.3, "int8": 10.6, "int4": 21.8},
  0.5: {"bfloat16": 1.36, "int8": 4.83, "int4": 10.4},
}
# {bits: (rank_max, rank_min, rank_multiple)} of edgc in int4.
_FALLING = {2: (52, 40, 2), 1: (26, 20, 1), 0.5: (12, 9, 1)}


def _arm(reducer: str, **options: Any) -> Mapping[str, Any]:
  return {"reducer": reducer} | {
    f"{reducer}.{key}": value for key, value in options.items()
  }


ARMS = {
  "dense": _arm("allreduce"),
  "dense, bf16": _arm("allreduce", wire_dtype="bfloat16"),
  "8 bits": _arm("quantize", bits=8, error_feedback=True),
  "4 bits": _arm("quantize", bits=4, error_feedback=True),
  "top-k, 1 %": _arm("topk", density=0.01),
}
for _bits, _ranks in _RANKS.items():
  for _wire, _rank in _ranks.items():
    for _allocation in ("uniform", "error"):
      ARMS[f"powersgd {_allocation}, {_wire}, {_bits} bits"] = _arm(
        "powersgd", rank=_rank, wire_dtype=_wire, allocation=_allocation,
        min_ratio=1.0,
      )  # fmt: skip
  _most, _least, _multiple = _FALLING[_bits]
  ARMS[f"edgc, int4, {_bits} bits"] = _arm(
    "edgc", rank_max=_most, rank_min=_least, rank_multiple=_multiple,
    max_rank_step=2 * _multiple, wire_dtype="int4", min_ratio=1.0,
  )  # fmt: skip
