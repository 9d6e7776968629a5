"""Data-parallel training through jax.pmap, from a configuration to a summary.

The replicas are devices of one process. Only scalars leave them: every step
hands its numbers out as device arrays, which are fetched in one go when a
line is logged, so that devices never wait for the host in between.
"""

import functools
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from jax import lax
from ml_collections import ConfigDict

import edgc_jax
from experiments import data, gpt2, report
from experiments.optimizer import make_optimizer, make_schedule
from experiments.run_folder import RunFolder, environment

AXIS = "data"
# Numbers that differ per pipeline stage are lists, one entry a stage.
_PER_STAGE = ("entropy", "rank", "rung", "wire_bytes", "relative_error",
              "predicted_error", "residual_norm")  # fmt: skip


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
      ValueError: if all replicas had the same gradients.
      FloatingPointError: if too many steps in a row were not finite.
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
    started = time.monotonic()
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
    log = _Log(self.folder, config.steps, started)
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
        if step == 1:
          log.start_clock()
    log.close()
    tokens = config.batch_size * self.model.context
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
      "seconds": time.monotonic() - started,
      "tokens_per_second": tokens * log.steps_per_second,
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
      raise ValueError(
        "All replicas had the same gradients in the first steps, so averaging"
        " them changes nothing; give every replica its own part of the batch."
      )
    if line["consecutive_skips"] >= self.config.optimizer.max_consecutive_skips:
      raise FloatingPointError(
        f"{line['consecutive_skips']} steps in a row up to step {step} had"
        " non-finite gradients; lower optimizer.lr or look at the data."
      )


class _Log:
  """Collects the numbers of the steps, and shows and writes them."""

  def __init__(self, folder: RunFolder, steps: int, started: float):
    self.folder = folder
    self.started = started
    self.pending: list[dict[str, jax.Array]] = []
    self.rank_history: list[Any] = []
    self.wire_bytes = 0.0
    self.steps = steps
    self.clock = (1, started)
    self.is_terminal = sys.stderr.isatty()
    self.bar = tqdm.tqdm(
      total=steps, disable=not self.is_terminal, unit="step", smoothing=0.1
    )
    self.learning_rate = make_schedule(ConfigDict(folder.config))

  def add(self, numbers: dict[str, jax.Array]) -> None:
    """Keeps a step's numbers, still on the devices."""
    self.pending.append(numbers)

  def fetch(self, step: int) -> dict[str, Any]:
    """The line for the steps since the last one; its loss is their mean."""
    first = lambda x: x.addressable_shards[0].data  # noqa: E731
    steps = jax.device_get(jax.tree.map(first, self.pending))
    steps = [{k: np.ravel(v)[0].item() for k, v in s.items()} for s in steps]
    self.pending = []
    for number, values in enumerate(steps, step - len(steps) + 1):
      self.wire_bytes += values["wire_bytes"]
      rank = [values["rank"]]
      if not self.rank_history or self.rank_history[-1][1] != rank:
        self.rank_history.append([number, rank])
    line = dict(steps[-1], step=step)
    line["loss"] = float(np.mean([s["loss"] for s in steps]))
    line["learning_rate"] = float(self.learning_rate(step - 1))
    line["compression_ratio"] = line["dense_bytes"] * step / self.wire_bytes
    line["seconds"] = time.monotonic() - self.started
    line["tokens_per_second"] = self._tokens * self.steps_per_second_at(step)
    return line

  @functools.cached_property
  def _tokens(self) -> int:
    config = self.folder.config
    return config["batch_size"] * config["model"]["context"]

  def steps_per_second_at(self, step: int) -> float:
    """Mean speed since the first step, which compiled."""
    since, at = self.clock
    elapsed = time.monotonic() - at
    return max(step - since, 1) / max(elapsed, 1e-9)

  @property
  def steps_per_second(self) -> float:
    return self.steps_per_second_at(self.steps)

  def start_clock(self) -> None:
    """Called after the first step."""
    self.clock = (1, time.monotonic())

  def write(self, line: dict[str, Any]) -> None:
    """Shows the line and adds it to the run folder."""
    rank = line["rank"] or "dense"
    shown = {
      "loss": f"{line['loss']:.3f}",
      "rank": rank,
      "ratio": f"{line['compression_ratio']:.2f}",
    }
    if "val_loss" in line:
      shown["val_loss"] = f"{line['val_loss']:.4f}"
    self.bar.set_postfix(shown, refresh=False)
    self.bar.update(line["step"] - self.bar.n)
    if not self.is_terminal:
      left = (self.steps - line["step"]) / self.steps_per_second_at(
        line["step"]
      )
      text = "  ".join(f"{name} {value}" for name, value in shown.items())
      print(
        f"step {line['step']}/{self.steps}  {text}  {left:.0f} s left",
        flush=True,
      )
    per_stage = {k: [line[k]] for k in _PER_STAGE if k in line}
    self.folder.log(line | per_stage)

  def close(self) -> None:
    self.bar.close()


def _check(config: ConfigDict) -> None:
  """What the parts do not check themselves."""
  for name in ("steps", "batch_size", "log_every"):
    if config[name] < 1:
      raise ValueError(
        f"`{name}` must be at least 1, got {config[name]}; raise it."
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
