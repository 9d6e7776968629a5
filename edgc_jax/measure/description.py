"""Describes how each leaf of a tree is sent, before anything runs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from edgc_jax import validation
from edgc_jax.comm.codes import name_of
from edgc_jax.comm.dataflow import Axes, names
from edgc_jax.compression.entrywise import EntrywisePlan
from edgc_jax.plan.leaves import Leaf, arrays_of
from edgc_jax.plan.plan import Plan, subset
from edgc_jax.plan.review import Reviewed, plans_seen
from edgc_jax.state.sharding import init_on_mesh


class LeafRow(NamedTuple):
  """How one leaf is sent.

  Attributes:
    path: Its key path, as `matrix_view` gets it.
    shape: Its shape; on shards, of one device's part.
    sent_as: Its matrices, or why it is sent dense.
    ranks: Columns of its factors at each rank of the reducer, 0 for dense;
      where matrices share a rank's bytes, before they do.
    wire_bytes: Bytes at each rank.
  """

  path: str
  shape: tuple[int, ...]
  sent_as: str
  ranks: tuple[int, ...]
  wire_bytes: tuple[int, ...]


class Part(NamedTuple):
  """How one reducer sends its leaves; bytes are those of one device.

  Attributes:
    axes: The axes of the reducer.
    shards: Axes over which any leaf is sharded.
    method: Factors, a code of entries, or dense.
    ladder: The ranks that may be used, 0 for dense.
    rows: One for each leaf.
    wire_bytes: Bytes of all leaves at each rank.
    dense_bytes: Bytes of a dense float32 exchange.
  """

  axes: Axes
  shards: tuple[str, ...]
  method: str
  ladder: tuple[int, ...]
  rows: tuple[LeafRow, ...]
  wire_bytes: tuple[int, ...]
  dense_bytes: int


class Description(NamedTuple):
  """How all leaves are sent, reducer by reducer; prints as tables."""

  parts: tuple[Part, ...]

  def __str__(self) -> str:
    """Returns one table for each reducer."""
    return "\n\n".join(_table(part) for part in self.parts)


def describe(
  tx: optax.GradientTransformation,
  params: Any,
  *,
  replicas: int = 1,
  mesh: Mesh | AbstractMesh | None = None,
  param_specs: Any = None,
) -> Description:
  """Tells how each leaf is sent: its matrices, ranks and bytes, or why dense.

  Nothing runs and nothing is allocated. Print the result:

    print(edgc_jax.describe(tx, params))

  Args:
    tx: A reducer, or any chain with reducers.
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    replicas: Number of replicas, on which the bytes of some methods depend; of
      a mesh it is not needed.
    mesh: As for `state_specs`; needed if parameters are sharded. Leaves,
      matrices and bytes are those of one device.
    param_specs: As for `state_specs`.

  Returns:
    Rows for each leaf of each reducer.

  Raises:
    ValueError: if `tx` holds no reducer, or `param_specs` is given without a
      mesh.

  >>> from edgc_jax.reducers.powersgd import powersgd
  >>> params = {"w": jax.numpy.zeros((64, 256)), "b": jax.numpy.zeros(256)}
  >>> print(describe(powersgd(rank=4), params))
  Over data, as factors of rank 4:
  leaf   shape    sent as             rank  bytes
  ['b']  256      dense: no matrix       -  1,024
  ['w']  64, 256  matrix of 64 x 256     4  5,188
  all                                       6,212  dense / 10.7
  """
  validation.require_int("replicas", replicas, 1)
  params = arrays_of(params)
  with plans_seen() as seen:
    if param_specs is None:
      jax.eval_shape(lambda p: tx.init(p), params)  # not from JAX's cache
    else:
      init_on_mesh(tx, params, mesh, param_specs)
  validation.require(
    bool(seen),
    "tx",
    tx,
    "a transformation with a reducer of this package",
    "pass the chain that begins with edgc() or another reducer",
  )
  return Description(
    tuple(_part(reviewed, replicas, mesh) for reviewed in seen)
  )


def _part(reviewed: Reviewed, replicas: int, mesh: Any) -> Part:
  """Describes the plans of one reducer."""
  axes, plans = reviewed
  if mesh is not None:
    validation.require(
      axes.known <= set(mesh.shape),
      "mesh",
      dict(mesh.shape),
      f"a mesh with the axes of the reducer, {sorted(axes.known)}",
      "pass the mesh of the training, or other names to the reducer",
    )
    replicas = math.prod(mesh.shape[axis] for axis in names(axes.replicas))
  ladder = plans[0].ladder[plans[0].first_rung :]

  def row(leaf: Leaf, plan: Plan) -> LeafRow:
    alone = subset(plan, [plan.leaves.index(leaf)])
    return LeafRow(
      leaf.path,
      leaf.shape,
      _sent_as(leaf, plan),
      tuple(plan.columns(leaf, rank) for rank in ladder),
      tuple(alone.wire_bytes(rank, replicas) for rank in ladder),
    )

  return Part(
    axes,
    tuple(sorted({axis for plan in plans for axis in plan.shards})),
    _method(plans[0], ladder),
    ladder,
    tuple(row(leaf, plan) for leaf, plan in reviewed.leaves),
    tuple(
      sum(plan.wire_bytes(rank, replicas) for plan in plans) for rank in ladder
    ),
    sum(plan.dense_bytes for plan in plans),
  )


def _method(plan: Plan, ladder: tuple[int, ...]) -> str:
  """Names the method of a plan."""
  if isinstance(plan, EntrywisePlan):
    method = getattr(plan.compressor, "code", plan.compressor)
    return f"entry by entry ({type(method).__name__.lower()})"
  code = f" in {name_of(plan.code)}" if plan.code else ""
  if not any(ladder):
    return f"dense{code}"
  ranks = ", ".join(str(rank) for rank in ladder if rank)
  first = "dense or " if 0 in ladder else ""
  method = f"{first}as factors of rank {ranks}{code}"
  if plan.spread > 1:
    method += " (matrices share a rank's bytes: one may get up to"
    method += f" {plan.spread} times the rank)"
  return method


def _sent_as(leaf: Leaf, plan: Plan) -> str:
  """Returns the matrices of a leaf, or why it is sent dense."""
  if leaf.placement == "shared":
    return "dense: shared by all stages"
  dense = f"dense in {name_of(plan.code)}" if plan.is_encoded(leaf) else "dense"
  if leaf.view is None:
    return f"{dense}: no matrix"
  count, rows, cols = leaf.view
  if plan.is_compressed(leaf):
    if isinstance(plan, EntrywisePlan):
      return "entries"
    several = f"{count} matrices" if count > 1 else "matrix"
    return f"{several} of {rows} x {cols}"
  if isinstance(plan, EntrywisePlan):
    return f"dense: fewer than {plan.min_size} entries"
  ranks = [rank for rank in plan.ladder if rank]
  if not ranks:
    return "dense"
  ratio = rows * cols / (min(*ranks, rows, cols) * (rows + cols))
  return (
    f"{dense}: {rows} x {cols} at rank {min(ranks)} saves {ratio:.1f} times"
  )


def _table(part: Part) -> str:
  """Returns a table of text, with a line for each leaf and one for all."""
  lines = [("leaf", "shape", "sent as", "rank", "bytes", "")]
  lines += [
    (
      row.path,
      ", ".join(map(str, row.shape)),
      row.sent_as,
      _range([rank for rank in row.ranks if rank]) or "-",
      _range(_compressed(part, row.wire_bytes)),
      "",
    )
    for row in part.rows
  ]
  sent = _compressed(part, part.wire_bytes)
  ratios = [part.dense_bytes / max(each, 1) for each in sent]
  saved = f"dense / {_range(ratios, '.1f')}"
  lines.append(("all", "", "", "", _range(sent), saved))
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  aligned = ("<", "<", "<", ">", ">", "<")
  text = [
    "  ".join(
      f"{cell:{side}{width}}"
      for cell, side, width in zip(line, aligned, widths, strict=True)
    ).rstrip()
    for line in lines
  ]
  return "\n".join([f"{_where(part)}, {part.method}:", *text])


def _compressed(part: Part, values: Sequence[int]) -> Sequence[int]:
  """Returns the values at all ranks but dense; all if there is only dense."""
  pairs = zip(part.ladder, values, strict=True)
  return [value for rank, value in pairs if rank] or values


def _where(part: Part) -> str:
  """Names the axes that a part is sent over."""
  where = f"Over {', '.join(names(part.axes.replicas))}"
  if part.shards:
    where += f", on each shard of {', '.join(part.shards)}"
  if part.axes.fast:
    where += (
      f", after a dense mean over {', '.join(names(part.axes.fast.axis_name))}"
    )
  return where


def _range(values: Sequence[float], form: str = ",") -> str:
  """Returns the least and the largest of some numbers; empty without any."""
  ends = (min(values), max(values)) if values else ()
  return " to ".join(dict.fromkeys(f"{value:{form}}" for value in ends))
