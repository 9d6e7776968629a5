"""Trains a model as a configuration says, and summarises the run.

A step returns its metrics as device arrays. They are fetched together when a
line is logged, so that the devices do not wait for the host in between.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.state.state import STATE_VERSION
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.parallel.stored_state import Stored, StoredForm, flat
from experiments.trainer.runs.checkpoints import CheckpointError, Checkpoints
from experiments.trainer.runs.run_folder import RunFolder, environment
from experiments.trainer.runs.storage import RunInUse, storage_of
from experiments.trainer.runtime import heap, hosts
from experiments.trainer.runtime.stop_signals import (
  StopSignals,
  TrainingInterrupted,
)
from experiments.trainer.training import advised, checks, reducers, times
from experiments.trainer.training.optimizer import (
  exchanges_between_checks,
  make_optimizer,
  steps_between_exchanges,
)
from experiments.trainer.training.progress_check import (
  ProgressCheck,
  TrainingStopped,
)
from experiments.trainer.training.run_log import RunLog
from experiments.trainer.training.site_rounds import SiteRounds, seed_of

# What a checkpoint says of a run beside its arrays.
_ABOUT = {
  "state_version", "replicas", "shards", "times", "choice", "corpus", "log",
  "line", "batches",
}  # fmt: skip


class Trainer:
  """One training run."""

  def __init__(self, config: ConfigDict):
    """Validates the configuration and loads the data; writes nothing.

    Args:
      config: As from a file in configs/.

    Raises:
      ValueError: if an option is out of range, or does not fit another.
      FileNotFoundError: if there is no data at `data.path`.
      FileExistsError: if `run_dir` holds other files.
      CheckpointError: if a checkpoint is needed and none can be used.
    """
    self.config = config
    self.task = checks.task_of(config)
    mesh = meshes.of_config(config)
    name = f"{config.name}-{config.reducer}-seed{config.seed}"
    name += f"-{config.site.name}" if config.site.url else ""
    path = config.run_dir or pathlib.Path("runs") / name
    self.folder = RunFolder(path, config.to_dict())
    self.checkpoints = Checkpoints(
      self.folder.checkpoints,
      config.checkpoint.keep,
      name=f"{self.folder.name}/checkpoints",
      note_removal=self.folder.storage.note_removal,
    )
    self._source = self.task.source
    hosts.wait_for_all("loaded")
    self._progress = self._find_progress()
    config, self.choice = advised.resolve(
      config, self.task, mesh, self._progress.about.get("choice")
    )
    self.config = config
    # The ladder depends on the times, so a run measures them only once.
    if "times" in self._progress.about:
      self.times = times.of_numbers(self._progress.about["times"])
    else:
      self.times = times.options_of(config, self.task, mesh)
    self.tx = make_optimizer(config, self.task, self.times, mesh=mesh)
    self.parallel = backends.make(config, self.task, self.tx, mesh)
    self._rounds = None
    if config.site.url:
      self._rounds = SiteRounds(config, self.task, self.parallel)
    form = self.parallel.stored
    checks.require_memory(form.shapes)
    self._leaves = str(
      edgc_jax.describe(
        self.tx, form.shapes[0], mesh=mesh, param_specs=form.specs[0]
      )
    )
    self._load_params = None
    if config.init_from and not (self._progress.step or self.folder.summary()):
      self._load_params = self._find_params(config.init_from)

  def run(
    self, after_line: Callable[[], None] = lambda: None
  ) -> dict[str, Any]:
    """Trains to the last step, and writes and returns the summary.

    Resumes from the run's newest checkpoint, if there is one.

    Args:
      after_line: Called in the first process after each logged line.

    Raises:
      TrainingStopped: if all replicas had the same gradients, too many
        consecutive steps were not finite, or replicas diverged
        (`sentinel.action`).
      TrainingInterrupted: after SIGTERM or Ctrl-C.
      CheckpointError: if a checkpoint could not be written or read.
      RunInUse: if another process writes into the folder.
    """
    try:
      self.folder.lock()
      self._require_unchanged()
      progress = self._load()
      last_line = progress.about.get("line", {}).get("step", 0)
      self.folder.start(progress.step, last_line, self._leaves)
      if self.times:
        hosts.say(times.describe(self.times))
      hosts.say(self._leaves)
      for note in checks.notes(self.config):
        hosts.say(f"note: {note}")
      with StopSignals() as signals:
        summary = self._train(progress, signals, after_line)
      self.checkpoints.close()
      self.folder.finish(summary)
    except TrainingStopped:
      self.checkpoints.close()  # the newest one may not be written yet
      raise
    finally:
      self.folder.close()
    return summary

  def _find_progress(self) -> "_Progress":
    """Finds the newest checkpoint of a resumed run, without its arrays."""
    if not self.config.resume and self.folder.is_claimed():
      raise ValueError(
        f"`run_dir` must be new with --config.resume=false, got"
        f" {self.folder.name}, which holds a run; leave `resume` out to resume"
        " it."
      )
    summary = self.folder.summary()
    self._found = self.checkpoints.steps(), summary
    newest = self.checkpoints.newest() if summary is None else None
    if newest is None:
      return _Progress(about=summary or {})
    step, about = newest
    _require_version(about, self.folder.name)
    if about["corpus"] != self._source.sha256:
      raise ValueError(
        f"`data.path` must hold the data that the run {self.folder.name} began"
        " with, got other data; restore it, or give another --config.run_dir."
      )
    mesh = self.config.mesh
    if mesh.backend == "vmap" and about["shards"] != mesh.fsdp:
      raise ValueError(
        "`mesh.backend` must be pmap or jit where a run on"
        f" {about['shards']} shards goes on without them, got 'vmap'; resume"
        " with jit, and from its next checkpoint with vmap."
      )
    return _Progress(step, about=about)

  def _require_unchanged(self) -> None:
    """Raises if a run that has ended since wrote into the folder."""
    if not hosts.is_first():
      return
    if (self.checkpoints.steps(), self.folder.summary()) != self._found:
      raise RunInUse(
        f"`run_dir` must not be in use, got {self.folder.name}, into which"
        " another process has written since this start read it; give the same"
        " command again."
      )

  def _load(self) -> "_Progress":
    """Returns the progress with parameters and optimiser state loaded."""
    config, progress = self.config, self._progress
    step, about = progress.step, progress.about
    self.checkpoints.set_aside()
    if not step:
      if self.folder.is_claimed():
        hosts.say("no checkpoint yet: begins at step 1")
      return progress
    replicas, shards = about["replicas"], about["shards"]
    stored, before = self.parallel.stored, self._form_before(replicas, shards)
    template = (before or stored).template(replicas)
    trees = self.checkpoints.load(step, template)
    _require_finite(trees, "run_dir", self.folder.name)
    params, opt_state = self.parallel.of_stored(stored.load(trees, before))
    mesh, changes = config.mesh, []
    if replicas != mesh.data:
      changes.append(f"on {mesh.data} replicas, {replicas} before")
    if shards != mesh.fsdp:
      changes.append(f"on {mesh.fsdp} shards of a replica, {shards} before")
    if changes:
      # The batch of a replica has changed, or the matrices of a device, and
      # with it the entropy.
      opt_state = edgc_jax.restart_reference(opt_state)
      residuals = optax.tree.get_all_with_path(opt_state, "residual")
      if jax.tree.leaves(residuals):
        changes.append("residuals keep their mean")
      if config.reducer == "edgc":
        changes.append("the reference entropy will move")
    hosts.say(f"resuming after step {step} {'; '.join(changes)}".rstrip())
    return _Progress(step, params, opt_state, about)

  def _form_before(self, replicas: int, shards: int) -> StoredForm | None:
    """Returns the stored form of a run on another number of shards."""
    if shards == self.config.mesh.fsdp:
      return None
    config = self.config.copy_and_resolve_references()
    config.mesh.update(data=replicas, fsdp=shards)
    mesh = meshes.abstract_mesh(replicas, shards=shards)
    tx = make_optimizer(config, self.task, self.times, mesh=mesh)
    return StoredForm.of(self.task.layout(mesh.shape), tx, mesh)

  def _find_params(self, folder: str) -> Callable[[], Any]:
    """Returns a function that loads the parameters of another run.

    Raises:
      CheckpointError: if the run has no checkpoint of this model.
    """
    stored = self.parallel.stored
    storage = storage_of(folder)
    checkpoints = Checkpoints(storage.checkpoints, 1, f"{folder}/checkpoints")
    try:
      newest = checkpoints.newest()
      if newest is None:
        raise CheckpointError("There are no checkpoints.")
      step, about = newest
      if not isinstance(about, dict) or "replicas" not in about:
        raise CheckpointError("They are of another program.")
      # Tensor shards store attention's columns in another order.
      tensor = about.get("tensor", 1)  # older checkpoints do not say it
      if tensor != self.config.mesh.tensor:
        raise CheckpointError(f"They are of mesh.tensor={tensor}.")
      shapes = stored.template(about["replicas"])["params"]
      checkpoints.require_shapes(step, {"params": shapes})
    except CheckpointError as error:
      raise CheckpointError(
        "`init_from` must be the folder of a run with checkpoints of this"
        f" model, got {folder}; give another folder. {error}"
      ) from error

    def load() -> Any:
      hosts.say(f"begins with the parameters of {folder} after step {step}")
      trees = checkpoints.load(step, {"params": shapes})
      _require_finite(trees, "init_from", folder)
      return self.parallel.of_stored(stored.load_params(trees["params"]))

    return load

  def _train(
    self,
    progress: "_Progress",
    signals: StopSignals,
    after_line: Callable[[], None],
  ) -> dict[str, Any]:
    config = self.config
    log = RunLog(
      self.folder, config, self.task, progress.about.get("log"),
      self.parallel.fetch,
    )  # fmt: skip
    params, opt_state = progress.params, progress.opt_state
    if progress.step == 0:
      params, opt_state = self.parallel.init(jax.random.key(config.seed))
      if self._load_params:
        params = self._load_params()
    self.parallel.compile_step(params, opt_state, config.batch_size)
    self.parallel.compile_evaluation(params, config.batch_size)
    hosts.wait_for_all("compiled")
    heap.keep_freed_memory()
    batches = self.task.train_batches(
      config.batch_size, seed_of(config), self.parallel.rows(config.batch_size)
    )
    if progress.step:
      batches.set_state(progress.about["batches"])
    line = progress.about.get("line", {})
    progress_check = ProgressCheck(config, line, progress.about.get("replicas"))
    step = progress.step
    if self._rounds:
      params, opt_state, step = self._rounds.join(
        step, params, opt_state, progress.about.get("site", {})
      )
      log.skip_to(step)
    while step < config.steps:
      step += 1
      log.begin_step()
      params, opt_state, numbers = self.parallel.step(
        params, opt_state, next(batches), step
      )
      log.add(numbers)
      if self._rounds:
        params, opt_state, step = self._rounds.after(step, params, opt_state)
        log.skip_to(step)
      measured: dict[str, float] = {}
      if log.has_line(step):
        self.parallel.wait(params)  # numbers may be of one device alone
        line = log.fetch()
        line |= self._rounds.numbers if self._rounds else {}
        try:
          if log.new_diverged_steps:
            params, opt_state = self._rejoin(
              params, opt_state, log.new_diverged_steps
            )
          else:
            progress_check.check(line)
        except TrainingStopped as stop:
          self.folder.stop(str(stop))
          log.write(line)  # shows why
          raise
        if log.has_evaluation(step):
          measured = self._evaluate(params)
          line |= {f"val_{name}": value for name, value in measured.items()}
        log.write(line)
        if hosts.is_first():
          after_line()
        hosts.wait_for_all("logged")  # for slow disks, uploads and pages
      is_last, every = step == config.steps, config.checkpoint.every
      is_stopped = signals.wants_stop(step) and not is_last
      if is_stopped or (every and (is_last or step % every == 0)):
        about = {
          "state_version": STATE_VERSION,
          "replicas": config.mesh.data,
          "shards": config.mesh.fsdp,
          "tensor": config.mesh.tensor,
          "times": times.as_numbers(self.times),
          "choice": self.choice,
          "corpus": self._source.sha256,
          "log": log.state(),
          "line": line,
          "batches": batches.get_state(),
          "site": self._rounds.state() if self._rounds else {},
        }
        self.folder.sync()
        trees = flat(self.parallel.to_stored((params, opt_state)))
        self.checkpoints.save(step, trees, about, self._score(measured))
        if self.folder.storage.copies_checkpoints:
          self.checkpoints.wait()
          # Whoever asked to stop must not believe that an unsent one is saved.
          sender = self.folder.storage if is_stopped else self.folder
          sender.upload()
      if is_stopped:
        if self._rounds:
          self._rounds.leave()
        self.checkpoints.close()
        raise TrainingInterrupted(signals.received, step)
    log.close()
    if self._rounds:
      self._rounds.leave()
    return self.summary(log, line)

  def summary(self, log: RunLog, line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary of a run with this log and last line."""
    config, numbers = self.config, log.summary()
    return {
      "reducer": config.reducer,
      "steps": config.steps,
      "params": self.parallel.num_params,
      "replicas": config.mesh.data,
      "stages": config.mesh.stage,
      "shards": config.mesh.fsdp,
      "tensor": config.mesh.tensor,
      "train_loss": line["loss"],
      **{f"val_{name}": line[f"val_{name}"] for name in self.task.metrics},
      "dense_bytes_per_step": line["dense_bytes"],
      "compression_ratio": line["compression_ratio"],
      **{
        name: line[name]
        for name in ("skipped_steps", "skipped_inner_steps")
        if name in line  # the latter with local steps alone
      },
      "traces": self.parallel.traces,
      "times": times.as_numbers(self.times),
      "choice": self.choice,
      **numbers,
      **(self._rounds.summary() if self._rounds else {}),
      **hosts.peak_memory(),
      log.speed_name: line[log.speed_name],
      "corpus": self._source._asdict(),
      "versions": {
        "task": self.task.version,
        **reducers.versions_of(config.reducer, config.local),
      },
      "environment": environment(),
    }

  def _evaluate(self, params: Any) -> dict[str, float]:
    """Returns the metrics of held-out data, the same in every run."""
    config = self.config
    batches = self.task.held_out_batches(
      config.batch_size, config.evaluation.batches
    )
    rows = self.parallel.rows(config.batch_size)
    found = [
      self.parallel.evaluate(params, jax.tree.map(lambda x: x[rows], batch))
      for batch in batches
    ]
    hosts.wait_for_devices(found)
    return {
      name: float(np.mean([np.asarray(numbers[name]) for numbers in found]))
      for name in self.task.metrics
    }

  def _score(self, measured: Mapping[str, float]) -> float | None:
    """Returns what the best checkpoint has least of; None if not evaluated."""
    if not measured:
      return None
    name = self.config.evaluation.metric
    sign = {"min": 1, "max": -1}[self.task.metrics[name]]
    return sign * measured[name]

  def _rejoin(
    self, params: Any, opt_state: Any, steps: list[int]
  ) -> tuple[Any, Any]:
    """Copies the first replica after replicas have diverged, or stops."""
    finding = (
      f"At step {steps[0]} replicas held different parameters, or applied"
      " different updates"
    )
    if self.config.sentinel.action == "stop":
      unseen = exchanges_between_checks(self.config)
      unseen *= steps_between_exchanges(self.config)
      raise TrainingStopped(
        f"{finding}; by then they may have trained different models for up to"
        f" {unseen} steps. Resume from a checkpoint before"
        " those steps (delete the later ones), or set"
        " --config.sentinel.action=follow to continue with the first replica's"
        " parameters and state on all replicas. If it happens again, check the"
        " hardware of the hosts, and any other code that changes parameters."
      )
    if hosts.is_first():
      print(f"{finding}; all continue with the first replica's", flush=True)
    return self.parallel.follow_first_replica(params, opt_state)


def _require_version(about: Mapping[str, Any], folder: str) -> None:
  """Raises unless a checkpoint is one that this version continues from."""
  is_whole = isinstance(about, dict) and about.keys() >= _ABOUT
  if not is_whole or about["state_version"] != STATE_VERSION:
    raise ValueError(
      f"`run_dir` must hold checkpoints with states of version {STATE_VERSION},"
      f" got {folder}, whose states are of another edgc_jax and do not load;"
      f" give another --config.run_dir, and --config.init_from={folder} for its"
      " parameters."
    )


def _require_finite(
  trees: Mapping[str, Stored], name: str, folder: str
) -> None:
  """Raises unless all parameters of a checkpoint are finite."""
  for path, array in trees["params"].items():
    parts = [array]
    if isinstance(array, jax.Array):
      parts = [part.data for part in array.addressable_shards]
    if not all(jnp.isfinite(part).all() for part in parts):
      raise CheckpointError(
        f"`{name}` must hold checkpoints with finite parameters, got {folder},"
        f" whose {path} has numbers that are not; remove its newest checkpoint,"
        " or give another folder."
      )


@dataclasses.dataclass(frozen=True)
class _Progress:
  """Progress of a run: steps done, state, and the checkpoint's `about`."""

  step: int = 0
  params: Any = None
  opt_state: Any = None
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
