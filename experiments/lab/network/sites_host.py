"""A host of `sites` and `overlap` that is one site of a run."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

import edgc_jax
from experiments.lab.network import calls
from experiments.trainer import tasks

_PATIENCE = 600.0
_TIMED = 5  # rounds of training


class SitesHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    del count, address  # sites need no address of each other
    self._index = index
    self._sites: dict[str, tuple[edgc_jax.Site, Any]] = {}
    self._trainings: dict[str, _Training] = {}

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

  def build_training(
    self,
    name: str,
    url: str,
    config: Mapping,
    every: int,
    exchanges: bool,
    is_hidden: bool,
  ) -> None:
    """Compiles a training step, and joins a run.

    Args:
      name: A name of it for later calls.
      url: The run's folder in a bucket.
      config: The configuration of one replica.
      every: Steps of a round.
      exchanges: Whether rounds end with an exchange.
      is_hidden: Whether the next round's steps run beside it.
    """
    site = edgc_jax.Site(
      url, f"site-{self._index}", every=every, density=None, bits=32,
      lr=0.7, momentum=0.9, patience=_PATIENCE, checkpoint_every=2**30,
    )  # fmt: skip
    self._trainings[name] = _Training(
      site, every, ConfigDict(config), exchanges, is_hidden
    )

  def round(self, name: str) -> float:
    """Times the steps of some rounds, each with one whole exchange.

    Several, because sites leave a round up to a look into the bucket apart.

    Returns:
      Seconds of a step.
    """
    training = self._trainings[name]
    training.round()
    start = time.perf_counter()
    for _ in range(_TIMED):
      training.round()
    seconds = time.perf_counter() - start
    training.finish()
    return seconds / _TIMED / training.every


class _Training:
  """Steps of a site on one device."""

  def __init__(
    self,
    site: edgc_jax.Site,
    every: int,
    config: ConfigDict,
    exchanges: bool,
    is_hidden: bool,
  ):
    task, tx = tasks.make(config), optax.adamw(config.optimizer.lr)
    self.every, self._site = every, site
    self._exchanges, self._is_hidden = exchanges, is_hidden

    def step(params: Any, state: Any, batch: Any) -> Any:
      gradient = jax.grad(task.loss, has_aux=True)
      grads, _ = gradient(params, batch, jax.random.key(0))
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self._step = jax.jit(step, donate_argnums=(0, 1))
    rows = config.batch_size
    self._batch = next(task.train_batches(rows, 0, slice(0, rows)))
    self._params = site.join(task.init(jax.random.key(0)))
    self._state = tx.init(self._params)

  def round(self) -> None:
    """Runs the steps of a round, and begins or makes its exchange."""
    for _ in range(self.every):
      self._params, self._state = self._step(
        self._params, self._state, self._batch
      )
    jax.block_until_ready(self._params)
    self.finish()
    if self._exchanges:
      self._site.begin(self._params)
    if not self._is_hidden:
      self.finish()

  def finish(self) -> None:
    """Waits for an exchange that has begun."""
    self._params = self._site.finish(self._params)


if __name__ == "__main__":
  calls.serve(SitesHost)
