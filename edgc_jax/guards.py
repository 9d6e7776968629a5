"""Checks that turn silent waste, wrong results and hangs into errors."""

from collections.abc import Sequence

import jax

from edgc_jax.comm import collectives, cpu_backend
from edgc_jax.comm.dataflow import is_varying
from edgc_jax.plan.leaves import Leaf


def require_stages(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  params: Sequence[jax.Array] | None,
  stage_axis: str,
) -> None:
  """Raises where a placement and JAX's types disagree.

  Args:
    gradients: The leaves, as they come into `update`.
    leaves: What is known about each.
    params: The parameters, if `update` was given them.
    stage_axis: The bound axis of the stages.

  Raises:
    ValueError: if the axis is not bound, varying types are not tracked, a
      leaf that differs by stage has a gradient equal on all stages, or a
      shared one has parameters that differ.
    RuntimeError: if CPU devices may run programs from JAX's cache.
  """
  if collectives.num_devices(stage_axis, "stage_axis") == 1:
    return
  cpu_backend.require_no_cached_programs()
  if not collectives.tracks_varying(stage_axis):
    raise ValueError(
      f"`stage_axis` must be an axis of jax.shard_map with its default"
      f" check_vma=True, got {stage_axis!r} where JAX does not track what"
      " varies; drop check_vma=False, and jax.pmap."
    )
  for gradient, leaf in zip(gradients, leaves, strict=True):
    varies = is_varying(gradient, stage_axis)
    if leaf.placement != "shared" and not varies:
      raise ValueError(
        f"`placement` must be 'shared' for a leaf that is equal on all stages,"
        f" got {leaf.placement!r} for {leaf.path}, whose gradient does not"
        f" vary over {stage_axis!r}; return 'shared' for its path, or shard it"
        " over the stages."
      )
  for param, leaf in zip(params or (), leaves, strict=False):
    if leaf.placement == "shared" and is_varying(param, stage_axis):
      raise ValueError(
        "`placement` must be 'own' or 'split' for a leaf that differs by stage,"
        f" got 'shared' for {leaf.path}, which varies over {stage_axis!r};"
        " gradients of different layers would be summed."
      )
