"""Checks that turn silent waste, wrong results and hangs into errors."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax.comm import collectives, cpu_backend
from edgc_jax.comm.dataflow import is_varying
from edgc_jax.matrices import Leaf
from edgc_jax.plan import Plan


def require_local(
  gradients: Sequence[jax.Array], leaves: Sequence[Leaf], axis_name: str
) -> None:
  """Raises where JAX's types show gradients already summed over the axis.

  Args:
    gradients: The leaves, as they come into `update`.
    leaves: What is known about each.
    axis_name: The bound axis of the replicas.

  Raises:
    ValueError: if varying types are tracked and a leaf does not vary.
  """
  if collectives.num_devices(axis_name) == 1 or not gradients:
    return
  if not collectives.tracks_varying(axis_name):
    return
  summed = [
    leaf.path
    for gradient, leaf in zip(gradients, leaves, strict=True)
    if not is_varying(gradient, axis_name)
  ]
  if summed:
    raise ValueError(
      f"`updates` must be local gradients that vary over axis {axis_name!r},"
      f" got gradients equal on all replicas at {summed[0] or 'the root'}"
      f" ({len(summed)} of {len(leaves)} leaves): under shard_map, jax.grad"
      " with respect to replicated parameters sums them over the axis,"
      " uncompressed;"
      f" differentiate with respect to jax.lax.pcast(params, {axis_name!r},"
      ' to="varying") instead, and drop any pmean or psum of the gradients. If'
      " that is done: only one reducer may see a leaf, so drop the other from"
      " the chain; and optax.MultiSteps holds gradients as equal on all"
      " replicas, so use edgc_jax.accumulate in its place."
    )


def require_same_leaves(updates: Any, like: Any) -> None:
  """Raises where gradients have other leaves than the parameters had.

  Args:
    updates: The tree that came into `update`.
    like: A tree of the state with an entry for every leaf that `init` saw.

  Raises:
    ValueError: if a leaf is missing, None for example, or was not there.
  """
  is_entry = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  now, then = (
    {
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_entry)
    }
    for tree in (updates, like)
  )
  missing, new = sorted(then - now), sorted(now - then)
  if missing or new:
    what = f"none at {missing[0]}" if missing else f"one more at {new[0]}"
    raise ValueError(
      f"`updates` must have the leaves of the parameters that `init` saw, got"
      f" {what} ({len(missing)} missing, {len(new)} more); a gradient that is"
      " None has no place in them, so give zeros, or split the tree with"
      " optax.partition before `init`."
    )


def warn_of_dtypes(leaves: Sequence[Leaf]) -> None:
  """Warns of leaves that come back with less than they seem to have.

  Warns:
    RuntimeWarning: for float64, which is exchanged in float32, and for float16,
      in which the mean comes back and whose squares an optimiser cannot hold.
  """
  for dtype, what, remedy in (
    (
      jnp.float64,
      "exchanged in float32 and rounded to it",
      "Average such leaves with jax.lax.pmean, or train them in float32",
    ),
    (
      jnp.float16,
      "returned in float16, in which squares above 65504 are infinite, as in"
      " Adam's second moment",
      "Cast gradients to float32 before the chain, and their loss scaling off",
    ),
  ):
    paths = [leaf.path for leaf in leaves if leaf.dtype == dtype]
    if paths:
      warnings.warn(
        f"Gradients of {jnp.dtype(dtype).name} are {what}: {paths[0]}"
        f" ({len(paths)} of {len(leaves)} leaves). {remedy}.",
        RuntimeWarning,
        stacklevel=4,
      )


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


def warn_if_nothing_pays(plan: Plan) -> None:
  """Warns where a ladder of ranks compresses no leaf at all.

  Warns:
    RuntimeWarning: if every leaf travels dense at every rung.
  """
  ranks = [rank for rank in plan.ladder if rank]
  if ranks and plan.leaves and not plan.compressible:
    warnings.warn(
      f"No leaf saves `min_ratio` ({plan.min_ratio:g}) at rank {min(ranks)} or"
      " above, so all gradients travel dense. Lower the rank, or give a"
      " `matrix_view` that folds the leaves into larger matrices.",
      RuntimeWarning,
      stacklevel=4,
    )
