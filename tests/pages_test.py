"""Every Python code block of README and docs runs, and links lead somewhere."""

import re

import pytest
from helpers.pages import ROOT, blocks_of, pages, run

_OUTPUT = re.compile(r"^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.slow
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_blocks_run_one_after_the_other(path, tmp_path):
  """The blocks of a page are one program, on eight CPU devices.

  What a page shows as text below a block is printed by it, line after line.
  """
  printed = run("\n".join(blocks_of(path)), tmp_path)
  printed = "\n".join(line.rstrip() for line in printed.splitlines())
  for shown in _OUTPUT.findall(path.read_text()):
    assert shown.rstrip() in printed, printed


def test_the_readme_has_an_example_and_stays_short():
  text = (ROOT / "README.md").read_text()
  assert blocks_of(ROOT / "README.md")
  assert len(text.split()) <= 900


@pytest.mark.parametrize(
  "path",
  [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")],
  ids=lambda path: path.stem,
)
def test_links_lead_to_files(path):
  targets = _LINK.findall(path.read_text())
  local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
  missing = [t for t in local if not (path.parent / t).exists()]
  assert not missing
