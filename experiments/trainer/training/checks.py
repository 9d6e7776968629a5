"""Validates a configuration before the run writes anything."""

import math
import os
from typing import Any

import jax
from ml_collections import ConfigDict

import edgc_jax
from configs import common
from edgc_jax.validation import shown
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.runtime import command_line
from experiments.trainer.runtime.refusals import nearest
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import reducers, times
from experiments.trainer.training.optimizer import (
  AUTO,
  has_local_steps,
  steps_between_exchanges,
)

# Keys that no other part checks, by their least values.
_LEAST = {
  1: ("steps", "batch_size", "log_every", "checkpoint.keep",
      "evaluation.batches", "pipeline.microbatches",
      "optimizer.max_consecutive_skips", "sentinel.every"),
  0: ("seed", "checkpoint.every", "evaluation.every", "local.every", "local.lr",
      "local.momentum", "local.overlap", "optimizer.lr",
      "optimizer.warmup_steps", "optimizer.final_lr_ratio", "optimizer.b1",
      "optimizer.b2", "optimizer.weight_decay", "pipeline.backward_seconds",
      "link.bandwidth", "link.latency", "link.compression_base",
      "link.compression_per_rank"),
}  # fmt: skip
_BELOW_ONE = ("local.momentum", "optimizer.b1", "optimizer.b2")
# Their defaults are numbers, and they may be None.
_OPTIONAL = ("edgc.rank_max", "edgc.max_rank_step", "site.density")
_LARGEST = {int: 2**31 - 1, float: 3e38}  # of int32 and float32


def task_of(config: ConfigDict) -> Task:
  """Validates a configuration, and returns its task.

  Raises:
    ValueError: if a key is missing or unknown, or a value is out of range.
    TypeError: if a value has another type than in configs/common.py.
  """
  check_keys(config)
  task = tasks.make(config)
  check(config, task)
  return task


def fit_devices(config: ConfigDict) -> None:
  """Takes the accelerators that there are, unless the command says how many.

  Raises:
    As `check_keys`.
  """
  check_keys(config)
  if not command_line.is_given("mesh.data"):
    meshes.fit_replicas(config)


def check(config: ConfigDict, task: Task) -> None:
  """Raises on values that no other part checks."""
  for least, names in _LEAST.items():
    for name in names:
      if config[name] < least:
        raise ValueError(
          f"`{name}` must be at least {least}, got {config[name]}; raise it."
        )
  for name in _BELOW_ONE:
    if config[name] >= 1:
      raise ValueError(
        f"`{name}` must be below 1, got {config[name]}; lower it."
      )
  if config.optimizer.clip_norm <= 0:
    raise ValueError(
      "`optimizer.clip_norm` must be positive, got"
      f" {config.optimizer.clip_norm}; 1 is usual, and a large one clips"
      " nothing."
    )
  _check_mesh(config, task)
  _check_local(config)
  _check_site(config)
  if config.sentinel.action not in ("stop", "follow"):
    raise ValueError(
      "`sentinel.action` must be stop or follow (the first replica), got"
      f" {config.sentinel.action!r}; stop ends the run if they diverge."
    )
  if config.evaluation.metric not in task.metrics:
    raise ValueError(
      f"`evaluation.metric` must be one of {', '.join(task.metrics)}, which the"
      f" task {config.task!r} measures, got {config.evaluation.metric!r}; it"
      " decides which checkpoint is the best."
    )


def require_memory(shapes: Any) -> None:
  """Raises if the memory of this machine's CPUs cannot hold a training state.

  Args:
    shapes: Of all its arrays, which the machine holds at least once.
  """
  if jax.default_backend() != "cpu" or jax.process_count() > 1:
    return
  leaves = jax.tree.leaves(shapes)
  needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
  memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  if needed > memory:
    raise ValueError(
      f"`model` must have a training state that fits into"
      f" {memory / 2**30:.1f} GiB of memory, got {needed / 2**30:.1f} GiB;"
      " choose smaller sizes."
    )


def notes(config: ConfigDict) -> list[str]:
  """Returns what a user may not expect of a run with this configuration."""
  found = [_unfinished_round(config), _endless_warmup(config)]
  if not config.checkpoint.every:
    found.append(
      "with checkpoint.every=0 a finished run leaves numbers and no parameters"
    )
  return [note for note in found if note]


def _unfinished_round(config: ConfigDict) -> str:
  """Tells which last steps no exchange has; empty if there are none."""
  local, steps = config.local, config.steps
  if not has_local_steps(config):
    return ""
  # An exchange begins after each round, and is applied `overlap` steps later.
  left = steps - max(0, steps - local.overlap) // local.every * local.every
  if not left:
    return ""
  note = (
    f"no exchange includes the last {left} of {steps} steps, and the evaluated"
    " parameters are those of the exchanges"
  )
  if left > local.overlap:
    note += f"; --config.steps={steps - left + local.every + local.overlap}"
    note += " ends with one"
  return note


def _endless_warmup(config: ConfigDict) -> str:
  """Tells that every exchange is dense; empty if not."""
  own = config.get(config.reducer, {})
  is_dense = config.reducer == "powersgd" or own.get("warmup_rank") == "dense"
  exchanges = config.steps // steps_between_exchanges(config)
  if not exchanges or not is_dense or own["warmup_steps"] < exchanges:
    return ""
  return (
    f"all {exchanges} exchanges are dense, since"
    f" {config.reducer}.warmup_steps is {own['warmup_steps']}"
  )


def check_keys(config: ConfigDict) -> None:
  """Raises unless a configuration has all keys, and values of their types."""
  if config.get("reducer") not in (*reducers.by_name(), AUTO):
    raise ValueError(
      f"`reducer` must be one of {', '.join((*reducers.by_name(), AUTO))}, got"
      f" {shown(config.get('reducer'))}; name one with --config=FILE:REDUCER."
    )
  known, given = _flat(common.base(config.reducer)), _flat(config)
  for key in known:
    if key not in given and not _is_of_task(key):
      raise ValueError(
        f"`{key}` must be a key of the configuration, got none; begin with"
        " configs/common.py."
      )
  for key, (value, _) in given.items():
    if key in known:
      _check_type(key, value, *known[key])
    elif not _is_of_task(key):
      raise ValueError(
        f"`{key}` must be a key of the configuration, which it is not, got"
        f" {shown(value)}; the nearest is {nearest(key, known)}."
      )


def _is_of_task(key: str) -> bool:
  """Returns whether a key is a size of a model, which each task names."""
  return key.startswith("model.") and key.count(".") == 1


def _flat(config: ConfigDict) -> dict[str, tuple[Any, type]]:
  """Returns values and types by key; None has the type of its placeholder."""
  found = {}
  for key in config:
    value = config[key]
    if isinstance(value, ConfigDict) and len(value):
      found |= {f"{key}.{name}": own for name, own in _flat(value).items()}
    else:
      found[key] = value, config.get_type(key)
  return found


def _check_type(key: str, value: Any, default: Any, kind: type) -> None:
  """Raises unless a value has the type of its default, and is finite."""
  if value is None and (default is None or key in _OPTIONAL):
    return
  kinds = (int, float) if kind is float else kind
  if not isinstance(value, kinds) or (type(value) is bool) != (kind is bool):
    raise TypeError(
      f"`{key}` must be of type {kind.__name__}, got {shown(value)}; give one."
    )
  if kind in (int, float) and not abs(value) <= _LARGEST[kind]:
    raise ValueError(
      f"`{key}` must be a finite number of at most {_LARGEST[kind]:.4g} in"
      f" size, got {value}; give another."
    )


def _check_local(config: ConfigDict) -> None:
  """Raises unless local steps fit the rest of the configuration."""
  local = config.local
  if local.every and (config.mesh.stage > 1 or config.reducer == AUTO):
    raise ValueError(
      "`local.every` must be 0 on pipeline stages and with the reducer"
      f" {AUTO}, got {local.every} with mesh.stage={config.mesh.stage} and"
      f" {config.reducer}; set --config.local.every=0."
    )
  defaults = common.base(config.reducer).local
  if not local.every and local.to_dict() != defaults.to_dict():
    raise ValueError(
      f"`local.every` must be at least 1 with other options of local steps,"
      f" got 0 with {local.to_dict()}; raise it."
    )
  if local.lookahead and local.overlap:
    raise ValueError(
      "`local.lookahead` must be False with an overlap, which only exchanges"
      f" have, got True with {local.overlap}; leave it out."
    )
  if local.lookahead and config.init_from:
    raise ValueError(
      "`init_from` must be empty with local.lookahead, whose state remembers"
      f" the parameters that it began with, got {config.init_from!r}; leave one"
      " of them out."
    )


def _check_site(config: ConfigDict) -> None:
  """Raises unless the rounds of sites fit the rest of the configuration."""
  site, defaults = config.site, common.base(config.reducer).site
  if not site.url:
    if site.to_dict() != defaults.to_dict():
      raise ValueError(
        "`site.url` must be given with other options of a site, got none with"
        f" {site.to_dict()}; give a bucket or a folder that all sites have."
      )
    return
  try:
    edgc_jax.Site(**site.to_dict())  # reads nothing yet
  except ImportError as error:
    raise ValueError(f"`site.url`: {error}") from error
  if config.local.every:
    raise ValueError(
      "`local.every` must be 0 at a site, which exchanges what its common"
      f" parameters have moved, got {config.local.every}; set"
      " --config.local.every=0."
    )


def _check_mesh(config: ConfigDict, task: Task) -> None:
  """Raises unless the devices suffice and model and batch divide over them."""
  mesh, microbatches = config.mesh, config.pipeline.microbatches
  shards, tensor, available = mesh.fsdp, mesh.tensor, len(jax.devices())
  if mesh.backend == "vmap":
    available = math.inf
  replicas, stages, processes = mesh.data, mesh.stage, jax.process_count()
  if mesh.backend == "vmap" and processes > 1:
    raise ValueError(
      "`mesh.backend` must be pmap or jit with several processes, got 'vmap',"
      " which simulates the replicas in one; start one process."
    )
  sizes = {
    "data": replicas, "stage": stages, "tensor": tensor, "fsdp": shards,
  }  # fmt: skip
  product = " times ".join(f"`mesh.{name}`" for name in sizes)
  got = " times ".join(map(str, sizes.values()))
  others = stages * tensor * shards
  total = replicas * others
  if processes > 1 and total != available:
    raise ValueError(
      f"{product} must be the number of devices of all"
      f" {processes} processes ({available}), got {got};"
      f" set --config.mesh.data={max(1, available // max(1, others))}."
      " On CPUs each process makes an equal share of the devices, so use a"
      " multiple of the number of processes."
    )
  if min(sizes.values()) < 1 or total > available:
    kind = jax.devices()[0].platform
    wanted = math.prod(max(1, n) for n in sizes.values())
    raise ValueError(
      f"{product} must be between 1 and the number of"
      f" devices ({available} {kind}), got {got}; lower"
      " them, or train on fake CPU devices with JAX_PLATFORMS=cpu"
      f" JAX_NUM_CPU_DEVICES={wanted} before the command."
    )
  for name, axis, size in (
    ("stage", "stages", stages), ("fsdp", "shards", shards),
    ("tensor", "shared stages", tensor),
  ):  # fmt: skip
    if size > 1 and name not in task.axes:
      raise ValueError(
        f"`mesh.{name}` must be 1 for the task {config.task!r}, whose model has"
        f" no {axis}, got {size}; set --config.mesh.{name}=1."
      )
  if shards > 1 and (mesh.backend != "jit" or stages > 1):
    raise ValueError(
      "`mesh.fsdp` must be 1 on pipeline stages, and with a backend other than"
      f" jit, got {shards} with {mesh.backend} and mesh.stage={stages};"
      " set --config.mesh.backend=jit and --config.mesh.stage=1."
    )
  if mesh.backend not in backends.BACKENDS:
    raise ValueError(
      f"`mesh.backend` must be one of {', '.join(backends.BACKENDS)}, got"
      f" {mesh.backend!r}; pmap has replicas only, vmap simulates them on one"
      " device, and jit also has shards and stages."
    )
  if stages > 1 and mesh.backend != "jit":
    raise ValueError(
      f"`mesh.backend` must be jit for several stages (mesh.stage is"
      f" {stages}), got {mesh.backend!r}; set --config.mesh.backend=jit."
    )
  if tensor > 1 and stages == 1:
    raise ValueError(
      f"`mesh.tensor` must be 1 without pipeline stages, got {tensor}; replicas"
      " without stages are sharded by mesh.fsdp."
    )
  if tensor > 1 and config.optimizer.name == "muon":
    raise ValueError(
      f"`optimizer.name` must not be muon with mesh.tensor ({tensor}), which"
      " splits kernels, got 'muon'; set --config.optimizer.name=adamw."
    )
  if tensor > 1 and config.model.num_heads % tensor:
    raise ValueError(
      "`mesh.tensor` must be a divisor of model.num_heads"
      f" ({config.model.num_heads}), got {tensor}; each device has whole heads."
    )
  if stages > 1 and config.model.num_layers % stages:
    raise ValueError(
      f"`model.num_layers` must be divisible by mesh.stage ({stages}), got"
      f" {config.model.num_layers}; every stage holds the same number."
    )
  parts = replicas * shards * (microbatches if stages > 1 else 1)
  if config.batch_size % parts:
    name = "mesh.data" if stages == 1 else "mesh.data * pipeline.microbatches"
    name = name if shards == 1 else "mesh.data * mesh.fsdp"
    rounded = max(1, round(config.batch_size / parts)) * parts
    raise ValueError(
      f"`batch_size` must be divisible by {name} ({parts}), got"
      f" {config.batch_size}; use {rounded}."
    )
  if (
    times.needed(config)
    and not config.link.bandwidth
    and (replicas == 1 or mesh.backend == "vmap")
  ):
    raise ValueError(
      "`mesh.data` must be at least 2, on devices of their own, to measure the"
      f" link between replicas, got {replicas} with backend {mesh.backend!r};"
      " give link.bandwidth, or set pipeline.align=none and edgc.rank_max."
    )
