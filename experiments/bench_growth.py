"""How the cost of a reducer grows with the model, and what it can be at least.

  python experiments/bench_growth.py

One device, GPT-2's shapes of 2M to 355M parameters, random gradients: nothing
is sent and no model is run, so what is timed is the transformation alone. Its
floor is what the same device needs to multiply and to move as much:

  3 products, M Q, M^T P and P Q^T, which read or write a gradient each
  4 passes more: the gradient and the residual are read, the update and the
    new residual written

by the times of M Q for all its matrices, and of a copy, which is two passes.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import edgc_jax
from experiments import gpt2, heap, measurements
from experiments.gpt2 import GPT2Config
from experiments.run_folder import environment

_SIZES = flags.DEFINE_list("sizes", ["2M", "11M", "124M", "355M"], "Models.")
_RANKS = flags.DEFINE_list("ranks", ["8", "32"], "Ranks.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "How often each is timed.")
_OUTPUT = flags.DEFINE_string("output", "docs/growth.md", "The page.")

MODELS = {
  "2M": GPT2Config(256, 128, 192, 4, 4),
  "11M": GPT2Config(256, 128, 384, 6, 6),
  "124M": GPT2Config(50304, 1024, 768, 12, 12),
  "355M": GPT2Config(50304, 1024, 1024, 24, 16),
}
_AXIS = "data"
_PASSES, _PRODUCTS = 4, 3  # see above
_MARK = "<!-- Made by experiments/bench_growth.py: do not edit. -->"


def main(argv: Sequence[str]) -> None:
  """Times all sizes, and writes the page."""
  del argv
  unknown = set(_SIZES.value) - MODELS.keys()
  if unknown:
    sys.exit(
      f"error: `--sizes` must be of {', '.join(MODELS)}, got {unknown.pop()!r}."
    )
  ranks = [int(rank) for rank in _RANKS.value]
  lines = [
    [
      "parameters", "method", "ms", "ns a parameter", "floor, ms",
      "time / floor", "temporary, MB",
    ]
  ]  # fmt: skip
  for size in _SIZES.value:
    found = measure(MODELS[size], ranks, _ROUNDS.value)
    lines += found
    for line in found:
      print(" | ".join(line), flush=True)
  page = pathlib.Path(_OUTPUT.value)
  page.parent.mkdir(parents=True, exist_ok=True)
  page.write_text("\n".join([*_heading(), *_table(lines)]) + "\n")


def measure(
  model: GPT2Config, ranks: Sequence[int], rounds: int
) -> list[list[str]]:
  """A line of the table for each reducer.

  Args:
    model: Whose shapes the gradients have.
    ranks: Of powersgd and edgc.
    rounds: How often each is timed.

  Returns:
    The cells.
  """
  shapes = gpt2.param_shapes(model)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  draw = jax.random.normal
  gradients = jax.jit(
    lambda: jax.tree.map(
      lambda leaf: draw(jax.random.key(leaf.size), leaf.shape), shapes
    )
  )()
  options = {"matrix_view": gpt2.matrix_view}
  reducers: dict[str, optax.GradientTransformation] = {
    "allreduce, bf16": edgc_jax.allreduce(
      _AXIS, wire_dtype="bfloat16", **options
    )
  }
  for rank in ranks:
    reducers[f"powersgd, rank {rank}"] = edgc_jax.powersgd(
      rank, _AXIS, **options
    )
    reducers[f"edgc, rank {rank}"] = edgc_jax.edgc(
      _AXIS, rank_max=rank, rank_min=rank, **options
    )
  calls, memory = {}, {}
  for name, tx in reducers.items():
    calls[name], memory[name] = _update(tx, gradients)
  rates = {rank: _product(shapes, rank) for rank in ranks}
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
  calls |= {f"product {rank}": rates[rank] for rank in ranks}
  calls["copy"] = functools.partial(copy, gradients)
  heap.keep_freed_memory()
  seconds = {
    name: float(np.median(each))
    for name, each in measurements.alternate(calls, rounds).items()
  }
  lines = []
  for name in reducers:
    floor = seconds["copy"]  # what is dense is read, and written rounded
    if not name.startswith("allreduce"):
      floor *= _PASSES / 2
      floor += _PRODUCTS * seconds[f"product {name.rsplit(maxsplit=1)[1]}"]
    lines.append(
      [
        f"{count:,}", name, f"{seconds[name] * 1e3:.1f}",
        f"{seconds[name] / count * 1e9:.2f}", f"{floor * 1e3:.1f}",
        f"{seconds[name] / floor:.2f}", f"{memory[name] / 1e6:.0f}",
      ]
    )  # fmt: skip
  return lines


def _update(
  tx: optax.GradientTransformation, gradients: Any
) -> tuple[Callable[[], Any], int]:
  """An update that goes on from its own state, and its temporary bytes."""
  mesh = Mesh(np.array(jax.devices()[:1]), (_AXIS,))
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.jit(on_device(tx.init))(gradients)
  update = jax.jit(on_device(tx.update), donate_argnums=1)
  compiled = update.lower(gradients, state).compile()

  def run() -> Any:
    nonlocal state
    updates, state = compiled(gradients, state)
    return updates

  return run, compiled.memory_analysis().temp_size_in_bytes


def _product(shapes: Any, rank: int) -> Callable[[], jax.Array]:
  """M Q of all matrices."""
  views = [
    view
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    if (view := gpt2.matrix_view(jax.tree_util.keystr(path), leaf.shape))
  ]
  matrices = [jnp.ones(view) for view in views]
  factors = [jnp.ones((view[0], view[2], rank)) for view in views]
  multiply = jax.jit(lambda m, q: jax.tree.map(jnp.matmul, m, q))
  return functools.partial(multiply, matrices, factors)


def _heading() -> list[str]:
  about = environment()
  device = jax.devices()[0]
  command = " ".join(["python experiments/bench_growth.py", *sys.argv[1:]])
  versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
  return [
    _MARK,
    "",
    "# Cost of the transformations by size of the model",
    "",
    f"`{command}`, commit {about['commit']}; {device.platform},"
    f" {device.device_kind}; {versions}. Medians of {_ROUNDS.value} rounds, all"
    " in turn.",
    "",
    "One device, random gradients of GPT-2's shapes: nothing is sent, and no"
    " model is run. The floor is what the device needs for"
    f" {_PRODUCTS} products of all its matrices with a factor, by the time of"
    f" one, and for {_PASSES} passes over it besides, by the time of a copy."
    " Temporary memory is the compiler's account, beside gradients,"
    " updates and state, which is donated.",
    "",
  ]


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
  lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
  return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
  app.run(main)
