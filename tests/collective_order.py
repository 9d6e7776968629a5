"""Collectives of a compiled program that may overtake each other on CPUs."""

import re

from edgc_jax import compiled_cost

_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = ")
_GROUPS = re.compile(
  r"(?:replica_groups|source_target_pairs)=((?:\{\{.*?\}\})|(?:\S+))"
)


def unordered(hlo: str) -> list[tuple[str, str]]:
  """Pairs over the same devices with one in a branch or loop, and no order.

  XLA's CPU backend keeps the order of a program's collectives, unless one is
  inside a conditional or a loop: there only data that the one takes from the
  other does (`collectives.after`).

  Args:
    hlo: Text of a compiled program.

  Returns:
    Names of instructions.
  """
  computations = compiled_cost._split(hlo)

  def groups(line: str) -> set[str]:
    """Of all collectives in what an instruction does."""
    if compiled_cost._COLLECTIVE.search(line):
      return set(_GROUPS.findall(line))
    return set().union(*(within(name) for name in called(line)))

  def called(line: str) -> list[str]:
    if " conditional(" in line:
      return compiled_cost._branches_of(line)
    return compiled_cost._CALLED.findall(line)

  def within(computation: str) -> set[str]:
    return set().union(*map(groups, computations[computation]))

  found = []
  for lines in computations.values():
    needs: dict[str, set[str]] = {}
    senders: list[tuple[str, str, set[str]]] = []
    for line in lines:
      match = _INSTRUCTION.match(line)
      if not match:
        continue
      name = match.group(1)
      operands = set(re.findall(r"%([\w.\-]+)", line)) & set(needs)
      needs[name] = operands.union(*(needs[other] for other in operands))
      own = groups(line)
      for other, kind, theirs in senders:
        is_plain = kind == "plain" and compiled_cost._COLLECTIVE.search(line)
        if own & theirs and not is_plain and other not in needs[name]:
          found.append((other, name))
      if own:
        is_plain = compiled_cost._COLLECTIVE.search(line)
        senders.append((name, "plain" if is_plain else "nested", own))
  return found
