"""Finds collectives of a compiled program that may overtake each other."""

import functools
import re

from edgc_jax.measure import hlo


def unordered(text: str) -> list[tuple[str, str]]:
  """Returns pairs of collectives, one in a branch or loop, without an order.

  XLA's CPU backend keeps the order of a program's collectives, unless one is
  inside a conditional or a loop: then only a data dependency orders them
  (`wire.channel`).
  """
  computations = hlo.computations_of(text)

  def sends(line: str) -> bool:
    """Returns whether an instruction is a collective or calls one."""
    called = hlo.called_by(line)
    return hlo.is_collective(line) or any(map(holds_collectives, called))

  @functools.cache
  def holds_collectives(name: str) -> bool:
    return any(map(sends, computations[name]))

  found = []
  for lines in computations.values():
    needs: dict[str, set[str]] = {}
    senders: dict[str, bool] = {}  # whether they are collectives themselves
    for line in lines:
      if not (match := re.match(r"(?:ROOT )?%?([\w.\-]+) = ", line)):
        continue
      name = match.group(1)
      operands = set(re.findall(r"%([\w.\-]+)", line)) & set(needs)
      needs[name] = operands.union(*(needs[other] for other in operands))
      if sends(line):
        is_plain = hlo.is_collective(line)
        found += [
          (other, name)
          for other, other_is_plain in senders.items()
          if not (is_plain and other_is_plain) and other not in needs[name]
        ]
        senders[name] = is_plain
  return found
