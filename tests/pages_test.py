"""Every Python code block of docs/ runs, and links lead somewhere.

That of README.md runs in wheel_test.py.
"""

import re

import pytest
from helpers.pages import ROOT, blocks_of, of_repository, pages, run_page

README, QUICKSTART = ROOT / "README.md", ROOT / "docs/quickstart.md"
LOOPS = 4  # of the quickstart: jit, pmap, shard_map and vmap
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HUNK = re.compile(r"^@@.*\n", re.MULTILINE)
_LOSSES = re.compile(r"^\d+ (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  found = of_repository(tmp_path_factory.mktemp("forks"))
  yield found
  found.close()


def check_losses(printed):
  """All loops of the quickstart learn."""
  losses = list(map(float, _LOSSES.findall(printed)))
  assert len(losses) == 3 * LOOPS
  for start in range(0, len(losses), 3):
    assert losses[start + 2] < 0.5 < losses[start]


@pytest.mark.slow
@pytest.mark.parametrize(
  "path",
  [page for page in pages() if page != README],
  ids=lambda path: path.stem,
)
def test_blocks_run_one_after_the_other(path, forks, tmp_path):
  printed = run_page(path, forks, tmp_path)
  if path == QUICKSTART:
    check_losses(printed)


def side(hunk, sign):
  """Returns the lines of a hunk with this sign, and those without one."""
  lines = hunk.splitlines(keepends=True)
  return "".join(line[1:] for line in lines if line[0] in (" ", sign))


@pytest.mark.slow
def test_diffs_of_the_quickstart_lead_from_dense_loops(tmp_path):
  """Each is applied backwards to its program; what is left learns, too."""
  programs = [b for b in blocks_of(QUICKSTART) if "def loss_fn" in b]
  dense = []
  for diff, program in zip(
    _DIFF.findall(QUICKSTART.read_text()), programs, strict=True
  ):
    assert "edgc_jax" in program
    for hunk in filter(None, _HUNK.split(diff)):
      old, new = (side(hunk, sign) for sign in "-+")
      assert program.count(new) == 1, f"not in the program once:\n{new}"
      program = program.replace(new, old)
    assert "edgc_jax" not in program
    dense.append(program)
  forks = of_repository(tmp_path, NPROC="16")  # which only edgc_jax would set
  check_losses(forks.run("\n".join(dense), tmp_path))
  forks.close()


@pytest.mark.parametrize(
  "path",
  [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")],
  ids=lambda path: path.stem,
)
def test_links_lead_to_files(path):
  targets = _LINK.findall(path.read_text())
  local = [t for t in targets if "://" not in t and not t.startswith("mailto:")]
  assert not [t for t in local if not (path.parent / t).exists()]
