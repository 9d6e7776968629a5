"""Measures how the cost of a reducer grows with the model, against a floor.

  python -m experiments.benchmarks.cost

Runs on one device with random gradients of GPT-2's shapes, 2M to 355M
parameters. Nothing is sent and no model runs, so this times the transformation
alone. The floor is the time of the same device for the same multiplications
and memory traffic, one after the other:

  4 products: M Q, M^T P and twice P Q^T, each reads or writes a gradient
  4 more passes over a gradient: to read the gradient and the residual, to
    write their sum, and to read it again for the new residual

The products are timed on all matrices, the passes as copies of two passes each.

`edgc` is timed with one rank for all matrices, as in its first window, and with
ranks by matrix as they are in training: a quarter of a stack's matrices have
twice the rank, the others less, at the same bytes. It is also timed with its
default ladder, at rank 32. `make pages` makes a table of the result,
docs/growth.json.
"""

import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.leaves.leaf import is_leaf_state
from edgc_jax.methods import linear_algebra
from edgc_jax.wire import cpu_backend
from experiments.models import gpt2
from experiments.models.gpt2 import GPT2Config
from experiments.runs.run_folder import environment
from experiments.runtime import heap

_SIZES = flags.DEFINE_list(
  "sizes", ["2M", "11M", "124M", "355M"], "Models, by number of parameters."
)
_RANKS = flags.DEFINE_list(
  "ranks", ["8", "32"], "Ranks of powersgd and edgc (its least and largest)."
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Number of timed rounds.")
_OUTPUT = flags.DEFINE_string("output", "docs/growth.json", "The JSON file.")

MODELS = {
  "2M": GPT2Config(256, 128, 192, 4, 4),
  "11M": GPT2Config(256, 128, 384, 6, 6),
  "124M": GPT2Config(50304, 1024, 768, 12, 12),
  "355M": GPT2Config(50304, 1024, 1024, 24, 16),
}
_AXIS = "data"
_DEFAULT = 32  # edgc's largest rank, which it has at first
_PASSES = 4  # of the floor, in addition to its products
_HEADINGS = (
  "parameters", "method", "ms", "ns a parameter", "floor, ms", "time / floor",
  "temporary / gradient", "compilation, s",
)  # fmt: skip


def main(argv: Sequence[str]) -> None:
  """Times all sizes and writes the file."""
  del argv
  unknown = set(_SIZES.value) - MODELS.keys()
  if unknown:
    sys.exit(
      f"error: `--sizes` must be among {', '.join(MODELS)}, got"
      f" {unknown.pop()!r}."
    )
  ranks = [int(rank) for rank in _RANKS.value]
  lines: list[list[str]] = []
  for size in _SIZES.value:
    # In a new process, or one size's heap would slow down the next.
    with futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
      found, device = pool.submit(_measure, size, ranks, _ROUNDS.value).result()
    lines += found
    for line in found:
      print(" | ".join(line), flush=True)
  here = environment()
  about = {
    "command": " ".join(
      ["python -m experiments.benchmarks.cost", *sys.argv[1:]]
    ),
    "commit": here["commit"],
    "device": device,
    "versions": ", ".join(f"{k} {v}" for k, v in here["versions"].items()),
    "rounds": _ROUNDS.value,
  }
  found = {
    "about": about,
    "lines": [dict(zip(_HEADINGS, line, strict=True)) for line in lines],
  }
  file = pathlib.Path(_OUTPUT.value)
  file.write_text(json.dumps(found, indent=1) + "\n")


def _measure(
  size: str, ranks: Sequence[int], rounds: int
) -> tuple[list[list[str]], str]:
  """Returns the lines of a size and the device; runs in a new process."""
  cpu_backend.fit_thread_pool(1)
  heap.share_one_heap()
  device = jax.devices()[0]
  about = f"{device.platform}, {device.device_kind}"
  return measure(MODELS[size], ranks, rounds), about


def measure(
  model: GPT2Config, ranks: Sequence[int], rounds: int
) -> list[list[str]]:
  """Measures all reducers on gradients of a model's shapes.

  Args:
    model: Sizes of the model.
    ranks: Ranks of powersgd and edgc.
    rounds: Number of timed rounds.

  Returns:
    The cells of a table, with a line per reducer.
  """
  shapes = gpt2.param_shapes(model)
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  draw = jax.random.normal
  gradients = jax.jit(
    lambda: jax.tree.map(
      lambda leaf: draw(jax.random.key(leaf.size), leaf.shape), shapes
    )
  )()
  reducers: dict[str, optax.GradientTransformation] = {
    "allreduce, bf16": edgc_jax.allreduce(_AXIS, wire_dtype="bfloat16")
  }
  for rank in ranks:
    reducers[f"powersgd, rank {rank}"] = edgc_jax.powersgd(rank, _AXIS)
    adaptive = edgc_jax.edgc(_AXIS, rank_max=rank, rank_min=rank)
    reducers[f"edgc, rank {rank}"] = adaptive
    reducers[f"edgc by matrix, rank {rank}"] = adaptive
  reducers[f"edgc, defaults, at rank {_DEFAULT}"] = edgc_jax.edgc(_AXIS)
  calls, cost = {}, {}
  for name, tx in reducers.items():
    ranks_of = _by_matrix if "by matrix" in name else lambda state: state
    calls[name], *cost[name] = _update(tx, gradients, ranks_of)
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
  calls |= {
    f"products {rank}": _products(gradients, shapes, rank)
    for rank in {*ranks, _DEFAULT}
  }
  calls["copy"] = functools.partial(copy, gradients)
  heap.keep_freed_memory()
  seconds = {
    name: float(np.median(each))
    for name, each in _alternate(calls, rounds).items()
  }
  lines, size = [], optax.tree.size(gradients) * 4
  for name in reducers:
    memory, compilation = cost[name]
    floor = seconds["copy"]  # allreduce reads a gradient and writes it rounded
    if not name.startswith("allreduce"):
      rank = name.rsplit(maxsplit=1)[1]
      floor = _PASSES / 2 * seconds["copy"] + seconds[f"products {rank}"]
    lines.append(
      [
        f"{count:,}", name, f"{seconds[name] * 1e3:.1f}",
        f"{seconds[name] / count * 1e9:.2f}", f"{floor * 1e3:.1f}",
        f"{seconds[name] / floor:.2f}", f"{memory / size:.2f}",
        f"{compilation:.1f}",
      ]
    )  # fmt: skip
  return lines


def _update(
  tx: optax.GradientTransformation,
  gradients: Any,
  ranks_of: Callable[[Any], Any],
) -> tuple[Callable[[], Any], int, float]:
  """Compiles an update that carries its state.

  Returns:
    The update, its temporary bytes, and the seconds of tracing and compiling.
  """
  mesh = Mesh(np.array(jax.devices()[:1]), (_AXIS,))
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = ranks_of(jax.jit(on_device(tx.init))(gradients))

  # The state first: JAX lends the memory of a donated array to the first
  # output of its shape.
  def state_first(gradients: Any, state: Any) -> Any:
    updates, state = on_device(tx.update)(gradients, state)
    return state, updates

  update = jax.jit(state_first, donate_argnums=1)
  start = time.perf_counter()
  compiled = update.lower(gradients, state).compile()
  seconds = time.perf_counter() - start

  def run() -> Any:
    nonlocal state
    state, updates = compiled(gradients, state)
    return state, updates

  return run, compiled.memory_analysis().temp_size_in_bytes, seconds


def _by_matrix(state: Any) -> Any:
  """Gives a quarter of each stack's matrices twice the rank, others less."""
  ranks, start = np.array(state.allocation.ranks), 0
  for leaf in jax.tree.leaves(state.leaves, is_leaf=is_leaf_state):
    if leaf.stats is None:  # it is always sent dense
      continue
    own = ranks[start : start + len(leaf.stats.rank)]  # a view
    start += len(own)
    wide = -(-len(own) // 4)
    if len(own) > 1:
      own[wide:] -= -(-own[0] * wide // (len(own) - wide))
      own[:wide] *= 2
  allocation = state.allocation._replace(ranks=jnp.array(ranks))
  return state._replace(allocation=allocation)


def _products(gradients: Any, shapes: Any, rank: int) -> Callable[[], Any]:
  """Compiles the products of an exchange of all matrices."""
  views = [
    edgc_jax.layer_matrix(jax.tree_util.keystr(path), leaf.shape)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
  ]

  @jax.jit
  def multiply(gradients: Any) -> Any:
    results = []
    for leaf, view in zip(jax.tree.leaves(gradients), views, strict=True):
      if view is None:
        continue
      m, is_tall = leaf.reshape(view), view.rows > view.cols
      # Any factors of this shape.
      q = jnp.swapaxes(m[..., :rank], 1, 2) if is_tall else m[:, :rank]
      to_p, to_q, outer = (
        jax.vmap(functools.partial(function, is_first_tall))
        for function, is_first_tall in (
          (linear_algebra.product, is_tall),
          (linear_algebra.product, not is_tall),
          (linear_algebra.outer_product, is_tall),
        )
      )
      p = to_p(q, m)
      q = to_q(p, m)
      results += [outer(p, q), outer(p, -q)]
    return results

  return functools.partial(multiply, gradients)


def _alternate(
  calls: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
  """Times functions in turn, so that other load on the machine hits them all.

  Returns:
    Seconds of each call by name; one more call compiles.
  """
  seconds: dict[str, list[float]] = {name: [] for name in calls}
  for call in calls.values():
    jax.block_until_ready(call())
  for _ in range(rounds):
    for name, call in calls.items():
      start = time.perf_counter()
      jax.block_until_ready(call())
      seconds[name].append(time.perf_counter() - start)
  return seconds


if __name__ == "__main__":
  app.run(main)
