"""Tables and pictures of the pages."""

import itertools

import numpy as np
import pytest
from PIL import Image

from edgc_jax import METHOD_VERSIONS
from edgc_jax.measure.evidence import of_protocol
from experiments.lab.pages import __main__ as pages
from experiments.lab.pages import evidence, protocol
from experiments.lab.study import study
from experiments.lab.study.records import Records

# What tables are made from, and the pages that have them.
LONG = pytest.mark.soak(
  "README.md", "configs", "docs", "results", "edgc_jax/measure",
  "edgc_jax/methods", "experiments",
)  # fmt: skip
PAGE = """# A page

Before.
<!-- table numbers -->
| old |
<!-- end -->
Between, <!-- a comment -->.
<!-- table of: 2 replicas -->
<!-- end -->
After.
"""


def test_tables_are_written_between_their_marks_alone():
  tables = {"numbers": lambda: ["| 1 |"], "of": lambda which: [which]}
  text = pages.filled(PAGE, tables)
  assert text == PAGE.replace(
    "<!-- table numbers -->\n| old |\n<!-- end -->",
    "<!-- table numbers -->\n\n| 1 |\n\n<!-- end -->",
  ).replace(
    "<!-- table of: 2 replicas -->\n",
    "<!-- table of: 2 replicas -->\n\n2 replicas\n\n",
  )
  assert pages.filled(text, tables) == text
  with pytest.raises(ValueError, match="`table` must be one of numbers, got"):
    pages.filled(PAGE, {"numbers": lambda: []})
  # Without an end the text up to the end of the next table would be lost.
  for number in (1, 2):
    cut = "<!-- end -->".join(PAGE.split("<!-- end -->", number)[:number])
    rest = PAGE.split("<!-- end -->", number)[number]
    with pytest.raises(ValueError, match="its 2 marks, got 1; add"):
      pages.filled(cut + rest, tables)


@LONG
@pytest.mark.parametrize(
  "file",
  pages.pages(),
  ids=lambda file: file.stem,
)
def test_committed_pages_have_the_tables_of_the_records(file):
  text = file.read_text()
  assert pages.filled(text, pages.TABLES) == text, "run `make pages`"


@LONG
def test_the_evidence_of_advice_is_that_of_the_records():
  assert pages.EVIDENCE.read_text() == evidence.text(), "run `make pages`"
  for dense, *_ in of_protocol().values():
    assert (dense.name, dense.steps, dense.predicted_bits) == ("dense", 1, 32)
  for one in itertools.chain(*of_protocol().values()):
    assert one.seeds >= 3 and one.steps >= 1
    # Of edgc, whose rank falls, they differ more.
    assert np.isclose(one.bits, one.predicted_bits, rtol=0.12)


@LONG
@pytest.mark.parametrize("name", pages.PICTURES)
def test_committed_pictures_show_the_records(name):
  file = pages.ROOT / "results/figures" / f"{name}.png"
  drawn = pages._drawn(pages.PICTURES[name]())
  assert pages._look_alike(drawn, Image.open(file).convert("RGB"))


def test_pictures_that_differ_are_noticed():
  white, other = (Image.new("RGB", (100, 100), c) for c in ("white", "white"))
  assert pages._look_alike(white, other)
  other.paste("black", (0, 0, 20, 20))
  assert not pages._look_alike(white, other)
  assert not pages._look_alike(white, Image.new("RGB", (100, 99), "white"))


@pytest.fixture
def made_up(tmp_path, monkeypatch):
  """Puts made-up records of two seeds in place of those of the protocol."""
  tables = {
    "Every entry": {"dense": {"reducer": "allreduce"}},
    "About 1 bit": {
      f"powersgd {rank}": {"reducer": "powersgd", "powersgd.rank": float(rank)}
      for rank in (8, 9)
    },
  }  # fmt: skip
  config = str(pages.ROOT / "configs/gpt2_tiny.py")
  own = study.Study("made_up", config, tables, (0, 1))
  records = Records(tmp_path)
  for arm, losses, bits in (
    ("dense", (2.0, 3.0), 32.0), ("powersgd 8", (2.1, 3.3), 1.0),
  ):  # fmt: skip
    for seed, loss in enumerate(losses):
      run, _ = own.judged(arm, seed, records)
      summary = {
        "reducer": run.config.reducer, "val_loss": loss, "params": 1000,
        "wire_bytes_per_step": [bits * 125], "seconds": 3600.0,
        "versions": {
          "task": 1, "method": METHOD_VERSIONS[run.config.reducer] - seed,
        },
        "corpus": {"name": "text"},
        "environment": {"device": "cpu", "cores": 2, "python": "3",
                        "versions": {"jax": "1"}, "commit": f"c{seed}"},
      }  # fmt: skip
      losses = [loss + 1, loss + 0.2, loss]
      lines = {"step": [100, 200, 400], "val_loss": losses}
      records.add(run.config, {"summary": summary, "lines": lines})
  for cached in (protocol.all_records, protocol.study_of, protocol._judged,
                 protocol.arms_of):  # fmt: skip
    cached.cache_clear()
  monkeypatch.setattr(protocol, "all_records", lambda: records)
  monkeypatch.setattr(protocol, "study_of", lambda name: own)
  yield
  for cached in (protocol._judged, protocol.arms_of):
    cached.cache_clear()


def test_tables_of_made_up_records(made_up):
  def cells(lines):
    """Returns the cells of each line by its first one."""
    split = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in split if row}

  lines = protocol._results("made up")
  assert lines[-1] == "Not finished yet: powersgd 9."
  table = cells(lines)
  (dense,) = [name for name in table if name.startswith("dense")]
  (low,) = [name for name in table if name.startswith("powersgd")]
  assert "older version" in dense  # seed 1 is
  assert table[dense][:4] == ["32.00", "2.5000", "-", "-"]
  # Gaps of 0.1 and 0.3; dense is there at steps 300 and, earlier, 192.
  assert table[low][:3] == ["1.00", "2.7000", "+0.2000 ± 0.1000"]
  assert table[low][3] == f"{(300 / 400 + 187.5 / 400) / 2:.0%}"
  (origin,) = protocol._origin("made up")
  assert origin.startswith("4 runs took 4.0 hours (cpu, 2 cores")
  assert "c0, c1" in origin
  assert "2 runs are missing" in origin
  assert protocol._fixed_arms("made up") == ["No run is finished yet."]
  summary = cells(protocol._summary("made up and made up"))
  assert any(name.startswith("powersgd 8") for name in summary)
