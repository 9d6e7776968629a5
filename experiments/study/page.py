"""Writes the page of a study, and a CSV table of all its runs."""

import csv
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.reporting import markdown
from experiments.study.comparison import Comparison, Row, difference, gap
from experiments.study.records import Record
from experiments.training.optimizer import LOW_RANK, rank_name

_MARK = "<!-- Made by experiments/compare.py from records: do not edit. -->"
_NONE = "-"
_RANKS = 12  # in the line of a run
_NUMBERS = (
  "val_loss", "train_loss", "steps", "params", "replicas", "compression_ratio",
  "peak_wire_bytes_per_step", "dense_bytes_per_step", "step_seconds", "seconds",
  "peak_memory_bytes", "peak_device_memory_bytes", "traces", "skipped_steps",
)  # fmt: skip
COLUMNS = (
  "table", "row", "seed", "reducer", "beside", *_NUMBERS, "wire_bytes",
  "ranks", "commit", "device", "settings", "error",
)  # fmt: skip


def require_own(page: pathlib.Path) -> None:
  """Raises unless `page` is new or was made by this program.

  Raises:
    ValueError: if another file is there.
  """
  if page.exists() and not page.read_text().startswith(_MARK):
    raise ValueError(
      f"`--output` must be new or a page that this program made, got {page},"
      " which is another file; give another with --output=FILE."
    )


def write(
  found: Comparison,
  page: pathlib.Path,
  pictures: Mapping[str, pathlib.Path],
  command: str,
) -> str:
  """Writes the page, and <study>.csv to the same folder.

  Args:
    found: The comparison, with at least one finished run.
    page: The file to write.
    pictures: {title: file}; the files are in the folder of the page.
    command: The command that makes the page.

  Returns:
    The text of the page.
  """
  require_own(page)
  table = page.parent / f"{found.study.name}.csv"
  lines = [_MARK, "", *_heading(found, command)]
  for title, rows in found.tables.items():
    lines += ["", f"## {title}"] if title else []
    lines += ["", *_table(rows, found.dense)]
  for title, file in pictures.items():
    lines += ["", f"## {title}", "", f"![{title}]({file.name})"]
  lines += ["", "## Every run", "", f"Also in [{table.name}]({table.name})."]
  lines += ["", *_every_run(found)]
  page.parent.mkdir(parents=True, exist_ok=True)
  with open(table, "w", newline="") as out:
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(csv_rows(found))
  text = "\n".join(lines) + "\n"
  page.write_text(text)
  return text


def csv_rows(found: Comparison) -> list[dict[str, Any]]:
  """Returns a dictionary by COLUMNS for each run, failed runs last."""
  rows = []
  for title, own in found.tables.items():
    for row in own:
      for one in (row, row.matched) if row.matched else (row,):
        partner = row.name if one is row.matched else ""
        rows += [
          {
            "table": title, "row": one.name, "seed": seed,
            "reducer": one.reducer, "beside": partner,
            **{key: run.get(key, "") for key in _NUMBERS},
            "wire_bytes": round(sum(run["wire_bytes_per_step"]) * run["steps"]),
            "ranks": _ranks(run, len(run["rank_history"])),
            "commit": run["environment"]["commit"],
            "device": run["environment"]["device"],
            "settings": json.dumps(run["settings"]), "error": "",
          }
          for seed, run in one.runs.items()
        ]  # fmt: skip
  for name, seed, error in found.failures:
    rows.append({"row": name, "seed": seed, "error": error})
  return rows


def _heading(found: Comparison, command: str) -> Sequence[str]:
  """Returns the text before the tables: origin and meaning of the numbers."""
  runs = [run for row in found.rows for run in row.runs.values()]
  first = runs[0]
  places = [run["environment"] for run in runs]
  machines = sorted({f"{p['device']}, {p['cores']} cores" for p in places})
  versions = sorted(
    {
      ", ".join(
        [
          f"Python {p['python']}",
          *(f"{k} {v}" for k, v in p["versions"].items()),
        ]
      )
      for p in places
    }
  )
  data = {
    f"{r['corpus']['name']}, sha256 {r['corpus']['sha256'][:16]}" for r in runs
  }
  return [
    f"# {found.study.name.capitalize()}: {first['params']:,} parameters,"
    f" {first['steps']} steps, {first['replicas']} replicas",
    "",
    *_missing_runs(found),
    f"`{command}`, configuration `{found.study.config}`, seeds"
    f" {', '.join(found.seeds)}. Commits: {_commits(found)}.",
    f"{'; '.join(machines)}. {'; '.join(versions)}.",
    f"Data: {'; '.join(sorted(data))}.",
    "",
    "Held-out loss is in nats per token at the last step: the mean over seeds;"
    " *spread* is the standard deviation. The gap is relative to"
    f" {found.dense.name}, paired by seed, with the standard error of its mean."
    " With three seeds, a difference below 4.3 standard errors is not resolved"
    " (95 %), and among many rows some are far off by chance. Rows with fewer"
    " seeds than others cannot be compared by their mean loss. Curves are means"
    " over seeds; their range leaves out the higher losses at the start of the"
    " run. Bytes are the payload that a replica sends, counted as for an"
    " all-reduce, and include warm-up, samples and agreement. The ratio is"
    " dense over sent bytes of the whole run."
    + (
      " Each row of edgc is followed by a fixed rank that was chosen to send"
      f" {'about ' * bool(found.study.grid)}the same bytes; the last column is"
      " the difference between them in nats, below zero if edgc is better."
      if found.study.matched_ranks
      else ""
    ),
    "",
    "The time of a step is the median between logged lines, without"
    " compilation, evaluation and checkpoints; the table has the smallest and"
    " the largest over the seeds. Rows cannot be compared by it, because runs"
    " are hours apart and the machine does other work. If replicas share the"
    " cores of one machine it is mostly computation, without any network."
    " Memory is the peak of the process, with all replicas and the compiler, or"
    " the peak of a device if the backend reports it.",
  ]  # fmt: skip


def _commits(found: Comparison) -> str:
  """Lists the commits of the runs by seed."""
  by_seed: dict[str, set[str]] = {}
  for row in found.rows:
    for seed, run in row.runs.items():
      by_seed.setdefault(seed, set()).add(run["environment"]["commit"])
  return "; ".join(
    f"seed {seed} {', '.join(sorted(own))}"
    for seed, own in sorted(by_seed.items())
  )


def _missing_runs(found: Comparison) -> Sequence[str]:
  """Returns a note about missing and failed runs, if there are any."""
  lines = []
  if found.finished < found.planned:
    lines.append(
      f"**{found.finished} of {found.planned} runs:** the same command starts"
      " the others."
    )
  if found.failures:
    lines.append(f"**{len(found.failures)} failed,** see the end of the page.")
  return [" ".join(lines), ""] if lines else []


def _table(rows: Sequence[Row], dense: Row) -> Sequence[str]:
  has_match = any(row.matched for row in rows)
  head = [
    "method", "held-out loss", "spread", "gap to dense", "MB a step",
    "peak MB", "ratio", "ms a step", "memory, GB", "seeds",
    *["to the fixed rank"] * has_match,
  ]  # fmt: skip
  lines = [head]
  for row in rows:
    lines.append(_cells(row, dense) + [_difference(row)] * has_match)
    if row.matched:
      name, *cells = _cells(row.matched, dense)
      lines.append([f"↳ {name}", *cells, ""])
  return markdown.table(lines)


def _cells(row: Row, dense: Row) -> list[str]:
  losses = [run["val_loss"] for run in row.runs.values()]
  memory = row.mean("peak_device_memory_bytes", "peak_memory_bytes")
  return [
    row.name,
    f"{statistics.mean(losses):.4f}",
    f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else _NONE,
    _gap(row, dense),
    _scaled(row.mean("wire_bytes_per_step"), 1e-6, ".3f"),
    _scaled(row.mean("peak_wire_bytes_per_step"), 1e-6, ".3f"),
    _scaled(row.mean("compression_ratio"), 1, ".2f"),
    _range(row),
    _scaled(memory, 1e-9, ".2f"),
    str(len(losses)),
  ]


def _range(row: Row) -> str:
  """Formats the milliseconds of a step, smallest and largest over seeds."""
  ends = (row.least("step_seconds"), row.most("step_seconds"))
  return " to ".join(_scaled(end, 1e3, ".0f") for end in dict.fromkeys(ends))


def _scaled(value: float | None, factor: float, spec: str) -> str:
  return _NONE if value is None else format(value * factor, spec)


def _gap(row: Row, dense: Row) -> str:
  found = gap(row, dense)
  if found is None:
    return _NONE
  mean, error = found
  return f"{mean:+.2%}" + (f" ± {error:.2%}" if error is not None else "")


def _difference(row: Row) -> str:
  found = difference(row, row.matched) if row.matched else None
  if found is None:
    return _NONE if row.reducer == "edgc" else ""
  mean, error = found
  return f"{mean:+.4f}" + (f" ± {error:.4f}" if error is not None else "")


def _every_run(found: Comparison) -> Sequence[str]:
  lines = [
    "| method | seed | held-out loss | ratio | rank, from step |",
    "|---|---|---|---|---|",
  ]
  for row in found.rows:
    lines += [
      f"| {row.name} | {seed} | {run['val_loss']:.4f}"
      f" | {run['compression_ratio']:.2f} | {_ranks(run)} |"
      for seed, run in row.runs.items()
    ]
  lines += [
    f"| {name} | {seed} | failed: {error.replace('|', '/')} | | |"
    for name, seed, error in found.failures
  ]
  return lines


def _ranks(run: Record, limit: int = _RANKS) -> str:
  """Lists ranks and their first steps, without the middle of very many."""
  if run["reducer"] not in LOW_RANK:
    return rank_name(run["reducer"], 0)
  texts = [
    f"{'/'.join(rank_name(run['reducer'], r) for r in ranks)} from {step}"
    for step, ranks in run["rank_history"]
  ]
  if len(texts) > limit:
    texts[limit // 2 : len(texts) - limit // 2] = ["..."]
  return ", ".join(texts)
