"""Measures how the cost of a reducer grows with the model, against a floor.

  python -m experiments.lab.benchmarks.cost

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
results/data/growth.json.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent import futures
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from absl import app, flags

import edgc_jax
from edgc_jax.leaves.leaf import is_leaf_state
from edgc_jax.measure import timing
from edgc_jax.methods import linear_algebra
from edgc_jax.wire import cpu_backend
from experiments import ROOT
from experiments.lab import benchmarks
from experiments.lab.update_alone import (
  AXIS,
  gradients_like,
  update_alone,
)
from experiments.trainer.models import gpt2
from experiments.trainer.models.gpt2 import GPT2Config
from experiments.trainer.runs.run_folder import environment
from experiments.trainer.runtime import heap

_RANKS = flags.DEFINE_multi_integer(
  "rank", [8, 32], "A rank of powersgd and edgc (its least and largest)."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 7, "Number of timed rounds.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string(
  "output", str(ROOT / "results/data/growth.json"), "The JSON file."
)

MODELS = {
  "2M": GPT2Config(256, 128, 192, 4, 4),
  "11M": GPT2Config(256, 128, 384, 6, 6),
  "124M": GPT2Config(50304, 1024, 768, 12, 12),
  "355M": GPT2Config(50304, 1024, 1024, 24, 16),
}
_FLOAT32 = {"wire_dtype": "float32"}
_DEFAULT = 32  # edgc's largest rank, which it has at first
_PASSES = 4  # of the floor, in addition to its products

_SIZES = flags.DEFINE_multi_enum(
  "size", list(MODELS), list(MODELS), "A model, by number of parameters."
)


def main(argv: Sequence[str]) -> None:
  """Times all sizes and writes the file."""
  del argv
  tables = []
  for size in _SIZES.value:
    # In a new process, or one size's heap would slow down the next.
    with futures.ProcessPoolExecutor(1, get_context("spawn")) as pool:
      arguments = MODELS[size], _RANKS.value, _ROUNDS.value
      tables.append(pool.submit(_measure_alone, *arguments).result())
    print(tables[-1].to_string(index=False), flush=True)
  here = environment()
  benchmarks.write(
    _OUTPUT.value, "cost", pd.concat(tables).to_dict("records"),
    device=here["device"],
    versions=", ".join(f"{k} {v}" for k, v in here["versions"].items()),
    rounds=_ROUNDS.value,
  )  # fmt: skip


def _measure_alone(*arguments: Any) -> pd.DataFrame:
  """Does as `measure` in a new process."""
  cpu_backend.fit_thread_pool(1)
  heap.share_one_heap()
  return measure(*arguments)


def measure(
  model: GPT2Config, ranks: Sequence[int], rounds: int
) -> pd.DataFrame:
  """Measures all reducers on gradients of a model's shapes.

  Args:
    model: Sizes of the model.
    ranks: Ranks of powersgd and edgc.
    rounds: Number of timed rounds.

  Returns:
    The table, with a line per reducer; all cells are text.
  """
  shapes = gpt2.param_shapes(model)
  gradients = gradients_like(shapes)
  # By name: the transformation, its state, and the floor's rank.
  same = lambda state: state  # noqa: E731
  reducers = {
    "allreduce, bf16": (
      edgc_jax.allreduce(AXIS, wire_dtype="bfloat16"),
      same,
      0,
    )
  }
  for rank in ranks:
    powersgd = edgc_jax.powersgd(rank, AXIS, **_FLOAT32)
    edgc = edgc_jax.edgc(AXIS, rank_max=rank, rank_min=rank, **_FLOAT32)
    reducers |= {
      f"powersgd, rank {rank}": (powersgd, same, rank),
      f"edgc, rank {rank}": (edgc, same, rank),
      f"edgc by matrix, rank {rank}": (edgc, _by_matrix, rank),
    }
  default = (edgc_jax.edgc(AXIS, **_FLOAT32), same, _DEFAULT)
  reducers[f"edgc, default ladder, at rank {_DEFAULT}"] = default
  calls, memory, compilation = zip(
    *(update_alone(tx, gradients, state) for tx, state, _ in reducers.values()),
    strict=True,
  )
  copy = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree))
  floors = {rank: _products(gradients, shapes, rank)
            for rank in (*ranks, _DEFAULT)}  # fmt: skip
  heap.keep_freed_memory()
  copied, *times = timing.medians(
    [functools.partial(copy, gradients), *calls, *floors.values()], rounds
  )
  # allreduce reads a gradient and writes it rounded
  products = dict(zip(floors, times[len(calls) :], strict=True))
  floor = np.array(
    [
      _PASSES / 2 * copied + products[rank] if rank else copied
      for _, _, rank in reducers.values()
    ]
  )
  count = optax.tree.size(gradients)
  seconds = np.array(times[: len(calls)])
  table = {
    "ms": (seconds * 1e3, ".1f"),
    "ns a parameter": (seconds / count * 1e9, ".2f"),
    "floor, ms": (floor * 1e3, ".1f"),
    "time / floor": (seconds / floor, ".2f"),
    "temporary / gradient": (np.array(memory) / (4 * count), ".2f"),
    "compilation, s": (compilation, ".1f"),
  }
  return pd.DataFrame(
    {"parameters": f"{count:,}", "method": list(reducers)}
    | {
      name: [format(value, spec) for value in values]
      for name, (values, spec) in table.items()
    }
  )


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


if __name__ == "__main__":
  app.run(main)
