"""Colours, sizes, axes and tables shared by all pages."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind people can distinguish.
COLORS = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f24",
)  # fmt: skip
DENSE = "#444444"
WIDTH, DPI = 9.0, 100  # inches and dots per inch: 900 pixels


def dress(axes: Axes, title: str) -> None:
  """Sets the title, grid and tick labels of a panel."""
  axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.tick_params(labelsize=8)


def markdown(table: Any) -> list[str]:
  """Returns the lines of a table: of a frame, or of dictionaries by column."""
  lines = pd.DataFrame(table)
  return lines.to_markdown(index=False, disable_numparse=True).splitlines()
