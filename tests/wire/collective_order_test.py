"""No collective of an update may overtake another on CPUs.

Between hosts, which these tests only pretend, some are others.
"""

import contextlib
import itertools
import math

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
from experiments.lab.network import jax_host

pytestmark = pytest.mark.slow

REPLICAS = 4
# Two matrices have one shape.
MATRIX = jnp.ones((48, 40))
PARAMS = {"bias": jnp.ones(40), "kernel": MATRIX, "other": MATRIX}
REDUCERS = reducers()
# One for each kind of wire, and for hosts: 0 for devices of one process.
CASES = [
  ("allreduce", 0), ("allreduce_bfloat16", 4), ("powersgd", 4),
  ("powersgd_bfloat16", 2), ("powersgd_int8", 4), ("edgc", 0), ("edgc", 4),
  ("edgc_int4", 2), ("quantize", 0), ("quantize", 4), ("topk", 0), ("topk", 2),
  ("randomk", 4),
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


def sizes_of(text):
  return [
    [(c.kind, c.pairs, dtype, math.prod(shape)) for dtype, shape in c.results]
    for c in hlo.collectives_in_order(text, -1)
  ]


@pytest.mark.parametrize(("name", "hosts"), CASES)
def test_every_collective_waits_for_branches(name, hosts):
  """And a replay without computation, which the network benchmark times."""
  reducer, replicas = REDUCERS[name](), hosts or REPLICAS
  tx = edgc_jax.skip_nonfinite(optax.chain(reducer, optax.adamw(1e-3)), AXIS)
  with between_hosts() if hosts else contextlib.nullcontext():
    step, arguments = stepper(tx, replicas=replicas)
    text = step.lower(*arguments).compile().as_text()
    traced = jax.make_jaxpr(step)(*arguments)
  assert " conditional(" in text
  kinds = {one.kind for one in hlo.collectives_in_order(text)}
  (found,) = reviewed(reducer, PARAMS)
  # XLA's reduce-scatter between CPU hosts loses values (`wire.cpu_backend`).
  assert "reduce-scatter" not in kinds
  if found.code is not None:
    assert ("all-to-all" in kinds) != bool(hosts)
  assert unordered(text) == []
  replay = jax.pmap(
    jax_host.replay_of(traced), AXIS, devices=jax.devices()[:replicas]
  )
  replayed = replay.lower(np.zeros(replicas, np.int32)).compile().as_text()
  assert unordered(replayed) == []
  sizes = [sizes_of(text), sizes_of(replayed)]
  if not hosts:  # there XLA joins all-reduces that do not need each other
    sizes = [sorted(itertools.chain(*collectives)) for collectives in sizes]
  assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
  ("name", "wrap", "params"),
  [
    ("edgc_one_rank", lambda tx: edgc_jax.accumulate(tx, 2), PARAMS),
    ("allreduce", lambda tx: tx, {
      "empty": jnp.ones(0), **{f"{i}": jnp.ones(3 + i % 2) for i in range(300)}
    }),
    ("edgc", lambda tx: tx, {"bias": jnp.ones(40)}),  # nothing to compress
  ],
  ids=["accumulate", "many leaves", "no compression"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:No leaf saves")
def test_it_waits_elsewhere_too(name, wrap, params):
  assert unordered(program(wrap(REDUCERS[name]()), params=params)) == []


def test_a_collective_of_the_user_that_does_not_wait_is_found():
  assert unordered(program(REDUCERS["powersgd"](), waits=False)) != []


def test_waiting_keeps_values():
  tx = REDUCERS["allreduce"]()
  gradients = gradients_like(PARAMS, 0, 1)
  waited = jax.pmap(
    lambda g: edgc_jax.after_update(g, tx.update(g, tx.init(PARAMS))[1]),
    AXIS,
    devices=jax.devices()[:1],
  )(gradients)
  chex.assert_trees_all_equal(waited, gradients)
