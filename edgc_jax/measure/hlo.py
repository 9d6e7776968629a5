"""Counts the bytes that a compiled program sends, from its HLO text.

`wire.wire` counts bytes while JAX traces; this module checks the count. An
all-reduce of B bytes counts B. Other collectives count as parts of an
all-reduce: a reduce-scatter or all-to-all half its operand, an all-gather half
its result. A permute counts its operand, which is all that it sends; this is
more than predicted if parts rotate between more than two CPU hosts. Compare
only totals per program or branch, since XLA merges single collectives freely.
"""

import math
import re
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

# Bytes of a value.
_WIDTHS = {
  "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
  "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b(" + "|".join(_WIDTHS) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(
  r"= (?P<result>.*?) (?P<kind>all-reduce|reduce-scatter|all-gather|all-to-all"
  r"|collective-permute)(?P<start>-start)?\((?P<operands>.*?)\)(?:,|$)"
)
_CALLED = re.compile(
  r"(?:calls|to_apply|body|condition|true_computation|false_computation)"
  r"=%?([\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{}]*)\}")
_GROUPS = re.compile(
  r"replica_groups=(?:\{(?P<listed>\{[\d,{} ]*\})\}"
  r"|\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
  r"|mesh\[(?P<mesh>[^\]]*)\]"
  r"(?:, device_ids=\(\[(?P<ids>[\d,]+)\](?:T\((?P<turn>[\d,]+)\))?\))?"
  r" *\{(?P<axes>[^}]*)\})"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def wire_bytes_of_branches(hlo: str) -> list[list[int]]:
  """Counts the bytes that the branches of each conditional send.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.

  Returns:
    Bytes per replica of each branch, with all branches inside of it: a list for
    each conditional, most branches first.
  """
  computations = computations_of(hlo)
  groups = [_names(listed) for listed in _BRANCHES.findall(hlo)]
  return [
    [_total(name, computations) for name in group]
    for group in sorted(groups, key=len, reverse=True)
  ]


def wire_bytes_by_rank(hlo: str) -> list[list[int]]:
  """Counts the bytes that the conditionals of a ladder send at each rank.

  These are the conditionals that send something in every branch: around an
  exchange one of dense and of ranks, if both may be used, and for each round of
  factors one over all ranks; two if they are encoded, or none if all ranks send
  as many blocks.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.

  Returns:
    Bytes per replica at each rank of the ladder, in order: a list for each
    outermost conditional. An exchange that may be dense has one, other
    exchanges at several ranks have two, for P and for Q, or four if factors are
    encoded, for both halves of each average.
  """
  return _by_rank(_entry(hlo), computations_of(hlo))


def wire_bytes_outside_branches(hlo: str) -> int:
  """Counts the bytes that the program sends outside of all conditionals.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.

  Returns:
    Bytes per replica.
  """
  return _total(_entry(hlo), computations_of(hlo), follow_branches=False)


def wire_bytes_of_step(hlo: str, ranks: int) -> list[int]:
  """Counts the bytes of a step at each rank, outside and inside of branches.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.
    ranks: Their number; they send the same if no branch tells them apart.

  Returns:
    Bytes per replica at each rank of the ladder.
  """
  ladders = wire_bytes_by_rank(hlo)
  by_rank = zip(*ladders, strict=True) if ladders else [()] * ranks
  plain = wire_bytes_outside_branches(hlo)
  return [plain + sum(own) for own in by_rank]


class Collective(NamedTuple):
  """One collective of a program; it may send several arrays."""

  kind: str  # its name in HLO
  results: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each
  pairs: tuple[tuple[int, int], ...] = ()  # sources and targets of a permute


def collectives_in_order(hlo: str, level: int = 0) -> list[Collective]:
  """Lists the collectives of a program in the order in which they run.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.
    level: Index into the ladder, or -1 for the largest rank; not read without a
      ladder. Conditionals that do not choose a rank are left out.

  Returns:
    The collectives, repeated as often as their loops run.
  """
  computations = computations_of(hlo)

  def walk(name: str, level: int) -> list[Collective]:
    found = []
    for line in computations[name]:
      match = _COLLECTIVE.search(line)
      if match:
        found.append(Collective(match["kind"], _results(match), _pairs(line)))
      elif " conditional(" in line:
        ranks = ranks_of(line, computations)
        found += walk(*ranks[level]) if ranks else []
      else:
        inside = [x for other in called_by(line) for x in walk(other, level)]
        found += inside and _trips(line) * inside
    return found

  return walk(_entry(hlo), level)


def computations_of(hlo: str) -> dict[str, list[str]]:
  """Returns the instructions of each computation, by its name."""
  computations: dict[str, list[str]] = {}
  current: list[str] = []
  for line in hlo.splitlines():
    header = _COMPUTATION.match(line)
    if header:
      current = computations.setdefault(header.group(1), [])
    else:
      current.append(line.strip())
  return computations


def is_collective(line: str) -> bool:
  """Returns whether an instruction is itself a collective."""
  return _COLLECTIVE.search(line) is not None


def called_by(line: str) -> list[str]:
  """Returns the computations that an instruction may run, by name.

  All branches of a conditional are among them.
  """
  called = _CALLED.findall(line)
  for group in _BRANCHES.findall(line):
    called += _names(group)
  return called


def _entry(hlo: str) -> str:
  """Returns the name of a program's entry computation."""
  (name,) = re.findall(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE)
  return name


def _names(listed: str) -> list[str]:
  """Returns the names of computations in an HLO list."""
  return [name.strip().lstrip("%") for name in listed.split(",")]


def _branches_of(line: str) -> list[str]:
  """Returns the names of a conditional's branches, in order of their index."""
  listed = _BRANCHES.search(line)
  if listed:
    return _names(listed.group(1))
  return [
    name
    for which in ("false", "true")
    for name in re.findall(rf"{which}_computation=%?([\w.\-]+)", line)
  ]


def ranks_of(
  line: str, computations: dict[str, list[str]]
) -> list[tuple[str, int]]:
  """Returns the branch that sends each rank, and the rank's index inside.

  Args:
    line: A conditional.
    computations: From `computations_of`.

  Returns:
    The ranks in order; none if a branch of the conditional sends nothing. A
    branch without conditionals of ranks in it is one rank.
  """
  branches = _branches_of(line)
  if not all(_total(branch, computations) for branch in branches):
    return []
  return [
    (branch, i)
    for branch in branches
    for i in range(max(map(len, _by_rank(branch, computations)), default=1))
  ]


def _by_rank(name: str, computations: dict[str, list[str]]) -> list[list[int]]:
  """Returns the bytes at each rank, for each ladder in a computation."""
  found = []
  for line in computations[name]:
    if " conditional(" in line:
      ranks = ranks_of(line, computations)
      sent = [_at_rank(*rank, computations) for rank in ranks]
      found += [sent] if sent else []
    else:
      for other in called_by(line):
        found += _by_rank(other, computations)
  return found


def _at_rank(name: str, i: int, computations: dict[str, list[str]]) -> int:
  """Returns the bytes of a branch at the i-th of its ranks."""
  plain = _total(name, computations, follow_branches=False)
  return plain + sum(ranks[i] for ranks in _by_rank(name, computations))


def _total(
  name: str, computations: dict[str, list[str]], follow_branches: bool = True
) -> int:
  """Sums the bytes of a computation and of all computations that it runs."""
  total = 0
  for line in computations[name]:
    match = _COLLECTIVE.search(line)
    if match:
      total += _bytes_of(match)
      continue
    if not follow_branches and " conditional(" in line:
      continue
    inside = sum(
      _total(other, computations, follow_branches) for other in called_by(line)
    )
    total += inside and _trips(line) * inside
  return total


def _pairs(line: str) -> tuple[tuple[int, int], ...]:
  """Returns the sources and targets of a permute."""
  listed = _PAIRS.search(line)
  pairs = re.findall(r"(\d+),(\d+)", listed.group(1)) if listed else []
  return tuple((int(source), int(target)) for source, target in pairs)


def _trips(line: str) -> int:
  """Returns how often an instruction runs the computations that it calls.

  Raises:
    ValueError: if it is a loop of unknown length.
  """
  if " while(" not in line:
    return 1
  known = _TRIPS.search(line)
  if not known:
    raise ValueError(
      "`hlo` must give the number of iterations of loops with collectives, got"
      f" a loop without it: {line}; give the loop a fixed length, as lax.scan"
      " does."
    )
  return int(known.group(1))


def _bytes_of(collective: re.Match) -> int:
  """Returns the bytes of one collective, counted as for an all-reduce."""
  size = sum(
    _WIDTHS[dtype] * math.prod(shape) for dtype, shape in _results(collective)
  )
  kind = collective["kind"]
  if kind in ("all-gather", "all-to-all"):
    return size // 2
  if kind == "reduce-scatter":
    # The operand has the size of the result times the replicas. Newer XLA does
    # not print its shape, so the replicas are counted in the groups.
    return size * len(groups_of(collective.string)[0]) // 2
  return size


def _is_known(groups: re.Match) -> bool:
  """Returns whether groups that name mesh axes name whole axes only."""
  axes = groups["axes"]
  return axes is None or re.fullmatch(r"('[^']*'(, ?)?)+", axes) is not None


def groups_of(line: str) -> list[list[int]]:
  """Returns the groups of devices that a collective communicates in.

  HLO writes groups as a list {{0,1},{2,3}}, as a reshape of all devices
  [2,2]<=[4] or [2,2]<=[2,2]T(1,0), or by the axes of a mesh,
  mesh['stage'=2,'data'=2] {'data'}, whose devices may have another order,
  mesh['stage'=2,'data'=2], device_ids=([2,2]T(1,0)) {'data'}.

  Args:
    line: The instruction of a collective with groups.

  Returns:
    Device positions, in the program's order, of each group.

  Raises:
    ValueError: if the groups are missing or have another format.

  >>> groups_of("all-reduce(%a), replica_groups=mesh['s'=2,'d'=2] {'s'}")
  [[0, 2], [1, 3]]
  >>> mesh = "mesh['s'=2,'d'=2], device_ids=([2,2]T(1,0))"
  >>> groups_of("all-reduce(%a), replica_groups=" + mesh + " {'s'}")
  [[0, 1], [2, 3]]
  """
  found = _GROUPS.search(line)
  if found is None or not _is_known(found):
    raise ValueError(
      "`line` must have replica_groups in a known format, got"
      f" {line}; compile with a version of JAX that the README names."
    )
  numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
  if found["listed"]:
    return [numbers(x) for x in re.findall(r"\{([\d,]+)\}", found["listed"])]
  if found["shape"]:
    dims = numbers(found["dims"])
    order = numbers(found["order"]) if found["order"] else None
    devices = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return devices.reshape(numbers(found["shape"])).tolist()
  sizes = [(name, int(size)) for name, size in _AXIS.findall(found["mesh"])]
  inside = [name for name, _ in _AXIS.findall(found["axes"])]
  devices = np.arange(math.prod(size for _, size in sizes))
  if found["ids"]:
    turn = numbers(found["turn"]) if found["turn"] else None
    devices = devices.reshape(numbers(found["ids"])).transpose(turn)
  devices = devices.reshape([size for _, size in sizes])
  names = [name for name, _ in sizes]
  outside = [name for name in names if name not in inside]
  order = [names.index(name) for name in (*outside, *inside)]
  count = math.prod(size for name, size in sizes if name in inside)
  return devices.transpose(order).reshape(-1, count).tolist()


def _results(collective: re.Match) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Returns the dtypes and shapes of the results of a collective.

  The type of an asynchronous one, `...-start`, has its operands first, and its
  counters, unless it is an all-reduce.
  """
  found = arrays_of(collective["result"])
  if not collective["start"] or collective["kind"] == "all-reduce":
    return found
  found = tuple(x for x in found if x != ("u32", ()))
  return found[len(found) // 2 :]


def arrays_of(types: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Returns the dtypes and shapes in an HLO type, in order."""
  return tuple(
    (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
    for dtype, dims in _ARRAY.findall(types)
  )


def over_axes(hlo: str, mesh: Mesh | AbstractMesh, *axes: str) -> str:
  """Drops the collectives of a program that are not over exactly these axes.

  Keeps permutes whose pairs lie within them.

  Args:
    hlo: Text of a compiled program.
    mesh: Its mesh.
    *axes: Axes of the mesh.
  """
  devices = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
  names = list(mesh.shape)
  inside = [names.index(axis) for axis in axes]
  outside = [i for i in range(len(names)) if i not in inside]
  count = int(np.prod([mesh.shape[axis] for axis in axes]))
  groups = devices.transpose(*outside, *inside).reshape(-1, count)
  wanted = {frozenset(group) for group in groups.tolist()}

  def is_kept(line: str) -> bool:
    if not is_collective(line):
      return True
    if pairs := _pairs(line):
      return all(any(set(pair) <= own for own in wanted) for pair in pairs)
    return {frozenset(group) for group in groups_of(line)} == wanted

  return "\n".join(line for line in hlo.splitlines() if is_kept(line))
