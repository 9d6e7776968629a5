"""Collectives: small leaves joined, parts rotated or swapped."""

import contextlib

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


def test_small_leaves_of_a_kind_are_one_operand():
  tree = {
    "a": draw(3, 5),
    "b": draw(),
    "c": draw(7, dtype=np.int32),
    "large": draw(600, 500),
    "none": draw(0),
  }
  with between_hosts():
    mean, program = pmapped(lambda t: collectives.mean(t, AXIS), tree)
  expected = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), tree)
  small = lambda tree: (tree["a"], tree["b"])  # noqa: E731
  chex.assert_trees_all_close(
    small(mean), small(expected), rtol=1e-5, atol=1e-4
  )
  np.testing.assert_allclose(
    mean["large"], expected["large"], rtol=1e-4, atol=1e-3
  )
  assert mean["none"].shape == (REPLICAS, 0)
  shapes = [
    shape
    for collective in hlo.collectives_in_order(program)
    for _, shape in collective.results
  ]
  assert sorted(shapes) == [(7,), (16,), (300_000,)]


def test_totals_of_integers_are_exact():
  tree = [draw(3, dtype=np.int32), draw(2, 2, dtype=np.int32)]
  with between_hosts():
    total, _ = pmapped(lambda t: collectives.total(t, AXIS), tree)
  chex.assert_trees_all_equal(
    [leaf[0] for leaf in total], [leaf.sum(0) for leaf in tree]
  )


def run_both(fn, x):
  """Returns collectives between hosts, and bytes elsewhere and there."""
  plain, inside = pmapped(fn, x)
  with between_hosts():
    sent, between = pmapped(fn, x)
  np.testing.assert_array_equal(plain, sent)
  counts = [hlo.wire_bytes_outside_branches(x) for x in (inside, between)]
  return hlo.collectives_in_order(between), *counts


@pytest.mark.parametrize(
  ("devices", "shifts"), [(3, [1, 2]), (4, [1, None, 3])]
)
def test_parts_arrive_by_rotations(devices, shifts):
  """In a rotation by half, devices swap."""
  x = draw(devices, 5, 10)[:devices]
  sent, whole, rotated = run_both(
    lambda x: collectives.exchange_parts(x, AXIS), x
  )
  found = [
    (one.pairs[0][1] - one.pairs[0][0]) % devices if one.pairs else None
    for one in sent
  ]
  assert found == shifts
  kinds = {"collective-permute", "reduce-scatter"}
  assert {one.kind for one in sent} <= kinds
  # An all-reduce sends 2 (N - 1) / N times its counted bytes.
  assert rotated == whole * 2 * (devices - 1) // devices


def test_two_swap_parts():
  sent, whole, swapped = run_both(
    lambda x: collectives.exchange_parts(x, AXIS), draw(2, 5, 10)[:2]
  )
  assert [one.kind for one in sent] == ["reduce-scatter"]
  assert swapped == whole


def test_swapped_bits_are_exact():
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
  ("replicas", "kind"), [(2, "reduce-scatter"), (4, "all-to-all")]
)
def test_stages_do_not_wait_for_each_other(replicas, kind):
  """Each stage is in its own branch, as if ranks differed."""
  mesh = mesh_of((2, replicas))
  x = draw(2 * replicas, 5, 10).reshape(-1, 5, 10)[: 2 * replicas**2]

  def exchange(x):
    def run(scale):
      sent = collectives.exchange_parts(scale * x, AXIS)
      return sent, collectives.gather(sent[0], AXIS).max()[None]

    return jax.lax.cond(
      jax.lax.axis_index("stage") == 0, lambda: run(1.0), lambda: run(2.0)
    )

  specs = P(("stage", AXIS))
  found = []
  for context in (contextlib.nullcontext(), between_hosts()):
    with context:
      # A new function, as above.
      mapped = jax.jit(
        jax.shard_map(
          lambda x: exchange(x),
          mesh=mesh,
          in_specs=specs,
          out_specs=(specs, P("stage")),
        )
      )
      found.append(mapped(x))
      program = mapped.lower(x).compile().as_text()
  chex.assert_trees_all_equal(*found)
  assert f" {kind}(" in program
  assert " collective-permute(" not in program


@pytest.mark.parametrize(
  ("devices", "kind"), [(2, "reduce-scatter"), (4, "all-gather")]
)
def test_two_swap_what_they_gather(devices, kind):
  sent, whole, swapped = run_both(
    lambda x: collectives.gather(x, AXIS), draw(6, 8)[:devices]
  )
  assert [one.kind for one in sent] == [kind]
  assert swapped == whole


def test_two_gather_where_types_must_be_equal():
  """A swap differs by device for JAX, if it tracks that."""
  mesh, x = mesh_of((1, 2)), draw(6, 8)[:2].reshape(-1, 8)

  def run():
    # A new function, as above.
    gather = jax.jit(
      jax.shard_map(
        lambda x: collectives.gather(x, AXIS),
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=P(),
      )
    )
    return gather(x)

  plain = run()
  with between_hosts():
    np.testing.assert_array_equal(plain, run())
