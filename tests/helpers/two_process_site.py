"""A script: one of two processes of a site, whose parameters are sharded.

python -m helpers.two_process_site FOLDER PORT INDEX
"""

import json
import sys
import time

import edgc_jax  # isort: skip

import jax  # isort: skip
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROUNDS = 3


def main(folder, port, index):
  jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index))
  mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
  sharding = NamedSharding(mesh, P("fsdp"))
  ones = jax.make_array_from_callback(
    (8, 4), sharding, lambda at: np.ones((8, 4), np.float32)[at]
  )
  move = jax.jit(lambda x: x + 1)
  site = edgc_jax.Site(
    folder, "pair", seconds=0.2, density=None, bits=32, residual_decay=1.0
  )
  params, rounds = site.join({"w": ones}), [site.round]
  for _ in range(ROUNDS - 1):
    params = {"w": move(params["w"])}
    while not site.is_due(0):
      time.sleep(0.01)
    params = site.exchange(params)
    rounds.append(site.round)
  site.begin({"w": move(params["w"])})
  later = {"w": move(move(params["w"]))}  # a step beside the exchange
  while not site.is_ready():
    time.sleep(0.01)
  params = site.finish(later)
  rounds.append(site.round)
  assert params["w"].sharding == sharding
  site.leave()
  whole = multihost_utils.process_allgather(params["w"], tiled=True)
  print(json.dumps([rounds, whole.tolist()]), flush=True)
  if index == "0":
    print(site.last)


if __name__ == "__main__":
  main(*sys.argv[1:])
