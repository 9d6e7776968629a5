"""Runs several methods with several seeds and writes what came out.

  python experiments/compare.py --config=configs/gpt2_tiny.py \
      --methods=allreduce,powersgd.rank=20,edgc --seeds=0,1,2

One run after the other, each in a process of its own and in a folder of its
own under --runs; what is finished is not run again, so the same command goes
on where it was cut off. The tables are written to --output, anew each time.
"""

import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

from absl import app, flags

_CONFIG = flags.DEFINE_string("config", None, "A file in configs/.")
_METHODS = flags.DEFINE_list(
  "methods",
  ["allreduce", "edgc", "powersgd.rank=8", "powersgd.rank=20",
   "powersgd.rank=32"],
  "Reducers, each with an option of its own behind it if you like.",
)  # fmt: skip
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")
_RUNS = flags.DEFINE_string("runs", "runs/compare", "Where the runs go.")
_OUTPUT = flags.DEFINE_string("output", "docs/results.md", "The table's file.")

_HERE = pathlib.Path(__file__).resolve().parent


def main(argv: list[str]) -> None:
  """Runs what is missing, then writes the table."""
  del argv
  summaries: dict[str, list[dict[str, Any]]] = {}
  for seed in _SEEDS.value:  # a seed at a time: all methods grow together
    for method in _METHODS.value:
      print(f"--- {method}, seed {seed}", flush=True)
      summaries.setdefault(method, []).append(_run(method, int(seed)))
  text = _table(summaries)
  print(text)
  output = pathlib.Path(_OUTPUT.value)
  output.parent.mkdir(parents=True, exist_ok=True)
  output.write_text(text)


def _run(method: str, seed: int) -> dict[str, Any]:
  """The summary of one run, from its folder if it is there."""
  reducer, *option = method.split(".", 1)
  folder = pathlib.Path(_RUNS.value) / f"{method}-seed{seed}"
  command = [
    sys.executable,
    str(_HERE / "train_gpt2.py"),
    f"--config={_CONFIG.value}:{reducer}",
    f"--config.seed={seed}",
    f"--config.run_dir={folder}",
  ]
  command += [f"--config.{reducer}.{item}" for item in option]
  subprocess.run(command, check=True)
  return json.loads((folder / "summary.json").read_text())


def _table(summaries: dict[str, list[dict[str, Any]]]) -> str:
  """Markdown: one row a method, means over seeds, gaps to the first method."""
  first = next(iter(summaries.values()))
  baseline = statistics.mean(s["val_loss"] for s in first)
  about = first[0]
  environment = about["environment"]
  commits = sorted(
    {s["environment"]["commit"] for runs in summaries.values() for s in runs}
  )
  versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
  lines = [
    f"# {pathlib.Path(_CONFIG.value).stem}: {about['params']:,} parameters,"
    f" {about['steps']} steps, {about['replicas']} replicas",
    "",
    "Written by `python experiments/compare.py"
    f" --config={_CONFIG.value} --methods={','.join(_METHODS.value)}"
    f" --seeds={','.join(_SEEDS.value)}`; do not edit.",
    "",
    f"Commit {', '.join(commits)}; {environment['device']},"
    f" {environment['cores']} cores, Python {environment['python']},"
    f" {versions}. Data: {about['corpus']['name']},"
    f" sha256 {about['corpus']['sha256'][:16]}.",
    "",
    "Held-out loss in nats a token at the last step: mean over seeds, and the"
    " standard deviation. The ratio is dense over sent bytes of the whole run,"
    " dense warm-up included.",
    "",
    "| method | held-out loss | spread | gap to the first | ratio"
    " | MB a step |",
    "|---|---|---|---|---|---|",
  ]
  for method, runs in summaries.items():
    losses = [s["val_loss"] for s in runs]
    mean = statistics.mean(losses)
    spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
    ratio = statistics.mean(s["compression_ratio"] for s in runs)
    sent = statistics.mean(sum(s["wire_bytes_per_step"]) for s in runs) / 1e6
    lines.append(
      f"| {method} | {mean:.4f} | {spread:.4f} | {mean / baseline - 1:+.2%}"
      f" | {ratio:.2f} | {sent:.2f} |"
    )
  lines += ["", "## Every run", ""]
  lines += ["| method | seed | held-out loss | ratio | rank, from step |"]
  lines += ["|---|---|---|---|---|"]
  for method, runs in summaries.items():
    for seed, summary in zip(_SEEDS.value, runs, strict=True):
      ranks = ", ".join(
        f"{rank[0] or 'dense'} from {step}"
        for step, rank in summary["rank_history"]
      )
      lines.append(
        f"| {method} | {seed} | {summary['val_loss']:.4f}"
        f" | {summary['compression_ratio']:.2f} | {ranks} |"
      )
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  flags.mark_flag_as_required("config")
  app.run(main)
