"""GPT-2 cut into pipeline stages, with the vocabulary split over them.

Stage s holds layers [s L / S, (s + 1) L / S) and rows [s V / S, (s + 1) V / S)
of the tied embedding, padded to equal parts; positions and final norm are on
all stages. So the stages carry equal loads, logits are never gathered, and
the embedding's gradient needs no exchange between stages.

Over the stages travel, besides the pipeline's microbatches, the embedded
batch to stage 0 and the last hidden states back to all: [batch, time, width]
twice, and twice more in the backward pass.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

import edgc_jax
from experiments.models import gpt2
from experiments.models.gpt2 import GPT2Config

AXIS = "stage"


def init_params(config: GPT2Config, num_stages: int, key: jax.Array) -> Any:
  """Those of `gpt2.init_params`, the embedding padded to equal parts.

  Args:
    config: Sizes of the model.
    num_stages: How many stages will share it.
    key: As for `gpt2.init_params`: the same key gives the same model.

  Returns:
    Global parameters; `param_specs` says how they are cut.
  """
  params = gpt2.init_params(config, key)
  missing = -config.vocab_size % num_stages
  embedding = jnp.pad(params["embedding"], ((0, missing), (0, 0)))
  return params | {"embedding": embedding}


def placement(path: str, shape: tuple[int, ...]) -> str:
  """What each stage holds of a leaf, in the terms of `edgc_jax.edgc`."""
  del shape
  if path.startswith("['blocks']"):
    return "own"
  return "split" if path == "['embedding']" else "shared"


def param_specs(params: Any) -> Any:
  """PartitionSpecs of the parameters on a mesh with the axis "stage"."""
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      PartitionSpec()
      if placement(jax.tree_util.keystr(path), p.shape) == "shared"
      else PartitionSpec(AXIS)
    ),
    params,
  )


def loss_fn(
  config: GPT2Config, num_microbatches: int, params: Any, batch: jax.Array
) -> jax.Array:
  """Mean cross-entropy in nats a token, as `gpt2.loss_fn` gives it.

  Args:
    config: Sizes of the whole model.
    num_microbatches: Divides the batch.
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
  """Loss and gradients, with the backward pass of the embedding left over.

  The gradient of what stage 0 embedded has to go to all stages, when stage 0
  is done. As a part of `jax.grad` that would come before any exchange of
  gradients, and every stage would wait for stage 0. So it is left to the
  reducer, which calls for it after the stage's own exchange.

  Args:
    config: As for `loss_fn`.
    num_microbatches: As for `loss_fn`.
    params: As for `loss_fn`; varying over the replicas.
    batch: As for `loss_fn`.

  Returns:
    The loss, the gradients without that part, and `late_updates` for the
    `update` of a reducer, which completes them.
  """
  late = {name: params[name] for name in ("embedding", "positions")}
  x, embed_backward = jax.vjp(lambda p: _embed(p, batch[:, :-1]), late)
  # Varying, so that its gradient is this stage's own and not yet summed.
  x = lax.pcast(x, AXIS, to="varying")

  def rest(params: Any, x: jax.Array) -> jax.Array:
    return _loss_of_embedded(config, num_microbatches, params, x, batch[:, 1:])

  loss, (gradients, x_gradient) = jax.value_and_grad(rest, (0, 1))(params, x)

  def late_updates(after: Callable[[Any], Any]) -> Any:
    (more,) = embed_backward(lax.psum(after(x_gradient), AXIS))
    return gradients | {name: gradients[name] + more[name] for name in more}

  return loss, gradients, late_updates


def make_stage_fn(
  config: GPT2Config, sequences: int, blocks: Any
) -> Callable[[Any, jax.Array], jax.Array]:
  """One stage's layers, on microbatches of a number of sequences.

  Args:
    config: Sizes of the whole model.
    sequences: In a microbatch.
    blocks: The stage's parameters; their first axis is the layer.

  Returns:
    From such parameters and x [sequences * time, width] to the same shape.
  """
  num_layers = jax.tree.leaves(blocks)[0].shape[0]
  module = gpt2.scanned_blocks(config, sequences, num_layers)
  return lambda params, x: module.apply({"params": params}, x, None)[0]


def _embed(params: Any, tokens: jax.Array) -> jax.Array:
  """Tokens [batch, time] to float32 [batch, time, width]."""
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
    config, num_sequences // num_microbatches, params["blocks"]
  )
  x = x.astype(config.dtype).reshape(num_microbatches, -1, config.width)
  x = edgc_jax.apply_stages(stage_fn, params["blocks"], x, AXIS)
  x = lax.psum(x, AXIS).reshape(num_sequences * time, -1)
  norm = nn.LayerNorm(dtype=config.dtype)
  x = norm.apply({"params": params["final_norm"]}, x)
  losses = cross_entropy(
    x, params["embedding"], labels.reshape(-1), config.vocab_size
  )
  return losses.mean()


def lookup(rows: jax.Array, tokens: jax.Array) -> jax.Array:
  """Rows of an embedding that is split over the stages.

  Args:
    rows: float32 [V / S, width], this stage's part.
    tokens: int32 [n], equal on all stages.

  Returns:
    float32 [n, width], equal on all stages.
  """
  places = tokens - lax.axis_index(AXIS) * rows.shape[0]
  is_here = (places >= 0) & (places < rows.shape[0])
  found = rows[jnp.where(is_here, places, 0)]
  return lax.psum(jnp.where(is_here[:, None], found, 0.0), AXIS)


def cross_entropy(
  x: jax.Array, rows: jax.Array, labels: jax.Array, vocab_size: int
) -> jax.Array:
  """Cross-entropy over a vocabulary whose rows are split over the stages.

    loss = m + ln sum_s sum_(v in s) e^(z_v - m) - z_label,   z = x rows^T

  with m the largest logit of all stages, so no exponential overflows. Per
  token three values travel over the stages.

  Args:
    x: [n, width], equal on all stages.
    rows: float32 [V / S, width], this stage's part; what is beyond
      `vocab_size` in the last parts is padding and takes no probability.
    labels: int32 [n], equal on all stages.
    vocab_size: Rows of all stages without padding.

  Returns:
    float32 [n], nats, equal on all stages.
  """
  first = lax.axis_index(AXIS) * rows.shape[0]
  logits = (x @ rows.T.astype(x.dtype)).astype(jnp.float32)
  is_real = first + jnp.arange(rows.shape[0]) < vocab_size
  logits = jnp.where(is_real, logits, -jnp.inf)
  largest = lax.pmax(lax.stop_gradient(logits.max(axis=-1)), AXIS)
  places = labels - first
  is_here = (places >= 0) & (places < rows.shape[0])
  own = jnp.take_along_axis(logits, jnp.where(is_here, places, 0)[:, None], 1)
  # As one: gradients need no label, and nothing else would wait for its sum.
  both = (
    jnp.where(is_here, own[:, 0], 0.0),
    jnp.exp(logits - largest[:, None]).sum(axis=-1),
  )
  label, mass = lax.psum(jnp.stack(both), AXIS)
  return largest + jnp.log(mass) - label
