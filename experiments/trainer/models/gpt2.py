"""GPT-2 in Flax Linen: learned positions, pre-LayerNorm, tied embedding.

With `is_masked`, attention is bidirectional and the model predicts masked
tokens, as in BERT; everything else is the same.

The model scans one block, so every parameter of the blocks has the layer as
its first axis, and a compressor sees a stack of matrices. Tokens are flattened
to [batch * time, width] except inside attention: that makes matrix products
faster on CPUs, and no slower elsewhere.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax

from experiments.trainer.models import masking

_INIT_STD = 0.02
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class GPT2Config:
  """Sizes of the model.

  Attributes:
    vocab_size: Number of token ids.
    context: Maximum number of tokens in a sequence.
    width: Size of the residual stream.
    num_layers: Number of blocks.
    num_heads: Attention heads; divides width.
    dtype: Dtype of activations; parameters are float32.
    unroll: Blocks per iteration of the scan; more run faster, and compile
      more slowly.
    is_masked: Whether the model predicts masked tokens, and not the next one;
      the last token id is the mask.
  """

  vocab_size: int
  context: int
  width: int
  num_layers: int
  num_heads: int
  dtype: str = "float32"
  unroll: int = 1
  is_masked: bool = False

  def __post_init__(self) -> None:
    if self.dtype not in _DTYPES:
      raise ValueError(
        f"`model.dtype` must be one of {', '.join(_DTYPES)}, got"
        f" {self.dtype!r}; parameters are float32 with either."
      )
    for name, value in dataclasses.asdict(self).items():
      if type(value) is int and value < 1:
        raise ValueError(
          f"`model.{name}` must be at least 1, got {value}; raise it."
        )
    if self.width % self.num_heads:
      raise ValueError(
        f"`model.num_heads` must divide model.width ({self.width}), got"
        f" {self.num_heads}; choose a divisor."
      )

  @property
  def reserved_ids(self) -> int:
    """Number of token ids that must not occur in the data: 1 for the mask."""
    return int(self.is_masked)


@jax.custom_vjp
def _product(x: jax.Array, w: jax.Array) -> jax.Array:
  """Returns x w for x [tokens, in] and w [in, out]."""
  return x @ w


def _product_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple]:
  return x @ w, (x, w)


def _product_backward(
  operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  x, w = operands
  # Without the barrier XLA merges the transpose into the product, which then
  # reads x with a large stride. The copy makes the whole backward pass of
  # gpt2_tiny 1.4 times as fast on CPUs.
  x_transposed = lax.optimization_barrier(x.T)
  return g @ w.T, x_transposed @ g


_product.defvjp(_product_forward, _product_backward)


class Tensor(NamedTuple):
  """How devices share the matrices of a block (tensor parallelism).

  Each holds some heads and some columns of the feed-forward layer, and the rows
  of the output matrices that they feed; the devices sum the outputs, twice a
  block (Megatron-LM, arXiv:1909.08053).

  Attributes:
    size: Number of devices.
    axis: Their axis, where it is bound; None leaves out the sums, to time the
      part of one device.
  """

  size: int = 1
  axis: str | None = None

  def enter(self, x: jax.Array) -> jax.Array:
    """Types what all devices hold as input of their own columns."""
    return x if self.axis is None else lax.pcast(x, self.axis, to="varying")

  def total(self, x: jax.Array) -> jax.Array:
    """Sums the devices' parts of an output."""
    return x if self.axis is None else lax.psum(x, self.axis)


class Block(nn.Module):
  """A block of attention and feed-forward on the residual stream."""

  config: GPT2Config
  batch: int
  tensor: Tensor = Tensor()

  @nn.compact
  def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
    """Maps x [batch * time, width] to the same shape."""
    c = self.config
    h = nn.LayerNorm(dtype=c.dtype, name="attention_norm")(x)
    qkv = self._columns(3 * c.width, "attention_in")(h)
    x += self._rows("attention_out")(self._attend(qkv))
    h = nn.LayerNorm(dtype=c.dtype, name="mlp_norm")(x)
    h = nn.gelu(self._columns(4 * c.width, "mlp_in")(h))
    x += self._rows("mlp_out")(h)
    return x, None

  def _columns(self, size: int, name: str) -> nn.Dense:
    """Returns a layer of which each device holds some outputs."""
    product = lambda x, w: _product(self.tensor.enter(x), w)  # noqa: E731
    return self._dense(size // self.tensor.size, name, product, _INIT_STD)

  def _rows(self, name: str) -> nn.Dense:
    """Returns an output layer of which each device holds some inputs."""
    c = self.config
    product = lambda x, w: self.tensor.total(_product(x, w))  # noqa: E731
    # GPT-2 scales down the output layers, because 2 * num_layers of them add
    # to the stream.
    std = _INIT_STD * (2 * c.num_layers) ** -0.5
    return self._dense(c.width, name, product, std)

  def _dense(
    self,
    size: int,
    name: str,
    product: Callable[[jax.Array, jax.Array], jax.Array],
    std: float,
  ) -> nn.Dense:
    return nn.Dense(
      size,
      dtype=self.config.dtype,
      kernel_init=nn.initializers.normal(std),
      # Tokens are flat, and the precision is the default.
      dot_general=lambda x, w, *_, **__: product(x, w),
      name=name,
    )

  def _attend(self, qkv: jax.Array) -> jax.Array:
    """Attends, causally unless masked; qkv is [batch * time, 3 * columns]."""
    heads = self.config.num_heads // self.tensor.size
    size = self.config.width // self.config.num_heads
    qkv = qkv.reshape(self.batch, -1, 3, heads, size).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv[0] * size**-0.5, qkv[1], qkv[2]  # [batch, heads, time, size]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32)
    if not self.config.is_masked:
      time = scores.shape[-1]
      is_past = jnp.tril(jnp.ones((time, time), bool))
      scores = jnp.where(is_past, scores, -1e30)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, v)
    return out.transpose(0, 2, 1, 3).reshape(-1, heads * size)


def scanned_blocks(
  config: GPT2Config,
  batch: int,
  num_layers: int,
  tensor: Tensor = Tensor(),  # noqa: B008
  name: str | None = None,
) -> nn.Module:
  """Makes a scan over blocks, with parameters stacked along a first axis."""
  scanned = nn.scan(
    Block,
    variable_axes={"params": 0},
    split_rngs={"params": True},
    length=num_layers,
    unroll=min(config.unroll, num_layers),
  )
  return scanned(config, batch, tensor, name=name)


class GPT2(nn.Module):
  """Maps token ids [batch, time] to logits [batch, time, vocab_size]."""

  config: GPT2Config

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    c = self.config
    batch, time = tokens.shape
    init = nn.initializers.normal(_INIT_STD)
    embedding = self.param("embedding", init, (c.vocab_size, c.width))
    positions = self.param("positions", init, (c.context, c.width))
    x = embedding[tokens.reshape(-1)]
    x = (x.reshape(batch, time, -1) + positions[:time]).astype(c.dtype)
    blocks = scanned_blocks(c, batch, c.num_layers, name="blocks")
    x, _ = blocks(x.reshape(batch * time, -1), None)
    x = nn.LayerNorm(dtype=c.dtype, name="final_norm")(x)
    logits = x @ embedding.T.astype(c.dtype)
    return logits.astype(jnp.float32).reshape(batch, time, -1)


@functools.partial(jax.jit, static_argnums=0)
def init_params(config: GPT2Config, key: jax.Array) -> Any:
  """Draws float32 parameters; compiled once per configuration."""
  tokens = jnp.zeros((1, config.context), jnp.int32)
  return GPT2(config).init(key, tokens)["params"]


def param_shapes(config: GPT2Config) -> Any:
  """Returns the shapes and dtypes of the parameters."""
  return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def loss_fn(config: GPT2Config, params: Any, batch: jax.Array) -> jax.Array:
  """Returns the mean cross-entropy in nats per predicted token.

  Args:
    config: Sizes of the model.
    params: As from `init_params`.
    batch: int32 [batch, time + 1]. Each token is predicted from the previous
      ones; with `is_masked`, the tokens that `masking` chooses of the first
      [batch, time] are predicted from all of them.

  Returns:
    float32 [].
  """
  inputs, labels = batch[:, :-1], batch[:, 1:]
  if config.is_masked:
    tokens = inputs
    inputs, positions = masking.mask_tokens(tokens, config.vocab_size)
    labels = jnp.take_along_axis(tokens, positions, 1)
  logits = GPT2(config).apply({"params": params}, inputs)
  if config.is_masked:
    logits = jnp.take_along_axis(logits, positions[..., None], 1)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
