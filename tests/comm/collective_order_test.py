"""No collective of an update may overtake another on CPUs.

Between hosts, which these tests only pretend, there are loops too.
"""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from helpers.collective_order import unordered
from helpers.meshes import AXIS, between_hosts, gradients_like

import edgc_jax
from edgc_jax.measure import hlo
from experiments.network import jax_host

REPLICAS = 4
PARAMS = {"kernel": jnp.ones((48, 40)), "bias": jnp.ones(40)}
COMPRESS = {"axis_name": AXIS, "min_ratio": 1.2}
REDUCERS = {
  "dense": lambda: edgc_jax.allreduce(AXIS),
  "dense_bfloat16": lambda: edgc_jax.allreduce(AXIS, wire_dtype="bfloat16"),
  "low_rank": lambda: edgc_jax.powersgd(4, **COMPRESS),
  "schedule": lambda: edgc_jax.powersgd({0: 8, 3: 4}, **COMPRESS),
  "encoded": lambda: edgc_jax.powersgd(4, wire_dtype="bfloat16", **COMPRESS),
  "adaptive": lambda: edgc_jax.edgc(
    rank_max=8, rank_min=4, window=10, **COMPRESS
  ),
  "adaptive_encoded": lambda: edgc_jax.edgc(
    rank_max=8, rank_min=4, window=10, wire_dtype="bfloat16", **COMPRESS
  ),
  "one_rank": lambda: edgc_jax.edgc(
    rank_max=4, rank_min=4, window=10, **COMPRESS
  ),
  "quantize": lambda: edgc_jax.quantize(8, AXIS),
  "signs": lambda: edgc_jax.signsgd(AXIS),
  "top": lambda: edgc_jax.topk(0.1, AXIS),
  "random": lambda: edgc_jax.randomk(0.1, AXIS),
}  # fmt: skip
ENCODED = ("dense_bfloat16", "encoded", "adaptive_encoded", "quantize", "signs")
IN_LOOPS = {2: (*ENCODED, "top"), 4: ENCODED}  # a ring of two is cut, too


def program(tx, waits=True, params=PARAMS, replicas=REPLICAS):
  """Compiles a step that also sends a number of its own."""

  def step(gradients, state):
    updates, state = tx.update(gradients, state, params)
    loss = sum(jnp.sum(g) for g in jax.tree.leaves(gradients))
    if waits:
      loss = edgc_jax.after_update(loss, state)
    return updates, state, jax.lax.pmax(loss, AXIS)  # not a sum to be joined

  state = jax.tree.map(
    lambda x: jnp.stack([x] * replicas), jax.jit(tx.init)(params)
  )
  mapped = jax.pmap(step, AXIS, devices=jax.devices()[:replicas])
  gradients = gradients_like(params, 0, replicas)
  return mapped.lower(gradients, state).compile().as_text()


class OrderTest(parameterized.TestCase):
  @parameterized.product(name=list(REDUCERS), hosts=[0, 2, 4])
  def test_every_collective_waits_for_branches(self, name, hosts):
    tx = edgc_jax.skip_nonfinite(
      optax.chain(REDUCERS[name](), optax.adamw(1e-3)), AXIS
    )
    with between_hosts(16) if hosts else contextlib.nullcontext():
      text = program(tx, replicas=hosts or REPLICAS)
    self.assertIn(" conditional(", text)
    sent = hlo.collectives_in_order(text)
    is_cut = len(sent) > len(set(sent))  # messages of the same size
    self.assertEqual(is_cut, name in IN_LOOPS.get(hosts, ()))
    self.assertEqual(unordered(text), [])

  @parameterized.parameters(
    ("dense", 0), ("dense", 4), ("low_rank", 4), ("encoded", 0), ("encoded", 4),
    ("quantize", 2), ("top", 2),
  )  # fmt: skip
  def test_a_replay_sends_the_same(self, name, hosts):
    """The network benchmark times such a replay, without computation."""
    params = {**PARAMS, "other": jnp.ones((48, 40))}  # two of a shape
    replicas = hosts or REPLICAS
    with between_hosts(16) if hosts else contextlib.nullcontext():
      sent = hlo.collectives_in_order(
        program(REDUCERS[name](), params=params, replicas=replicas)
      )
    replay = jax.pmap(
      jax_host.replay_of(sent, replicas),
      AXIS,
      devices=jax.devices()[:replicas],
    )
    zeros = np.zeros(replicas, np.int32)
    text = replay.lower(zeros).compile().as_text()
    sizes = [
      [
        [
          (c.kind, c.pairs, dtype, int(np.prod(shape)))
          for dtype, shape in c.results
        ]
        for c in collectives
      ]
      for collectives in (sent, hlo.collectives_in_order(text))
    ]
    self.assertEqual(*sizes)
    self.assertEqual(unordered(text), [])

  def test_under_accumulate(self):
    tx = edgc_jax.accumulate(REDUCERS["adaptive"](), 2)
    self.assertEqual(unordered(program(tx)), [])

  def test_more_dense_leaves_than_one_collective_takes(self):
    """Those that are not joined with P must wait for branches, too."""
    params = {f"leaf_{i:03}": jnp.ones(3 + i % 2) for i in range(600)}
    text = program(REDUCERS["low_rank"](), params={**PARAMS, **params})
    self.assertEqual(unordered(text), [])

  def test_many_leaves(self):
    """These are more than XLA joins into one collective."""
    params = {f"leaf_{i:03}": jnp.ones(3 + i % 2) for i in range(300)}
    params["empty"] = jnp.ones(0)
    text = program(REDUCERS["dense"](), params=params)
    self.assertEqual(unordered(text), [])

  def test_without_compression(self):
    tx = REDUCERS["adaptive"]()
    with self.assertWarns(RuntimeWarning):
      text = program(tx, params={"bias": jnp.ones(40)})
    self.assertEqual(unordered(text), [])

  def test_a_collective_of_the_user_that_does_not_wait_is_found(self):
    text = program(REDUCERS["low_rank"](), waits=False)
    self.assertNotEqual(unordered(text), [])

  def test_waiting_keeps_values(self):
    tx = REDUCERS["dense"]()
    gradients = gradients_like(PARAMS, 0, 1)
    waited = jax.pmap(
      lambda g: edgc_jax.after_update(g, tx.update(g, tx.init(PARAMS))[1]),
      AXIS,
      devices=jax.devices()[:1],
    )(gradients)
    chex.assert_trees_all_equal(waited, gradients)

  def test_a_state_without_a_reducer_raises(self):
    state = optax.adam(1e-3).init(PARAMS)
    with self.assertRaisesRegex(ValueError, "`opt_state` must be a state with"):
      edgc_jax.after_update(1.0, state)


if __name__ == "__main__":
  absltest.main()
