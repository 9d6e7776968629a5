"""What a compiled program really sends, read from its HLO text.

`comm_cost` predicts; this counts. An all-reduce of B bytes counts B; other
collectives count what an all-reduce made of them would: a reduce-scatter or
all-to-all half its operand, an all-gather half its result. A permute counts its
operand, which is all that it sends: more than `comm_cost` says where parts
rotate between more than two CPU hosts. Totals per program or branch are what
can be compared: XLA merges single collectives as it likes.
"""

import math
import re
from typing import NamedTuple

import numpy as np

_WIDTHS = {
  "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
  "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b(" + "|".join(_WIDTHS) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_COLLECTIVE = re.compile(
  r"= (?P<result>.*?) (?P<kind>all-reduce|reduce-scatter|all-gather|all-to-all"
  r"|collective-permute)(?:-start)?\((?P<operands>.*?)\)(?:,|$)"
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
  r"|mesh\[(?P<mesh>[^\]]*)\] *\{(?P<axes>[^}]*)\})"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+))?")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def wire_bytes_of_branches(hlo: str) -> list[list[int]]:
  """Bytes sent by the branches of each conditional, the widest first.

  For a reducer with a ladder of several ranks the first is its `lax.switch`,
  and its branches are the rungs, in order.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.

  Returns:
    Bytes per replica, a list for each conditional.
  """
  computations = computations_of(hlo)
  groups = [_names(listed) for listed in _BRANCHES.findall(hlo)]
  return [
    [_total(name, computations) for name in group]
    for group in sorted(groups, key=len, reverse=True)
  ]


def wire_bytes_outside_branches(hlo: str) -> int:
  """Bytes that the program sends whatever branches it takes.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.

  Returns:
    Bytes per replica.
  """
  return _total(_entry(hlo), computations_of(hlo), follow_branches=False)


class Collective(NamedTuple):
  """One collective of a program; several arrays may travel in it."""

  kind: str  # as HLO calls it
  results: tuple[tuple[str, tuple[int, ...]], ...]  # dtype and shape of each
  pairs: tuple[tuple[int, int], ...] = ()  # of a permute: sources and targets


def collectives_in_order(hlo: str, branch: int = 0) -> list[Collective]:
  """What the program sends, one after the other.

  Args:
    hlo: Text of a compiled program, as from `compiled.as_text()`.
    branch: Which one is taken of the conditional that sends the most, for a
      reducer with a ladder its rung; other conditionals are left out.

  Returns:
    The collectives, in the order in which they run.
  """
  computations, entry = computations_of(hlo), _entry(hlo)
  conditionals = [
    line
    for line in computations[entry]
    if " conditional(" in line and _bytes_of_branches(line, computations)
  ]
  ladder = max(
    conditionals,
    key=lambda line: _bytes_of_branches(line, computations),
    default=None,
  )

  def walk(name: str) -> list[Collective]:
    found = []
    for line in computations[name]:
      match = _COLLECTIVE.search(line)
      if match:
        found.append(
          Collective(match["kind"], _arrays(match["result"]), _pairs(line))
        )
      elif line == ladder:
        found += walk(_branches_of(line)[branch])
      elif " conditional(" not in line:
        for other in _CALLED.findall(line):
          inside = walk(other)
          found += inside and _trips(line) * inside
    return found

  return walk(entry)


def computations_of(hlo: str) -> dict[str, list[str]]:
  """The instructions of each computation, by its name."""
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
  """Whether an instruction is one itself."""
  return _COLLECTIVE.search(line) is not None


def called_by(line: str) -> list[str]:
  """Names of the computations that an instruction may run, all branches."""
  called = _CALLED.findall(line)
  for group in _BRANCHES.findall(line):
    called += _names(group)
  return called


def _entry(hlo: str) -> str:
  """The name of the computation that a program begins with."""
  return re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.MULTILINE).group(1)


def _names(listed: str) -> list[str]:
  """Of computations, from a list in HLO."""
  return [name.strip().lstrip("%") for name in listed.split(",")]


def _branches_of(line: str) -> list[str]:
  """Names of a conditional's branches, by their number."""
  listed = _BRANCHES.search(line)
  if listed:
    return _names(listed.group(1))
  both = [
    re.search(rf"{which}_computation=%?([\w.\-]+)", line)
    for which in ("false", "true")
  ]
  return [match.group(1) for match in both]


def _bytes_of_branches(line: str, computations: dict[str, list[str]]) -> int:
  return sum(_total(name, computations) for name in _branches_of(line))


def _total(
  name: str, computations: dict[str, list[str]], follow_branches: bool = True
) -> int:
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
  """Sources and targets of a permute."""
  listed = _PAIRS.search(line)
  pairs = re.findall(r"(\d+),(\d+)", listed.group(1)) if listed else []
  return tuple((int(source), int(target)) for source, target in pairs)


def _trips(line: str) -> int:
  """How often an instruction runs what it calls and what has collectives."""
  if " while(" not in line:
    return 1
  known = _TRIPS.search(line)
  if not known:
    raise ValueError(
      "`hlo` must tell how often loops with collectives run, got one that does"
      f" not: {line}; give it a fixed length, as lax.scan has."
    )
  return int(known.group(1))


def _bytes_of(collective: re.Match) -> int:
  size = _size(collective["result"])
  kind = collective["kind"]
  if kind in ("all-gather", "all-to-all"):
    return size // 2
  if kind == "reduce-scatter":
    # The operand is as many times the result as there are replicas; its text
    # holds no shape in newer XLA, the groups do.
    return size * len(groups_of(collective.string)[0]) // 2
  return size


def _is_known(groups: re.Match) -> bool:
  """Whether axes of a mesh, if there are any, are whole ones by their names."""
  axes = groups["axes"]
  return axes is None or re.fullmatch(r"('[^']*'(, ?)?)+", axes) is not None


def groups_of(line: str) -> list[list[int]]:
  """The devices that exchange with each other in a collective, by group.

  HLO writes them as a list {{0,1},{2,3}}, as a cut through all devices
  [2,2]<=[4] or [2,2]<=[2,2]T(1,0), or, since JAX 0.12, by the axes of a mesh,
  mesh['stage'=2,'data'=2] {'data'}.

  Args:
    line: Of a collective with groups.

  Returns:
    Positions of devices in the program's order.

  Raises:
    ValueError: if the groups are written in another way.

  >>> groups_of("all-reduce(%a), replica_groups=mesh['s'=2,'d'=2] {'s'}")
  [[0, 2], [1, 3]]
  """
  found = _GROUPS.search(line)
  if found is None or not _is_known(found):
    raise ValueError(
      "`line` must have replica_groups in a known way, got one that does not:"
      f" {line}; compile with a version of JAX that README names."
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
  devices = devices.reshape([size for _, size in sizes])
  names = [name for name, _ in sizes]
  outside = [name for name in names if name not in inside]
  order = [names.index(name) for name in (*outside, *inside)]
  count = math.prod(size for name, size in sizes if name in inside)
  return devices.transpose(order).reshape(-1, count).tolist()


def _size(types: str) -> int:
  """Bytes of an HLO type, tuples summed."""
  return sum(
    _WIDTHS[dtype] * math.prod(shape) for dtype, shape in _arrays(types)
  )


def _arrays(types: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
  """Dtypes and shapes in an HLO type, in order."""
  return tuple(
    (dtype, tuple(int(dim) for dim in dims.split(",") if dim))
    for dtype, dims in _ARRAY.findall(types)
  )
