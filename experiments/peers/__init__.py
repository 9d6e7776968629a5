"""Methods of others, for comparison; and all reducers by name."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

import edgc_jax
from experiments.peers.demo import demo
from experiments.peers.late import late
from experiments.peers.sparse_loco import sparse_loco

_PEERS = {"demo": demo, "late": late, "sparse_loco": sparse_loco}
# Raised as `edgc_jax.METHOD_VERSIONS` is.
_VERSIONS = dict.fromkeys([*_PEERS, "lookahead"], 1)


def reducers() -> Mapping[
  str, Callable[..., optax.GradientTransformationExtraArgs]
]:
  """Returns the reducers of the package and those of others."""
  return {**edgc_jax.REDUCERS, **_PEERS}


def versions_of(
  reducer: str, local: Mapping[str, Any]
) -> Mapping[str, int | None]:
  """Returns what a record holds of the methods of a run.

  Args:
    reducer: Its name; None is the version of a name that is gone.
    local: The section `local` of the configuration, or nothing.
  """
  versions = {**edgc_jax.METHOD_VERSIONS, **_VERSIONS}
  names = {"method": reducer}
  if local.get("every"):
    rounds = "lookahead" if local["lookahead"] else "local_steps"
    names[rounds] = rounds
  return {key: versions.get(name) for key, name in names.items()}
