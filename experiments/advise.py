"""Advises which method to send gradients with, for a model, mesh and link.

  python experiments/advise.py --config=configs/gpt2_tiny.py

Measures the link, a training step and the cost of exchanges on the machines it
runs on: one process, or all processes of a cluster, as for `train_gpt2.py`.
Prints the predicted step time of each method, the speed of a replica's uplink
above which dense is faster, and the choice. `--config=FILE:auto` trains with
that choice. To get advice for another link, give its payload bytes per second
and its latency in seconds, both of an all-reduce:

  --config.link.bandwidth=12.5e6 --config.link.latency=1e-3

It compares dense float32, dense bfloat16 and several ranks of edgc; powersgd
computes less than edgc at the same rank. It does not advise for pipeline
stages. If replicas shard their parameters (`mesh.fsdp`), a given bandwidth is
one shard's, while all shards of the replica send.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ml_collections import ConfigDict

from experiments import tasks
from experiments.parallel import meshes
from experiments.runtime import command_line, hosts
from experiments.training import advised, checks


def main(config: ConfigDict) -> None:
  """Measures and prints the table of methods."""
  try:
    task = tasks.make(config)
    checks.check(config, task)
    advised.require_choice(config)
  except ValueError as error:
    sys.exit(f"error: {error}")
  mesh = meshes.of_config(config)
  advice = advised.measure(config, task, mesh)
  hosts.say(advised.table(advice, mesh))


if __name__ == "__main__":
  command_line.run(main)
