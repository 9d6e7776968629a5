"""A small model for local steps, on four replicas."""

import jax
import jax.numpy as jnp
import optax

from helpers import meshes
from helpers.meshes import AXIS

REPLICAS = 4
PARAMS = {
  "w": 0.1 * jax.random.normal(jax.random.key(1), (48, 64)),
  "v": 0.1 * jax.random.normal(jax.random.key(2), (64, 48)),
  "b": jnp.zeros(64),
}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def mesh_of(shape=(REPLICAS,), names=(AXIS,)):
  return meshes.mesh_of(shape, names=names)


def loss_fn(params, x):
  h = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
  return jnp.mean((h - x) ** 2)


def batch(step):
  return jax.random.normal(jax.random.key(step), (32, 48))
