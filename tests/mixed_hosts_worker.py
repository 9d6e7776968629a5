"""One of several hosts whose linear algebra rounds in a way of its own.

python tests/mixed_hosts_worker.py FOLDER PORT INDEX COUNT SECONDS CASE...

Each case trains a small model for `STEPS` steps on white gradients and for as
many on real ones, in one process a replica, and saves what each step applied.
"""

import faulthandler
import functools
import pathlib
import sys

import edgc_jax  # isort: skip

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

STEPS = 200
# Ranks that move, and a window's end every few steps.
_MOVING = {
  "rank_max": 12, "rank_min": 4, "rank_multiple": 4, "window": 5,
  "warmup_steps": 5, "max_warmup_steps": 5, "step_rate": 1.0,
  "entry_rate": 1.0, "min_ratio": 1.2,
}  # fmt: skip

REDUCERS = {
  "allreduce_bfloat16": lambda: edgc_jax.allreduce(wire_dtype="bfloat16"),
  "powersgd": lambda: edgc_jax.powersgd(12, min_ratio=1.2),
  "powersgd_bfloat16": lambda: edgc_jax.powersgd(
    {0: 12, 100: 6}, min_ratio=1.2, wire_dtype="bfloat16"
  ),
  "powersgd_alternating": lambda: edgc_jax.powersgd(
    12, min_ratio=1.2, alternating=True, refresh_every=50
  ),
  "edgc": lambda: edgc_jax.edgc(**_MOVING),
  "edgc_published": lambda: edgc_jax.edgc(
    granularity="stage", warmup_rank=None, estimator="histogram", **_MOVING
  ),
  "edgc_bfloat16": lambda: edgc_jax.edgc(
    curves="energy", wire_dtype="bfloat16", **_MOVING
  ),
  "topk": lambda: edgc_jax.topk(0.05, sample_rate=0.5),
  "randomk": lambda: edgc_jax.randomk(0.1),
  "quantize": lambda: edgc_jax.quantize(4, error_feedback=True),
  "signsgd": lambda: edgc_jax.signsgd(),
}
STAGES = "stages"  # two of them, of two replicas each


def model(stage):
  """Parameters, and the loss of a replica's own batch in one step.

  Its gradients are far from random: a decaying spectrum, a layer that sees
  inputs of rank 4 only, rows without any gradient.
  """
  keys = jax.random.split(jax.random.key(stage), 6)
  params = {
    "bias": jnp.zeros((64,)),
    "first": 0.1 * jax.random.normal(keys[0], (48, 64)),
    "last": 0.1 * jax.random.normal(keys[1], (64, 40)),
    "low": 0.1 * jax.random.normal(keys[2], (40, 64)),
    "stack": 0.1 * jax.random.normal(keys[3], (2, 64, 64)),
  }
  scales = 0.8 ** jnp.arange(48.0)
  few = jax.random.normal(keys[4], (4, 40)) * (jnp.arange(40) < 30)
  teacher = jax.random.normal(keys[5], (48, 40))

  def loss_fn(params, key):
    x = jax.random.normal(key, (32, 48)) * scales
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    hidden += jnp.tanh((x[:, :4] @ few) @ params["low"])
    for w in params["stack"]:
      hidden += jnp.tanh(hidden @ w)
    return jnp.mean((hidden @ params["last"] - x @ teacher) ** 2)

  return params, loss_fn


def gradients_of(loss_fn, params, is_white, key):
  """White noise in half of the runs, else those of the loss."""
  real = jax.grad(loss_fn)(params, key)
  leaves, structure = jax.tree.flatten(real)
  white = [
    jax.random.normal(jax.random.fold_in(key, i), g.shape)
    for i, g in enumerate(leaves)
  ]
  return jax.tree.map(
    lambda w, r: jnp.where(is_white, w, r),
    jax.tree.unflatten(structure, white),
    real,
  )


def train(tx, mesh, stage_axis=None):
  """Runs both kinds of gradients; numbers of this process by their name."""
  params, loss_fn = model(0)
  specs = jax.tree.map(lambda _: P(), params)
  if stage_axis:
    specs = jax.tree.map(lambda _: P(stage_axis), params)
    params = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
  everyone = (stage_axis, "data") if stage_axis else ("data",)

  def run(params, is_white):
    state = tx.init(params)
    start, own = params, jax.lax.axis_index("data")
    keys = jax.random.split(jax.random.key(7), STEPS)
    lead = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731

    def step(carry, key):
      params, state, owed = carry
      key = jax.random.fold_in(key, own)
      local = jax.lax.pcast(params, "data", to="varying")
      local = lead(local) if stage_axis else local
      gradients = gradients_of(loss_fn, local, is_white, key)
      if stage_axis:
        gradients = jax.tree.map(lambda g: g[None], gradients)
      updates, state = tx.update(gradients, state, params)
      params = jax.tree.map(lambda p, u: p - 0.02 * u, params, updates)
      mean = jax.lax.pmean(edgc_jax.after_update(gradients, state), "data")
      owed = jax.tree.map(lambda o, g, u: o + g - u, owed, mean, updates)
      numbers = edgc_jax.metrics(state)
      shown = {n: numbers[n] for n in ("rank", "rung", "matrix_rank")}
      return (params, state, owed), (updates, shown)

    carry = (params, state, jax.tree.map(jnp.zeros_like, params))
    # A loop wants its state typed beforehand as it will be.
    types, _ = jax.eval_shape(step, carry, keys[0])
    carry = jax.tree.map(
      lambda x, like: _varying(x, like.manual_axis_type.varying), carry, types
    )
    (params, state, owed), (updates, shown) = jax.lax.scan(step, carry, keys)
    kept = jax.lax.pmean(state.exchange.residual, "data")
    owed = jax.tree.map(
      lambda o, e: o if isinstance(e, optax.MaskedNode) else o - e,
      owed,
      kept or owed,
      is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    moved = jax.tree.map(lambda a, b: a - b, params, start)
    return jax.tree.map(
      lambda x: _varying(x, everyone)[None],
      {"updates": updates, "shown": shown, "moved": moved, "owed": owed,
       "parted": state.checks.parted_steps},
    )  # fmt: skip

  fn = jax.jit(
    jax.shard_map(run, mesh=mesh, in_specs=(specs, P()), out_specs=P(everyone))
  )
  results = {}
  for name in ("white", "real"):
    found = fn(params, np.array(name == "white"))
    for path, x in jax.tree_util.tree_leaves_with_path(found):
      own = np.asarray(x.addressable_shards[0].data)[0]
      results[f"{name}{jax.tree_util.keystr(path)}"] = own
  return results


def _varying(x, axes):
  """As varying over these axes, whether it does already or not."""
  missing = set(axes) - set(jax.typeof(x).manual_axis_type.varying)
  return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def fingerprint():
  """What this process's linear algebra makes of a matrix."""
  a = np.random.default_rng(0).standard_normal((24, 48)).astype(np.float32)
  a = jnp.asarray(a @ a.T)
  root = jax.lax.linalg.cholesky(a)
  return np.asarray(jax.lax.linalg.triangular_solve(root, a, lower=True))


def main(folder, port, index, count, seconds, *cases):
  # Shows where a process hangs, and leaves none behind.
  faulthandler.dump_traceback_later(float(seconds), exit=True)
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
  folder = pathlib.Path(folder)
  np.save(folder / f"fingerprint_{index}.npy", fingerprint())
  auto = functools.partial(jax.make_mesh, devices=jax.devices())
  for case in cases:
    if case == STAGES:
      mesh = auto((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
      tx = edgc_jax.edgc(stage_axis="stage", align="none", **_MOVING)
      numbers = train(tx, mesh, "stage")
    else:
      mesh = auto((int(count),), ("data",), axis_types=(AxisType.Auto,))
      numbers = train(REDUCERS[case](), mesh)
    np.savez(folder / f"{case}_{index}.npz", **numbers)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(*sys.argv[1:])
