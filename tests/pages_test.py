"""Every Python code block of README and docs runs, and links lead somewhere."""

import os
import re
import subprocess
import sys

import pytest
from helpers import quick_compile
from helpers.pages import ROOT, blocks_of, pages

SECONDS = 300  # a page takes some seconds on an idle machine
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.slow
@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_blocks_run_one_after_the_other(path, tmp_path):
  """The blocks of a page are one program, on eight CPU devices."""
  script = tmp_path / "page.py"
  script.write_text("\n".join(blocks_of(path)))
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("NPROC", "PYTHONWARNINGS")
  }
  environment |= {
    "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8",
    "XLA_FLAGS": quick_compile.XLA_FLAGS, "PYTHONPATH": str(ROOT),
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-W", "error", str(script)],
    cwd=tmp_path,
    env=environment,
    capture_output=True,
    text=True,
    timeout=SECONDS,
  )
  assert done.returncode == 0, done.stderr


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
