"""Advises how to exchange, for a model, mesh and link.

  python experiments/advise.py --config=configs/gpt2_tiny.py

Measures the link, a training step and the cost of exchanges on the machines
that run it: one process, or all processes of a cluster, as for `train_gpt2.py`.
Prints for each method the predicted seconds of a step, the steps and the time
to a loss as multiples of dense's, the speed of a replica's uplink above which
dense is sooner, the choice, and what is assumed. `--config=FILE:auto` trains
with the choice among methods that exchange at every step. To get advice for
another link, give its payload bytes per second and its latency in seconds, both
of an all-reduce:

  --config.link.bandwidth=12.5e6 --config.link.latency=1e-3

It does not advise for pipeline stages. If replicas shard their parameters
(`mesh.fsdp`), a given bandwidth is one shard's, while all shards of the replica
send.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ml_collections import ConfigDict

from experiments.trainer.parallel import meshes
from experiments.trainer.runtime import command_line, hosts
from experiments.trainer.runtime.refusals import refusals
from experiments.trainer.training import advised, checks


def main(config: ConfigDict) -> None:
  """Measures, and prints the table of methods."""
  with refusals():
    checks.fit_devices(config)
    task = checks.task_of(config)
    advised.require_choice(config)
  mesh = meshes.of_config(config)
  hosts.say(str(advised.measure(config, task, mesh)))


if __name__ == "__main__":
  command_line.run(main)
