"""`edgc` with flat options, for tests that merge or vary them."""

import dataclasses

import edgc_jax
from experiments.trainer.training.rules import linear
from helpers import float32

_GROUPS = {"sampling": edgc_jax.Sampling, "stages": edgc_jax.Stages}
_RULES = {"cqm": edgc_jax.cqm, "linear": linear}


def edgc(*, rule="cqm", stage_axis=None, **options):
  """Returns `edgc_jax.edgc` and puts each option into its group.

  Args:
    rule: Name of the rank rule.
    stage_axis: Name of the mesh axis of stages, None without stages.
    **options: Arguments of `edgc` and fields of its option classes.
  """
  groups = {}
  for group, kind in _GROUPS.items():
    names = {field.name for field in dataclasses.fields(kind)} & set(options)
    groups[group] = {name: options.pop(name) for name in names - {"axis_name"}}
  if stage_axis is None:
    del groups["stages"]
  else:
    groups["stages"]["axis_name"] = stage_axis
  made = {group: _GROUPS[group](**own) for group, own in groups.items()}
  return float32.edgc(rule=_RULES[rule], **options, **made)
