"""Trains MaxText's DiLoCo with a compressed exchange.

MaxText 0.2.5 averages what its replicas have moved by one dense
`drjax.reduce_mean`, and gives the mean to its outer optimiser. Inside
`averaged_by` a reducer of this package is the first link of that optimiser, and
averages instead. All else is MaxText's own trainer: a transformer on 2 replicas
of 2 shards, 16 rounds of 6 steps, once for each exchange.

    DECOUPLE_GCLOUD=TRUE python examples/maxtext_diloco.py [ARM ...]

DECOUPLE_GCLOUD tells MaxText to do without Google's cloud clients.
"""

import contextlib
import functools
import json
import pathlib
import sys
import tempfile
from unittest import mock

import drjax
import jax
import numpy as np
import optax
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.trainers.diloco import utils as diloco_utils
from maxtext.trainers.pre_train import train
from maxtext.utils import train_utils

import edgc_jax  # before JAX uses a device

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

ARMS = {
  "MaxText's mean": None,
  "allreduce": edgc_jax.allreduce,
  "quantize": functools.partial(edgc_jax.quantize, 4, error_feedback=True),
  "topk": functools.partial(edgc_jax.topk, 1 / 16, chunk=4096, bits=2),
  "powersgd": functools.partial(edgc_jax.powersgd, 8, wire_dtype="float32"),
}
SETTINGS = {
  "run_name": "example", "dataset_type": "synthetic", "hardware": "cpu",
  "enable_diloco": True, "ici_diloco_parallelism": 2, "ici_fsdp_parallelism": 2,
  "diloco_sync_period": 6, "diloco_outer_lr": 1.0, "diloco_outer_momentum": 0.0,
  "steps": 96, "learning_rate": 0.003, "per_device_batch_size": 4,
  "base_num_decoder_layers": 2, "base_emb_dim": 64, "base_mlp_dim": 128,
  "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 16,
  "vocab_size": 256, "max_target_length": 32, "attention": "dot_product",
  "dtype": "float32", "skip_jax_distributed_system": True, "jax_cache_dir": "",
  "enable_checkpointing": False, "enable_tensorboard": False,
  "gcs_metrics": False, "log_config": False,
}  # fmt: skip


@contextlib.contextmanager
def averaged_by(make_reducer):
  """Has MaxText's DiLoCo average by a reducer while this is open.

  Args:
    make_reducer: A reducer of this package.

  Raises:
    ValueError: when training starts, if MaxText is to save checkpoints or to
      exchange in fragments.
  """
  setup = train_utils.setup_train_loop
  synchronize = diloco_utils.synchronize_full_state
  reducer = None

  def setup_train_loop(*args, **kwargs):
    """Adds the reducer's state to the state of the outer optimiser."""
    nonlocal reducer
    config, *_ = args
    for name in ("enable_checkpointing", "enable_streaming_diloco"):
      if getattr(config, name):
        raise ValueError(
          f"`{name}` must be false with a reducer, got true: MaxText expects"
          " the state of optax.sgd alone there. Set it to false."
        )
    found = list(setup(*args, **kwargs))
    shardings, mesh, state = found[2], found[4], found[-1]
    reducer = edgc_jax.on_mesh(
      make_reducer(
        axis_name="diloco",
        matrix_view=edgc_jax.scanned(1),  # as MaxText stacks its layers
      ),
      mesh,
      shardings.params,
      axis_name="diloco",
    )
    own = reducer.init(state.params)
    found[-1] = state.replace(outer_opt_state=(own, state.outer_opt_state))
    found[2] = shardings.replace(
      outer_opt_state=(
        jax.tree.map(lambda x: x.sharding, own),
        shardings.outer_opt_state,
      )
    )
    return tuple(found)

  def synchronize_full_state(state, outer_optimizer, mesh=None):
    """Takes MaxText's outer step with the differences of all replicas."""
    outer = optax.chain(reducer, outer_optimizer)
    with mock.patch.object(drjax, "reduce_mean", lambda deltas: deltas):
      return synchronize(state, outer, mesh=mesh)

  with (
    mock.patch.object(train_utils, "setup_train_loop", setup_train_loop),
    mock.patch.object(
      diloco_utils, "synchronize_full_state", synchronize_full_state
    ),
  ):
    yield


def count_up(config, mesh):
  """Returns batches of sequences that count up from a random token."""

  def draw():
    rows, length = config.global_batch_size_to_load, config.max_target_length
    rng, place = np.random.default_rng(0), np.arange(length + 1)
    places = np.broadcast_to(place, (rows, length + 1)).astype(np.int32)
    ones = np.ones((rows, length), np.int32)
    while True:
      start = rng.integers(config.vocab_size, size=(rows, 1))
      tokens = ((start + place) % config.vocab_size).astype(np.int32)
      yield {
        "inputs": tokens[:, :-1], "targets": tokens[:, 1:],
        "inputs_position": places[:, :-1], "targets_position": places[:, 1:],
        "inputs_segmentation": ones, "targets_segmentation": ones,
      }  # fmt: skip

  return draw(), None


def main(arm="quantize"):
  """Runs MaxText's trainer, and returns its losses and the statistics."""
  make_reducer = ARMS[arm]
  data = mock.patch.object(
    input_pipeline_interface, "create_data_iterator", count_up
  )
  averaged = (
    averaged_by(make_reducer) if make_reducer else contextlib.nullcontext()
  )
  with tempfile.TemporaryDirectory() as folder, data, averaged:
    file = pathlib.Path(folder) / "metrics.jsonl"
    own = {"base_output_directory": folder, "metrics_file": file}
    settings = [f"{name}={x}" for name, x in (SETTINGS | own).items()]
    config, recorder = train.initialize([train.__file__, *settings])
    state = train.train_loop(config, recorder)
    steps = map(json.loads, file.read_text().splitlines())
    losses = [step["learning/loss"] for step in steps]
  numbers = edgc_jax.metrics(state.outer_opt_state) if make_reducer else None
  return losses, numbers


if __name__ == "__main__":
  found = {arm: main(arm) for arm in sys.argv[1:] or ARMS}
  for arm, (losses, numbers) in found.items():
    sent = f"{numbers['wire_bytes']:,.0f} bytes" if numbers else "float32"
    last = np.mean(losses[-SETTINGS["diloco_sync_period"] :])
    print(f"{arm}: loss {losses[0]:.3f} to {last:.4f}, {sent} an exchange")
