"""Data-parallel training through jax.pmap, from a configuration to a summary.

The replicas are devices of one process. Only scalars leave them: every step
hands its numbers out as device arrays, which are fetched in one go when a
line is logged, so that devices never wait for the host in between.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from ml_collections import ConfigDict

import edgc_jax
from experiments import data, gpt2, report
from experiments.optimizer import make_optimizer
from experiments.run_folder import RunFolder, environment
from experiments.run_log import RunLog

AXIS = "data"


class TrainingStopped(RuntimeError):
  """A run that cannot go on, and why."""


class Trainer:
  """One run: everything that can be wrong with its options is found here."""

  def __init__(self, config: ConfigDict):
    """Checks the configuration and loads the data; writes nothing.

    Args:
      config: As from a file in configs/.

    Raises:
      ValueError: if an option is out of range, or does not fit another.
      FileNotFoundError: if there is no data at `data.path`.
      FileExistsError: if `run_dir` holds something else.
    """
    _check(config)
    self.config = config
    self.model = gpt2.GPT2Config(**config.model.to_dict())
    self.tx = make_optimizer(config, AXIS)
    self.replicas = config.mesh.data
    self.devices = jax.devices()[: self.replicas]
    name = f"{config.name}-{config.reducer}-seed{config.seed}"
    path = config.run_dir or pathlib.Path("runs") / name
    self.folder = RunFolder(path, config.to_dict())
    self.corpus = data.load_corpus(config.data.path, context=self.model.context)
    data.check_vocab(self.corpus, self.model.vocab_size)
    self.traces = 0

  def run(self) -> dict[str, Any]:
    """Trains to the last step and returns the summary, also written.

    Raises:
      TrainingStopped: if all replicas had the same gradients, or too many
        steps in a row were not finite.
    """
    self.folder.start()
    try:
      summary = self._train()
    finally:
      self.folder.close()
    self.folder.finish(summary)
    report.write_report([self.folder.path])
    return summary

  def _train(self) -> dict[str, Any]:
    config = self.config
    log = RunLog(self.folder)
    params, opt_state = self._init()
    num_params = sum(p[0].size for p in jax.tree.leaves(params))
    step_fn = jax.pmap(
      self._step, AXIS, devices=self.devices, donate_argnums=(0, 1)
    )
    batches = data.train_batches(
      self.corpus.train,
      context=self.model.context,
      batch_size=config.batch_size,
      seed=config.seed,
    )
    for step in range(1, config.steps + 1):
      batch = self._split(next(batches))
      params, opt_state, numbers = step_fn(params, opt_state, batch)
      log.add(numbers)
      every = config.evaluation.every
      is_evaluated = step == config.steps or (every and step % every == 0)
      if is_evaluated or step % config.log_every == 0 or step == 1:
        line = log.fetch(step)
        self._stop_if_hopeless(line, step)
        if is_evaluated:
          line["val_loss"] = self._evaluate(params)
        log.write(line)
    log.close()
    wire = log.wire_bytes / config.steps
    return {
      "reducer": config.reducer,
      "steps": config.steps,
      "params": num_params,
      "replicas": self.replicas,
      "stages": 1,
      "train_loss": line["loss"],
      "val_loss": line["val_loss"],
      "dense_bytes_per_step": line["dense_bytes"],
      "wire_bytes_per_step": [wire],
      "compression_ratio": line["dense_bytes"] / wire,
      "rank_history": log.rank_history,
      "skipped_steps": line["skipped_steps"],
      "traces": self.traces,
      "seconds": log.seconds(),
      "tokens_per_second": line["tokens_per_second"],
      "corpus": {"name": self.corpus.name, "sha256": self.corpus.sha256},
      "environment": environment(),
    }

  def _init(self) -> tuple[Any, Any]:
    """Parameters and optimiser state, one copy a replica."""
    key = jax.random.key(self.config.seed)

    def init(_: jax.Array) -> tuple[Any, Any]:
      params = gpt2.init_params(self.model, key)
      return params, self.tx.init(params)

    return jax.pmap(init, AXIS, devices=self.devices)(jnp.arange(self.replicas))

  def _step(
    self, params: Any, opt_state: Any, batch: jax.Array
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    """One step of one replica; batch [sequences, context + 1]."""
    self.traces += 1  # runs when JAX traces, not when the step runs
    loss_fn = functools.partial(gpt2.loss_fn, self.model)
    loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = self.tx.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    numbers = edgc_jax.metrics(opt_state)
    numbers["loss"] = lax.pmean(loss, AXIS)
    return params, opt_state, numbers

  def _evaluate(self, params: Any) -> float:
    """Mean loss on the held-out windows, the same in every run."""
    batches = data.held_out_batches(
      self.corpus.held_out,
      context=self.model.context,
      batch_size=self.config.batch_size,
      num_batches=self.config.evaluation.batches,
    )
    losses = [self._loss(params, self._split(batch)) for batch in batches]
    return float(np.mean([np.mean(loss) for loss in losses]))

  @functools.cached_property
  def _loss(self) -> Any:
    loss_fn = functools.partial(gpt2.loss_fn, self.model)
    return jax.pmap(loss_fn, AXIS, devices=self.devices)

  def _split(self, batch: np.ndarray) -> np.ndarray:
    """[batch, time] to [replicas, batch / replicas, time]."""
    return batch.reshape(self.replicas, -1, batch.shape[-1])

  def _stop_if_hopeless(self, line: dict[str, Any], step: int) -> None:
    if line["identical_gradients"] and self.replicas > 1:
      raise TrainingStopped(
        "All replicas had the same gradients in the first steps, so averaging"
        " them changes nothing; give every replica its own part of the batch."
      )
    if line["consecutive_skips"] >= self.config.optimizer.max_consecutive_skips:
      raise TrainingStopped(
        f"{line['consecutive_skips']} steps in a row up to step {step} had"
        " non-finite gradients; lower optimizer.lr or look at the data."
      )


def _check(config: ConfigDict) -> None:
  """What the parts do not check themselves."""
  for name in ("steps", "batch_size", "log_every"):
    if config[name] < 1:
      raise ValueError(
        f"`{name}` must be at least 1, got {config[name]}; raise it."
      )
  if config.seed < 0:
    raise ValueError(
      f"`seed` must be at least 0, got {config.seed}; choose another."
    )
  replicas, available = config.mesh.data, len(jax.devices())
  if not 1 <= replicas <= available:
    kind = jax.devices()[0].platform
    raise ValueError(
      f"`mesh.data` must be between 1 and the number of devices ({available}"
      f" {kind}), got {replicas}; lower it, or train on fake CPU devices with"
      f" JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={replicas} before the command."
    )
  if config.batch_size % replicas:
    raise ValueError(
      f"`batch_size` must be divisible by mesh.data ({replicas}), got"
      f" {config.batch_size}; use"
      f" {max(1, round(config.batch_size / replicas)) * replicas}."
    )
  if config.evaluation.batches < 1 or config.evaluation.every < 0:
    raise ValueError(
      "`evaluation.batches` must be at least 1 and `evaluation.every` at least"
      f" 0, got {config.evaluation.batches} and {config.evaluation.every}."
    )
