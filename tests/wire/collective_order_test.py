"""No collective of an update may overtake another on CPUs.

Between hosts, which these tests only pretend, some are others.
"""

import contextlib
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.collective_order import unordered
from helpers.meshes import AXIS, between_hosts, gradients_like
from helpers.reducers import reducers

import edgc_jax
from edgc_jax.measure import hlo
from edgc_jax.measure.description import reviewed
from experiments.network import jax_host

pytestmark = pytest.mark.slow

REPLICAS = 4
PARAMS = {"kernel": jnp.ones((48, 40)), "bias": jnp.ones(40)}
REDUCERS = reducers()
# One for each kind of wire, and for hosts: 0 for devices of one process.
CASES = [
  ("allreduce", 0), ("allreduce_bfloat16", 4), ("powersgd", 4),
  ("powersgd_bfloat16", 2), ("powersgd_int8", 4), ("edgc", 0),
  ("edgc_int4", 2), ("quantize", 0), ("quantize", 4), ("topk", 0),
  ("topk", 2), ("randomk", 4),
]  # fmt: skip


def stepper(tx, waits=True, params=PARAMS, replicas=REPLICAS):
  """Returns a step that also sends a number of its own, and its arguments."""

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
  return mapped, (gradients_like(params, 0, replicas), state)


def program(*args, **options):
  """Compiles a step of `stepper`."""
  step, arguments = stepper(*args, **options)
  return step.lower(*arguments).compile().as_text()


@pytest.mark.parametrize(("name", "hosts"), CASES)
def test_every_collective_waits_for_branches(name, hosts):
  reducer = REDUCERS[name]()
  tx = edgc_jax.skip_nonfinite(optax.chain(reducer, optax.adamw(1e-3)), AXIS)
  with between_hosts() if hosts else contextlib.nullcontext():
    text = program(tx, replicas=hosts or REPLICAS)
  assert " conditional(" in text
  sent = hlo.collectives_in_order(text)
  kinds = {one.kind for one in sent}
  (found,) = reviewed(reducer, PARAMS)
  # Hosts swap what is encoded, and two of them whatever is gathered.
  if not hosts:
    assert "reduce-scatter" not in kinds
  elif found.code is not None:
    assert "reduce-scatter" in kinds
  if hosts == 2:
    assert "all-gather" not in kinds
  assert unordered(text) == []


@pytest.mark.parametrize(
  ("name", "hosts"),
  [
    ("allreduce", 0), ("powersgd_bfloat16", 0), ("powersgd_bfloat16", 4),
    ("quantize", 2), ("topk", 2), ("edgc", 4),
  ],
)  # fmt: skip
def test_a_replay_sends_the_same(name, hosts):
  """The network benchmark times such a replay, without computation."""
  params = {**PARAMS, "other": jnp.ones((48, 40))}  # two of a shape
  replicas = hosts or REPLICAS
  with between_hosts() if hosts else contextlib.nullcontext():
    step, arguments = stepper(
      REDUCERS[name](), params=params, replicas=replicas
    )
    traced = jax.make_jaxpr(step)(*arguments)
    sent = hlo.collectives_in_order(
      step.lower(*arguments).compile().as_text(), -1
    )
  replay = jax.pmap(
    jax_host.replay_of(traced), AXIS, devices=jax.devices()[:replicas]
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
  if not hosts:  # there XLA joins all-reduces that do not need each other
    sizes = [sorted(itertools.chain(*collectives)) for collectives in sizes]
  assert sizes[0] == sizes[1]
  assert unordered(text) == []


def test_under_accumulate():
  tx = edgc_jax.accumulate(REDUCERS["edgc_one_rank"](), 2)
  assert unordered(program(tx)) == []


def test_many_leaves():
  params = {f"leaf_{i:03}": jnp.ones(3 + i % 2) for i in range(300)}
  params["empty"] = jnp.ones(0)
  text = program(REDUCERS["allreduce"](), params=params)
  assert unordered(text) == []


def test_without_compression():
  tx = REDUCERS["edgc"]()
  with pytest.warns(RuntimeWarning):
    text = program(tx, params={"bias": jnp.ones(40)})
  assert unordered(text) == []


def test_a_collective_of_the_user_that_does_not_wait_is_found():
  text = program(REDUCERS["powersgd"](), waits=False)
  assert unordered(text) != []


def test_waiting_keeps_values():
  tx = REDUCERS["allreduce"]()
  gradients = gradients_like(PARAMS, 0, 1)
  waited = jax.pmap(
    lambda g: edgc_jax.after_update(g, tx.update(g, tx.init(PARAMS))[1]),
    AXIS,
    devices=jax.devices()[:1],
  )(gradients)
  chex.assert_trees_all_equal(waited, gradients)


def test_a_state_without_a_reducer_raises():
  state = optax.adam(1e-3).init(PARAMS)
  with pytest.raises(ValueError, match="`opt_state` must be a state with"):
    edgc_jax.after_update(1.0, state)
