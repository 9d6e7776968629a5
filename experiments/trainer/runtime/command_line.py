"""The --config flag of all commands, and errors that name the nearest key."""

import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags
from absl import logging as absl_logging
from flax import traverse_util
from ml_collections import ConfigDict, config_flags

import experiments
from edgc_jax.wire import cpu_backend
from experiments.trainer.runtime import heap, hosts
from experiments.trainer.runtime.refusals import nearest, one_line, refusals

_MOST_CPUS = 1024  # devices that CPUs stand for
_CONFIG = config_flags.DEFINE_config_file(
  "config", None, "A file in configs/, or FILE:REDUCER."
)
_FILE = re.compile(r"^--?config=([^:]*)")
_OVERRIDE = re.compile(r"--config\.([\w.]+)")


def run(main: Callable[[ConfigDict], Any]) -> None:
  """Parses the flags, makes CPU devices for the replicas and calls `main`.

  Args:
    main: The command, a function of the configuration.
  """

  def start(argv: list[str]) -> None:
    if len(argv) > 1:
      sys.exit(
        f"error: arguments must begin with --, got {argv[1:]}; write"
        " --config.KEY=VALUE for a key."
      )
    if not sys.warnoptions:  # a program is traced several times
      warnings.simplefilter("once", RuntimeWarning)
    heap.share_one_heap()
    # Orbax logs each file, and errors before it raises them.
    absl_logging.set_verbosity(absl_logging.FATAL)
    config = _CONFIG.value
    with refusals(RuntimeError):
      processes = hosts.initialize()
    if not _devices_are_chosen():
      # Only the CPU platform uses this: replicas share a machine's cores.
      devices = math.prod(_mesh_sizes(config).values())
      share = max(1, devices // processes) if processes else 1
      if share > _MOST_CPUS:
        sys.exit(
          f"error: `mesh` must have at most {_MOST_CPUS} devices a process"
          f" where CPUs stand for them, got {share}; lower mesh.data."
        )
      jax.config.update("jax_num_cpu_devices", share)
      cpu_backend.fit_thread_pool(share)
    if processes == 1:  # several look for their devices together
      with refusals(RuntimeError):
        hosts.require_devices()
    has_parts = {"stage", "fsdp"} & _mesh_sizes(config).keys()
    if has_parts and jax.default_backend() == "cpu":
      # Cached programs mix up collectives: see edgc_jax.wire.cpu_backend.
      jax.config.update("jax_enable_compilation_cache", False)
    with hosts.end_together():
      main(config)

  app.run(start, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
  """Parses flags with absl; a key that does not exist is one clear error."""
  # ml_collections warns of what is an error here.
  absl_logging.set_verbosity(absl_logging.FATAL)
  for i, flag in enumerate(argv[:-1]):  # --config FILE is --config=FILE
    if flag in ("--config", "-config"):
      argv[i : i + 2] = [f"{flag}={argv[i + 1]}"]
      break
  argv[:] = [_FILE.sub(_from_root, flag) for flag in argv]
  sys.argv = argv  # from which ml_collections reads overrides
  named = [m.group(1) for m in map(_FILE.match, argv) if m]
  if not named and not any(re.fullmatch("--?help.*", a) for a in argv):
    sys.exit(
      "error: `--config` must name a file, got none; name one of configs/, such"
      " as configs/gpt2_tiny.py."
    )
  for file in named:
    if not os.path.isfile(file):
      sys.exit(
        f"error: `--config` must name a file, got {file!r}, which is none; this"
        " project's files are in configs/."
      )
  try:
    left = flags.FLAGS(argv)
    _require_dict()
    return left
  except Exception as error:  # of ml_collections, or of the file
    overrides = _OVERRIDE.findall(" ".join(argv))
    # Parse again without overrides; ml_collections reads them from sys.argv.
    sys.argv = [a for a in argv if not _OVERRIDE.match(a)]
    flags.FLAGS.unparse_flags()
    absl_logging.set_verbosity(absl_logging.FATAL)  # a flag, too
    try:
      app.parse_flags_with_usage(sys.argv)
      config = _require_dict().to_dict()
    except Exception as of_file:
      sys.exit(
        "error: `--config` must name a Python file whose get_config(REDUCER)"
        f" returns a ConfigDict, got one that raises {_located(of_file)};"
        " correct it, or name one of configs/."
      )
    keys = list(traverse_util.flatten_dict(config, sep="."))
    for key in overrides:
      if key not in keys:
        sys.exit(
          f"error: `--config.KEY` must be a key of the configuration, got"
          f" {key!r}; the nearest is {nearest(key, keys)}."
        )
    found = f"{' '.join(argv[1:])} ({_located(error)})"
    if isinstance(error, flags.Error):  # names the flag and its value
      found = one_line(error).removeprefix("flag ")
    sys.exit(
      "error: `--config.KEY` must have values of the types in the file, got"
      f" {found}; give another value."
    )


def _from_root(flag: re.Match) -> str:
  """Returns `--config=FILE` with the path of a file, if there is one."""
  return flag[0].removesuffix(flag[1]) + experiments.from_root(flag[1])


def is_given(key: str) -> bool:
  """Returns whether the command line gives a key of the configuration."""
  return any(re.match(rf"--?config\.{key}\b", flag) for flag in sys.argv)


def _require_dict() -> ConfigDict:
  """Returns the configuration; raises if it is something else."""
  if not isinstance(_CONFIG.value, ConfigDict):
    raise TypeError(f"get_config returned a {type(_CONFIG.value).__name__}")
  return _CONFIG.value


def _mesh_sizes(config: ConfigDict) -> dict[str, int]:
  """Returns the sizes above 1 of the axes of the mesh, of devices."""
  mesh = config.get("mesh")
  if not isinstance(mesh, ConfigDict) or mesh.get("backend") == "vmap":
    return {}
  sizes = {axis: mesh.get(axis) for axis in ("data", "stage", "tensor", "fsdp")}
  return {k: n for k, n in sizes.items() if isinstance(n, int) and n > 1}


def _located(error: Exception) -> str:
  """Returns an error on one line, with the file and line that raised it."""
  where = traceback.extract_tb(error.__traceback__)[-1]
  text = f"{type(error).__name__}: {one_line(error)}"
  return f"{text} ({where.filename}:{where.lineno})"


def _devices_are_chosen() -> bool:
  """Returns whether the user has set the number of CPU devices."""
  in_flags = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
  return in_flags or "JAX_NUM_CPU_DEVICES" in os.environ
