"""Writes the page of the figures; all of its numbers come from the runs."""

import pathlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.figures.numbers import rank_after
from experiments.figures.sources import FALL, RecordedRun

Numbers = Mapping[str, Any]


def page(
  sources: Mapping[str, Numbers],
  runs: Mapping[str, RecordedRun],
  command: str,
) -> str:
  """Returns the page in Markdown: each picture with a text, then the origin.

  Args:
    sources: From `sources.collect`.
    runs: The recorded runs by name.
    command: The command that makes the page.

  Returns:
    The page, which expects its pictures in figures/.
  """
  first = next(iter(runs.values()))
  steps = first.summary["steps"]
  lines = [
    "# The method in pictures",
    "",
    f"Written by `{command}`; do not edit. Byte-level GPT (`gpt2_tiny`,"
    f" {first.summary['params']:,} parameters) and BERT (`bert_tiny`,"
    f" {runs['bert-cqm'].summary['params']:,}), {steps} steps,"
    f" {first.summary['replicas']} replicas on one machine, one seed. All"
    " matrices have the rank that the rule chooses, or the largest rank during"
    " warm-up. Entropies are sampled in every step. The numbers of each picture"
    " are in figures/, as JSON.",
  ]
  for name, (title, text) in _TEXTS.items():
    lines += ["", f"## {title}", "", f"![{title}](figures/{name}.png)", ""]
    lines += [text(sources[name])]
  return "\n".join([*lines, "", *_origin(runs, command), ""])


def entropy_text(numbers: Numbers) -> str:
  """Describes the fall of the entropy, its later changes, and the ranks."""
  parts = []
  for name, run in numbers.items():
    entropy, means = np.array(run["entropy"]), np.array(run["window_mean"])
    half = len(means) // 2
    lowest = int(np.argmin(means))
    steps = np.array(run["step"])
    jump = np.median(np.abs(np.diff(entropy[len(entropy) // 2 :])))
    parts.append(
      f"{name}: the entropy is {entropy[0]:.2f} nats in step {steps[0]},"
      f" {means[lowest]:.2f} in the lowest window (around step"
      f" {run['window_middle'][lowest]:.0f}) and {means[-1]:.2f} in the last."
      f" In the second half, windows are between {means[half:].min():.2f} and"
      f" {means[half:].max():.2f}, and consecutive steps differ by"
      f" {jump:.2f} (median). Ranks: {_spans(run['step'], run['rank'])}."
      f" Held-out loss at the end: {run['val_loss']:.4f} nats."
    )
  return "\n\n".join(parts)


def histogram_text(numbers: Numbers) -> str:
  """Describes the scale of the entries and their excess kurtosis."""
  parts = []
  for name, steps in numbers.items():
    (first, begin), *_, (last, end) = steps.items()
    tails = ", ".join(
      f"{found['excess_kurtosis']:.0f} in step {step}"
      for step, found in steps.items()
    )
    parts.append(
      f"{name}: the root mean square is {begin['rms']:.2g} in step {first} and"
      f" {end['rms']:.2g} in step {last}. The excess kurtosis over the entries"
      " of all matrices, 0 for the Gaussian entries of the model, is"
      f" {tails}."
    )
  return "\n\n".join(parts)


def error_text(numbers: Numbers) -> str:
  """Compares the error model with Gaussian matrices and with gradients."""
  rank, found = numbers["rank_max"], numbers["matrices"]
  lines = [
    f"| matrices | model's error at rank {rank} | error of one replica's"
    f" gradient | error of the mean gradient | rank for {FALL} nats less, model"
    f" | rank for {FALL} nats less, own curve |",
    "|---|---|---|---|---|---|",
  ]
  worst, factors, moves = [], [], []
  for name, m in found.items():
    model, drawn = np.array(m["model"]), np.array(m["gaussian"])
    top = 1 + 3 * (len(model) - 1) // 4
    worst.append(np.abs(model[:top] / drawn[:top] - 1).max())
    local, mean = (_newest(m["real"], kind) for kind in ("local", "mean"))
    factors.append(model[rank] / mean[rank])
    moves.append([rank_after(e, rank, FALL) for e in (model, mean)])
    rows, cols = m["shape"]
    lines.append(
      f"| {name}, {m['matrices']} of {rows} x {cols} | {model[rank]:.3f}"
      f" | {local[rank]:.4f} | {mean[rank]:.4f} | {moves[-1][0]:.1f}"
      f" | {moves[-1][1]:.1f} |"
    )
  by_model, by_curve = np.transpose(moves)
  text = (
    f"On Gaussian matrices the model is within {max(worst):.1%} of an exact"
    " decomposition, up to three quarters of all ranks"
    f" (mean of {numbers['draws']} draws). For the mean gradient it predicts"
    f" {min(factors):.3g} to {max(factors):.3g} times the real error at rank"
    f" {rank}, because the energy of gradients is in few directions, and the"
    " energy of independent entries in all. If the entropy falls by"
    f" {FALL} nats, the model goes from rank {rank} to between"
    f" {by_model.min():.1f} and {by_model.max():.1f}; the gradients' own curves"
    f" would go to between {by_curve.min():.1f} and {by_curve.max():.1f}. The"
    f" vertical line is rank {rank}, the run's largest."
  )
  return "\n".join(
    [
      text,
      "",
      *lines,
      "",
      "The errors of gradients and their own curves are from the last step,"
      " without the residual that the reducer adds, averaged over the matrices"
      " of a name.",
    ]
  )


def rank_text(numbers: Numbers) -> str:
  """Describes the ranks that each rule chose."""
  parts = []
  for rule, run in numbers.items():
    ranks = np.array(run["rank"])
    at_ends = [
      f"{np.sum(ranks == run[end])} at {end} ({run[end]})"
      for end in ("rank_min", "rank_max")
    ]
    changes = np.abs(np.diff(ranks))
    at_limit = np.sum(changes == run["max_rank_step"])
    parts.append(
      f"`{rule}`: {len(ranks)} windows, of which {' and '.join(at_ends)}. The"
      f" rank changed {np.count_nonzero(changes)} times, {at_limit} times by"
      f" the limit of {run['max_rank_step']}. The held-out loss is"
      f" {run['val_loss']:.4f} at {run['compression_ratio']:.2f} times fewer"
      " bytes than dense."
    )
  first, *others = (run["rank"] for run in numbers.values())
  if all(ranks == first for ranks in others):
    parts.append(
      "The rules chose the same ranks in every window, so their curves coincide"
      " and these runs do not distinguish them."
    )
  else:
    parts.append("One seed is too few to show which rule is better.")
  return "\n\n".join(parts)


def sampling_text(numbers: Numbers) -> str:
  """Describes errors and times of the estimates by sampling rate."""
  rates = numbers["entry_rates"]
  lines = [
    f"Root mean square errors of the mean over a window of {numbers['window']}"
    " steps, compared with all entries in all steps; steps"
    f" {numbers['first_step']} to {numbers['last_step']} of GPT. In the model,"
    f" a step from the largest rank to {numbers['rank_step']} ranks below it is"
    f" worth {numbers['rank_step_nats']:.4f} nats for the largest matrices."
    " Times are medians of ratios to forward and backward"
    f" ({numbers['pass_seconds'] * 1e3:.0f} ms) over {numbers['rounds']} rounds"
    " in turn, with all replicas at once. Only a sampled step has this cost, so"
    " multiply it by the fraction of steps.",
    "",
    "| estimator | entries | "
    + " | ".join(f"error, {float(r):g} of steps" for r in _steps(numbers))
    + " | time of an estimate |",
    "|---|---|" + "---|" * (len(_steps(numbers)) + 1),
  ]
  for estimator, by_step in numbers["errors"].items():
    for i, rate in enumerate(rates):
      errors = " | ".join(f"{by_step[r][i]:.4f}" for r in by_step)
      cost = numbers["cost"][estimator][i]
      lines.append(f"| {estimator} | {rate:g} | {errors} | {cost:.1%} |")
  widest, coarsest = _steps(numbers)[0], len(rates) - 1
  fewest = _steps(numbers)[-1]
  parts = [
    f"{estimator} {by_step[widest][coarsest]:.4f} and {by_step[fewest][0]:.4f}"
    for estimator, by_step in numbers["errors"].items()
  ]
  lines += [
    "",
    f"Errors with {rates[-1]:g} of the entries in all steps, and with all"
    f" entries in {float(fewest):g} of the steps: {', '.join(parts)} nats.",
    f"The histogram's entropy minus the Gaussian estimate is"
    f" {numbers['gap']:+.2f} nats; it would be 0 for Gaussian entries. A"
    " constant difference changes no rank.",
    "A longer window has more samples at the same rate, and smaller errors;"
    " that was not measured here.",
  ]
  return "\n".join(lines)


_TEXTS = {
  "entropy": ("Entropy of the gradient, and the ranks", entropy_text),
  "histograms": ("Entries of the gradient", histogram_text),
  "errors": ("Error by rank: model and gradients", error_text),
  "ranks": ("Two rules", rank_text),
  "sampling": ("Errors and cost of sampling", sampling_text),
}


def _newest(real: list[Numbers], kind: str) -> list[float]:
  """Returns g of the last recorded step."""
  return max(
    (each for each in real if each["kind"] == kind), key=lambda x: x["step"]
  )["errors"]


def _steps(numbers: Numbers) -> list[str]:
  return list(next(iter(numbers["errors"].values())))


def _spans(steps: list[int], ranks: list[int]) -> str:
  """Formats ranks, such as "32 from step 1, 28 from step 31"."""
  starts = [i for i in range(len(ranks)) if not i or ranks[i] != ranks[i - 1]]
  names = [
    f"{ranks[i] or 'dense'} from {'step ' * (not i)}{steps[i]}" for i in starts
  ]
  if len(names) > 12:
    between = len(names) - 10
    names = [*names[:8], f"{between} more changes", *names[-2:]]
  return ", ".join(names)


def _origin(runs: Mapping[str, RecordedRun], command: str) -> list[str]:
  summaries = [run.summary for run in runs.values()]
  about, corpus = summaries[0]["environment"], summaries[0]["corpus"]
  commits = sorted({s["environment"]["commit"] for s in summaries})
  seeds = sorted({run.config["seed"] for run in runs.values()})
  versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
  minutes = sum(s["seconds"] for s in summaries) / 60
  return [
    "## Origin",
    "",
    f"- Command: `{command}`; {len(runs)} runs, {minutes:.0f} minutes",
    f"- Commit of the runs: {', '.join(commits)}",
    f"- Hardware: {about['device']}, {_processor()}, {about['cores']} cores",
    f"- Python {about['python']}, {versions}",
    f"- Seeds: {', '.join(map(str, seeds))}",
    f"- Data: {corpus['name']}, sha256 {corpus['sha256'][:16]}",
  ]


def _processor() -> str:
  """Returns the name of this machine's processor."""
  file = pathlib.Path("/proc/cpuinfo")
  if file.exists():
    for line in file.read_text().splitlines():
      if line.startswith("model name"):
        return line.split(":", 1)[1].strip()
  return platform.machine()
