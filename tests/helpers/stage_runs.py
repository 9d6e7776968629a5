"""Runs of reducers on pipeline stages times replicas."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import edgc_jax
from helpers.flat_options import edgc
from helpers.meshes import AXIS, Run, stage_mesh

STAGES, REPLICAS = 4, 2
# Shapes of one stage: own leaves, a part of a split tensor, a shared leaf.
LOCAL = {
  "blocks": {"bias": (1, 24), "kernel": (2, 48, 40)},
  "embedding": (32, 40),
  "norm": (40,),
}
# Every rank differs, and stage 3 has time for a dense exchange.
TIMES = {
  "link": edgc_jax.LinkModel(latency=1e-6, bandwidth=1e6),
  "backward_seconds": 3.5e-3,
}
OPTIONS = {
  "rank_max": 8, "rank_min": 2, "rank_multiple": 2, "window": 2,
  "warmup_steps": 2, "max_warmup_steps": 2, "step_rate": 1.0,
  "min_ratio": 1.2, "max_rank_step": 8,
  "allocation": "uniform", "warmup_rank": None,
}  # fmt: skip
LADDER = (0, 2, 4, 6, 8)


def placement(path, shape):
  del shape
  names = {"blocks": "own", "embedding": "split", "norm": "shared"}
  return names[re.match(r"\['(\w+)'\]", path).group(1)]


def make_edgc(**options):
  return edgc(
    stage_axis="stage", placement=placement, **(OPTIONS | TIMES | options)
  )


def _map_shapes(fn):
  """Maps paths and shapes of `LOCAL`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, shape: fn(jax.tree_util.keystr(path), shape),
    LOCAL,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def param_specs():
  return _map_shapes(lambda path, _: P() if "norm" in path else P("stage"))


def local_params():
  return _map_shapes(lambda path, shape: jnp.zeros(shape))


def global_params():
  return jax.tree.map(
    lambda x, spec: jnp.concatenate([x] * (STAGES if any(spec) else 1)),
    local_params(),
    param_specs(),
  )


def gradients(seed, scales=(1.0,) * STAGES):
  """Draws [STAGES, REPLICAS, ...] arrays, with one scale for each stage."""
  random = np.random.default_rng(seed)
  sizes = np.array(scales, np.float32)

  def draw(path, shape):
    values = random.standard_normal((STAGES, REPLICAS, *shape))
    values *= sizes.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.asarray(values, jnp.float32)

  return _map_shapes(draw)


def stage_run(tx, late=False):
  """Returns a run on the mesh; updates of own leaves are [STAGES, ...].

  Args:
    tx: Transformation.
    late: Whether the gradients of the embedding come last, as in a pipeline.
  """

  def update(grads, state, params):
    local = jax.tree.map(lambda g: g[0, 0], grads)
    options, first = {}, local
    if late:
      first = local | {"embedding": jnp.zeros_like(local["embedding"])}

      def late_updates(after):
        rest = jax.lax.psum(after(local["embedding"]), "stage") * 0
        return local | {"embedding": local["embedding"] + rest}

      options = {"late_updates": late_updates}
    updates, state = tx.update(first, state, params, **options)
    return jax.tree.map(lambda u: u[None], updates), state

  own = lambda s: P("stage") if s != P() else P(None)  # noqa: E731
  return Run(
    tx,
    global_params(),
    stage_mesh(STAGES, REPLICAS),
    param_specs(),
    update=update,
    gradient_specs=P("stage", AXIS),
    update_specs=jax.tree.map(own, param_specs()),
  )
