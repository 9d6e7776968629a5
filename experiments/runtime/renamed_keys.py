"""Keys of earlier configurations, and the keys that replace them."""

from collections.abc import Iterable

RENAMED = {
  "edgc.step_rate": "edgc.sampling.step_rate",
  "edgc.entry_rate": "edgc.sampling.entry_rate",
  "edgc.estimator": "edgc.sampling.estimator",
  "edgc.bins": "edgc.sampling.bins",
  "edgc.rule": "edgc.rule.name",
  "edgc.exponent": "edgc.rule.exponent",
  "edgc.rank_multiple": "edgc.rule.rank_multiple",
  "edgc.max_rank_step": "edgc.rule.max_rank_step",
  "edgc.warmup_rank": "edgc.rule.warmup_rank",
  "edgc.max_warmup_steps": "edgc.rule.max_warmup_steps",
  "edgc.granularity": "edgc.allocation.granularity",
  "edgc.curves": "edgc.allocation.curves",
  "edgc.scale_exponent": "edgc.allocation.scale_exponent",
}
# What was measured of them is in docs/design.md.
REMOVED = {
  "alternating": "wire_dtype=bfloat16 also halves the bytes, and loses less",
  "refresh_every": "leave it out; no gain was measured",
}


def problem(keys: Iterable[str]) -> str | None:
  """Returns an error message for the first key that no longer exists.

  Args:
    keys: Full keys of values, such as "edgc.rule.name".

  Returns:
    The message, or None if all keys may exist.

  >>> problem(["steps", "edgc.step_rate"])
  '`edgc.step_rate` is now `edgc.sampling.step_rate`; use the new key.'
  """
  for key in keys:
    if key in RENAMED:
      return f"`{key}` is now `{RENAMED[key]}`; use the new key."
    section, _, name = key.partition(".")
    if section in ("edgc", "powersgd") and name in REMOVED:
      return f"`{key}` was removed; {REMOVED[name]}."
  return None
