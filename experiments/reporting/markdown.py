"""Tables for pages."""

from collections.abc import Sequence


def table(lines: Sequence[Sequence[str]]) -> list[str]:
  """Lines of a Markdown table.

  Args:
    lines: Cells of each line; the first are the headings.
  """
  lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
  return [f"| {' | '.join(cells)} |" for cells in lines]
