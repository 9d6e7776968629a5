"""A host of `sites` that is one site of a run."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

import edgc_jax
from experiments.lab.network import calls
from experiments.trainer import tasks

_PATIENCE = 600.0


class SitesHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    del count, address  # sites need no address of each other
    self._index = index
    self._sites: dict[str, tuple[edgc_jax.Site, Any]] = {}

  def build(
    self, code: str, url: str, options: Mapping[str, Any], config: Mapping
  ) -> int:
    """Joins a run, and takes part in a round; returns the parameters.

    Args:
      code: The name of the run.
      url: Its folder in a bucket.
      options: Of `edgc_jax.Site`.
      config: The model's configuration.
    """
    params = tasks.make(ConfigDict(config)).init(jax.random.key(0))
    # No round writes a checkpoint.
    site = edgc_jax.Site(
      url, f"site-{self._index}", every=1, patience=_PATIENCE,
      checkpoint_every=2**30, **options,
    )  # fmt: skip
    self._sites[code] = site, jax.device_get(site.join(params))
    self.run(code)
    return sum(x.size for x in jax.tree.leaves(params))

  def run(self, code: str) -> dict[str, float]:
    """Moves the parameters, and takes part in a round.

    Returns:
      Seconds until the change is encoded, of the whole round, and until the
      others' changes have come after the own upload; bytes of changes.
    """
    site, params = self._sites[code]
    random = np.random.default_rng([site.round, self._index])
    move = np.float32(1e-3)
    own = jax.tree.map(
      lambda x: x + move * random.standard_normal(x.shape, np.float32), params
    )
    start = time.perf_counter()
    site.begin(own)
    encoded = time.perf_counter() - start
    params = site.finish(own)
    seconds = time.perf_counter() - start
    self._sites[code] = site, params
    found = site.last
    assert found is not None
    return {
      "seconds": seconds, "encoded": encoded, "waited": found.waited,
      "sent": found.sent, "received": found.received,
      "members": len(found.members),
    }  # fmt: skip


if __name__ == "__main__":
  calls.serve(SitesHost)
