"""The key numbers of a run as text."""

from typing import Any

import numpy as np

from experiments.trainer.training.optimizer import rank_name

_PARTS = ("stages", "tensor", "shards")  # left out if a replica is in one part


def summary_table(summary: dict[str, Any]) -> str:
  """Formats a run's key numbers for a terminal, at most 78 columns wide.

  Args:
    summary: The contents of `summary.json`; missing numbers are left out.
  """
  lines = []
  for name, text in texts(summary, width=58).items():
    for part in text.splitlines():
      lines.append(f"{name:<20}{part[:58]}")
      name = ""
  return "\n".join(lines)


def texts(numbers: dict[str, Any], width: int) -> dict[str, str]:
  """Returns those key numbers that are known as text by name.

  Args:
    numbers: As in `summary.json`.
    width: The most letters in a line of ranks.
  """
  numbers = numbers | {
    "sent": _sent(numbers), "ranks": _ranks(numbers, width),
    "rounds": _rounds(numbers),
  }  # fmt: skip
  if numbers["rounds"] and numbers.get("replicas") == 1:
    # Within such a site nothing is sent.
    numbers |= dict.fromkeys(("sent", "ranks", "compression_ratio"))
  held_out = [key for key in numbers if key.startswith("val_")]
  speeds = [key for key in numbers if key.endswith("_per_second")]
  # fmt: off
  formats = (
    ("reducer", "reducer", ""), ("steps", "steps", ",.0f"),
    ("parameters", "params", ",.0f"), ("replicas", "replicas", ".0f"),
    ("stages", "stages", ".0f"), ("devices of a stage", "tensor", ".0f"),
    ("shards", "shards", ".0f"),
    *((key.replace("val_", "held-out "), key, ".4f") for key in held_out),
    ("training loss", "train_loss", ".4f"), ("bytes a step", "sent", ""),
    ("compression ratio", "compression_ratio", ".2f"),
    ("rank over time", "ranks", ""), ("rounds of sites", "rounds", ""),
    *((key.replace("_per_", " a "), key, ",.0f") for key in speeds),
    ("seconds", "seconds", ",.1f"), ("skipped steps", "skipped_steps", ",.0f"),
    ("skipped inner steps", "skipped_inner_steps", ",.0f"),
    ("diverging windows", "most_diverging_windows", ",.0f"),
  )
  # fmt: on
  return {
    name: format(numbers[key], form)
    for name, key, form in formats
    if numbers.get(key) is not None
    and not (key in _PARTS and numbers[key] == 1)
  }


def _sent(numbers: dict[str, Any]) -> str | None:
  sent = numbers.get("wire_bytes_per_step")
  dense = numbers.get("dense_bytes_per_step")
  if sent is None or dense is None:
    return None
  text = f"{_bytes(np.sum(sent))} (dense {_bytes(dense)})"
  stages = ", ".join(map(_bytes, np.atleast_1d(sent)))
  return f"{text}\nby stage {stages}" if np.size(sent) > 1 else text


def _rounds(numbers: dict[str, Any]) -> str | None:
  """Returns the rounds of sites, their bytes and who was late."""
  count = numbers.get("site_rounds")
  if not count:
    return None
  up, down = (_bytes(numbers[f"site_{x}"]) for x in ("sent", "received"))
  text = (
    f"{count} ({up} up, {down} down, {numbers['site_waited']:.0f} s waiting)"
  )
  late = numbers.get("site_late") or {}
  names = ", ".join(f"{name} {times}" for name, times in late.items())
  return f"{text}\nlate: {names}" if late else text


def _bytes(count: float) -> str:
  """Formats bytes, such as "2.5 MB"; a kB is 1000 B."""
  units = ["TB", "GB", "MB", "kB", "B"]
  while count >= 999.5 and len(units) > 1:
    count, _ = count / 1000, units.pop()
  return f"{count:.3g} {units[-1]}"


def _ranks(numbers: dict[str, Any], width: int) -> str | None:
  """Returns ranks and their last steps, "dense until 40", per stage."""
  starts, ranks = zip(*numbers.get("rank_history") or [(0, [])], strict=True)
  if rank_name(numbers.get("reducer", ""), np.max(ranks, initial=0)) == "-":
    return None
  ends = [
    *(start - 1 for start in starts[1:]),
    numbers.get("steps", starts[-1]),
  ]
  lines = []
  for stage, values in enumerate(zip(*ranks, strict=True)):
    spans = [
      f"{rank_name('edgc', value)} until {end:.0f}"
      for value, end, later in zip(values, ends, [*values[1:], -1], strict=True)
      if value != later  # otherwise only another stage's rank changed
    ]
    name = f"stage {stage}: " if len(ranks[0]) > 1 else ""
    # As many as fit together with an ellipsis, half from each end.
    room = (width - len(name) - 5) // (max(map(len, spans)) + 2)
    if room < len(spans):
      spans[room - room // 2 : len(spans) - room // 2] = ["..."]
    lines.append(name + ", ".join(spans))
  return "\n".join(lines) or None
