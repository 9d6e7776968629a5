"""A diffusion model of handwritten digits, which learns to remove noise.

It stands in for generative models of images and video.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax import validation
from experiments.trainer.models import vision
from experiments.trainer.tasks._digits import SIDE, Digits
from experiments.trainer.tasks.base import Metrics

_EARLIEST = 0.02  # the least time: later ones have noise to predict
_SEED = 2006  # of the noise in evaluations


class Diffusion(Digits):
  """Predicts the noise in an image at a random time (arXiv:2006.11239).

  x_t = cos(pi t / 2) x + sin(pi t / 2) noise,   x from -1 to 1, t from 0 to 1
  loss = mean |network(x_t, t) - noise|^2
  """

  network = vision.Denoiser

  def _require_sizes(self, sizes: Mapping[str, Any]) -> None:
    super()._require_sizes(sizes)
    width = sizes.get("width", 8)
    validation.require(
      width % 8 == 0, "model.width", width, "a multiple of 8", "use 64"
    )

  def init(self, key: jax.Array) -> Any:
    images = jnp.zeros((1, SIDE, SIDE))
    return self._network.init(key, images, jnp.zeros(1))["params"]

  def loss(
    self, params: Any, batch: Any, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    images = 2.0 * batch["image"] - 1.0
    of_time, of_noise = jax.random.split(key)
    time = jax.random.uniform(of_time, (len(images),), minval=_EARLIEST)
    noise = jax.random.normal(of_noise, images.shape)
    angle = 0.5 * jnp.pi * time[:, None, None]
    noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
    found = self._network.apply({"params": params}, noisy, time)
    return jnp.mean((found - noise) ** 2), {}

  def evaluate(self, params: Any, batch: Any) -> Metrics:
    """Returns the loss for one draw of times and noise, always the same."""
    return {"loss": self.loss(params, batch, jax.random.key(_SEED))[0]}


TASK = Diffusion
