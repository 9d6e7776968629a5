"""Tells which way of sending gradients suits a model, its mesh and its link.

  python experiments/advise.py --config=configs/gpt2_tiny.py

Measures the link, a training step and the cost of exchanges where it runs, on
one process or on all of a cluster as `train_gpt2.py`, and prints what each way
would take, the speed of a replica's uplink above which dense is faster, and
the choice. `--config=FILE:auto` trains with it. A link that is not there can be
given, in bytes of payload a second of an all-reduce and seconds of latency:

  --config.link.bandwidth=12.5e6 --config.link.latency=1e-3

Through pmap, without stages. Dense float32, dense bfloat16 and ranks of edgc
are compared; powersgd computes less than edgc at the same rank.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ml_collections import ConfigDict

from experiments.models import gpt2
from experiments.parallel import meshes
from experiments.runtime import command_line, hosts
from experiments.training import advised, checks


def main(config: ConfigDict) -> None:
  """Prints the table."""
  try:
    checks.check(config)
    advised.require_choice(config)
  except ValueError as error:
    sys.exit(f"error: {error}")
  mesh = meshes.make_mesh(config.mesh.data, config.mesh.stage)
  model = gpt2.GPT2Config(**config.model.to_dict())
  advice = advised.measure(config, model, mesh)
  hosts.say(advised.table(advice, config.mesh.data))


if __name__ == "__main__":
  command_line.run(main)
