"""Makes the tables and pictures of all pages again, from what is recorded.

  python -m experiments.lab.pages [--check]

People write the pages. Between the lines

  <!-- table NAME -->
  <!-- end -->

this program writes the table of that name, in README.md, docs/*.md and
results/*.md. Some names take an argument, as in `network: 2 replicas`. Pictures
go to results/figures/, and what `edgc_jax.advise` knows of losses to
edgc_jax/measure/evidence.json. With --check nothing is written, and a file that
would change is an error.
"""

import io
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import app, flags
from matplotlib.figure import Figure
from PIL import Image, ImageChops

from experiments import ROOT
from experiments.lab.pages import (
  benchmarks,
  evidence,
  network,
  paper,
  protocol,
  sites,
)
from experiments.trainer.reporting.style import DPI

_CHECK = flags.DEFINE_bool("check", False, "Write nothing, and compare.")

EVIDENCE = ROOT / "edgc_jax/measure/evidence.json"
# Fonts and lines may be drawn a little differently by another version.
# The mean difference of pixels, of 1, in any square of so many pixels.
_MOST_DIFFERENT, _SIDE = 0.05, 12
_START = "<!-- table "
_BLOCK = re.compile(
  rf"({_START}([^:>]+?)(?:: ([^>]+?))? -->\n)(?:(?!{_START}).)*?(<!-- end -->)",
  re.DOTALL,
)

Table = Callable[..., Sequence[str]]
Picture = Callable[[], Figure]
TABLES: Mapping[str, Table] = {
  **protocol.TABLES, **network.TABLES, **benchmarks.TABLES, **paper.TABLES,
  **sites.TABLES,
}  # fmt: skip
PICTURES: Mapping[str, Picture] = {
  **protocol.PICTURES, **network.PICTURES, **paper.PICTURES,
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
  """Writes or checks all pages and pictures."""
  del argv
  stale = [*_texts(), *_pictures()]
  for file in stale:
    print(f"{'stale' if _CHECK.value else 'written'}: {file.relative_to(ROOT)}")
  if _CHECK.value and stale:
    sys.exit("error: pages differ from the records; run `make pages`.")


def filled(text: str, tables: Mapping[str, Table]) -> str:
  """Returns a page with its tables made again.

  Raises:
    ValueError: if a table is unknown, or has no end.
  """
  starts, blocks = text.count(_START), len(_BLOCK.findall(text))
  if blocks < starts:
    raise ValueError(
      f"`text` must have an end mark after each of its {starts} marks,"
      f" got {blocks}; add `<!-- end -->` where a table ends."
    )

  def block(found: re.Match) -> str:
    start, name, argument, end = found.groups()
    if name not in tables:
      raise ValueError(
        f"`table` must be one of {', '.join(tables)}, got {name!r}; rename it."
      )
    lines = tables[name](*[argument] if argument else [])
    return "\n".join([start, *lines, "", end])

  return _BLOCK.sub(block, text)


def pages() -> list[pathlib.Path]:
  """Returns the pages that may have tables."""
  folders = [ROOT / "docs", ROOT / "results"]
  found = [file for folder in folders for file in sorted(folder.glob("*.md"))]
  return [ROOT / "README.md", *found]


def _texts() -> list[pathlib.Path]:
  """Writes the pages and the evidence that have changed, and returns them."""
  texts = {file: filled(file.read_text(), TABLES) for file in pages()}
  texts[EVIDENCE] = evidence.text()
  stale = [
    file
    for file, text in texts.items()
    if not file.exists() or file.read_text() != text
  ]
  if not _CHECK.value:
    for file in stale:
      file.write_text(texts[file])
  return stale


def _pictures() -> list[pathlib.Path]:
  """Writes the pictures that look different, and returns them."""
  changed = []
  for name, draw in PICTURES.items():
    file = ROOT / "results/figures" / f"{name}.png"
    image = _drawn(draw())
    if file.exists() and _look_alike(image, Image.open(file).convert("RGB")):
      continue
    changed.append(file)
    if not _CHECK.value:
      file.parent.mkdir(exist_ok=True)
      # A palette makes the file a third as large, and git keeps every version.
      # The default one, of median cuts, gives rare colours to their neighbours.
      palette = Image.Quantize.MAXCOVERAGE
      image = image.quantize(256, palette, dither=Image.Dither.NONE)
      image.save(file, optimize=True)
  return changed


def _drawn(figure: Figure) -> Image.Image:
  pixels = io.BytesIO()
  figure.savefig(pixels, dpi=DPI)
  return Image.open(pixels).convert("RGB")


def _look_alike(one: Image.Image, other: Image.Image) -> bool:
  if one.size != other.size:
    return False
  squares = np.asarray(ImageChops.difference(one, other).reduce(_SIDE))
  return squares.mean(-1).max() <= 255 * _MOST_DIFFERENT


if __name__ == "__main__":
  app.run(main)
