"""Builds the documentation site from the pages and the docstrings.

  python -m experiments.lab.pages.site [--site=site]

The site has the pages that zensical.toml names, at their places in the
repository, so that a link in a page leads to the same file here and there.
Other files to which pages link become pages, too, with their text as code. The
build fails on a link or an anchor that leads nowhere, and on a public name
without a docstring.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence

import jax
from absl import app, flags

from experiments import ROOT

_SITE = flags.DEFINE_string("site", "site", "Folder of the site.")

CONFIG = "zensical.toml"
ASSETS = "docs/assets"
_ONLY_SITES = "404.html"  # have this file
_PICTURES = (".png", ".svg")
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
_SOURCE = """\
---
search:
  exclude: true
---
# {name}

`{path}`

~~~~{language}
{text}
~~~~
"""


def main(argv: Sequence[str]) -> None:
  """Builds the site."""
  del argv
  try:
    build(pathlib.Path(_SITE.value))
  except subprocess.CalledProcessError:
    sys.exit("error: the site has the faults above, and was not written.")
  except (FileNotFoundError, ValueError) as error:
    sys.exit(f"error: {error}")


def build(output: pathlib.Path, root: pathlib.Path = ROOT) -> None:
  """Builds the site of a repository into a folder, which it replaces.

  Raises:
    FileNotFoundError: if a page, or the target of a link, does not exist.
    ValueError: if a page is not in `nav`, or the folder holds something else.
    subprocess.CalledProcessError: if Zensical finds a fault, which it prints.
  """
  if output.exists() and not (output / _ONLY_SITES).is_file():
    raise ValueError(
      f"`--site` must be a new folder, or one with a site, got {output}; name"
      " another one, since it would be replaced."
    )
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    shutil.copy(root / CONFIG, folder)
    config = tomllib.loads((root / CONFIG).read_text())["project"]
    pages = folder / config["docs_dir"]
    gather(root, set(jax.tree.leaves(config["nav"])), pages)
    shutil.copytree(root / ASSETS, pages / ASSETS)
    subprocess.run(
      [sys.executable, "-m", "zensical", "build", "--strict"],
      cwd=folder,
      env=os.environ | {"PYTHONPATH": str(root)},
      check=True,
    )
    if output.exists():
      shutil.rmtree(output)
    shutil.copytree(folder / config["site_dir"], output)


def gather(root: pathlib.Path, pages: set[str], folder: pathlib.Path) -> None:
  """Copies pages into a folder, with all files that they link to."""
  found = [*root.glob("docs/*.md"), *root.glob("results/*.md")]
  unlisted = {str(page.relative_to(root)) for page in found} - pages
  if unlisted:
    raise ValueError(
      f"`nav` of {CONFIG} must name all pages, and lacks"
      f" {', '.join(sorted(unlisted))}; add them."
    )

  def copied(page: str, link: str) -> str:
    """Copies the target of a link, and returns the link to the copy."""
    file = pathlib.Path(os.path.normpath((root / page).parent / link))
    if not file.is_file():
      raise FileNotFoundError(
        f"`{link}` in {page} must be a file; mend the link."
      )
    path = str(file.relative_to(root))
    if path in pages:
      return link
    if file.suffix == ".md":
      raise ValueError(
        f"`{link}` in {page} must be in `nav` of {CONFIG}; add {path} there."
      )
    if file.suffix in _PICTURES:
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(file, folder / path)
      return link
    text = _SOURCE.format(
      name=file.name, path=path, language=file.suffix[1:], text=file.read_text()
    )
    _write(folder / f"{path}.md", text)
    return f"{link}.md"

  for page in pages:
    text = (root / page).read_text()
    text = _LINK.sub(lambda link, page=page: copied(page, link[1]), text)
    _write(folder / page, text)


def _write(file: pathlib.Path, text: str) -> None:
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(text)


if __name__ == "__main__":
  app.run(main)
