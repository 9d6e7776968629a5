"""What a method of your own is made of.

A method says how one leaf of the gradient is averaged; `reducer` makes a
gradient transformation of it. docs/writing_a_method.md explains the parts, and
examples/own_method.py is one.
"""

from edgc_jax.leaves.leaf import Leaf, LeafState
from edgc_jax.methods.entrywise import entrywise
from edgc_jax.reducer.of_method import reducer
from edgc_jax.reducer.rounds import (
  Draws,
  Each,
  Energies,
  Method,
  Outcome,
  added,
)
from edgc_jax.wire.wire import Reply, Send

__all__ = [
  "Draws",
  "Each",
  "Energies",
  "Leaf",
  "LeafState",
  "Method",
  "Outcome",
  "Reply",
  "Send",
  "added",
  "entrywise",
  "reducer",
]
