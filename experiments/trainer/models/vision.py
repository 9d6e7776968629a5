"""Small networks for images of 8 x 8: a transformer, convolutions, two inputs.

All map images to class logits, but `Denoiser`. The parameters are float32.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp


class Attention(nn.Module):
  """A block of attention to a context, and feed-forward, with pre-LayerNorm."""

  width: int
  num_heads: int
  dropout: float

  @nn.compact
  def __call__(
    self, x: jax.Array, context: jax.Array, is_noisy: bool
  ) -> jax.Array:
    """Maps x [batch, tokens, width] to its shape; context has any tokens."""
    drop = nn.Dropout(self.dropout, deterministic=not is_noisy)
    h = nn.LayerNorm()(x)
    seen = h if context is x else nn.LayerNorm()(context)
    attend = nn.MultiHeadDotProductAttention(self.num_heads)
    x += drop(attend(h, seen))
    h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
    return x + drop(nn.Dense(self.width)(h))


class Patches(nn.Module):
  """Embeds square patches of images, with learned positions."""

  patch: int
  width: int

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """Maps images [batch, height, width] to [batch, patches, width]."""
    size, (batch, height, width) = self.patch, images.shape
    x = images.reshape(batch, height // size, size, width // size, size)
    x = x.transpose(0, 1, 3, 2, 4).reshape(batch, -1, size * size)
    x = nn.Dense(self.width)(x)
    init = nn.initializers.normal(0.02)
    return x + self.param("positions", init, x.shape[1:])


class VisionTransformer(nn.Module):
  """A ViT with mean pooling (arXiv:2010.11929)."""

  patch: int
  width: int
  num_layers: int
  num_heads: int
  dropout: float
  num_classes: int

  @nn.compact
  def __call__(self, images: jax.Array, is_noisy: bool = False) -> jax.Array:
    """Maps images [batch, 8, 8] to logits [batch, classes]."""
    x = Patches(self.patch, self.width)(images)
    for _ in range(self.num_layers):
      x = Attention(self.width, self.num_heads, self.dropout)(x, x, is_noisy)
    return nn.Dense(self.num_classes)(nn.LayerNorm()(x).mean(1))


class Convolution(nn.Module):
  """Convolutions of 3 x 3, each after the first at half the resolution."""

  channels: Sequence[int]
  dropout: float
  num_classes: int

  @nn.compact
  def __call__(self, images: jax.Array, is_noisy: bool = False) -> jax.Array:
    """Maps images [batch, 8, 8] to logits [batch, classes]."""
    x = images[..., None]
    for i, size in enumerate(self.channels):
      x = nn.Conv(size, (3, 3), strides=1 + (i > 0))(x)
      x = nn.relu(nn.GroupNorm(8)(x))
    x = nn.Dropout(self.dropout, deterministic=not is_noisy)(x.mean((1, 2)))
    return nn.Dense(self.num_classes)(x)


class Denoiser(nn.Module):
  """Residual convolutions of 3 x 3, shifted by an embedding of the time."""

  width: int
  num_layers: int

  @nn.compact
  def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
    """Maps images [batch, 8, 8] and times [batch] to images of noise."""
    angles = jnp.pi * time[:, None] * 2.0 ** jnp.arange(4)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    when = nn.silu(nn.Dense(self.width)(waves))
    x = nn.Conv(self.width, (3, 3))(images[..., None])
    for _ in range(self.num_layers):
      h = nn.GroupNorm(8)(x) + nn.Dense(self.width)(when)[:, None, None]
      h = nn.Conv(self.width, (3, 3))(nn.silu(h))
      x += nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(h)))
    return nn.Conv(1, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))[..., 0]


class CoAttention(VisionTransformer):
  """Two streams of tokens, each of which attends to the other.

  Source: the co-attentional transformer of ViLBERT, arXiv:1908.02265. Here
  each layer has cross-attention alone, without self-attention.
  """

  @nn.compact
  def __call__(self, images: jax.Array, is_noisy: bool = False) -> jax.Array:
    """Maps images [batch, 8, 8] to logits; the halves are the two inputs."""
    left, right = jnp.split(images, 2, axis=2)
    a = Patches(self.patch, self.width)(left)
    b = Patches(self.patch, self.width)(right)
    for _ in range(self.num_layers):
      one, other = (
        Attention(self.width, self.num_heads, self.dropout) for _ in range(2)
      )
      a, b = one(a, b, is_noisy), other(b, a, is_noisy)
    both = jnp.concatenate([a.mean(1), b.mean(1)], axis=1)
    return nn.Dense(self.num_classes)(nn.LayerNorm()(both))
