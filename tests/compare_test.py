"""The tables of a study, from summaries made up."""

import pathlib
import runpy

import pytest

from experiments import compare, optimizer

ROOT = pathlib.Path(__file__).resolve().parents[1]
ENVIRONMENT = {
  "commit": "abc", "device": "cpu", "cores": 2, "python": "3", "versions": {},
}  # fmt: skip


def summary(loss, sent=2.0):
  return {
    "val_loss": loss, "compression_ratio": 8.0 / sent, "params": 1,
    "steps": 40, "replicas": 4, "wire_bytes_per_step": [1e6 * sent],
    "rank_history": [[1, [0]], [3, [4]]], "environment": ENVIRONMENT,
    "corpus": {"name": "text", "sha256": "0"},
  }  # fmt: skip


@pytest.fixture
def page():
  dense = {"0": summary(2.0, 8.0), "1": summary(3.0, 8.0)}
  strong = {"0": summary(2.2), "1": summary(3.3)}
  noise = {"0": summary(2.0), "1": summary(3.05)}
  better = {"0": summary(1.9), "1": summary(2.9)}
  tables = {
    "Dense": {"all-reduce": dense},
    "Four times less": {"strong": strong, "half done": {"1": summary(3.05)}},
    "No gap to close": {"within noise": noise, "better": better},
  }
  compare.flags.FLAGS(["compare", "--study=a.py"])
  return compare._page("a/gpt2_tiny.py", dense, tables)


def cells(page, row):
  (line,) = [
    line for line in page.splitlines()
    if line.startswith(f"| {row} |") and "from" not in line
  ]  # fmt: skip
  return [cell.strip() for cell in line.strip("|").split("|")]


def test_gaps_are_of_the_seeds_that_both_have(page):
  assert cells(page, "all-reduce")[3:5] == ["-", "-"]
  # 0.2 and 0.3 above a mean of 2.5.
  assert cells(page, "strong")[1:3] == ["2.7500", "0.7778"]
  assert cells(page, "strong")[3:5] == ["+10.00% ± 2.00%", "-"]
  # Seed 1 alone: 0.05 of 0.3, though its loss is above the other row's mean.
  assert cells(page, "half done")[1:5] == ["3.0500", "-", "+1.67%", "83%"]


def test_nothing_is_closed_where_there_is_no_gap(page):
  assert cells(page, "within noise")[3:5] == ["+1.00% ± 1.00%", "-"]
  assert cells(page, "better")[3:5] == ["-4.00%", "not resolved"]


def test_every_run_has_a_line(page):
  assert "| half done | 1 | 3.0500 | 4.00 | dense from 1, 4 from 3 |" in page


def test_rows_of_one_name_must_be_one_run():
  same = {"a": {"x": 1}}
  assert compare._rows({"one": same, "two": same}) == same
  with pytest.raises(ValueError, match="`TABLES` must have one row"):
    compare._rows({"one": same, "two": {"a": {"x": 2}}})


def test_schedules_of_the_study_send_what_the_fixed_rank_sends():
  tables = runpy.run_path(str(ROOT / "configs/studies/allocation.py"))["TABLES"]
  for table in list(tables.values())[1:]:
    rows = list(table.values())
    fixed, schedules = rows[0]["powersgd.rank"], rows[2:4]
    for settings in schedules:
      ranks = optimizer._rank_schedule(
        settings["powersgd.rank"], settings["powersgd.final_rank"], 400
      )
      ends = [*ranks, 400][1:]
      sent = sum(
        rank * (end - start)
        for (start, rank), end in zip(ranks.items(), ends, strict=True)
      )
      assert abs(sent / 400 - fixed) < 0.01 * fixed
