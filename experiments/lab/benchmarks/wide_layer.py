"""Measures what methods lose on a wide layer and on a narrow one.

  python -m experiments.lab.benchmarks.wide_layer

Trains the protocol's model dense, once as it is and once 8 times as wide, and
records the gradients that each replica has of one matrix, `mlp_in`: 128 x 512,
and 1024 x 4096. Every method then averages the recorded gradients, at the same
bits an entry, with its own error feedback. In narrow models the rank of a
budget is a larger part of the width; this says what that costs. The result is
results/data/wide_layer.json.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

import edgc_jax
from configs.protocol import gpt
from experiments import ROOT
from experiments.lab import benchmarks
from experiments.trainer import tasks
from experiments.trainer.training import optimizer

_STEPS = flags.DEFINE_integer("steps", 100, "Training steps.", lower_bound=1)
_MEASURED = flags.DEFINE_integer(
  "measured", 20, "Last steps, to measure.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  "output", str(ROOT / "results/data/wide_layer.json"), "The file."
)

WIDTHS = (128, 1024)
BITS = (2.0, 1.0, 0.5)
_AXIS, _REPLICAS = "data", 4
_RATES = {128: 8e-3, 1024: 1e-3}  # wider models need lower ones


def main(argv: Sequence[str]) -> None:
  """Measures both widths and writes the file."""
  del argv
  lines = [line for width in WIDTHS for line in measure(width)]
  benchmarks.write(
    _OUTPUT.value, "benchmarks.wide_layer", lines, steps=_STEPS.value,
    measured=_MEASURED.value,
  )  # fmt: skip


def arms_of(rows: int, cols: int) -> dict[str, optax.GradientTransformation]:
  """Returns the methods by name, with ranks that spend the bits on a matrix."""
  arms: dict[str, optax.GradientTransformation] = {
    f"quantize, {bits} bits": edgc_jax.quantize(bits, error_feedback=True)
    for bits in (8, 4)
  }
  arms["topk, 1 %"] = edgc_jax.topk(0.01)
  for bits in BITS:
    for wire, each in (("bfloat16", 16), ("int8", 8), ("int4", 4)):
      rank = round(bits * rows * cols / (each * (rows + cols)))
      if rank >= 1:
        arms[f"powersgd {rank}, {wire}"] = edgc_jax.powersgd(
          rank, wire_dtype=wire, min_ratio=1.0
        )
  return arms


def measure(width: int) -> Iterator[dict[str, Any]]:
  """Yields a line for each method: bits an entry, and shares of energy lost.

  `step` is the mean over steps of the energy that one update lacks of the mean
  gradient: |update - mean|^2 / |mean|^2. `sum` is the same of the sums over all
  steps, in which error feedback has made up for most of it.
  """
  gradients = list(_recorded(width))
  params = {"w": jax.ShapeDtypeStruct(gradients[0].shape[1:], jnp.float32)}
  for name, tx in arms_of(*gradients[0].shape[1:]).items():
    axes = edgc_jax.state_axes(tx, params)
    size = {"axis_name": _AXIS, "axis_size": _REPLICAS}
    init = jax.vmap(tx.init, in_axes=None, out_axes=axes, **size)
    update = jax.jit(
      jax.vmap(
        tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=_AXIS
      )
    )
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
    state, lost, total, sent = init(zeros), [], 0.0, 0.0
    for i, g in enumerate(gradients):
      updates, state = update({"w": g}, state)
      if i < len(gradients) - _MEASURED.value:
        continue
      mean = g.mean(0)
      lost.append(_share(updates["w"] - mean, mean))
      total, sent = total + mean, sent + updates["w"]
    numbers = edgc_jax.metrics(state)
    line = {
      "width": width,
      "arm": name,
      "bits": 8 * float(jnp.sum(numbers["wire_bytes"])) / gradients[0][0].size,
      "step": sum(lost) / len(lost),
      "sum": _share(sent - total, total),
    }
    print(line, flush=True)
    yield line


def _share(left: jax.Array, whole: jax.Array) -> float:
  return float(jnp.sum(left**2) / jnp.sum(whole**2))


def _recorded(width: int) -> Iterator[jax.Array]:
  """Trains dense, and yields the replicas' gradients [4, m, n] of a matrix."""
  config = gpt.get_config("allreduce")
  config.model.update(width=width, num_layers=1)
  config.optimizer.lr = _RATES[width]
  config.optimizer.warmup_steps = _STEPS.value // 2
  config.steps = _STEPS.value
  task = tasks.make(config)
  tx = optax.chain(
    optax.clip_by_global_norm(config.optimizer.clip_norm),
    optax.adamw(optimizer.make_schedule(config), b2=config.optimizer.b2),
  )
  params = jax.jit(task.init)(jax.random.key(0))
  opt_state = tx.init(params)

  @jax.jit
  def step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
    parts = batch.reshape(_REPLICAS, -1, batch.shape[-1])
    grads = jax.vmap(
      lambda rows: jax.grad(lambda p: task.evaluate(p, rows)["loss"])(params)
    )(parts)
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    updates, opt_state = tx.update(mean, opt_state, params)
    own = grads["blocks"]["mlp_in"]["kernel"][:, 0]
    return optax.apply_updates(params, updates), opt_state, own

  batches = task.train_batches(config.batch_size, 0, slice(None))
  for _ in range(_STEPS.value):
    params, opt_state, own = step(params, opt_state, next(batches))
    yield own


if __name__ == "__main__":
  app.run(main)
