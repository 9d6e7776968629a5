"""Reducers by name: those of the package, and those that a program adds."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

import edgc_jax

Maker = Callable[..., optax.GradientTransformationExtraArgs]

_added: dict[str, Maker] = {}
_versions: dict[str, int] = {"lookahead": 1}


def add(name: str, make: Maker, version: int = 1) -> None:
  """Adds a reducer under the name that a configuration gives it.

  The section of its name in a configuration holds its arguments.

  Args:
    name: A new name.
    make: Makes the reducer; it takes `axis_name` and `check_every`.
    version: Raise it when its results change, as `edgc_jax.METHOD_VERSIONS`.
  """
  _added[name], _versions[name] = make, version


def by_name() -> Mapping[str, Maker]:
  """Returns all reducers."""
  return {**edgc_jax.REDUCERS, **_added}


def versions_of(
  reducer: str, local: Mapping[str, Any]
) -> Mapping[str, int | None]:
  """Returns what a record holds of the methods of a run.

  Args:
    reducer: Its name; None is the version of a name that is gone.
    local: The section `local` of the configuration, or nothing.
  """
  versions = {**edgc_jax.METHOD_VERSIONS, **_versions}
  names = {"method": reducer}
  if local.get("every"):
    rounds = "lookahead" if local["lookahead"] else "local_steps"
    names[rounds] = rounds
  return {key: versions.get(name) for key, name in names.items()}
