"""Makes the optax chain of a configuration: reducer, clipping, descent."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.wire.order import varying_axes
from experiments.trainer.parallel.meshes import DATA, STAGE, TENSOR
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import reducers, rules
from experiments.trainer.training.lookahead import lookahead

_SCHEDULE_PARTS = 8
LOW_RANK = ("edgc", "powersgd")  # reducers with a rank
AUTO = "auto"  # `advised` chooses one


def make_reducer(
  config: ConfigDict,
  task: Task,
  times: Mapping[str, Any],
  mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Returns the gradient transformation that `config.reducer` names.

  Args:
    config: The whole configuration.
    task: Its task.
    times: Arguments of `edgc` from `times.options_of`.
    mesh: The devices; None if the axis is bound in any case.

  Returns:
    A transformation that averages gradients over the replicas.

  Raises:
    ValueError: if the name is unknown or an option is out of range.
  """
  known = reducers.by_name()
  if config.reducer not in known:
    raise ValueError(
      f"`reducer` must be one of {', '.join(known)}, got"
      f" {config.reducer!r}; name one with --config=FILE:REDUCER."
    )
  times = dict(times)
  options = {"axis_name": DATA}
  if config.mesh.stage > 1:
    options["stages"] = edgc_jax.Stages(
      STAGE,
      task.placement,
      align=config.pipeline.align,
      backward_seconds=times.pop("backward_seconds", None),
    )
  # A reducer counts exchanges.
  options["check_every"] = exchanges_between_checks(config)
  exchanges = config.steps // steps_between_exchanges(config)
  make = known[config.reducer]
  if "seed" in inspect.signature(make).parameters:
    options["seed"] = config.seed
  options |= config.get(config.reducer, ConfigDict()).to_dict()
  if config.reducer in LOW_RANK:
    options["allocation"] = allocation_of(options)
    del options["scale_exponent"]
  if config.reducer == "edgc":
    options |= times
    if options["window"] is None:
      options["total_steps"] = max(1, exchanges)
    options["sampling"] = edgc_jax.Sampling(**options["sampling"])
    options["rule"] = rules.rule_of(options["rule"], options.pop("exponent"))
    options["warmup_rank"] = _warmup_rank(options["warmup_rank"])
  elif config.reducer == "powersgd":
    schedule = _rank_schedule(
      options["rank"],
      options.pop("final_rank"),
      options.pop("final_exponent"),
      exchanges,
    )
    options["rank"] = _after_warmup(schedule, options.pop("warmup_steps"))
  reducer = make(**options)
  if _is_plain(config, mesh):
    specs = task.layout(mesh.shape).specs
    reducer = edgc_jax.on_mesh(reducer, mesh, specs, axis_name=DATA)
  return reducer


def has_local_steps(config: ConfigDict) -> bool:
  """Returns whether replicas train alone between exchanges."""
  return bool(config.local.every) and not config.local.lookahead


def steps_between_exchanges(config: ConfigDict) -> int:
  """Returns the steps from one update of the reducer to the next."""
  return config.local.every if has_local_steps(config) else 1


def exchanges_between_checks(config: ConfigDict) -> int:
  """Returns the exchanges from one comparison of replicas to the next."""
  return max(1, config.sentinel.every // steps_between_exchanges(config))


def allocation_of(options: Mapping[str, Any]) -> Any:
  """Returns the argument `allocation` from a section of a configuration."""
  if options["allocation"] == "error":
    return edgc_jax.ErrorAllocation(options["scale_exponent"])
  return options["allocation"]


def without_exchange(
  config: ConfigDict, task: Task, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
  """Returns an optimiser with a reducer's state that averages nothing.

  It is for measuring a step without an exchange, so replicas do not agree on
  steps to skip, either. Under `jit`, where parameters have to stay equal on all
  replicas, all entries of the gradients are replaced by their sum: they are
  read as usual, but only one number is sent.
  """
  clip = _make_clip(config)
  return optax.chain(
    unaveraged(config, task, mesh), clip, _make_descent(config)
  )


def unaveraged(
  config: ConfigDict, task: Task, mesh: Mesh | None = None
) -> optax.GradientTransformationExtraArgs:
  """Returns the first link of `without_exchange`."""
  reducer = make_reducer(config, task, {}, mesh)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    late_updates: Callable[[Any], Any] | None = None,
    **_: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    if late_updates is not None:
      updates = late_updates(lambda x: x)
    if config.mesh.backend != "jit":
      return updates, state
    if _is_plain(config, mesh):
      total = jnp.sum(jax.vmap(optax.tree.sum)(updates))
    else:
      total = optax.tree.sum(updates)
      total = lax.psum(total, varying_axes(total))
    return jax.tree.map(lambda p: jnp.full_like(p, total), params), state

  return optax.GradientTransformationExtraArgs(reducer.init, update)


def rank_name(reducer: str, rank: float) -> str:
  """Formats a rank; 0 means dense, or "-" for a reducer without ranks."""
  if rank:
    return f"{rank:.0f}"
  return "dense" if reducer in (*LOW_RANK, "allreduce", AUTO) else "-"


def _warmup_rank(rank: str) -> int | str | None:
  """Returns the rank of a warm-up that a configuration names."""
  if rank.isdigit():
    return int(rank)
  return None if rank == "dense" else rank


def _after_warmup(schedule: dict[int, int], steps: int) -> dict[int, int]:
  """Returns a schedule whose first steps send dense gradients."""
  if steps < 0:
    raise ValueError(
      f"`powersgd.warmup_steps` must be at least 0, got {steps}; 0 begins with"
      " the rank."
    )
  if not steps:
    return schedule
  then = schedule[max(step for step in schedule if step <= steps)]
  later = {step: rank for step, rank in schedule.items() if step > steps}
  return {0: 0, steps: then, **later}


def _rank_schedule(
  rank: float, final_rank: int, exponent: float, exchanges: int
) -> dict[int, int]:
  """Returns powersgd's schedule, {first exchange: rank}.

    rank(x) = rank + (final_rank - rank) x^exponent,   x from 0 to 1

  Args:
    rank: A fraction is the mean over the run: first the rank above it, then
      the one below.
    final_rank: If not 0, the rank moves there in equal parts of the run.
    exponent: Of the way to it.
    exchanges: Of the run.
  """
  if exponent <= 0:
    raise ValueError(
      f"`powersgd.final_exponent` must be positive, got {exponent}; 1 moves the"
      " rank in equal steps."
    )
  if final_rank < 0:
    raise ValueError(
      f"`powersgd.final_rank` must be at least 0, got {final_rank}; 0 keeps the"
      " rank."
    )
  below = math.floor(rank)
  if rank < 1:
    raise ValueError(
      f"`powersgd.rank` must be at least 1, got {rank}; a larger one sends more"
      " and loses less."
    )
  if final_rank and below != rank:
    raise ValueError(
      "`powersgd.rank` must be a whole number with a final_rank"
      f" ({final_rank}), got {rank}; use {below}."
    )
  if final_rank in (0, rank):
    change = round((rank - below) * exchanges)
    if change in (0, exchanges):
      return {0: below + bool(change)}
    return {0: below + 1, change: below}
  parts = 1 + min(abs(final_rank - below), _SCHEDULE_PARTS - 1)
  way = np.linspace(0.0, 1.0, parts) ** exponent
  ranks = (rank + (final_rank - rank) * way).round().astype(int).tolist()
  return {i * exchanges // parts: rank for i, rank in enumerate(ranks)}


def make_schedule(config: ConfigDict) -> optax.Schedule:
  """Returns the learning rate by step: linear warm-up, then cosine decay."""
  options = config.optimizer
  # Of a peak of 1, because optax does not take a traced one.
  share = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=1.0,
    warmup_steps=min(options.warmup_steps, config.steps - 1),
    decay_steps=config.steps,
    end_value=options.final_lr_ratio,
  )
  return lambda step: options.lr * share(step)


def at_step(opt_state: Any, step: int) -> Any:
  """Moves the schedule of the learning rate to a step, from 0 on."""

  def moved(state: Any) -> Any:
    if not isinstance(state, optax.ScaleByScheduleState):
      return state
    old = state.count
    new = np.full(old.shape, step, old.dtype)
    # Where the old one lies, which may be on the devices of several hosts.
    count = jax.make_array_from_callback(
      old.shape, old.sharding, new.__getitem__
    )
    return state._replace(count=count)

  return jax.tree.map(
    moved, opt_state,
    is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState),
  )  # fmt: skip


def make_optimizer(
  config: ConfigDict,
  task: Task,
  times: Mapping[str, Any],
  reducer: optax.GradientTransformation | None = None,
  mesh: Mesh | AbstractMesh | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Chains the reducer, clipping of the mean gradient, and the descent.

  With local steps clipping, of a replica's gradient, and descent are the inner
  optimiser, and the reducer begins the outer one.

  Args:
    config: The whole configuration.
    task: Its task.
    times: Arguments of `edgc` from `times.options_of`.
    reducer: Replaces the reducer of the configuration if given.
    mesh: As for `make_reducer`.

  Returns:
    The transformation, which skips steps with non-finite gradients.

  Raises:
    ValueError: if a name is unknown or an option is out of range.
  """
  if reducer is None:
    reducer = make_reducer(config, task, times, mesh)
  options, local = config.optimizer, config.local
  axes = None if _is_plain(config, mesh) else (DATA, *_parts(config))
  is_plain_sgd = isinstance(local.momentum, float) and not local.momentum
  momentum = None if is_plain_sgd else local.momentum
  outer = optax.sgd(local.lr, momentum, nesterov=True)
  if has_local_steps(config):
    how: dict[str, Any] = {}
    if _is_plain(config, mesh):
      how = {"mesh": mesh, "param_specs": task.layout(mesh.shape).specs}
    return edgc_jax.local_steps(
      make_inner(config),
      optax.chain(reducer, outer),
      local.every,
      DATA,
      overlap=local.overlap,
      **how,
    )
  chain = edgc_jax.skip_nonfinite(
    optax.chain(reducer, _make_clip(config), _make_descent(config)),
    axes,
    options.max_consecutive_skips,
  )
  return lookahead(chain, outer, local.every) if local.every else chain


def make_inner(config: ConfigDict) -> optax.GradientTransformation:
  """Chains clipping and the descent, for replicas that train alone."""
  return optax.chain(_make_clip(config), _make_descent(config))


def _parts(config: ConfigDict) -> tuple[str, ...]:
  """Returns the axes over which a replica's leaves lie in parts, on stages."""
  if config.mesh.stage == 1:
    return ()
  return (STAGE, TENSOR) if config.mesh.tensor > 1 else (STAGE,)


def _make_clip(config: ConfigDict) -> optax.GradientTransformation:
  """Returns the link that clips the norm of a whole replica's gradient."""
  norm, parts = config.optimizer.clip_norm, _parts(config)
  if parts:
    return edgc_jax.clip_by_global_norm(norm, parts)
  return optax.clip_by_global_norm(norm)


def _make_descent(config: ConfigDict) -> optax.GradientTransformation:
  """Returns the last links of the chain."""
  options = config.optimizer
  schedule = make_schedule(config)
  adamw = optax.adamw(
    schedule,
    b1=options.b1,
    b2=options.b2,
    weight_decay=options.weight_decay,
    mask=_is_matrix,
  )
  sign = optax.chain(
    optax.scale_by_sign(),
    optax.add_decayed_weights(options.weight_decay, _is_matrix),
    optax.scale_by_learning_rate(schedule),
  )
  muon = optax.contrib.muon(
    schedule,
    weight_decay=options.weight_decay,
    adam_b1=options.b1,
    adam_b2=options.b2,
    muon_weight_dimension_numbers=_kernel_axes,
    consistent_rms=0.2,  # steps about as long as AdamW's
  )
  descents = {"adamw": adamw, "muon": muon, "sign": sign}
  if options.name not in descents:
    raise ValueError(
      f"`optimizer.name` must be one of {', '.join(descents)}, got"
      f" {options.name!r}; sign belongs to the reducer demo."
    )
  return descents[options.name]


def _is_plain(config: ConfigDict, mesh: Mesh | AbstractMesh | None) -> bool:
  """Returns whether the step is plain `jax.jit`, in which no axis is bound."""
  has_stages = config.mesh.stage > 1
  return mesh is not None and config.mesh.backend == "jit" and not has_stages


def _is_matrix(params: optax.Params) -> optax.Params:
  """Masks weight decay: kernels and embeddings only."""
  return jax.tree_util.tree_map_with_path(
    lambda path, p: (
      edgc_jax.layer_matrix(jax.tree_util.keystr(path), p.shape) is not None
    ),
    params,
  )


def _kernel_axes(params: optax.Params) -> optax.Params:
  """Returns the axes of each kernel that Muon takes as rows and columns.

  Embeddings, positions, biases and gains have None: Adam moves them.
  """

  def axes_of(path: Any, p: Any) -> optax.contrib.MuonDimensionNumbers | None:
    view = edgc_jax.layer_matrix(jax.tree_util.keystr(path), p.shape)
    name = jax.tree_util.keystr(path[-1:], simple=True)
    if view is None or name != "kernel":
      return None
    sizes = [math.prod(p.shape[:i]) for i in range(p.ndim)]
    first = sizes.index(view.count)
    last = sizes.index(view.count * view.rows)
    return optax.contrib.MuonDimensionNumbers(
      tuple(range(first, last)), tuple(range(last, p.ndim))
    )

  return jax.tree_util.tree_map_with_path(axes_of, params)
