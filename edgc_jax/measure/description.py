"""Describes how each leaf of a tree is sent, before anything runs.

Bytes are counted by running the methods themselves, without sending.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from edgc_jax import validation
from edgc_jax.leaves.leaf import (
  Leaf,
  PlacementFn,
  arrays_of,
  leaves_in,
  own_placement,
  require_arrays,
)
from edgc_jax.leaves.review import Reviewed, reducers_seen
from edgc_jax.leaves.views import ViewFn, layer_matrix
from edgc_jax.mesh.sharding import (
  num_replicas,
  require_is_mesh,
  require_not_split,
  traced_init,
)
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer.reducer import exchanges_of, shards_of
from edgc_jax.reducer.rounds import count_bytes, exchange_bytes
from edgc_jax.wire.codes import Code, code_of, name_of
from edgc_jax.wire.order import Axes, names


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
  replicas: int | None = None,
  mesh: Mesh | AbstractMesh | None = None,
  param_specs: Any = None,
) -> Description:
  """Tells how each leaf is sent: its matrices, ranks and bytes, or why dense.

  Nothing runs and nothing is allocated. Print the result:

    print(edgc_jax.describe(tx, params))

  Args:
    tx: A reducer, or any chain with reducers.
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    replicas: Number of replicas. Bytes of `topk` grow with it, others depend on
      it a little: codes fill as many equal parts. None is the number on the
      mesh of `on_mesh` or of `jax.set_mesh`, or else 1.
    mesh: As for `state_specs`; needed if parameters are sharded. Leaves,
      matrices and bytes are those of one device, and `replicas` is that of the
      mesh.
    param_specs: As for `state_specs`.

  Returns:
    Rows for each leaf of each reducer.

  Raises:
    TypeError: if `tx` is no transformation, or `mesh` no mesh.
    ValueError: if `tx` holds no reducer, `params` no array, or `param_specs` is
      given without a mesh or does not fit.

  >>> from edgc_jax.methods import powersgd
  >>> params = {"w": jax.numpy.zeros((64, 256)), "b": jax.numpy.zeros(256)}
  >>> print(describe(powersgd(rank=4), params))
  Over data, as factors of rank 4 in int4:
  leaf   shape    sent as                   rank  bytes
  ['b']  256      dense in int4: no matrix     -    136
  ['w']  64, 256  matrix of 64 x 256           4    736
  all                                               876  dense / 76.0
  """
  if replicas is not None:
    validation.require_int("replicas", replicas, 1)
  seen = reviewed(tx, params, mesh=mesh, param_specs=param_specs)
  for one in seen:
    require_not_split(param_specs, one.axes.replicas)
  return Description(tuple(_part(one, replicas, mesh) for one in seen))


def reviewed(
  tx: optax.GradientTransformation,
  params: Any,
  *,
  mesh: Mesh | AbstractMesh | None = None,
  param_specs: Any = None,
) -> list[Reviewed]:
  """Returns the leaves and the budget of each reducer of a chain.

  Args:
    tx, params, mesh, param_specs: As for `describe`.

  Raises:
    ValueError: as `describe`.
  """
  validation.require_transformation("tx", tx)
  require_is_mesh(mesh, optional=True)
  require_arrays(params)
  params = arrays_of(params)
  with reducers_seen() as seen:
    if param_specs is None:
      jax.eval_shape(lambda p: tx.init(p), params)  # not from JAX's cache
    else:
      traced_init(tx, params, mesh, param_specs)
  validation.require(
    bool(seen),
    "tx",
    tx,
    "a transformation with a reducer of this package",
    "pass the chain that begins with edgc() or another reducer",
  )
  return seen


def wire_bytes(
  params: Any,
  rank: int,
  *,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  placement: PlacementFn = own_placement,
  first_rank: int | None = None,
  rank_min: int | None = None,
  wire_dtype: Any = "int4",
  replicas: int = 1,
) -> int:
  """Predicts the payload bytes that a replica sends in one step's exchange.

  Valid for `edgc` and `powersgd` with equal ranks, and for `allreduce`;
  `describe` predicts the bytes of any reducer.

  Args:
    params: Parameters, gradients, or their `jax.ShapeDtypeStruct`s; on
      pipeline stages, the tree of one stage.
    rank: Columns of the factors; 0 for dense.
    min_ratio: As for `powersgd`.
    matrix_view: As for `edgc`.
    placement: As for `Stages`.
    first_rank: On pipeline stages, the rank of stage 0, at which all stages
      send their "split" and "shared" leaves; None if it is `rank`.
    rank_min: The smallest rank of `edgc`, which decides which leaves are
      factors; None if `rank` is the only one.
    wire_dtype: As for `powersgd`. For `allreduce()` pass rank 0 and "float32".
    replicas: Number of replicas; encoded values are padded to as many equal
      parts.

  Returns:
    The bytes, without entropy samples, checks of the replicas, and ranks that
    are broadcast at the end of a window.

  Raises:
    TypeError: if a rank or `replicas` is not a Python integer.
    ValueError: if a rank or `replicas` is too small, `wire_dtype` is unknown,
      or `params` has no array.

  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> wire_bytes(weights, 32), wire_bytes(weights, 32, wire_dtype="float32")
  (63444, 491596)
  """
  first_rank = rank if first_rank is None else first_rank
  rank_min = rank if rank_min is None else rank_min
  for name, value, least in (
    ("rank", rank, 0), ("first_rank", first_rank, 0), ("rank_min", rank_min, 0),
    ("replicas", replicas, 1),
  ):  # fmt: skip
    validation.require_int(name, value, least)
  validation.require_finite("min_ratio", min_ratio, "use 2 or more")
  code = code_of(wire_dtype)
  require_arrays(params)
  ladder = sorted({rank, first_rank, rank_min})
  view = matrix_view or layer_matrix
  leaves = leaves_in(arrays_of(params), view, placement)
  leaves = with_factors(leaves, [r for r in ladder if r], min_ratio, code)
  total = 0
  for members in exchanges_of(leaves):
    own = [leaves[i] for i in members]
    at = first_rank if any(leaf.is_late for leaf in own) else rank
    total += int(exchange_bytes(own, [at], code, replicas)[0])
  return total


def factor_bytes(
  params: Any,
  ranks: Sequence[int],
  min_ratio: float,
  wire_dtype: Any,
  matrix_view: ViewFn,
  replicas: int,
) -> list[int]:
  """Predicts the bytes of `wire_bytes` at each rank of a ladder, in one trace.

  Args:
    params: The parameters.
    ranks: The ladder; its least rank decides which leaves are factors.
    min_ratio: As for `wire_bytes`.
    wire_dtype: As for `wire_bytes`.
    matrix_view: As for `wire_bytes`.
    replicas: As for `wire_bytes`.
  """
  code = code_of(wire_dtype)
  leaves = with_factors(leaves_in(params, matrix_view), ranks, min_ratio, code)
  return exchange_bytes(leaves, ranks, code, replicas).tolist()


def bytes_of_step(found: Reviewed, replicas: int) -> list[int]:
  """Predicts the bytes of all leaves of a reducer, at each rank of its ladder.

  Args:
    found: From `reviewed`.
    replicas: Number of replicas.
  """
  leaves, budget, code = found.leaves, found.budget, found.code
  by_exchange = [
    exchange_bytes([leaves[i] for i in own], budget.ladder, code, replicas)
    for own in exchanges_of(leaves)
  ]
  return np.sum(by_exchange, axis=0).tolist()


def _part(found: Reviewed, replicas: int | None, mesh: Any) -> Part:
  """Describes the leaves of one reducer."""
  axes, leaves, budget, code, by_error, own = found
  ladder, replicas = budget.ladder, replicas or own or 1
  if mesh is not None:
    validation.require(
      axes.known <= set(mesh.shape),
      "mesh",
      dict(mesh.shape),
      f"a mesh with the axes of the reducer, {sorted(axes.known)}",
      "pass the mesh of the training, or other names to the reducer",
    )
    replicas = num_replicas(mesh, axes.replicas)

  def row(leaf: Leaf) -> LeafRow:
    any_path = dataclasses.replace(leaf, path="")  # counts equal leaves once
    return LeafRow(
      leaf.path,
      leaf.shape,
      _sent_as(leaf, ladder, code),
      tuple(leaf.columns(rank) for rank in ladder),
      tuple(count_bytes([any_path], ladder, code, replicas).tolist()),
    )

  return Part(
    axes,
    shards_of(leaves),
    _method(leaves, ladder, code, by_error),
    ladder,
    tuple(row(leaf) for leaf in leaves),
    tuple(bytes_of_step(found, replicas)),
    4 * sum(leaf.size for leaf in leaves),
  )


def _method(
  leaves: Sequence[Leaf],
  ladder: Sequence[int],
  code: Code | None,
  by_error: bool,
) -> str:
  """Names the method of a reducer."""
  in_code = f" in {name_of(code)}" if code else ""
  for leaf in leaves:
    if leaf.is_compressed and not leaf.cap:
      return leaf.method.name
  if not any(ladder):
    return f"dense{in_code}" if any(x.is_encoded for x in leaves) else "dense"
  ranks = ", ".join(str(rank) for rank in ladder if rank)
  first = "dense or " if 0 in ladder else ""
  method = f"{first}as factors of rank {ranks}{in_code}"
  if by_error:
    method += " (matrices share a rank's bytes: one may get up to 3 times the"
    method += " rank)"
  return method


def _sent_as(leaf: Leaf, ladder: Sequence[int], code: Code | None) -> str:
  """Returns the matrices of a leaf, or why it is sent dense."""
  if leaf.is_shared:
    return "dense: shared by all stages"
  dense = f"dense in {name_of(code)}" if leaf.is_encoded else "dense"
  if leaf.view is None:
    return f"{dense}: no matrix"
  count, rows, cols = leaf.view
  if leaf.is_compressed:
    if not leaf.cap:
      return leaf.method.name
    several = f"{count} matrices" if count > 1 else "matrix"
    return f"{several} of {rows} x {cols}"
  ranks = [rank for rank in ladder if rank]
  if not ranks or not leaf.size:
    return dense
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
  return where


def _range(values: Sequence[float], form: str = ",") -> str:
  """Returns the least and the largest of some numbers; empty without any."""
  ends = (min(values), max(values)) if values else ()
  return " to ".join(dict.fromkeys(f"{value:{form}}" for value in ends))
