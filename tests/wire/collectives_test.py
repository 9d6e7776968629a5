"""Collectives: small leaves joined, parts rotated, messages cut."""

import contextlib

import chex
import jax
import numpy as np
from absl.testing import absltest, parameterized
from helpers import hlo
from helpers.meshes import AXIS, between_hosts, mesh_of
from jax.sharding import PartitionSpec as P

from edgc_jax.wire import collectives, cpu_backend

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


class JoinedTest(absltest.TestCase):
  """Joined leaves between pretended CPU hosts."""

  def test_small_leaves_of_a_kind_are_one_operand(self):
    tree = {
      "a": draw(3, 5), "b": draw(), "c": draw(7, dtype=np.int32),
      "large": draw(600, 500), "none": draw(0),
    }  # fmt: skip
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
    self.assertEqual(mean["none"].shape, (REPLICAS, 0))
    shapes = [
      shape
      for collective in hlo.collectives_in_order(program)
      for _, shape in collective.results
    ]
    self.assertCountEqual(shapes, [(16,), (7,), (300_000,)])

  def test_totals_of_integers_are_exact(self):
    tree = [draw(3, dtype=np.int32), draw(2, 2, dtype=np.int32)]
    with between_hosts():
      total, _ = pmapped(lambda t: collectives.total(t, AXIS), tree)
    chex.assert_trees_all_equal(
      [leaf[0] for leaf in total], [leaf.sum(0) for leaf in tree]
    )


class MessagesTest(parameterized.TestCase):
  """Messages between pretended CPU hosts."""

  def run_both(self, fn, x):
    """Returns collectives with messages, and bytes without and with them."""
    plain, in_one = pmapped(fn, x)
    with between_hosts(64):
      cut, in_many = pmapped(fn, x)
    np.testing.assert_array_equal(plain, cut)
    sent = [hlo.wire_bytes_outside_branches(x) for x in (in_one, in_many)]
    return hlo.collectives_in_order(in_many), *sent

  @parameterized.parameters((3, [1, 2]), (4, [1, 2, 2, 2, 3]))
  def test_parts_arrive_by_rotations(self, devices, shifts):
    """A rotation by half is cut: 50 values into 3 messages."""
    x = draw(devices, 5, 10)[:devices]
    sent, whole, rotated = self.run_both(
      lambda x: collectives.exchange_parts(x, AXIS), x
    )
    self.assertEqual({one.kind for one in sent}, {"collective-permute"})
    found = [(one.pairs[0][1] - one.pairs[0][0]) % devices for one in sent]
    self.assertEqual(found, shifts)
    # An all-reduce sends 2 (N - 1) / N times its counted bytes.
    self.assertEqual(rotated, whole * 2 * (devices - 1) // devices)

  def test_two_swap_parts(self):
    """They swap 50 values in 3 messages."""
    x = draw(2, 5, 10)[:2]
    sent, whole, cut = self.run_both(
      lambda x: collectives.exchange_parts(x, AXIS), x
    )
    self.assertEqual([one.kind for one in sent], ["all-gather"] * 3)
    self.assertEqual(cut, whole)

  @parameterized.parameters(collectives.exchange_parts, collectives.gather)
  def test_leaves_of_any_kind(self, fn):
    tree = [draw(4, 50), draw(4, 0), draw(4, 3, dtype=np.int8), draw(8)]
    run = lambda tree: fn(tree, AXIS)  # noqa: E731
    plain, _ = pmapped(run, tree)
    with between_hosts(64):
      cut, _ = pmapped(run, tree)
    chex.assert_trees_all_equal(plain, cut)

  @parameterized.parameters((2, "all-gather"), (4, "all-to-all"))
  def test_stages_do_not_wait_for_each_other(self, replicas, kind):
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
    for context in (contextlib.nullcontext(), between_hosts(64)):
      with context:
        # A new function, as above.
        mapped = jax.jit(
          jax.shard_map(
            lambda x: exchange(x), mesh=mesh, in_specs=specs,
            out_specs=(specs, P("stage")),
          )
        )  # fmt: skip
        found.append(mapped(x))
        program = mapped.lower(x).compile().as_text()
    chex.assert_trees_all_equal(*found)
    self.assertIn(f" {kind}(", program)
    self.assertNotIn(" collective-permute(", program)

  @parameterized.parameters((2, 3), (4, 1))
  def test_parts_are_gathered_as_in_one_message(self, devices, count):
    """A ring of two is cut: 48 values into 3 messages."""
    sent, whole, cut = self.run_both(
      lambda x: collectives.gather(x, AXIS), draw(6, 8)[:devices]
    )
    self.assertEqual([one.kind for one in sent], ["all-gather"] * count)
    self.assertEqual(cut, whole)

  def test_latencies_of_messages(self):
    part = 5 * cpu_backend._MESSAGE
    for num_bytes, count in ((2**10, 1), (part, 5), (2**30, 128)):
      self.assertEqual(cpu_backend.num_messages(num_bytes), count)
    self.assertEqual(cpu_backend.more_trips(2 * part, 2), 0)
    with between_hosts():
      # An all-reduce has 2, 6 and 4 messages.
      self.assertEqual(cpu_backend.more_trips(2 * part, 2), 4)
      self.assertEqual(cpu_backend.more_trips(4 * part, 4), 4 / 6)
      self.assertEqual(cpu_backend.more_trips(3 * part, 3), 0)


if __name__ == "__main__":
  absltest.main()
