"""edgc with all options side by side, as tests vary and merge them."""

import dataclasses

import edgc_jax

_GROUPS = {
  "sampling": edgc_jax.Sampling,
  "rule": edgc_jax.RankRule,
  "allocation": edgc_jax.Allocation,
  "stages": edgc_jax.Stages,
}


def edgc(*, rule="cqm", stage_axis=None, **options):
  """Returns `edgc_jax.edgc`, each option put where it belongs.

  Args:
    rule: Name of the rule.
    stage_axis: Name of the axis of the stages, None if there are none.
    **options: Of `edgc`, and of the classes that group its options.
  """
  options |= {"name": rule}
  groups = {}
  for group, kind in _GROUPS.items():
    names = {field.name for field in dataclasses.fields(kind)} & set(options)
    groups[group] = {name: options.pop(name) for name in names - {"axis_name"}}
  if stage_axis is None:
    del groups["stages"]
  else:
    groups["stages"]["axis_name"] = stage_axis
  made = {group: _GROUPS[group](**own) for group, own in groups.items()}
  return edgc_jax.edgc(**options, **made)
