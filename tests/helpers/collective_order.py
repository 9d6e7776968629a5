"""Finds collectives of a compiled program that may overtake each other."""

import functools
import re

from edgc_jax.measure import hlo

_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = ")


def unordered(text: str) -> list[tuple[str, str]]:
  """Returns pairs of collectives, one in a branch or loop, without an order.

  XLA's CPU backend keeps the order of a program's collectives, unless one is
  inside a conditional or a loop: then only a data dependency orders them
  (`wire.order.in_turn`).

  Args:
    text: Text of a compiled program.

  Returns:
    Names of instructions.
  """
  computations = hlo.computations_of(text)

  def sends(line: str) -> bool:
    """Returns whether an instruction is a collective or calls one."""
    if hlo.is_collective(line):
      return True
    return any(map(holds_collectives, hlo.called_by(line)))

  @functools.cache
  def holds_collectives(name: str) -> bool:
    return any(map(sends, computations[name]))

  found = []
  for lines in computations.values():
    needs: dict[str, set[str]] = {}
    senders: list[tuple[str, bool]] = []
    for line in lines:
      match = _INSTRUCTION.match(line)
      if not match:
        continue
      name = match.group(1)
      operands = set(re.findall(r"%([\w.\-]+)", line)) & set(needs)
      needs[name] = operands.union(*(needs[other] for other in operands))
      if not sends(line):
        continue
      is_plain = hlo.is_collective(line)
      found += [
        (other, name)
        for other, other_is_plain in senders
        if not (is_plain and other_is_plain) and other not in needs[name]
      ]
      senders.append((name, is_plain))
  return found
