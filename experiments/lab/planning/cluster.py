"""Models a step, and a whole run, on a cluster that is not at hand.

A node holds one stage of one replica; its T devices share the stage's matrices
and the node's uplink. With M microbatches and S stages,

  step     = pipeline + max over stages (exchange_s - s t_b) + late exchange
  pipeline = (M + S - 1) (t_f + t_b + t_send)
  t_f      = products + sums,    t_b = k products + (k - 1) sums
  products = FLOPs of a microbatch / (T peak share)
  sums     = 2 a layer, of the activations, in a ring of the node's T devices
  t_send   = the activations of a microbatch and their gradients, once each

with k = 2, or 3 if the backward pass computes activations again. Stage s ends
its backward pass s t_b before stage 0, and exchanges its own leaves then;
leaves that stages split follow, at the rank of stage 0. Exchanges and ranks are
computed by the package itself: bytes by `describe`, seconds and aligned ranks
by `budget`, and decisions by `edgc`'s own budget. All time to compress is in
the exchange of a stage's own leaves.

As in Megatron a node sends activations once. (In `trainer/models` each of its
devices sends them.) As in `trainer/models` all stages split the vocabulary,
where Megatron's first stage has it whole. Left out are what stages
exchange of embedding and logits, that the stages' loads differ by these, and
the products that make bases orthonormal, which grow with the square of the
rank.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.budget import alignment, entropy, ladder
from edgc_jax.budget.entropy_budget import EntropyBudget
from edgc_jax.leaves.review import Reviewed
from edgc_jax.measure.advice import trips_of
from edgc_jax.measure.description import reviewed
from edgc_jax.reducer import rounds
from edgc_jax.wire.link_model import ring_bytes
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.training import optimizer, times

_BYTES = 4  # of a float32, as gradients are
# Passes over a gradient to compress it: M is read for P, for Q and for the
# residual, which is read and written; the update is written.
_PASSES = 6
_PARTS = 1000  # of a run, at whose beginnings a schedule of ranks is read


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Assumptions about a cluster.

  Attributes:
    peak: FLOPs of a device per second, at the precision of the model.
    share: Share of the peak that training reaches.
    memory: Bytes per second of a device's memory.
    inside: Bytes per second of a device's link to its node's other devices.
    megabits: Of a node's uplink per second, each way.
    round_trip: Seconds between two nodes and back.
    recomputes: Whether the backward pass computes activations again.

  Raises:
    ValueError: if a number is not finite, not positive (`round_trip` may be 0),
      or `share` is above 1.
  """

  peak: float
  share: float
  memory: float
  inside: float
  megabits: float
  round_trip: float
  recomputes: bool = False

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      is_least = value == 0 and name in ("round_trip", "recomputes")
      if not (math.isfinite(value) and (value > 0 or is_least)):
        least = "at least 0" if name == "round_trip" else "positive"
        raise ValueError(
          f"`{name}` must be {least} and finite, got {value}; give FLOPs,"
          " bytes or megabits per second, or seconds."
        )
    if self.share > 1:
      raise ValueError(
        f"`share` must be at most 1, got {self.share}; it is a share of the"
        " peak, such as 0.4."
      )


class Compute(NamedTuple):
  """Seconds of a step without an exchange.

  Attributes:
    backward: A microbatch's backward pass on one stage.
    step: All microbatches on all stages.
  """

  backward: float
  step: float


class Run(NamedTuple):
  """A whole run on paper; means over all of its steps.

  Attributes:
    step: Seconds of a step.
    communication: Seconds of stage 0's exchanges in a step: it ends last.
    exposed: Seconds by which exchanges lengthen a step.
    megabytes: Payload of a device in a step, 10^6 bytes, a mean over stages.
    ranks: The first step of each new choice, and the ranks of the stages from
      there on, 0 for dense.
  """

  step: float
  communication: float
  exposed: float
  megabytes: float
  ranks: tuple[tuple[int, tuple[int, ...]], ...]


def require_planned(config: ConfigDict) -> None:
  """Raises unless the model knows all that the configuration says.

  Raises:
    ValueError: if it does not.
  """
  if config.mesh.data < 2:
    raise ValueError(
      "`mesh.data` must be at least 2 for a cluster on paper, got"
      f" {config.mesh.data}; one replica exchanges nothing."
    )
  for name, found, rule in (
    ("task", config.task, "gpt2"),
    ("local.every", config.local.every, 0),
    ("mesh.fsdp", config.mesh.fsdp, 1),
  ):
    if found != rule:
      raise ValueError(
        f"`{name}` must be {rule} for a cluster on paper, got {found!r}; other"
        " times are not modelled."
      )


def compute_of(config: ConfigDict, hardware: Hardware) -> Compute:
  """Returns the seconds of a step without an exchange."""
  model, mesh = config.model, config.mesh
  stages = mesh.stage
  microbatches = config.pipeline.microbatches if stages > 1 else 1
  rows = config.batch_size // mesh.data // microbatches
  tokens, layers = rows * model.context, model.num_layers / stages
  # Products with the weights of a stage: 12 width^2 a layer, and the logits of
  # its part of the vocabulary; scores and weighted values of the attention.
  weights = (
    layers * 12 * model.width**2 + model.vocab_size * model.width / stages
  )
  attention = layers * 2 * model.context * model.width
  flops = 2 * tokens * (weights + attention) / mesh.tensor
  products = flops / (hardware.peak * hardware.share)
  activations = tokens * model.width * jnp.dtype(model.dtype).itemsize
  sums = 2 * layers * ring_bytes(activations, mesh.tensor) / hardware.inside
  k = 3 if hardware.recomputes else 2
  forward, backward = products + sums, k * products + (k - 1) * sums
  # Activations go to the next stage, and their gradients back.
  sends = 2 * activations * 8e-6 / hardware.megabits * (stages > 1)
  ticks = microbatches + stages - 1
  return Compute(backward, ticks * (forward + backward + sends))


def link_of(config: ConfigDict, hardware: Hardware) -> edgc_jax.LinkModel:
  """Returns the link of a device, which shares its node's uplink."""
  mesh = config.mesh
  return edgc_jax.LinkModel.of_uplink(
    hardware.megabits, hardware.round_trip, mesh.data, mesh.tensor
  )


def compression_of(
  config: ConfigDict, hardware: Hardware
) -> edgc_jax.CompressionModel:
  """Returns the seconds in which a device computes a compressed exchange."""
  mesh = _mesh_of(config)
  layout = tasks.make(config).layout(mesh.shape)
  local = jax.tree.leaves(layout.of_one_device(mesh.shape))
  values = sum(float(leaf.size) for leaf in local if leaf.ndim > 1)
  # M Q and M^T P, and P Q^T of the mean and of what this replica sent, take
  # 2 m n operations a column each.
  return edgc_jax.CompressionModel(
    _PASSES * _BYTES * values / hardware.memory,
    8 * values / (hardware.peak * hardware.share),
  )


def _mesh_of(config: ConfigDict) -> AbstractMesh:
  mesh = config.mesh
  return meshes.abstract_mesh(mesh.data, mesh.stage, mesh.fsdp, mesh.tensor)


class Exchanges:
  """The exchanges of one reducer on a cluster.

  Attributes:
    ladder: The ranks, 0 for dense.
    own: Seconds of the exchange of a stage's own leaves at each of them.
    late: Seconds of the exchange of the other leaves.
    own_bytes, late_bytes: Their payload of a device.
    budget: The budget of the reducer.
  """

  def __init__(
    self,
    config: ConfigDict,
    link: edgc_jax.LinkModel,
    compression: edgc_jax.CompressionModel,
    backward: float,
  ):
    """Describes the leaves of a device; runs nothing.

    Args:
      config: Its mesh is that of the cluster.
      link: Of one device.
      compression: Seconds to compute a compressed exchange.
      backward: Seconds of a microbatch's backward pass on one stage.
    """
    given: dict[str, Any] = {"link": link, "compression": compression}
    if config.mesh.stage > 1:
      given["backward_seconds"] = backward
    needed = times.needed(config)
    found = _described(config.to_json(), tuple(given.items()) * needed)
    self.budget, self.ladder = found.budget, tuple(found.budget.ladder)
    own, late = (
      _bytes_of(found, is_late, config.mesh.data) for is_late in (False, True)
    )
    self.own_bytes, self.late_bytes = own, late
    # `exchange_seconds` takes one off where an exchange is dense.
    num_reduces = trips_of(config.reducer, found.code is not None)
    num_reduces += not any(self.ladder)
    seconds = functools.partial(
      ladder.exchange_seconds, self.ladder, link=link, num_reduces=num_reduces
    )
    free = edgc_jax.CompressionModel(0.0, 0.0)
    self.own = seconds(sizes=own, compression=compression)
    self.late = seconds(sizes=late, compression=free) * (late > 0)
    stages, self._backward = config.mesh.stage, backward
    self._levels = np.tile(np.arange(len(self.ladder)), (stages, 1))
    if getattr(found.budget, "seconds", None) is not None:
      self._levels = alignment.aligned_levels(self.own, stages, backward)

  def levels_at(self, level: int) -> np.ndarray:
    """Returns the levels of all stages while stage 0 is on one."""
    return self._levels[:, level]

  def exposed(self, levels: np.ndarray) -> float:
    """Returns the seconds by which the exchanges lengthen a step."""
    ends = alignment.finish_seconds(self.own, levels, self._backward)
    return max(0.0, float(np.max(ends))) + float(self.late[levels[0]])


def run_of(
  config: ConfigDict,
  hardware: Hardware,
  entropy_at: Callable[[float], float] | None = None,
  most_ranks: int | None = None,
) -> Run:
  """Models a whole run.

  Args:
    config: The configuration, with its reducer.
    hardware: The cluster.
    entropy_at: For `edgc`, the entropy of the gradients in nats at a share of
      the run's steps, from 0 to 1.
    most_ranks: For `edgc`, ranks by which stage 0 moves in a window at most,
      though a step of the ladder is wider. None for that of the configuration.

  Returns:
    Means over all steps.

  Raises:
    ValueError: if `edgc` is given no entropy.
  """
  compute = compute_of(config, hardware)
  exchanges = Exchanges(
    config,
    link_of(config, hardware),
    compression_of(config, hardware),
    compute.backward,
  )
  budget, steps = exchanges.budget, config.steps
  if isinstance(budget, EntropyBudget):
    if entropy_at is None:
      raise ValueError(
        "`entropy_at` must be given for edgc, got None; pass the curve of a"
        " run, or one of experiments/lab/planning/presets.py."
      )
    starts = list(range(0, steps, budget.window))
    first = levels_of(budget, steps, entropy_at)
    if most_ranks is not None:
      first = slowed(first, exchanges.ladder, most_ranks)
  else:  # a schedule of steps
    starts = sorted({i * steps // _PARTS for i in range(_PARTS)})
    first = np.asarray(
      jax.vmap(lambda i: jnp.asarray(budget.levels((), i)[0]))(
        jnp.array(starts, jnp.int32)
      )
    )
  lengths = np.diff([*starts, steps])
  every = [exchanges.levels_at(level) for level in first]
  ranks: list[tuple[int, tuple[int, ...]]] = []
  for start, levels in zip(starts, every, strict=True):
    own = tuple(exchanges.ladder[level] for level in levels)
    if not ranks or ranks[-1][1] != own:
      ranks.append((start, own))

  def mean(values: Any) -> float:
    return float(np.average(values, weights=lengths))

  exposed = mean([exchanges.exposed(levels) for levels in every])
  sent = [
    exchanges.own_bytes[levels].mean() + exchanges.late_bytes[levels[0]]
    for levels in every
  ]
  return Run(
    compute.step + exposed,
    mean(exchanges.own[first] + exchanges.late[first]),
    exposed,
    mean(sent) / 1e6,
    tuple(ranks),
  )


def levels_of(
  budget: EntropyBudget, steps: int, entropy_at: Callable[[float], float]
) -> np.ndarray:
  """Returns stage 0's level in each window: the decisions of `edgc` itself.

  All matrices are taken to be Gaussian, with the entropy of the whole.
  """
  alone = dataclasses.replace(budget, stage_axis=None, seconds=None, shards=())
  num_matrices = len(budget.matrices)

  def close(state: Any, mean: jax.Array, count: jax.Array) -> Any:
    # sigma^2 = e^(2 H) / (2 pi e)
    variance = jnp.exp(2 * mean) / (2 * np.pi * np.e)
    sample = entropy.EntropySample(
      mean,
      jnp.full(num_matrices, variance),
      jnp.full(num_matrices, mean),
      jnp.float32(1.0),
    )
    state = alone.observe(state, sample, jnp.array(True))
    state = alone.close_window(state, count)
    return state, alone.levels(state, count)[0]

  close, state = jax.jit(close), alone.init()
  level = alone.levels(state, jnp.int32(0))[0]
  found = []
  for first in range(0, steps, budget.window):
    found.append(int(level))
    last = min(first + budget.window, steps)
    mean = entropy_at((first + last) / 2 / steps)
    state, level = close(state, jnp.float32(mean), jnp.int32(last))
  return np.array(found)


def slowed(
  levels: Sequence[int], ranks: Sequence[int], most: int
) -> np.ndarray:
  """Returns levels of windows that follow others by few ranks a window.

  Args:
    levels: The levels to follow.
    ranks: The rank of each level, rising; 0 for dense.
    most: The most ranks from one window to the next. Between two ranks of the
      ladder, the larger one is in use. Into and out of dense a rank jumps.

  >>> slowed([0, 3, 1, 1, 1, 1], (0, 8, 12, 16), 3).tolist()
  [0, 3, 3, 2, 1, 1]
  """
  found, rank = [], 0
  for level in levels:
    wanted = ranks[level]
    if rank and wanted:
      wanted = min(max(wanted, rank - most), rank + most)
    rank = wanted
    found.append(int(np.searchsorted(ranks, rank)))
  return np.array(found)


@functools.cache
def _described(config: str, given: tuple[tuple[str, Any], ...]) -> Reviewed:
  """Returns the leaves and the budget of a configuration's reducer.

  Args:
    config: The configuration, as JSON.
    given: Times that it needs, by name.
  """
  values = ConfigDict(json.loads(config))
  task, mesh = tasks.make(values), _mesh_of(values)
  layout = task.layout(mesh.shape)
  tx = optimizer.make_reducer(values, task, dict(given))
  (found,) = reviewed(tx, layout.shapes, mesh=mesh, param_specs=layout.specs)
  return found


def _bytes_of(found: Reviewed, is_late: bool, replicas: int) -> np.ndarray:
  """Returns the bytes of early or late exchanges of a device at each rank."""
  own = [leaf for leaf in found.leaves if leaf.is_late == is_late]
  if not own:
    return np.zeros(len(found.budget.ladder))
  return rounds.exchange_bytes(own, found.budget.ladder, found.code, replicas)
