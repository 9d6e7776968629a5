"""Collectives: small leaves joined, parts rotated or swapped."""

import chex
import jax
import numpy as np
import pytest
from helpers.meshes import AXIS, between_hosts, mesh_of
from jax.sharding import PartitionSpec as P

from edgc_jax.measure import hlo
from edgc_jax.wire import collectives

REPLICAS = 4


def pmapped(fn, *args):
  """Returns a function's results on all replicas, and its program."""
  mapped = jax.pmap(
    lambda *args: fn(*args),  # a new function, which JAX compiles again
    axis_name=AXIS,
    devices=jax.devices()[: len(jax.tree.leaves(args)[0])],
  )
  return mapped(*args), mapped.lower(*args).compile().as_text()


def draw(*shape, dtype=np.float32):
  values = 100 * np.random.default_rng(0).standard_normal((REPLICAS, *shape))
  return values.astype(dtype)


def on_stages(fn, x, mesh, out_specs):
  """Returns a function's results on a mesh, and its program."""
  specs = P(mesh.axis_names) if mesh.shape["stage"] > 1 else P(AXIS)
  mapped = jax.jit(
    jax.shard_map(
      lambda x: fn(x), mesh=mesh, in_specs=specs, out_specs=out_specs
    )
  )
  return mapped(x), mapped.lower(x).compile().as_text()


def test_small_leaves_of_a_kind_are_one_operand():
  tree = {
    "a": draw(3, 5), "b": draw(), "c": draw(7, dtype=np.int32),
    "large": draw(600, 500), "none": draw(0),
  }  # fmt: skip
  with between_hosts():
    mean, program = pmapped(lambda t: collectives.mean(t, AXIS), tree)
    integers = [tree["c"], draw(2, 2, dtype=np.int32)]
    totals, _ = pmapped(lambda t: collectives.total(t, AXIS), integers)
  for total, leaf in zip(totals, integers, strict=True):
    np.testing.assert_array_equal(total[0], leaf.sum(0))
  for name, rtol, atol in (
    ("a", 1e-5, 1e-4), ("b", 1e-5, 1e-4), ("large", 1e-4, 1e-3),
  ):  # fmt: skip
    for found in mean[name]:
      np.testing.assert_allclose(found, tree[name].mean(0), rtol, atol)
  assert mean["none"].shape == (REPLICAS, 0)
  found = hlo.collectives_in_order(program)
  shapes = [shape for one in found for _, shape in one.results]
  assert sorted(shapes) == [(7,), (16,), (300_000,)]


SWAP, ROTATION = "all-gather", "collective-permute"


@pytest.mark.parametrize(
  ("fn", "devices", "kinds", "shifts"),
  [
    ("exchange_parts", 2, {SWAP}, [None]),
    ("exchange_parts", 3, {ROTATION}, [1, 2]),
    ("exchange_parts", 4, {ROTATION, SWAP}, [1, None, 3]),
    ("gather", 2, {"all-gather"}, [None]),
    ("gather", 4, {"all-gather"}, [None]),
  ],
)
def test_two_hosts_swap_and_others_rotate(fn, devices, kinds, shifts):
  run = lambda x: getattr(collectives, fn)(x, AXIS)  # noqa: E731
  x = draw(devices, 5, 10)[:devices]
  plain, inside = pmapped(run, x)
  with between_hosts():
    found, between = pmapped(run, x)
  np.testing.assert_array_equal(plain, found)
  sent = hlo.collectives_in_order(between)
  assert {one.kind for one in sent} == kinds
  assert shifts == [
    (one.pairs[0][1] - one.pairs[0][0]) % devices if one.pairs else None
    for one in sent
  ]
  whole, now = map(hlo.wire_bytes_outside_branches, (inside, between))
  # An all-reduce sends 2 (N - 1) / N times its counted bytes.
  share = 2 * (devices - 1) / devices if ROTATION in kinds else 1
  assert now == whole * share


def test_bits_are_exact():
  """Not a number, and zeros with a sign, as any other values."""
  x = np.array([[[np.nan, -0.0], [-np.inf, 1.0]]] * 2, np.float32)
  x.view(np.uint32)[:, :, 0] += np.arange(4, dtype=np.uint32).reshape(2, 2)
  with between_hosts():
    parts, _ = pmapped(lambda x: collectives.exchange_parts(x, AXIS), x)
    both, _ = pmapped(lambda x: collectives.gather(x, AXIS), x)
  bits = x.view(np.uint32)
  np.testing.assert_array_equal(
    np.asarray(parts).view(np.uint32), bits.swapaxes(0, 1)
  )
  for found in np.asarray(both).view(np.uint32):
    np.testing.assert_array_equal(found, bits)


@pytest.mark.parametrize("fn", [collectives.exchange_parts, collectives.gather])
def test_leaves_of_any_kind(fn):
  tree = [draw(4, 50), draw(4, 0), draw(4, 3, dtype=np.int8), draw(8)]
  run = lambda tree: fn(tree, AXIS)  # noqa: E731
  plain, _ = pmapped(run, tree)
  with between_hosts():
    cut, _ = pmapped(run, tree)
  chex.assert_trees_all_equal(plain, cut)


@pytest.mark.parametrize(
  ("replicas", "kind"), [(2, "all-gather"), (4, "all-to-all")]
)
def test_stages_do_not_wait_for_each_other(replicas, kind):
  """Each stage is in its own branch, as if ranks differed."""
  x = draw(2 * replicas, 5, 10).reshape(-1, 5, 10)[: 2 * replicas**2]

  def exchange(x):
    def run(scale):
      sent = collectives.exchange_parts(scale * x, AXIS)
      return sent, collectives.gather(sent[0], AXIS).max()[None]

    return jax.lax.cond(
      jax.lax.axis_index("stage") == 0, lambda: run(1.0), lambda: run(2.0)
    )

  where = mesh_of((2, replicas)), (P(("stage", AXIS)), P("stage"))
  plain, _ = on_stages(exchange, x, *where)
  with between_hosts():
    found, program = on_stages(exchange, x, *where)
  chex.assert_trees_all_equal(plain, found)
  assert f" {kind}(" in program
  assert " collective-permute(" not in program
