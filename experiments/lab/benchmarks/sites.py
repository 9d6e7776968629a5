"""Trains the protocol's model at four sites, one of them often away or slow.

  python -m experiments.lab.benchmarks.sites [SEED ...]

One process simulates the sites: they train side by side on one device, each on
its quarter of every batch, and exchange by `edgc_jax.Site` through a temporary
folder. *Local steps* are four replicas of `edgc_jax.local_steps` instead, with
the same exchange; else the fourth site is

  all there     never away
  a tenth away  killed for 3 of every 30 rounds: it trains on nothing meanwhile,
  a third away  and for 10 of every 30; it returns as a new process, with the
                common parameters and its old optimiser state
  slow, late    three times slower, in rounds by steps: it is in every third
                round, with its change since three rounds before
  slow, timed   three times slower, in rounds by time: it takes a third of the
                steps, and weighs a third
  all entries   never away, and all sites send 2 bits of every entry

The learning rate follows the run, also at a site that takes fewer steps. Every
run of sites checks that its rounds had these members. A finished run is a file
in results/data/sites/, and is not repeated; it takes 10 to 20 minutes.
"""

import functools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app
from ml_collections import ConfigDict

import edgc_jax
from configs.protocol import gpt
from edgc_jax.sites.site import Round
from experiments import ROOT
from experiments.lab import benchmarks
from experiments.trainer import tasks
from experiments.trainer.training import optimizer
from experiments.trainer.training.trainer import Trainer

FOLDER = ROOT / "results/data/sites"
NAMES = ("a", "b", "c", "d")
LOCAL = "local steps"
SEEDS = (0, 1, 2)
EVERY = 24
# As tuned for the exchange of SparseLoCo every 24 steps.
_RATE, _MOMENTUM = 8e-3, 0.5
_PATIENCE = 3.0


class Arm(NamedTuple):
  """What the fourth site does.

  Attributes:
    away: Rounds of every 30 in which it is killed.
    pace: Of so many steps of the others it takes one.
    is_timed: Whether rounds end by time.
    density: Share of the entries that all sites send; None for all.
  """

  away: int = 0
  pace: int = 1
  is_timed: bool = False
  density: float | None = 1 / 64

  def is_away(self, round_number: int) -> bool:
    """Returns whether the fourth site is killed during a round."""
    return (round_number + 20) % 30 < self.away

  def is_in(self, round_number: int) -> bool:
    """Returns whether the fourth site takes part in a round."""
    is_late = not self.is_timed and (round_number + 1) % self.pace != 0
    return not self.is_away(round_number) and not is_late


ARMS = {
  "all there": Arm(),
  "a tenth away": Arm(away=3),
  "a third away": Arm(away=10),
  "slow, late": Arm(pace=3),
  "slow, timed": Arm(pace=3, is_timed=True),
  "all entries": Arm(density=None),
}


def main(argv: Sequence[str]) -> None:
  """Runs what is missing of some seeds."""
  for seed in map(int, argv[1:] or SEEDS):
    for name, arm in {LOCAL: None, **ARMS}.items():
      file = f"{name.replace(', ', '-').replace(' ', '-')}-seed{seed}.json"
      path = FOLDER / file
      if path.exists():
        continue
      config = gpt.get_config("allreduce" if arm else "topk")
      config.optimizer.lr, config.seed = _RATE, seed
      found = simulate(config, arm) if arm else by_local_steps(config)
      line = {"arm": name, "seed": seed, **found}
      benchmarks.write(
        path, "benchmarks.sites", [line], steps=config.steps, every=EVERY,
        momentum=_MOMENTUM, lr=_RATE,
      )  # fmt: skip
      print(line, flush=True)


def by_local_steps(config: ConfigDict) -> dict[str, Any]:
  """Trains by `local_steps`; returns the held-out loss and the tokens."""
  config.topk.update(density=1 / 64, chunk=4096, bits=2, residual_decay=0.95)
  config.local.update(every=EVERY, momentum=_MOMENTUM)
  config.evaluation.every = 0
  with tempfile.TemporaryDirectory() as folder:
    config.run_dir = f"{folder}/run"
    summary = Trainer(config).run()
  tokens = EVERY * config.batch_size * config.model.context  # of a round
  return {"loss": summary["val_loss"], "tokens": config.steps // EVERY * tokens}


def simulate(config: ConfigDict, arm: Arm) -> dict[str, Any]:
  """Trains at four sites.

  Args:
    config: Of a run; each site takes a quarter of its batch.
    arm: What the fourth site does.

  Returns:
    The held-out loss, rounds, tokens, and the bytes of changes that all sites
    together have uploaded and downloaded.

  Raises:
    RuntimeError: if a round had other members than the arm says.
  """
  began = time.monotonic()
  task, rows = tasks.make(config), config.batch_size
  batches = task.train_batches(rows, config.seed, slice(0, rows))
  inner = optimizer.make_inner(config)
  train_step = jax.jit(functools.partial(_step, task, inner))
  common = task.init(jax.random.key(config.seed))
  own = jax.tree.map(lambda x: jnp.stack([x] * len(NAMES)), common)
  opt_state = jax.vmap(inner.init)(own)
  found: list[Round] = []
  total = np.zeros(len(NAMES), int)  # steps of each site
  before = total.copy()  # its last round
  with tempfile.TemporaryDirectory() as folder:
    sites: dict[str, edgc_jax.Site] = {}
    for t in range(config.steps // EVERY):
      there = NAMES[:-1] if arm.is_away(t) else NAMES
      sites = {name: site for name, site in sites.items() if name in there}
      for name in there:
        if name not in sites:
          sites[name] = _site(folder, name, arm)
          own = _with(own, name, sites[name].join(_of(own, name)))
      for i in range(EVERY):
        is_active = np.array([name in there for name in NAMES])
        is_active[-1] &= (t * EVERY + i + 1) % arm.pace == 0
        opt_state = optimizer.at_step(opt_state, t * EVERY + i)
        own, opt_state = train_step(own, opt_state, next(batches), is_active)
        total += is_active
      members = there if arm.is_in(t) else NAMES[:-1]
      for name in reversed(members):
        i = NAMES.index(name)
        sites[name].begin(_of(own, name), float(total[i] - before[i]))
        before[i] = total[i]
        # The others' round takes in who uploads first, late or not.
        path = pathlib.Path(folder) / f"rounds/{t}/sites/{name}"
        _wait_for_upload(sites[name], path)
      for name in members:
        common = sites[name].finish(_of(own, name))
        own = _with(own, name, common)
        found.append(_checked(sites[name], t, members))
  held_out = task.held_out_batches(rows, config.evaluation.batches)
  evaluate = jax.jit(task.evaluate)
  losses = [evaluate(common, batch)["loss"] for batch in held_out]
  return {
    "loss": float(np.mean(losses)), "rounds": config.steps // EVERY,
    "tokens": int(total.sum()) * rows // len(NAMES) * task.units_per_row,
    "sent": sum(x.sent for x in found),
    "received": sum(x.received for x in found),
    "seconds": round(time.monotonic() - began),
  }  # fmt: skip


def _step(
  task: tasks.Task,
  inner: optax.GradientTransformation,
  own: Any,
  opt_state: Any,
  batch: jax.Array,
  is_active: jax.Array,
) -> tuple[Any, Any]:
  """Takes a step at each site that is active.

  Args:
    task: The task, which draws no random numbers.
    inner: The sites' optimiser.
    own: The sites' parameters, [sites, ...] a leaf.
    opt_state: Their optimisers' states, likewise.
    batch: Rows of all sites.
    is_active: bool [sites].
  """

  def one(site: Any) -> tuple[Any, Any]:
    params, state, rows, is_active = site
    gradient = jax.grad(lambda p: task.loss(p, rows, jax.random.key(0))[0])
    updates, new_state = inner.update(gradient(params), state, params)
    new = optax.apply_updates(params, updates), new_state
    return jax.tree.map(
      lambda x, y: jnp.where(is_active, x, y), new, (params, state)
    )

  parts = batch.reshape(len(NAMES), -1, *batch.shape[1:])
  # As in the trainer's simulation: one after the other is faster on a CPU.
  return jax.lax.map(one, (own, opt_state, parts, is_active))


def _site(folder: str, name: str, arm: Arm) -> edgc_jax.Site:
  return edgc_jax.Site(
    folder, name, every=EVERY, momentum=_MOMENTUM, patience=_PATIENCE,
    density=arm.density,
  )  # fmt: skip


def _of(stacked: Any, name: str) -> Any:
  """Returns the part of one site."""
  return jax.tree.map(lambda x: x[NAMES.index(name)], stacked)


def _with(stacked: Any, name: str, part: Any) -> Any:
  """Returns the parts of all sites, one of which is new."""
  i = NAMES.index(name)
  return jax.tree.map(lambda x, y: x.at[i].set(y), stacked, part)


def _wait_for_upload(site: edgc_jax.Site, path: pathlib.Path) -> None:
  """Waits until a site's change is in the folder, or its exchange has ended."""
  while not (path.exists() or site.is_ready()):
    time.sleep(0.01)


def _checked(
  site: edgc_jax.Site, round_number: int, members: Sequence[str]
) -> Round:
  """Returns what a site says of a round, if it had these members."""
  found = site.last
  wanted = round_number, tuple(members)
  if found is None or (found.number, found.members) != wanted:
    raise RuntimeError(
      f"`members` of round {round_number} must be {members}, got {found}; raise"
      " the patience."
    )
  return found


if __name__ == "__main__":
  app.run(main)
