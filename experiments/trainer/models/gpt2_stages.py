"""GPT-2 cut into pipeline stages, with the vocabulary split over them.

Stage s holds layers [s L / S, (s + 1) L / S) and rows [s V / S, (s + 1) V / S)
of the tied embedding, padded to equal parts. All stages hold the positions and
the final norm. So the stages have equal loads, logits are never gathered, and
the embedding's gradient needs no exchange between stages.

In addition to the pipeline's microbatches, the stages exchange the embedded
batch, for stage 0, and the last hidden states, for all: [batch, time, width]
twice, and twice more in the backward pass.

On a mesh with the axis "tensor", too, the devices of a stage share its blocks
(`gpt2.Tensor`), and the vocabulary is split over stages and devices.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from experiments.trainer.models import gpt2
from experiments.trainer.models.gpt2 import GPT2Config, Tensor
from experiments.trainer.models.pipeline import apply_stages

AXIS, TENSOR = "stage", "tensor"
_COLUMNS, _ROWS = ("attention_in", "mlp_in"), ("attention_out", "mlp_out")


def init_params(
  config: GPT2Config, mesh_shape: Mapping[str, int], key: jax.Array
) -> Any:
  """Draws the parameters of `gpt2.init_params`, laid out for a mesh.

  Args:
    config: Sizes of the model.
    mesh_shape: As for `laid_out`.
    key: As for `gpt2.init_params`: the same key gives the same model.
  """
  return laid_out(gpt2.init_params(config, key), mesh_shape)


def laid_out(params: Any, mesh_shape: Mapping[str, int]) -> Any:
  """Returns parameters or gradients of `gpt2` in the layout of a mesh.

  The embedding is padded to equal parts. Queries, keys and values are ordered
  by device first, [devices, 3, heads / devices, size].

  Args:
    params: The whole model's.
    mesh_shape: Size of each axis of the mesh.

  Returns:
    Global arrays, to be sharded by `param_specs`.
  """
  tensor = mesh_shape.get(TENSOR, 1)
  missing = -len(params["embedding"]) % (mesh_shape[AXIS] * tensor)
  embedding = jnp.pad(params["embedding"], ((0, missing), (0, 0)))

  def by_device(x: jax.Array) -> jax.Array:
    parts = x.reshape(*x.shape[:-1], 3, tensor, -1)
    return jnp.swapaxes(parts, -2, -3).reshape(x.shape)

  blocks = dict(params["blocks"])
  blocks["attention_in"] = jax.tree.map(by_device, blocks["attention_in"])
  return params | {"embedding": embedding, "blocks": blocks}


def placement(path: str, shape: tuple[int, ...]) -> str:
  """Returns "own", "split" or "shared" for a leaf: see `edgc_jax.Stages`."""
  del shape
  if path.startswith("['blocks']"):
    return "own"
  return "split" if path == "['embedding']" else "shared"


def param_specs(params: Any, mesh_shape: Mapping[str, int]) -> Any:
  """Returns the parameters' PartitionSpecs on a mesh with the axis "stage"."""
  tensor = TENSOR if TENSOR in mesh_shape else None

  def spec(path: tuple, leaf: Any) -> PartitionSpec:
    text = jax.tree_util.keystr(path)
    if text == "['embedding']":
      return PartitionSpec((AXIS, tensor) if tensor else AXIS)
    if placement(text, leaf.shape) == "shared":
      return PartitionSpec()
    if tensor and any(name in text for name in _COLUMNS):
      return PartitionSpec(AXIS, *[None] * (leaf.ndim - 2), tensor)
    if tensor and any(name in text for name in _ROWS) and leaf.ndim == 3:
      return PartitionSpec(AXIS, tensor)
    return PartitionSpec(AXIS)

  return jax.tree_util.tree_map_with_path(spec, params)


def loss_fn(
  config: GPT2Config, num_microbatches: int, params: Any, batch: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy in nats per token, as `gpt2.loss_fn`.

  Args:
    config: Sizes of the whole model.
    num_microbatches: Number of parts of the batch; divides it.
    params: This stage's part of the parameters.
    batch: int32 [batch, time + 1], the same on all stages.

  Returns:
    float32 [], equal on all stages.
  """
  x = _embed(params, batch[:, :-1])
  return _loss_of_embedded(config, num_microbatches, params, x, batch[:, 1:])


def value_and_grad(
  config: GPT2Config, num_microbatches: int, params: Any, batch: jax.Array
) -> tuple[jax.Array, Any, Callable]:
  """Returns loss and gradients, and leaves out the embedding's backward pass.

  The gradient of the embedded batch has to go from stage 0 to all stages, once
  stage 0 is done. Inside `jax.grad` that would come before any exchange of
  gradients, and every stage would wait for stage 0. So `late_updates` does it:
  the reducer calls it after the exchange of the stage's own gradients.

  Args:
    config: As for `loss_fn`.
    num_microbatches: As for `loss_fn`.
    params: As for `loss_fn`; varying over the replicas.
    batch: As for `loss_fn`.

  Returns:
    The loss, the gradients without that part, and the argument `late_updates`
    of a reducer's `update`, which completes them.
  """
  late = {name: params[name] for name in ("embedding", "positions")}
  x, embed_backward = jax.vjp(lambda p: _embed(p, batch[:, :-1]), late)
  # If x varies, its gradient is this stage's own, not yet summed.
  x = lax.pcast(x, AXIS, to="varying")

  def rest(params: Any, x: jax.Array) -> jax.Array:
    return _loss_of_embedded(config, num_microbatches, params, x, batch[:, 1:])

  loss, (gradients, x_gradient) = jax.value_and_grad(rest, (0, 1))(params, x)

  def late_updates(after: Callable[[Any], Any]) -> Any:
    (more,) = embed_backward(lax.psum(after(x_gradient), AXIS))
    return gradients | {name: gradients[name] + more[name] for name in more}

  return loss, gradients, late_updates


def make_stage_fn(
  config: GPT2Config,
  sequences: int,
  blocks: Any,
  tensor: Tensor = Tensor(),  # noqa: B008
) -> Callable[[Any, jax.Array], jax.Array]:
  """Returns a function that applies one stage's layers to a microbatch.

  Args:
    config: Sizes of the whole model.
    sequences: Number of sequences in a microbatch.
    blocks: The parameters of one device; their first axis is the layer.
    tensor: How the devices of the stage share them.

  Returns:
    A function of such parameters and x [sequences * time, width], which
    returns an array of the shape of x.
  """
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  module = gpt2.scanned_blocks(config, sequences, num_layers, tensor)
  return lambda params, x: module.apply({"params": params}, x, None)[0]


def _embed(params: Any, tokens: jax.Array) -> jax.Array:
  """Embeds tokens [batch, time] as float32 [batch, time, width]."""
  x = lookup(params["embedding"], tokens.reshape(-1))
  return x.reshape(*tokens.shape, -1) + params["positions"][: tokens.shape[1]]


def _loss_of_embedded(
  config: GPT2Config,
  num_microbatches: int,
  params: Any,
  x: jax.Array,
  labels: jax.Array,
) -> jax.Array:
  num_sequences, time = labels.shape
  stage_fn = make_stage_fn(
    config, num_sequences // num_microbatches, params["blocks"], _tensor()
  )
  x = x.astype(config.dtype).reshape(num_microbatches, -1, config.width)
  x = apply_stages(stage_fn, params["blocks"], x, AXIS)
  x = lax.psum(x, AXIS).reshape(num_sequences * time, -1)
  norm = nn.LayerNorm(dtype=config.dtype)
  x = norm.apply({"params": params["final_norm"]}, x)
  losses = cross_entropy(
    x, params["embedding"], labels.reshape(-1), config.vocab_size
  )
  return losses.mean()


def _tensor() -> Tensor:
  """Returns how the devices of a stage share it, where their axis is bound."""
  if TENSOR in jax.sharding.get_abstract_mesh().manual_axes:
    return Tensor(lax.axis_size(TENSOR), TENSOR)
  return Tensor()


def _all_axes() -> tuple[str, ...]:
  """Returns the axes that split the vocabulary."""
  tensor = _tensor().axis
  return (AXIS, tensor) if tensor else (AXIS,)


def lookup(rows: jax.Array, tokens: jax.Array) -> jax.Array:
  """Returns the tokens' rows of an embedding that is split over the stages.

  Args:
    rows: float32 [V / S, width], the part of one of S devices: the stages, or
      all devices that share the stages.
    tokens: int32 [n], equal on all of them.

  Returns:
    float32 [n, width], equal on all of them.
  """
  axes = _all_axes()
  places = tokens - lax.axis_index(axes) * rows.shape[0]
  is_here = (places >= 0) & (places < rows.shape[0])
  found = rows[jnp.where(is_here, places, 0)]
  return lax.psum(jnp.where(is_here[:, None], found, 0.0), axes)


def cross_entropy(
  x: jax.Array, rows: jax.Array, labels: jax.Array, vocab_size: int
) -> jax.Array:
  """Computes cross-entropy over a vocabulary that is split over the stages.

    loss = m + ln sum_s sum_(v in s) e^(z_v - m) - z_label,   z = x rows^T

  with m the largest logit of all stages, so no exponential overflows. The
  stages exchange three values per token.

  Args:
    x: [n, width], equal on all devices, as for `lookup`.
    rows: float32 [V / S, width], as for `lookup`; rows beyond `vocab_size`
      in the last parts are padding and have no probability.
    labels: int32 [n], equal on all devices.
    vocab_size: Number of rows of all devices, without padding.

  Returns:
    float32 [n], nats, equal on all devices.
  """
  axes = _all_axes()
  first = lax.axis_index(axes) * rows.shape[0]
  logits = (x @ rows.T.astype(x.dtype)).astype(jnp.float32)
  is_real = first + jnp.arange(rows.shape[0]) < vocab_size
  logits = jnp.where(is_real, logits, -jnp.inf)
  largest = lax.pmax(lax.stop_gradient(logits.max(axis=-1)), axes)
  places = labels - first
  is_here = (places >= 0) & (places < rows.shape[0])
  own = jnp.take_along_axis(logits, jnp.where(is_here, places, 0)[:, None], 1)
  # In one psum: no gradient depends on the label's sum, so nothing would wait
  # for a separate one.
  both = (
    jnp.where(is_here, own[:, 0], 0.0),
    jnp.exp(logits - largest[:, None]).sum(axis=-1),
  )
  label, mass = lax.psum(jnp.stack(both), axes)
  return largest + jnp.log(mass) - label
