"""Trains twice on a Ray cluster of two nodes on loopback, into a folder.

  python tests/helpers/ray_driver.py FOLDER

The second time a worker is killed once, before step `KILLED_AT`. What was found
is in found.json.
"""

import json
import os
import pathlib
import signal
import sys

# The examples are no package; workers import them by PYTHONPATH.
sys.path.insert(
  0, str(pathlib.Path(__file__).resolve().parents[2] / "examples")
)

import ray
import ray_cluster
from ray.cluster_utils import Cluster

KILLED_AT = 25


def train(config):
  """Trains as the example does, and writes down where it runs."""
  rank = ray.train.get_context().get_world_rank()
  folder, batch_of = pathlib.Path(config["folder"]), ray_cluster.batch_of
  is_first = not (folder / "node_1").exists()
  (folder / f"node_{rank}").write_text(ray.get_runtime_context().get_node_id())

  def killed_at(step):
    is_killed = is_first and folder.name == "killed" and rank == 1
    if is_killed and step == KILLED_AT:
      os.kill(os.getpid(), signal.SIGKILL)
    return batch_of(step)

  ray_cluster.batch_of = killed_at
  ray_cluster.train(config)


def main(folder):
  node = {
    "node_ip_address": "127.0.0.1", "num_cpus": 1, "include_dashboard": False,
    "object_store_memory": 80 * 2**20,
  }  # fmt: skip
  cluster = Cluster(initialize_head=True, head_node_args=node)
  try:
    cluster.add_node(**node)
    ray.init(address=cluster.address)
    found = {"nodes": len(ray.nodes())}
    for name in ("whole", "killed"):
      found[name] = ray_cluster.fit(folder, 2, train, name).metrics
      paths = [pathlib.Path(folder, name, f"node_{rank}") for rank in range(2)]
      found[name]["nodes"] = [path.read_text() for path in paths]
    pathlib.Path(folder, "found.json").write_text(json.dumps(found))
  finally:
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
  main(sys.argv[1])
