"""What compression costs in steps, as measured by the project's protocol.

`evidence.json` is made from the records of the protocol (docs/results.md).
"""

import functools
import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple


class Evidence(NamedTuple):
  """A method of averaging, and what it costs.

  Attributes:
    name: A name to print.
    optimizer: Of the judged runs, and of the dense ones that they stand beside:
      "adamw", or "muon": Muon for kernels, Adam for the rest
      (docs/recipes.md).
    reducer: Name of a function of this package.
    options: Its arguments, for the model of the protocol.
    every: Steps between two exchanges: 1 for gradients, H for `local_steps`.
    outer: Arguments of the outer `optax.sgd` of `local_steps`.
    bits: Bits a parameter and step that a replica sent.
    predicted_bits: With ranks, the same as `describe` predicts it, a mean over
      them; otherwise `bits`.
    loss: Held-out loss above dense float32, in nats; mean over seeds.
    error: Standard error of that difference.
    steps: Steps to the loss that it reaches, as a multiple of the steps in
      which dense reaches it.
    seeds: Number of seeds.
    is_current: Whether the method still gives these results. Otherwise they are
      of an older version, until the runs are there again.
  """

  name: str
  optimizer: str
  reducer: str
  options: Mapping[str, Any]
  every: int
  outer: Mapping[str, float]
  bits: float
  predicted_bits: float
  loss: float
  error: float
  steps: float
  seeds: int
  is_current: bool


@functools.cache
def of_protocol() -> Mapping[str, tuple[Evidence, ...]]:
  """Returns what the protocol has judged by optimizer, dense first."""
  text = pathlib.Path(__file__).with_suffix(".json").read_text()
  found: dict[str, tuple[Evidence, ...]] = {}
  for one in (Evidence(**each) for each in json.loads(text)):
    found[one.optimizer] = *found.get(one.optimizer, ()), one
  return types.MappingProxyType(found)
