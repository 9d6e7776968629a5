"""Describes pipeline stages to the reducers."""

import dataclasses

from edgc_jax import validation
from edgc_jax.leaves.leaf import PlacementFn, own_placement

ALIGNMENTS = ("slack", "none")


@dataclasses.dataclass(frozen=True)
class Stages:
  """The pipeline stages of a mesh.

  Attributes:
    axis_name: Axis of the stages, bound by `jax.shard_map`.
    placement: From a leaf's path and shape to "own" (layers of one stage, the
      default), "split" (a tensor split over all stages, such as rows of the
      embedding) or "shared" (the same on all stages; their gradients are
      summed, if JAX has not done that).
    align: "slack": `edgc` gives stage s the largest rank whose modelled
      all-reduce ends no later than the all-reduce of stage 0. "none": each
      stage follows only its own entropy. Other reducers do not read it.
    backward_seconds: Seconds of one microbatch's backward pass on a stage
      (`measure_backward`); needed for "slack".

  Raises:
    TypeError: if `backward_seconds` is not a number.
    ValueError: if an attribute is out of range.
  """

  axis_name: str = "stage"
  placement: PlacementFn = own_placement
  align: str = "slack"
  backward_seconds: float | None = None

  def __post_init__(self) -> None:
    validation.require(
      isinstance(self.axis_name, str) and bool(self.axis_name),
      "axis_name",
      self.axis_name,
      "the name of a mesh axis",
      "without pipeline stages pass stages=None to the reducer",
    )
    validation.require(
      callable(self.placement),
      "placement",
      self.placement,
      "a function of a leaf's path and shape",
      "leave it out if every leaf belongs to one stage",
    )
    validation.require_one_of("align", self.align, ALIGNMENTS)
    if self.backward_seconds is not None:
      validation.require_finite(
        "backward_seconds",
        self.backward_seconds,
        "give the time of one microbatch; 0 gives all stages one rank",
      )
