"""Trains on the workers of a Ray cluster; Ray restarts them if one dies.

    ray start --head                        # on the first host
    ray start --address=FIRST_HOST:6379     # on every other
    python examples/ray_cluster.py --workers=2 --storage=/shared/ray

Each worker is a replica on CPUs, and `--storage` a folder that all hosts share.
For GPUs, one for each worker, add `use_gpu=True` to `ScalingConfig`. After a
failure Ray starts all workers again, and they continue from the newest
checkpoint. The same command continues a run whose cluster has died.
"""

import argparse
import pathlib
import socket

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import ray
import ray.train.collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ray.train.v2.jax import JaxTrainer

import edgc_jax  # before JAX uses a device

STEPS, EVERY, ROWS = 60, 10, 128  # in all, between checkpoints, of a batch


def init_params():
  keys = jax.random.split(jax.random.key(0))
  return {
    "up": jax.random.normal(keys[0], (64, 128)) / 8,
    "down": jax.random.normal(keys[1], (128, 64)) / 12,
  }


def loss_fn(params, x):
  out = (x + jax.nn.relu(x @ params["up"]) @ params["down"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


def batch_of(step):
  """Returns the batch of a step, the same in every worker and every run."""
  rows = np.random.default_rng(step).normal(size=(ROWS, 64))
  return rows.astype(np.float32)


def join():
  """Joins the workers, unless `JaxTrainer` has: with `use_gpu` or `use_tpu`."""
  if jax.distributed.is_initialized():
    return
  context = ray.train.get_context()
  address, rank = None, context.get_world_rank()
  if rank == 0:
    with socket.socket() as free:
      free.bind(("", 0))
      port = free.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
  address = ray.train.collective.broadcast_from_rank_zero(address)
  jax.config.update("jax_num_cpu_devices", 1)  # a worker is a replica
  jax.distributed.initialize(
    address, context.get_world_size(), rank, coordinator_bind_address=address
  )


def newest_step(folder):
  """Returns the step of the newest whole checkpoint, or 0.

  `ray.train.get_checkpoint` may be one behind: Ray hears of a report some time
  after it. Orbax gives a checkpoint its name once it is whole.
  """
  names = [path.name for path in pathlib.Path(folder).glob("*")]
  return max((int(name) for name in names if name.isdecimal()), default=0)


def train(config):
  """Trains in one worker, from the newest checkpoint if there is one."""
  join()
  mesh = jax.make_mesh(
    (jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)
  )
  tx = optax.chain(
    edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-2)
  )

  @jax.jit
  def train_step(params, opt_state, x):
    loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = jax.device_put(init_params(), NamedSharding(mesh, P()))
  # A shared folder may not show all hosts the same at once.
  done = ray.train.collective.broadcast_from_rank_zero(
    newest_step(config["folder"])
  )
  if done:
    path = pathlib.Path(config["folder"], str(done))
    params, opt_state = edgc_jax.restore(path, tx, params, mesh=mesh)
  else:
    opt_state = tx.init(params)
  rows = NamedSharding(mesh, P("data"))
  for step in range(done + 1, STEPS + 1):
    x = batch_of(step)  # of which each worker takes its rows
    x = jax.make_array_from_callback(x.shape, rows, x.__getitem__)
    params, opt_state, loss = train_step(params, opt_state, x)
    if step % EVERY and step < STEPS:
      continue
    path = pathlib.Path(config["folder"], str(step))
    with ocp.StandardCheckpointer() as checkpointer:  # all write their parts
      state = {"params": params, "opt_state": opt_state}
      checkpointer.save(path, state, force=True)
    ratio = edgc_jax.metrics(opt_state)["compression_ratio"]
    ray.train.report(
      {"step": step, "first": done + 1, "loss": float(loss), "ratio": ratio},
      ray.train.Checkpoint(path),
      checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )
  jax.distributed.shutdown()


def fit(storage, workers, loop=train, name="edgc"):
  """Trains on a running cluster, and returns Ray's result."""
  return JaxTrainer(
    loop,
    train_loop_config={"folder": str(pathlib.Path(storage, name).absolute())},
    scaling_config=ray.train.ScalingConfig(
      num_workers=workers, placement_strategy="SPREAD"
    ),
    run_config=ray.train.RunConfig(
      name=name,
      storage_path=str(pathlib.Path(storage).absolute()),
      failure_config=ray.train.FailureConfig(max_failures=3),
      checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
    ),
  ).fit()


if __name__ == "__main__":
  parser = argparse.ArgumentParser()
  parser.add_argument("--workers", type=int, required=True)
  parser.add_argument("--storage", required=True)
  arguments = parser.parse_args()
  if arguments.workers < 1 or ROWS % arguments.workers:
    parser.error(f"--workers must divide the {ROWS} rows of a batch")
  ray.init(address="auto")
  result = fit(arguments.storage, arguments.workers)
  print(f"loss {result.metrics['loss']:.3f}")
  print(f"{result.metrics['ratio']:.1f} times fewer bytes than dense")
