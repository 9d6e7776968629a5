"""Keys of earlier configurations, and the keys that replace them."""

from collections.abc import Iterable

RENAMED = {
  "edgc.step_rate": "edgc.sampling.step_rate",
  "edgc.entry_rate": "edgc.sampling.entry_rate",
  "edgc.estimator": "edgc.sampling.estimator",
  "edgc.bins": "edgc.sampling.bins",
  "edgc.rule.name": "edgc.rule",
  "edgc.rule.exponent": "edgc.exponent",
  "edgc.rule.rank_multiple": "edgc.rank_multiple",
  "edgc.rule.max_rank_step": "edgc.max_rank_step",
  "edgc.rule.warmup_rank": "edgc.warmup_rank",
  "edgc.rule.max_warmup_steps": "edgc.max_warmup_steps",
  "edgc.granularity": "edgc.allocation",
  "edgc.allocation.granularity": "edgc.allocation",
  "edgc.allocation.scale_exponent": "edgc.scale_exponent",
}
# What was measured of them is in docs/design.md.
REMOVED = {
  "edgc.alternating": "wire_dtype=bfloat16 also halves the bytes, loses less",
  "powersgd.alternating": "wire_dtype=bfloat16 halves the bytes, loses less",
  "edgc.refresh_every": "leave it out; no gain was measured",
  "powersgd.refresh_every": "leave it out; no gain was measured",
  "edgc.curves": "leave it out; calibrated curves lost least",
  "edgc.allocation.curves": "leave it out; calibrated curves lost least",
  "topk.sample_rate": "leave it out; the k largest are exact",
  "model.objective": "task=bert has masked tokens, task=gpt2 the next token",
  "signsgd.block": "use quantize(bits=4), or another method",
}


def problem(keys: Iterable[str]) -> str | None:
  """Returns an error message for the first key that no longer exists.

  Args:
    keys: Full keys of values, such as "edgc.rule".

  Returns:
    The message, or None if all keys may exist.

  >>> problem(["steps", "edgc.step_rate"])
  '`edgc.step_rate` is now `edgc.sampling.step_rate`; use the new key.'
  """
  for key in keys:
    if key in RENAMED:
      return f"`{key}` is now `{RENAMED[key]}`; use the new key."
    if key in REMOVED:
      return f"`{key}` was removed; {REMOVED[key]}."
  return None
