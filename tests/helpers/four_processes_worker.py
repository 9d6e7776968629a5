"""A script: one of several processes that train together, or one alone.

python four_processes_worker.py FOLDER PORT INDEX COUNT SECONDS
"""

import faulthandler
import pathlib
import random
import sys

# `experiments` and `configs` lie in the repository, and are not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import edgc_jax  # noqa: F401  (before JAX uses a device, see conftest.py)

import jax  # isort: skip

from configs import gpt2_tiny
from experiments.trainer.runtime import hosts
from experiments.trainer.training.trainer import Trainer

DEVICES = 4  # of all processes together


def small(folder, name, reducer, data, stage=1, kind="jit"):
  """Returns a run of six steps of a model of two layers of width 32.

  edgc starts dense.
  """
  config = gpt2_tiny.get_config(reducer)
  config.run_dir = str(folder / name)
  config.data.path = str(folder / "words.txt")
  config.steps, config.batch_size, config.log_every = 6, 8, 1
  config.model.update(
    vocab_size=128, context=16, width=32, num_layers=2, num_heads=2, unroll=1
  )
  config.evaluation.update(every=3, batches=1)
  config.optimizer.update(warmup_steps=1, lr=1e-2)
  config.mesh.update(data=data, stage=stage, backend=kind)
  config.pipeline.update(microbatches=2, backward_seconds=15e-3)
  config.link.update(bandwidth=1e6, latency=1e-6)
  config.edgc.update(
    rank_max=8, rank_min=8, window=2, warmup_steps=2, min_ratio=1.5,
    max_warmup_steps=2, warmup_rank="dense", wire_dtype="float32",
    sampling={"step_rate": 1.0},
  )  # fmt: skip
  return config


def pipeline_run(folder, name):
  """Returns a run on two stages of two replicas; rank 8 is on stage 0 alone.

  Encoded values are cut into messages between hosts, as for large models.
  """
  config = small(folder, name, "edgc", data=2, stage=2)
  config.batch_size = 4
  config.checkpoint.every = 0  # all processes would share one folder
  config.pipeline.backward_seconds = 1e-4
  # All-reduces so fast that a microbatch's time is enough for a dense one.
  config.link.bandwidth = 1e9
  config.edgc.update(min_ratio=3.1, wire_dtype="bfloat16")
  return config


def write_text(folder):
  """Writes the text that all processes train on."""
  words = ("gradient", "rank", "stage", "the", "of", "a", "link", "slack")
  text = " ".join(random.Random(0).choices(words, k=2000))
  (folder / "words.txt").write_text(text)


def main(folder, port, index, count, seconds):
  """Trains as process `index` of `count`, on its share of the CPU devices.

  The run is in FOLDER/process_INDEX_of_COUNT.
  """
  # Prints where a process hangs, and ends it.
  faulthandler.dump_traceback_later(float(seconds), exit=True)
  count = int(count)
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_num_cpu_devices", DEVICES // count)
  if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(
      address, count, int(index), coordinator_bind_address=address
    )
    hosts.is_first = lambda: True  # all write their metrics, to be compared
  assert jax.device_count() == DEVICES, jax.devices()
  assert jax.local_device_count() == DEVICES // count, jax.local_devices()
  name = f"process_{index}_of_{count}"
  Trainer(pipeline_run(pathlib.Path(folder), name)).run()
  if count > 1:
    jax.distributed.shutdown()


if __name__ == "__main__":
  main(*sys.argv[1:])
