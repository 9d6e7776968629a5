"""A site that moves its parameters by random numbers, until it is told to end.

  python tests/helpers/site_worker.py FOLDER NAME

The file FOLDER/end holds the round after which it ends; then it prints the hash
of the common parameters.
"""

import pathlib
import sys
import time

import jax
import numpy as np

import edgc_jax
from edgc_jax.sites import bucket


def main(folder, name):
  folder, random = pathlib.Path(folder), np.random.default_rng()
  bucket.Folder.poll = 0.01
  site = edgc_jax.Site(
    folder / "run", name, every=1, density=None, bits=4, patience=1.0,
    checkpoint_every=10_000,
  )  # fmt: skip
  params = site.join({"w": np.zeros((64, 64), np.float32)})
  end = folder / "end"
  while not end.exists() or site.round < int(end.read_text()):
    if end.exists():
      site._patience = 60.0  # nobody is killed any more: all end together
    time.sleep(0.02)
    moves = {"w": random.standard_normal((64, 64), np.float32)}
    params = site.exchange(jax.tree.map(np.subtract, params, moves))
  print(site.round, site._run.hash, flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
