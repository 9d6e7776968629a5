"""The diffs of docs/quickstart.md lead from dense loops to its programs."""

import re

import pytest
from helpers.pages import ROOT, blocks_of, run

PAGE = ROOT / "docs/quickstart.md"
_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HUNK = re.compile(r"^@@.*\n", re.MULTILINE)
_LOSSES = re.compile(r"^\d+ (\S+)$", re.MULTILINE)
NAMES = ("jit", "pmap", "shard_map", "vmap")


def pairs():
  """Returns the programs before and after each diff of the page, by name."""
  programs = [b for b in blocks_of(PAGE) if "def loss_fn" in b]
  found = []
  for diff, after in zip(
    _DIFF.findall(PAGE.read_text()), programs, strict=True
  ):
    before = after
    for hunk in filter(None, _HUNK.split(diff)):
      old, new = (_side(hunk, sign) for sign in "-+")
      assert before.count(new) == 1, f"not in the program once:\n{new}"
      before = before.replace(new, old)
    found.append((before, after))
  return dict(zip(NAMES, found, strict=True))


def _side(hunk, sign):
  """Returns the lines of a hunk with this sign, and those without one."""
  lines = hunk.splitlines(keepends=True)
  return "".join(line[1:] for line in lines if line[0] in (" ", sign))


@pytest.mark.parametrize("name", NAMES)
def test_the_diff_leads_to_the_program(name):
  before, after = pairs()[name]
  assert "edgc_jax" not in before
  assert "edgc_jax" in after
  compile(before, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_both_programs_learn(name, tmp_path):
  for program in pairs()[name]:
    printed = run(program, tmp_path, NPROC="16")  # dense ones do not set it
    losses = [float(loss) for loss in _LOSSES.findall(printed)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 < losses[0]
