"""Times the reducers, compared with a model's forward and backward pass.

  python -m experiments.benchmarks.reducer --config=configs/gpt2_tiny.py

Prints medians. All functions are timed in turn, so that other load on the
machine hits them all. The replicas of a CPU share its cores, and their exchange
is a copy in memory, so these are times of computation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from ml_collections import ConfigDict

import edgc_jax
from experiments.benchmarks import measurements
from experiments.models import gpt2
from experiments.runtime import command_line
from experiments.training import optimizer

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Number of timed rounds.")
_RANKS = flags.DEFINE_list("ranks", ["8", "20", "32"], "Ranks of powersgd.")
_AXIS = "data"


def main(config: ConfigDict) -> None:
  """Prints two tables: times, and memory as the compiler reports it."""
  replicas = config.mesh.data
  devices = jax.devices()[:replicas]
  model = gpt2.GPT2Config(**config.model.to_dict())
  pmap = functools.partial(jax.pmap, axis_name=_AXIS, devices=devices)
  index = jnp.arange(replicas)
  params = pmap(lambda _: gpt2.init_params(model, jax.random.key(0)))(index)
  batch = jax.random.randint(
    jax.random.key(1),
    (replicas, config.batch_size // replicas, model.context + 1),
    0,
    model.vocab_size,
  )
  gradient = pmap(jax.value_and_grad(functools.partial(gpt2.loss_fn, model)))
  _, gradients = gradient(params, batch)

  timed = {"forward and backward": functools.partial(gradient, params, batch)}
  memory = {}
  reducers = {"allreduce": edgc_jax.allreduce(_AXIS)}
  for rank in map(int, _RANKS.value):
    reducers[f"powersgd, rank {rank}"] = edgc_jax.powersgd(rank, _AXIS)
  with config.unlocked():
    config.reducer = "edgc"
  reducers["edgc"] = optimizer.make_reducer(config, _AXIS, {})
  for name, tx in reducers.items():
    state = pmap(lambda p, tx=tx: tx.init(p))(params)
    update = pmap(tx.update).lower(gradients, state).compile()
    in_place = pmap(tx.update, donate_argnums=(0, 1))
    memory[name] = _memory(in_place.lower(gradients, state).compile())
    if name != "edgc":
      timed[name] = functools.partial(update, gradients, state)
      continue
    options = config.edgc
    for rank in (options.rank_min, options.rank_max):
      fixed = _with_rank(state, rank)
      timed[f"edgc, {rank}"] = functools.partial(update, gradients, fixed)
  for name, rate in (
    ("entropy, sampled", config.edgc.sampling.entry_rate),
    ("entropy, all entries", 1.0),
  ):
    estimate = measurements.make_estimate(
      config, _AXIS, rate, config.edgc.sampling.estimator
    )
    zeros = jnp.zeros(replicas, jnp.int32)
    timed[name] = functools.partial(pmap(estimate), gradients, zeros)
  seconds = measurements.alternate(timed, _ROUNDS.value)
  medians = {name: float(np.median(each)) for name, each in seconds.items()}

  base = medians["forward and backward"]
  print(f"{replicas} replicas, medians of {_ROUNDS.value} rounds")
  print(f"{'':24}{'ms':>9}{'share of forward and backward':>33}")
  for name, seconds in medians.items():
    print(f"{name:24}{seconds * 1e3:9.1f}{seconds / base:33.1%}")
  every = medians["entropy, all entries"]
  for rate in sorted({0.1, config.edgc.sampling.step_rate}):
    sampled = medians["entropy, sampled"] * rate
    print(
      f"entropy at step_rate {rate}, averaged over steps:"
      f" {sampled * 1e3:.2f} ms per step, {sampled / base:.2%} of forward and"
      f" backward, {1 - sampled / every:.1%} less than all entries in all steps"
    )
  print(f"\n{'MB a replica, donated':24}{'arguments':>12}{'temporary':>12}")
  for name, (arguments, temporary) in memory.items():
    print(f"{name:24}{arguments / 1e6:12.2f}{temporary / 1e6:12.2f}")


def _with_rank(state: Any, rank: int) -> Any:
  """Returns the state on a rank, at a step without samples or checks.

  The step does not end a window either, so the rank stays.
  """
  budget = state.budget
  fixed = jnp.full_like(budget.first_rank, rank)
  decision = budget.decision._replace(
    rank=fixed, is_warm=jnp.ones_like(budget.decision.is_warm)
  )
  return state._replace(
    budget=budget._replace(decision=decision, first_rank=fixed),
    count=jnp.full_like(state.count, 1001),
    checks=state.checks._replace(
      identical_steps=jnp.full_like(state.count, -1)
    ),
  )


def _memory(compiled: Any) -> tuple[int, int]:
  analysis = compiled.memory_analysis()
  return analysis.argument_size_in_bytes, analysis.temp_size_in_bytes


if __name__ == "__main__":
  command_line.run(main)
