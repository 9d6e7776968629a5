"""GPT-2 on text: predicts each token from the ones before it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.trainer.data import text
from experiments.trainer.models import gpt2, gpt2_shards, gpt2_stages
from experiments.trainer.tasks.base import Layout, Metrics, Source, StagedTask


class Gpt2(StagedTask):
  """GPT-2 of `config.model` on the text of `config.data`."""

  axes = frozenset({gpt2_stages.AXIS, gpt2_stages.TENSOR, gpt2_shards.AXIS})
  unit = "tokens"
  is_masked = False

  def __init__(self, config: ConfigDict):
    """Makes the model of `config.model`; the text is read when it is needed.

    Raises:
      ValueError: if sizes do not fit.
    """
    sizes = config.model.to_dict()
    try:
      self.model = gpt2.GPT2Config(**sizes, is_masked=self.is_masked)
    except TypeError as error:  # a key is missing, or unknown
      raise ValueError(
        f"`model` must have the options of the task {config.task!r}, got"
        f" {sorted(config.model)}: {error}; use its file in configs/."
      ) from error
    self.units_per_row = self.model.context
    self.row = jax.ShapeDtypeStruct((self.model.context + 1,), np.int32)
    self._path = config.data.path

  @functools.cached_property
  def corpus(self) -> text.Corpus:
    """The text, which is read when it is needed.

    Raises:
      ValueError: if it is no text, or a token is not in the vocabulary.
      FileNotFoundError: if there is none at `data.path`.
    """
    corpus = text.load_corpus(self._path, context=self.model.context)
    text.check_vocab(corpus, self.model.vocab_size, self.model.reserved_ids)
    return corpus

  @property
  def source(self) -> Source:
    return Source(self.corpus.name, self.corpus.sha256)

  def init(self, key: jax.Array) -> Any:
    return gpt2.init_params(self.model, key)

  def loss(
    self, params: Any, batch: jax.Array, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    del key
    return gpt2.loss_fn(self.model, params, batch), {}

  def evaluate(self, params: Any, batch: jax.Array) -> Metrics:
    return {"loss": gpt2.loss_fn(self.model, params, batch)}

  def train_batches(
    self, batch_size: int, seed: int, rows: slice
  ) -> grain.DatasetIterator:
    return text.train_batches(
      self.corpus.train,
      context=self.model.context,
      batch_size=batch_size,
      seed=seed,
      rows=rows,
    )

  def held_out_batches(self, batch_size: int, num_batches: int) -> np.ndarray:
    return text.held_out_batches(
      self.corpus.held_out,
      context=self.model.context,
      batch_size=batch_size,
      num_batches=num_batches,
    )

  def layout(self, mesh_shape: Mapping[str, int]) -> Layout:
    if gpt2_stages.AXIS in mesh_shape:
      init = functools.partial(gpt2_stages.init_params, self.model, mesh_shape)
      shapes = jax.eval_shape(init, jax.random.key(0))
      return Layout(init, shapes, gpt2_stages.param_specs(shapes, mesh_shape))
    whole = super().layout(mesh_shape)
    if gpt2_shards.AXIS in mesh_shape:
      shards = mesh_shape[gpt2_shards.AXIS]
      return whole._replace(specs=gpt2_shards.param_specs(whole.shapes, shards))
    return whole

  def placement(self, path: str, shape: tuple[int, ...]) -> str:
    return gpt2_stages.placement(path, shape)

  def staged_loss(
    self, num_microbatches: int, params: Any, batch: jax.Array
  ) -> jax.Array:
    return gpt2_stages.loss_fn(self.model, num_microbatches, params, batch)

  def staged_value_and_grad(
    self, num_microbatches: int, params: Any, batch: jax.Array
  ) -> tuple[jax.Array, Any, Callable]:
    return gpt2_stages.value_and_grad(
      self.model, num_microbatches, params, batch
    )

  def stage_of(
    self, mesh_shape: Mapping[str, int], rows: int
  ) -> tuple[Callable[[Any, jax.Array], jax.Array], Any, jax.Array]:
    blocks = self.layout(mesh_shape).of_one_device(mesh_shape)["blocks"]
    params = jax.tree.map(lambda p: jnp.full(p.shape, 0.01, p.dtype), blocks)
    size = (rows * self.model.context, self.model.width)
    inputs = jnp.ones(size, self.model.dtype)
    # Without the sums over the devices that share the stage.
    tensor = gpt2.Tensor(mesh_shape.get(gpt2_stages.TENSOR, 1))
    stage_fn = gpt2_stages.make_stage_fn(self.model, rows, params, tensor)
    return stage_fn, params, inputs


TASK = Gpt2
