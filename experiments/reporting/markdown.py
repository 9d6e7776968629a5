"""Markdown tables."""

from collections.abc import Sequence


def table(lines: Sequence[Sequence[str]]) -> list[str]:
  """Returns the lines of a Markdown table.

  Args:
    lines: The cells of each line; the first line has the headings.
  """
  lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
  return [f"| {' | '.join(cells)} |" for cells in lines]
