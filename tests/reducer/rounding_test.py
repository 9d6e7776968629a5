"""A replica whose products round differently applies the same updates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.constants import changed
from helpers.meshes import AXIS, Pmap, gradients_like
from helpers.reducers import moving
from jax.extend import core

pytestmark = pytest.mark.slow

LEVEL = 1e-7
ROUNDS = ("cholesky", "dot_general", "triangular_solve")
CALLS = ("closed_call", "jit", "pjit", "remat2", "checkpoint")


def interpreted(fn, compute):
  """Returns the same function, whose operations `compute` carries out.

  The function is traced to a jaxpr, which is evaluated operation by operation:
  `compute(equation, number, inputs)` returns an operation's outputs.
  """

  def run(*args):
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = evaluate(
      compute, program.jaxpr, program.consts, *jax.tree.leaves(args)
    )
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)

  return run


def evaluate(compute, program, consts, *args):
  values = dict(zip(program.invars, args, strict=True))
  values |= zip(program.constvars, consts, strict=True)
  for number, equation in enumerate(program.eqns):
    inputs = [_read(x, values) for x in equation.invars]
    name, params = equation.primitive.name, equation.params
    if name == "cond":
      branches = [
        functools.partial(evaluate, compute, branch.jaxpr, branch.consts)
        for branch in params["branches"]
      ]
      outputs = jax.lax.switch(inputs[0], branches, *inputs[1:])
    elif name == "scan":
      outputs = _scan(compute, equation, inputs)
    elif name == "while":
      outputs = _while(compute, params, inputs)
    elif name in CALLS:
      inner = params["jaxpr"]
      outputs = evaluate(compute, inner.jaxpr, inner.consts, *inputs)
    else:
      outputs = compute(equation, number, inputs)
    values |= zip(equation.outvars, outputs, strict=True)
  return [_read(x, values) for x in program.outvars]


def _scan(compute, equation, inputs):
  """Evaluates a loop of fixed length."""
  params = equation.params
  body = params["jaxpr"]
  # The counts by shape, since their names differ between versions of JAX: only
  # arrays that the loop iterates over have one axis more outside.
  scanned = _more_axes(equation.invars, body.jaxpr.invars)
  stacked = _more_axes(equation.outvars, body.jaxpr.outvars)
  carried = len(equation.outvars) - stacked
  fixed = len(inputs) - scanned - carried
  consts, init, xs = (
    inputs[:fixed],
    inputs[fixed : fixed + carried],
    inputs[fixed + carried :],
  )

  def step(carry, x):
    outputs = evaluate(compute, body.jaxpr, body.consts, *consts, *carry, *x)
    return outputs[:carried], outputs[carried:]

  carry, ys = jax.lax.scan(
    step, init, xs, length=params["length"], reverse=params["reverse"]
  )
  return [*carry, *ys]


def _more_axes(outer, inner):
  pairs = zip(outer, inner, strict=True)
  return sum(x.aval.ndim > y.aval.ndim for x, y in pairs)


def _while(compute, params, inputs):
  """Evaluates another loop."""
  first, second = params["cond_nconsts"], params["body_nconsts"]
  test_consts, rest = inputs[:first], inputs[first:]
  body_consts, init = rest[:second], rest[second:]
  test, body = params["cond_jaxpr"], params["body_jaxpr"]
  run = functools.partial(evaluate, compute)
  return jax.lax.while_loop(
    lambda c: run(test.jaxpr, test.consts, *test_consts, *c)[0],
    lambda c: run(body.jaxpr, body.consts, *body_consts, *c),
    init,
  )


def _read(x, values):
  return x.val if isinstance(x, core.Literal) else values[x]


def _bind(equation, inputs):
  bound = equation.primitive.get_bind_params(equation.params)
  # Some versions of JAX return functions apart from other parameters.
  functions, bound = bound if isinstance(bound, tuple) else ((), bound)
  outputs = equation.primitive.bind(*functions, *inputs, **bound)
  return outputs if equation.primitive.multiple_results else [outputs]


def with_noise(equation, number, inputs):
  """Adds noise to every product of replica 1.

  The noise of an entry is `LEVEL` times the root mean square of its row.
  """
  outputs = _bind(equation, inputs)
  if equation.primitive.name not in ROUNDS:
    return outputs
  return [
    _noisy(x, number) if jnp.issubdtype(x.dtype, jnp.floating) else x
    for x in outputs
  ]


def in_bfloat16(equation, number, inputs):
  """Rounds operands as accelerators do, on replica 1.

  They round the operands of products whose precision the program leaves open.
  """
  del number
  is_open = equation.params.get("precision") is None
  if equation.primitive.name == "dot_general" and is_open:
    is_rounded = jax.lax.axis_index(AXIS) == 1
    coarse = [x.astype(jnp.bfloat16).astype(x.dtype) for x in inputs]
    inputs = [
      jnp.where(is_rounded, c, x) for c, x in zip(coarse, inputs, strict=True)
    ]
  return _bind(equation, inputs)


def _noisy(x, number):
  key = jax.random.fold_in(jax.random.key(1), number)
  size = LEVEL * jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
  noise = size * jax.random.normal(key, x.shape, x.dtype)
  return x + noise * (jax.lax.axis_index(AXIS) == 1)


class Mixed(Pmap):
  """A run in which replica 1 computes otherwise."""

  def __init__(self, tx, params, compute, replicas=2):
    super().__init__(tx, params, replicas)
    update = lambda gradients, state: tx.update(gradients, state, params)  # noqa: E731
    self.step_fn = self._pmap(interpreted(update, compute))


PARAMS = {"stack": jnp.zeros((2, 48, 64)), "tall": jnp.zeros((80, 40))}


def matrix(shape, values, random):
  u, _ = np.linalg.qr(random.standard_normal((shape[0], len(values))))
  v, _ = np.linalg.qr(random.standard_normal((shape[1], len(values))))
  return (u * values) @ v.T


def of_spectrum(values, turns):
  """Returns gradients of these singular values; vectors turn if asked."""

  def gradients(step):
    random = np.random.default_rng(1000 + step if turns else 0)
    draw = lambda shape: np.float32(  # noqa: E731
      [matrix(shape, values, random) for _ in range(4)]
    )
    return {
      "stack": draw((48, 64)).reshape(2, 2, 48, 64),
      "tall": draw((80, 40))[:2],
    }

  return gradients


GRADIENTS = {
  "white": lambda step: gradients_like(PARAMS, step, 2),
  "rank_2": of_spectrum(np.array([1.0, 0.5]), turns=True),
  "decaying": of_spectrum(0.7 ** np.arange(30), turns=True),
  "wide": of_spectrum(np.r_[np.full(4, 1e4), np.ones(20)], turns=True),
  "the_same": of_spectrum(0.9 ** np.arange(30), turns=False),
}


CASES = [
  (kind, reducer, compute)
  for compute, reducer in (("with_noise", "edgc"), ("in_bfloat16", "powersgd"))
  for kind in GRADIENTS
]


@pytest.mark.parametrize(("kind", "reducer", "compute"), CASES)
def test_updates_agree_and_nothing_is_lost(kind, reducer, compute):
  run = _run_of(reducer, compute)
  run.state, owed = run.first_state, jax.tree.map(jnp.zeros_like, PARAMS)
  for step in range(20):
    gradients = GRADIENTS[kind](step)
    updates = run.step(gradients)
    assert difference(updates) < 1e-5
    owed = jax.tree.map(
      lambda o, g, u: o + np.float64(g).mean(0) - u[0], owed, gradients, updates
    )
  for name, e in run.residual().items():
    scale = np.linalg.norm(gradients[name])
    assert np.linalg.norm(owed[name] - e.mean(0)) < 2e-4 * scale


def test_the_noise_is_there():
  run = _run_of("edgc", "with_noise")
  run.state = run.first_state
  updates = run.step(GRADIENTS["white"](0))
  assert np.abs(updates["tall"][1] - updates["tall"][0]).max() > 0


def test_bases_and_updates_need_their_precision():
  with changed(_EXACT=None):
    run = Mixed(float32.powersgd(16, min_ratio=0), PARAMS, in_bfloat16)
    updates = run.step(GRADIENTS["white"](0))
  assert difference(updates) > 1e-4


def difference(updates):
  """Returns the distance of the replicas' updates, over their norm."""
  norms = [
    np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))
    for tree in (
      jax.tree.map(lambda u: u[1] - u[0], updates),
      jax.tree.map(lambda u: u[0], updates),
    )
  ]
  return norms[0] / norms[1]


@functools.cache
def _run_of(reducer, compute):
  """Returns a run, compiled once for all kinds of gradients."""
  compute = {"with_noise": with_noise, "in_bfloat16": in_bfloat16}[compute]
  tx = {
    "powersgd": lambda: float32.powersgd(16, min_ratio=0),
    "edgc": lambda: float32.edgc(**(moving(12, window=5) | {"min_ratio": 0})),
  }[reducer]()
  return Mixed(tx, PARAMS, compute)
