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
CALLS = ("closed_call", "jit", "pjit")


def interpreted(fn, compute):
  """Returns the same function, whose operations `compute` carries out.

  The function is traced to a jaxpr, which is evaluated operation by operation:
  `compute(equation, number, inputs)` returns an operation's outputs.
  """

  def run(*args):
    program, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = evaluate(compute, program, *jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)

  return run


def evaluate(compute, closed, *args):
  program, run = closed.jaxpr, functools.partial(evaluate, compute)
  values = dict(zip(program.invars, args, strict=True))
  values |= zip(program.constvars, closed.consts, strict=True)
  read = lambda x: x.val if isinstance(x, core.Literal) else values[x]  # noqa: E731
  for number, equation in enumerate(program.eqns):
    inputs = list(map(read, equation.invars))
    name, params = equation.primitive.name, equation.params
    if name == "cond":
      branches = [functools.partial(run, one) for one in params["branches"]]
      outputs = jax.lax.switch(inputs[0], branches, *inputs[1:])
    elif name == "scan":
      outputs = _scan(run, equation, inputs)
    elif name == "while":
      outputs = _while(run, params, inputs)
    elif name in CALLS:
      outputs = run(params["jaxpr"], *inputs)
    else:
      outputs = compute(equation, number, inputs)
    values |= zip(equation.outvars, outputs, strict=True)
  return list(map(read, program.outvars))


def _scan(run, equation, inputs):
  """Evaluates a loop of fixed length."""
  params, body = equation.params, equation.params["jaxpr"]
  # The counts by shape, since their names differ between versions of JAX: only
  # arrays that the loop iterates over have one axis more outside.
  more = lambda outer, inner: sum(  # noqa: E731
    x.aval.ndim > y.aval.ndim for x, y in zip(outer, inner, strict=True)
  )
  scanned = more(equation.invars, body.jaxpr.invars)
  carried = len(equation.outvars)
  carried -= more(equation.outvars, body.jaxpr.outvars)
  fixed = len(inputs) - scanned - carried

  def step(carry, x):
    outputs = run(body, *inputs[:fixed], *carry, *x)
    return outputs[:carried], outputs[carried:]

  init, xs = inputs[fixed : fixed + carried], inputs[fixed + carried :]
  how = {name: params[name] for name in ("length", "reverse")}
  carry, ys = jax.lax.scan(step, init, xs, **how)
  return [*carry, *ys]


def _while(run, params, inputs):
  """Evaluates another loop."""
  first = params["cond_nconsts"]
  second = first + params["body_nconsts"]
  return jax.lax.while_loop(
    lambda c: run(params["cond_jaxpr"], *inputs[:first], *c)[0],
    lambda c: run(params["body_jaxpr"], *inputs[first:second], *c),
    inputs[second:],
  )


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

  def noisy(x):
    key = jax.random.fold_in(jax.random.key(1), number)
    size = LEVEL * jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
    noise = size * jax.random.normal(key, x.shape, x.dtype)
    return x + noise * (jax.lax.axis_index(AXIS) == 1)

  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
  is_product = equation.primitive.name in ROUNDS
  outputs = _bind(equation, inputs)
  return [noisy(x) if is_product and is_float(x) else x for x in outputs]


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


class Mixed(Pmap):
  """A run in which replica 1 computes otherwise."""

  def __init__(self, tx, params, compute, replicas=2):
    super().__init__(tx, params, replicas)
    update = lambda gradients, state: tx.update(gradients, state, params)  # noqa: E731
    self.step_fn = jax.pmap(
      interpreted(update, compute), AXIS, devices=jax.devices()[:replicas]
    )


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


@functools.cache
def run_of(reducer):
  """Returns a run, compiled once for all kinds of gradients."""
  if reducer == "edgc":
    tx = float32.edgc(**(moving(12, window=5) | {"min_ratio": 0}))
    return Mixed(tx, PARAMS, with_noise)
  return Mixed(float32.powersgd(16, min_ratio=0), PARAMS, in_bfloat16)


def difference(updates):
  """Returns the distance of the replicas' updates, over their norm."""
  first, second = (
    jax.tree.map(lambda u, i=i: np.float64(u[i]), updates) for i in (0, 1)
  )
  norm = lambda tree: np.sqrt(sum(np.sum(x**2) for x in tree.values()))  # noqa: E731
  return norm({k: second[k] - first[k] for k in first}) / norm(first)


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("reducer", ["edgc", "powersgd"])
def test_updates_agree_and_nothing_is_lost(kind, reducer):
  run = run_of(reducer)
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
  run = run_of("edgc")
  run.state = run.first_state
  updates = run.step(GRADIENTS["white"](0))
  assert np.abs(updates["tall"][1] - updates["tall"][0]).max() > 0


def test_bases_and_updates_need_their_precision():
  with changed(_EXACT=None):
    run = Mixed(float32.powersgd(16, min_ratio=0), PARAMS, in_bfloat16)
    updates = run.step(GRADIENTS["white"](0))
  assert difference(updates) > 1e-4
