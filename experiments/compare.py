"""Runs the methods of a study with several seeds and writes what came out.

  python experiments/compare.py --study=configs/studies/allocation.py

A study is a Python file with CONFIG, the configuration that all runs share,
TABLES, {table: {row: settings}}, and perhaps SETTINGS, those of all rows. One
run after the other, each in a process of its own and in a folder of its own
under --runs; what is finished is not run again, so the same command goes on
where it was cut off. The tables are written to --output, anew each time; with
--nowait of what is there.
"""

import json
import pathlib
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

_STUDY = flags.DEFINE_string("study", None, "A file in configs/studies/.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_RUNS = flags.DEFINE_string("runs", "runs/compare", "Where the runs go.")
_OUTPUT = flags.DEFINE_string(
  "output", "docs/results.md", "The file of the tables."
)
_WAIT = flags.DEFINE_bool("wait", True, "Run what is missing.")

_HERE = pathlib.Path(__file__).resolve().parent

Settings = Mapping[str, Any]
Summaries = Mapping[str, Mapping[str, Any]]  # {seed: summary}


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes the tables."""
  del argv
  values = runpy.run_path(_STUDY.value)
  config, tables = values["CONFIG"], values["TABLES"]
  shared, rows = values.get("SETTINGS", {}), _rows(tables)
  if _WAIT.value:
    for seed in _SEEDS.value:  # a seed at a time: all methods grow together
      for row, settings in rows.items():
        print(f"--- {row}, seed {seed}", flush=True)
        command = _command(config, row, {**shared, **settings}, seed)
        subprocess.run(command, check=True)
  runs = {row: _finished(row) for row in rows}
  found = {
    t: {row: runs[row] for row in own if runs[row]} for t, own in tables.items()
  }
  dense = runs[next(iter(rows))]
  text = _page(config, dense, {t: own for t, own in found.items() if own})
  print(text)
  output = pathlib.Path(_OUTPUT.value)
  output.parent.mkdir(parents=True, exist_ok=True)
  output.write_text(text)


def _rows(
  tables: Mapping[str, Mapping[str, Settings]],
) -> Mapping[str, Settings]:
  """The rows of all tables; a row's name is its run folder's, so unique."""
  rows: dict[str, Settings] = {}
  for table in tables.values():
    for row, settings in table.items():
      if row in rows and rows[row] != settings:
        raise ValueError(
          f"`TABLES` must have one row of each name, got {row!r} twice with"
          " different settings; name them apart."
        )
      rows[row] = settings
  return rows


def _folder(row: str, seed: str) -> pathlib.Path:
  name = re.sub(r"[^a-z0-9.]+", "-", row.lower()).strip("-")
  return pathlib.Path(_RUNS.value) / f"{name}-seed{seed}"


def _command(
  config: str, row: str, settings: Settings, seed: str
) -> Sequence[str]:
  """The command line of one run; it ends at once where it was run before."""
  settings = dict(settings)
  reducer = settings.pop("reducer")
  return [
    sys.executable,
    str(_HERE / "train_gpt2.py"),
    f"--config={config}:{reducer}",
    f"--config.seed={seed}",
    f"--config.run_dir={_folder(row, seed)}",
    *(f"--config.{key}={value}" for key, value in settings.items()),
  ]


def _finished(row: str) -> dict[str, dict[str, Any]]:
  files = {s: _folder(row, s) / "summary.json" for s in _SEEDS.value}
  return {s: json.loads(f.read_text()) for s, f in files.items() if f.exists()}


def _page(
  config: str, dense: Summaries, tables: Mapping[str, Mapping[str, Summaries]]
) -> str:
  """Markdown: a table for each group, then every run; gaps are to `dense`."""
  rows = {row: runs for table in tables.values() for row, runs in table.items()}
  if not rows:
    raise ValueError(
      f"--runs must be where runs of the study are, got {_RUNS.value}, which"
      " has none; leave out --nowait to make them."
    )
  lines = _heading(config, [s for runs in rows.values() for s in runs.values()])
  for table, own in tables.items():
    lines += ["", f"## {table}"] if table else []
    lines += _table(own, dense)
  return "\n".join(lines + _every_run(rows)) + "\n"


def _heading(
  config: str, summaries: Sequence[Mapping[str, Any]]
) -> Sequence[str]:
  """Where the numbers come from and what they mean."""
  about = summaries[0]
  environment = about["environment"]
  commits = sorted({s["environment"]["commit"] for s in summaries})
  versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
  return [
    f"# {pathlib.Path(config).stem}: {about['params']:,} parameters,"
    f" {about['steps']} steps, {about['replicas']} replicas",
    "",
    f"Written by `python experiments/compare.py --study={_STUDY.value}`; do not"
    " edit.",
    "",
    f"Commit {', '.join(commits)}; {environment['device']},"
    f" {environment['cores']} cores, Python {environment['python']},"
    f" {versions}. Data: {about['corpus']['name']},"
    f" sha256 {about['corpus']['sha256'][:16]}.",
    "",
    "Held-out loss in nats a token at the last step: mean over seeds, and the"
    " standard deviation. The gap is to the first row of all, seed by seed,"
    " with the standard error of its mean; what is closed is the share of the"
    " gap of the table's first row that a row does not have, where that gap is"
    " more than two standard errors. The ratio is dense over sent bytes of the"
    " whole run, dense steps included.",
  ]


def _table(rows: Mapping[str, Summaries], dense: Summaries) -> Sequence[str]:
  first = next(iter(rows.values()))
  lines = [
    "",
    "| method | held-out loss | spread | gap to dense | closed | ratio"
    " | MB a step | seeds |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for row, runs in rows.items():
    losses = [s["val_loss"] for s in runs.values()]
    ratios = [s["compression_ratio"] for s in runs.values()]
    sent = [sum(s["wire_bytes_per_step"]) / 1e6 for s in runs.values()]
    spread = f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "-"
    lines.append(
      f"| {row} | {statistics.mean(losses):.4f} | {spread}"
      f" | {_gap(runs, dense)} | {_closed(runs, first, dense)}"
      f" | {statistics.mean(ratios):.2f} | {statistics.mean(sent):.2f}"
      f" | {len(runs)} |"
    )
  return lines


def _every_run(rows: Mapping[str, Summaries]) -> Sequence[str]:
  lines = ["", "## Every run", ""]
  lines += ["| method | seed | held-out loss | ratio | rank, from step |"]
  lines += ["|---|---|---|---|---|"]
  for row, runs in rows.items():
    for seed, summary in runs.items():
      ranks = ", ".join(
        f"{rank[0] or 'dense'} from {step}"
        for step, rank in summary["rank_history"]
      )
      lines.append(
        f"| {row} | {seed} | {summary['val_loss']:.4f}"
        f" | {summary['compression_ratio']:.2f} | {ranks} |"
      )
  return lines


def _gap(runs: Summaries, dense: Summaries) -> str:
  """Percent above dense, of the seeds both have, and the standard error."""
  seeds = [seed for seed in runs if seed in dense]
  if not seeds or runs == dense:
    return "-"
  level = statistics.mean(dense[seed]["val_loss"] for seed in seeds)
  gap, error = _difference(seeds, runs, dense)
  return f"{gap / level:+.2%}" + (f" ± {error / level:.2%}" if error else "")


def _closed(runs: Summaries, first: Summaries, dense: Summaries) -> str:
  """Share of the first row's gap that is gone, of the seeds all have."""
  seeds = [seed for seed in runs if seed in first and seed in dense]
  if not seeds or runs is first:
    return "-"
  gap, error = _difference(seeds, first, dense)
  if gap <= 2 * error:
    return "not resolved"
  return f"{1 - _difference(seeds, runs, dense)[0] / gap:z.0%}"


def _difference(
  seeds: Sequence[str], runs: Summaries, others: Summaries
) -> tuple[float, float]:
  """Mean difference of losses, seed by seed, and its standard error."""
  found = [runs[s]["val_loss"] - others[s]["val_loss"] for s in seeds]
  spread = statistics.stdev(found) if len(found) > 1 else 0.0
  return statistics.mean(found), spread / len(found) ** 0.5


if __name__ == "__main__":
  flags.mark_flag_as_required("study")
  app.run(main)
