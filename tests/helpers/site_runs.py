"""Sites in threads of this process, which move by random numbers."""

import concurrent.futures
import contextlib
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import edgc_jax

DENSE = {"density": None, "bits": 32, "residual_decay": 1.0}
QUICK = {"every": 1, "patience": 20.0, **DENSE}
_SECONDS = 120.0  # after which a test fails that waits, on any machine


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


def wait_until(condition, *calls):
  """Waits while calls run; fails if one ends before, or after two minutes."""
  end = time.monotonic() + _SECONDS
  while not condition():
    ended = [each.result() for each in calls if each.done()]
    assert condition() or not ended, ended
    assert time.monotonic() < end
    time.sleep(0.002)


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

  def steps_to(self, number):
    while self.site.round < number:
      self.step()

  def steps_of(self, count):
    return [self.step() for _ in range(count)]

  @property
  def hash(self):
    return self.site._run.hash


def sites(folder, names="abc", **options):
  return [Trained(folder, name, **options) for name in names]


@contextlib.contextmanager
def impatient(site):
  """Has a site decide alone, whoever is away or slow; after it, it waits."""
  before, site.site._patience = site.site._patience, 0.0
  try:
    yield
  finally:
    site.site._patience = before


def require_all_return(*trained):
  """Requires that all are in a round again after some, and equal.

  Each site is in a loop of its own, so that one that is a round ahead waits for
  the others, and one that is alone does not run away.
  """
  names = tuple(sorted(each.site.name for each in trained))
  end = time.monotonic() + _SECONDS

  def return_to_all(each):
    pause = 0.01
    while each.step().members != names:
      assert time.monotonic() < end, each.site.last
      time.sleep(pause)
      pause *= 1.5

  together(*(functools.partial(return_to_all, each) for each in trained))
  require_equal(*trained)


def require_equal(*trained):
  assert len({each.hash for each in trained}) == 1
  first, *rest = trained
  for other in rest:
    jax.tree.map(np.testing.assert_array_equal, first.params, other.params)
