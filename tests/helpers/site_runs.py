"""Sites in threads of this process, which move by random numbers."""

import concurrent.futures
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

import edgc_jax

DENSE = {"density": None, "bits": 32, "residual_decay": 1.0}
QUICK = {"every": 1, "patience": 20.0, **DENSE}


def zeros():
  return {"b": jnp.zeros(5), "w": jnp.zeros((40, 50))}


def moved(params, seed):
  """What a site does in a round: it moves by numbers that the seed draws."""
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: x - jnp.asarray(random.standard_normal(x.shape), x.dtype), params
  )


def together(*calls):
  """Runs functions at once, and returns or raises what they do."""
  with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
    return [each.result() for each in [pool.submit(call) for call in calls]]


class Trained:
  """A site with its parameters, which moves them once a round."""

  def __init__(self, folder, name, **options):
    self.site = edgc_jax.Site(folder, name, **{**QUICK, **options})
    self.params = self.site.join(zeros())
    self.site._layout.encode(self.site._residual)  # compiles

  def step(self, weight=1.0):
    seed = [self.site.round, *self.site.name.encode()]
    self.params = self.site.exchange(moved(self.params, seed), weight)
    return self.site.last

  def steps_of(self, count):
    return [self.step() for _ in range(count)]

  @property
  def hash(self):
    return self.site._run.hash


def sites(folder, names="abc", **options):
  return [Trained(folder, name, **options) for name in names]


@contextlib.contextmanager
def impatient(*trained, seconds=0.0):
  """Has sites not wait for those who are away; after it they wait again."""
  for each in trained:
    each.site._patience = seconds
  yield
  for each in trained:
    each.site._patience = QUICK["patience"]


def require_all_return(*trained):
  """Requires that all are in a round again after some, and equal."""
  names = tuple(sorted(each.site.name for each in trained))

  def return_to_all(each):
    # Each in its own loop: a site that is a round ahead waits for the others.
    return any(each.step().members == names for _ in range(20))

  calls = [functools.partial(return_to_all, each) for each in trained]
  assert all(together(*calls))
  require_equal(*trained)


def require_equal(*trained):
  assert len({each.hash for each in trained}) == 1
  first, *rest = trained
  for other in rest:
    jax.tree.map(np.testing.assert_array_equal, first.params, other.params)
