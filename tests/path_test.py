"""The path of one `update` through the package stays short.

A reader who follows `update` moves from file to file. The test counts, while
JAX traces one `update`, the files whose functions are called, and the moves: a
call of a function that lies in another file than the function called last.
"""

import os
import pathlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from helpers.flat_options import edgc

import edgc_jax

PACKAGE = f"{pathlib.Path(edgc_jax.__file__).parent}{os.sep}"
PARAMS = {
  "embedding": jnp.zeros((256, 192)),
  "layers": {
    "bias": jnp.zeros((4, 768)),
    "expand": jnp.zeros((4, 192, 768)),
    "contract": jnp.zeros((4, 768, 192)),
  },
  "norm": jnp.zeros(192),
}
# The settings of configs/gpt2_tiny.py: four ranks.
TINY = {
  "rank_max": 28, "rank_min": 22, "rank_multiple": 2, "window": 10,
  "warmup_steps": 20, "max_warmup_steps": 40, "step_rate": 1.0,
  "entry_rate": 0.05,
}  # fmt: skip
# Python 3.12 and later run these without a call.
_INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")


class Path(NamedTuple):
  files: set[str]
  moves: list[str]  # the files, in the order of the calls


def path_of(tx):
  """Traces one `update` and returns its path."""
  path, last = Path(set(), []), None

  def on_event(frame, event, _):
    nonlocal last
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(PACKAGE):
      return
    if code.co_name in _INLINED:
      return
    file = code.co_filename.removeprefix(PACKAGE)
    path.files.add(file)
    if file != last:
      path.moves.append(f"{file} {code.co_name}")
    last = file

  def update(gradients, state):
    sys.setprofile(on_event)
    try:
      return tx.update(gradients, state, PARAMS)
    finally:
      sys.setprofile(None)

  state = tx.init(PARAMS)
  replicas = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS)
  jax.eval_shape(
    jax.vmap(update, axis_name="data", in_axes=(0, None)), replicas, state
  )
  return path


class PathTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("edgc", lambda: edgc(**TINY), 20, 250),
    ("powersgd", lambda: edgc_jax.powersgd(8), 15, 100),
    ("allreduce", edgc_jax.allreduce, 15, 100),
    ("topk", lambda: edgc_jax.topk(0.01), 15, 120),
  )
  def test_files_and_moves(self, make, most_files, most_moves):
    path = path_of(make())
    self.assertLessEqual(len(path.files), most_files, sorted(path.files))
    self.assertLessEqual(len(path.moves), most_moves, "\n".join(path.moves))

  def test_every_call_is_seen(self):
    """An update passes at least through its reducer and the collectives."""
    path = path_of(edgc_jax.powersgd(8))
    self.assertContainsSubset(
      {"comm/collectives.py", "compression/low_rank.py"}, path.files
    )
    self.assertIn("reducers/base.py update", path.moves)


if __name__ == "__main__":
  absltest.main()
