"""Tests the benchmark of cost by model size, without its timings."""

from unittest import mock

import jax.numpy as jnp
from helpers import float32

from experiments.lab.benchmarks import cost
from experiments.trainer.models.gpt2 import GPT2Config

MODEL = GPT2Config(64, 32, 16, 1, 2)


def measured(ranks, medians):
  """Returns the table by method, with given times in place of measured ones.

  Args:
    ranks: As for `cost.measure`.
    medians: Returns the times of calls.
  """
  with (
    mock.patch.object(cost, "update_alone", return_value=("update", 1, 1.0)),
    mock.patch.object(cost, "_products", lambda _, shapes, rank: rank),
    mock.patch.object(cost.heap, "keep_freed_memory"),
    mock.patch.object(cost.timing, "medians", lambda calls, _: medians(calls)),
  ):
    return cost.measure(MODEL, ranks, rounds=1).set_index("method")


def test_every_time_is_compared_with_the_floor_of_its_rank():
  """Products of rank r take r ms, a copy 1 ms, and every update 40 ms."""

  def medians(calls):
    copy, *others = calls
    assert callable(copy)
    return [0.001, *(0.04 if x == "update" else x / 1e3 for x in others)]

  table = measured([8], medians)
  assert set(table.index) == {
    "allreduce, bf16", "powersgd, rank 8", "edgc, rank 8",
    "edgc by matrix, rank 8", "edgc, default ladder, at rank 32",
  }  # fmt: skip
  assert set(table["ms"]) == {"40.0"}
  for name, floor in (
    ("allreduce, bf16", "1.0"), ("powersgd, rank 8", "10.0"),  # and two copies
    ("edgc by matrix, rank 8", "10.0"),
    ("edgc, default ladder, at rank 32", "34.0"),
  ):  # fmt: skip
    assert table["floor, ms"][name] == floor
  assert table["time / floor"]["edgc, rank 8"] == "4.00"


def test_ranks_by_matrix_send_the_same_bytes():
  """A quarter of the four matrices has twice the rank, others less."""
  params = {"a": jnp.zeros((4, 64, 64)), "b": jnp.zeros((64, 96)),
            "bias": jnp.zeros(64)}  # fmt: skip
  tx = float32.edgc(rank_max=8, rank_min=8)
  state = cost._by_matrix(tx.init(params))
  assert state.allocation.ranks.tolist() == [16, 5, 5, 5, 8]
