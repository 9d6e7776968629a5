"""Makes the figures of the method from recorded training runs.

  python -m experiments.figures

Starts the missing runs one after the other, each in a separate process and a
separate folder under --runs. Finished runs are not repeated, so the same
command resumes after an interruption. Then it writes the pictures and their
numbers to OUTPUT/figures/, and the page OUTPUT/figures.md.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments.figures import page, panels
from experiments.figures.sources import collect, read_run, rounded

_STEPS = flags.DEFINE_integer(
  "steps", 400, "Steps of each run; fewer to try it, with another --output."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of all runs.")
_RUNS = flags.DEFINE_string("runs", "runs/figures", "Parent of run folders.")
_OUTPUT = flags.DEFINE_string("output", "docs", "The folder of the page.")

_CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
_GRADIENT_STEPS = (1, 10, 50, 100, 400)
_SHARED = {
  "edgc.allocation": "uniform",  # the paper's
  "edgc.rank_max": 32,
  "edgc.rank_min": 8,
  "edgc.rank_multiple": 4,
  "edgc.max_rank_step": 24,  # the whole range: the rule alone decides
  "edgc.sampling.step_rate": 1.0,
  "evaluation.every": 0,
  "log_every": 1,
}
# Name: configuration, rule, and whether to record the estimates of all
# estimators and sampling rates.
_RUN_LIST = {
  "gpt2-cqm": ("gpt2_tiny", "cqm", True),
  "bert-cqm": ("bert_tiny", "cqm", False),
  "gpt2-linear": ("gpt2_tiny", "linear", False),
}


def main(argv: Sequence[str]) -> None:
  """Starts the missing runs, then writes the page."""
  del argv
  if _STEPS.value < 40 or _STEPS.value % 40:
    sys.exit(
      f"error: `--steps` must be a multiple of 40, got {_STEPS.value}; the"
      " figures compare the last quarter of a run in windows of 10 steps."
    )
  runs = {}
  for name in _RUN_LIST:
    folder = pathlib.Path(_RUNS.value, f"{name}-{_STEPS.value}-{_SEED.value}")
    if not (folder / "summary.json").exists():
      print(f"--- {name}", flush=True)
      subprocess.run(_command(name, folder), check=True)
    runs[name] = read_run(folder)
  sources = collect(runs)
  figures = pathlib.Path(_OUTPUT.value, "figures")
  figures.mkdir(parents=True, exist_ok=True)
  for name, numbers in sources.items():
    text = json.dumps(rounded(numbers), allow_nan=False)
    (figures / f"{name}.json").write_text(text + "\n")
    picture = panels.DRAW[name](numbers)
    picture.savefig(figures / f"{name}.png", dpi=90)
  command = "python -m experiments.figures"
  if sys.argv[1:]:
    command += " " + " ".join(sys.argv[1:])
  text = page.page(sources, runs, command)
  (figures.parent / "figures.md").write_text(text)
  print(f"page: {figures.parent / 'figures.md'}")


def _command(name: str, folder: pathlib.Path) -> Sequence[str]:
  """Returns the command of a run."""
  config, rule, is_sampled = _RUN_LIST[name]
  steps = _STEPS.value
  kept = sorted({min(step, steps) for step in _GRADIENT_STEPS})
  settings = {
    **_SHARED,
    "edgc.rule": rule,
    "steps": steps,
    "seed": _SEED.value,
    "run_dir": folder,
  }
  return [
    sys.executable,
    "-m",
    "experiments.figures.record_run",
    f"--config={_CONFIGS / config}.py:edgc",
    *(f"--config.{key}={value}" for key, value in settings.items()),
    f"--gradient_steps={','.join(map(str, kept))}",
    f"--sampled_steps={steps // 4 if is_sampled else 0}",
  ]


if __name__ == "__main__":
  app.run(main)
