"""What tasks on scikit-learn's handwritten digits share."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from sklearn import datasets

from edgc_jax import validation
from experiments.trainer.data import batches
from experiments.trainer.tasks.base import Metrics, Source, Task

CLASSES, SIDE = 10, 8
_HELD_OUT = 5  # one image in this many is held out
_MOST = 4096  # of heads, layers and values of a layer


class Digits(Task):
  """A network on 1,797 images of 8 x 8 pixels; every fifth one is held out."""

  unit = "images"
  network: Callable[..., nn.Module]
  side: int = SIDE  # of the images that are cut into patches

  def __init__(self, config: ConfigDict, **sizes: int):
    """Makes the network of `config.model`.

    Args:
      config: The whole configuration.
      **sizes: Options of the network that are not in `config.model`.

    Raises:
      ValueError: if `config.model` has other options than the network, or sizes
        that do not fit.
    """
    self._require_sizes(config.model.to_dict())
    try:
      self._network = self.network(**config.model.to_dict(), **sizes)
    except TypeError as error:
      raise ValueError(
        f"`model` must have the options of the task {config.task!r}, got"
        f" {sorted(config.model)}: {error}; use its file in configs/."
      ) from error
    self.row = {
      "image": jax.ShapeDtypeStruct((SIDE, SIDE), np.float32),
      "label": jax.ShapeDtypeStruct((), np.int32),
    }

  def _require_sizes(self, sizes: Mapping[str, Any]) -> None:
    """Raises unless the options that are known have values that fit."""
    width, side = sizes.get("width", 1), self.side
    for name, default, is_fine, rule in (
      *((name, 1, _is_count, f"an integer from 1 to {_MOST}")
        for name in ("width", "num_heads", "num_layers")),
      ("num_heads", 1, lambda n: width % n == 0,
       f"a divisor of width, {width}"),
      ("patch", 1, lambda n: _is_count(n) and side % n == 0,
       f"a divisor of {side}, the pixels of a side"),
      ("dropout", 0.0, lambda x: isinstance(x, int | float) and 0 <= x < 1,
       "from 0 on and below 1"),
      ("channels", (8,), _are_channels, f"multiples of 8 up to {_MOST}"),
    ):  # fmt: skip
      value = sizes.get(name, default)
      validation.require(
        is_fine(value), f"model.{name}", value, rule, "choose another value"
      )

  @functools.cached_property
  def _rows(self) -> dict[bool, dict[str, np.ndarray]]:
    """The rows that are held out, by True, and all others, by False."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, SIDE, SIDE)
    is_held_out = np.arange(len(labels)) % _HELD_OUT == 0
    return {
      held_out: {
        "image": images[is_held_out == held_out],
        "label": labels[is_held_out == held_out].astype(np.int32),
      }
      for held_out in (False, True)
    }

  @property
  def source(self) -> Source:
    digest = hashlib.sha256()
    for rows in self._rows.values():
      digest.update(rows["image"].tobytes() + rows["label"].tobytes())
    return Source("digits of scikit-learn", digest.hexdigest())

  def train_batches(
    self, batch_size: int, seed: int, rows: slice
  ) -> grain.DatasetIterator:
    return batches.shuffled(
      len(self._rows[False]["label"]),
      functools.partial(_taken, self._rows[False]),
      batch_size=batch_size,
      seed=seed,
      rows=rows,
    )

  def held_out_batches(
    self, batch_size: int, num_batches: int
  ) -> Iterable[Any]:
    count = len(self._rows[True]["label"])
    index = batches.spread(
      count, batch_size=batch_size, num_batches=num_batches
    )
    index = index * count // index.size
    return [_taken(self._rows[True], rows) for rows in index]


class DigitsTask(Digits):
  """Classifies the images; training shifts them at random."""

  metrics: ClassVar = {"loss": "min", "accuracy": "max"}

  def __init__(self, config: ConfigDict):
    super().__init__(config, num_classes=CLASSES)

  def init(self, key: jax.Array) -> Any:
    return self._network.init(key, jnp.zeros((1, SIDE, SIDE)))["params"]

  def loss(
    self, params: Any, batch: Any, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    shift, noise = jax.random.split(key)
    images = jax.vmap(_shifted)(
      batch["image"], jax.random.randint(shift, (len(batch["image"]), 2), 0, 3)
    )
    logits = self._network.apply(
      {"params": params}, images, True, rngs={"dropout": noise}
    )
    numbers = _measured(logits, batch["label"])
    return numbers.pop("loss"), numbers

  def evaluate(self, params: Any, batch: Any) -> Metrics:
    logits = self._network.apply({"params": params}, batch["image"])
    return _measured(logits, batch["label"])


def _taken(rows: dict[str, np.ndarray], index: np.ndarray) -> Any:
  return {name: values[index] for name, values in rows.items()}


def _is_count(value: Any) -> bool:
  return type(value) is int and 0 < value <= _MOST


def _are_channels(value: Any) -> bool:
  is_list = isinstance(value, tuple | list) and len(value) > 0
  return is_list and all(_is_count(n) and n % 8 == 0 for n in value)


def _shifted(image: jax.Array, by: jax.Array) -> jax.Array:
  """Moves an image by -1, 0 or 1 pixels in each direction; by is 0 to 2."""
  return jax.lax.dynamic_slice(jnp.pad(image, 1), by, image.shape)


def _measured(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  is_right = logits.argmax(-1) == labels
  return {"loss": losses.mean(), "accuracy": is_right.mean(dtype=jnp.float32)}
