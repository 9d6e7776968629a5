"""Tells what is installed, tests it, and advises: `python -m edgc_jax`."""

import argparse
import math
import os
import sys
import textwrap
import threading
from collections.abc import Sequence
from typing import Any

import jax

import edgc_jax
from edgc_jax.diagnosis import coordinator, installation, self_test
from edgc_jax.diagnosis.shapes import shapes_of

_DESCRIPTION = """\
Prints versions, devices and known traps, and tests the package on these
devices; exits with 1 if a test fails. With --advise it predicts instead which
method reaches a loss soonest on a link:

  python -m edgc_jax --advise --shapes=1024x4096x24,50257x1024 \\
      --gbit=1 --round_trip_ms=1 --replicas=8 --step_seconds=2

To test several hosts, or to measure their link, start it on each of them with
the three flags of processes.
"""
_CPU_DEVICES = 4  # that the test makes of a CPU
_WIDTH = 78


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command.

  Args:
    arguments: Those of the command line; None for the process's own.

  Returns:
    The exit status: 0, or 1 if a test failed.

  Raises:
    SystemExit: if the arguments are wrong, with status 2.
  """
  parser = _parser()
  flags = parser.parse_args(arguments)
  _require_together(parser, flags)
  bind = _checked(parser, flags)
  with _TimeLimit(flags.time_limit) as limit:
    made = _choose_devices(flags, bind)
    if flags.advise:
      limit.part = "advice"
      return _advise(parser, flags)
    return _test(limit, made)


class _TimeLimit:
  """Ends the process with status 1 if the block takes longer."""

  def __init__(self, seconds: float):
    self.part = "joining the other processes"  # what runs now
    self._seconds = seconds
    self._timer = threading.Timer(seconds, self._end)
    self._timer.daemon = True

  def __enter__(self) -> "_TimeLimit":
    self._timer.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._timer.cancel()

  def _end(self) -> None:
    print(
      f"{self.part} FAILED: not done {self._seconds:g} s after the start. If it"
      " uses no CPU, it hangs: see the known traps. Otherwise give a larger"
      " --time_limit.",
      flush=True,
    )
    os._exit(1)  # XLA cannot be interrupted


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    "python -m edgc_jax",
    description=_DESCRIPTION,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--version", action="version", version=edgc_jax.__version__)
  add(
    "--time_limit", type=float, default=300, metavar="S",
    help="seconds after which the command fails (300)",
  )  # fmt: skip
  add = parser.add_argument_group("advice").add_argument
  add("--advise", action="store_true", help="predict the times of all methods")
  add(
    "--shapes", metavar="MODEL",
    help="matrices ROWSxCOLUMNS[xCOUNT], with commas, or a JSON file of shapes",
  )  # fmt: skip
  add(
    "--step_seconds", type=float, metavar="S",
    help="of a training step without an exchange",
  )  # fmt: skip
  add(
    "--gbit", type=float, metavar="GBIT",
    help="of a replica's uplink, per second; without it the link between the"
    " devices is measured",
  )  # fmt: skip
  add("--round_trip_ms", type=float, metavar="MS", help="between two replicas")
  add("--replicas", type=int, metavar="N", help="that average their gradients")
  add(
    "--optimizer", metavar="NAME",
    help="with which the methods were judged: adamw (default) or muon",
  )  # fmt: skip
  add = parser.add_argument_group("processes").add_argument
  add("--coordinator_address", help="HOST:PORT of the first process")
  add("--num_processes", type=int, metavar="N")
  add("--process_id", type=int, metavar="I", help="from 0")
  return parser


def _require_together(
  parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> None:
  """Ends with a message if flags are missing that need each other."""
  model = ("shapes", "step_seconds")
  link = ("gbit", "round_trip_ms", "replicas")
  processes = ("coordinator_address", "num_processes", "process_id")
  for names in (model, link, processes):
    missing = [name for name in names if getattr(flags, name) is None]
    if len(missing) == len(names) and not (flags.advise and names is model):
      continue
    if missing:
      parser.error(f"give --{', --'.join(names)} together")
    if names is not processes and not flags.advise:
      parser.error(f"--{names[0]} is for --advise; give it, too")
  if flags.optimizer and not flags.advise:
    parser.error("--optimizer is for --advise; give it, too")


def _checked(
  parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> str | None:
  """Ends with a message if a flag is out of range.

  Returns:
    Where this process listens, if it is the first of several.
  """
  if not 0 < flags.time_limit <= threading.TIMEOUT_MAX:
    parser.error(
      f"--time_limit must be positive, got {flags.time_limit}; 120 is usual"
    )
  if flags.coordinator_address is None:
    return None
  if flags.num_processes < 1:
    parser.error(
      f"--num_processes must be at least 1, got {flags.num_processes}; give the"
      " number of all processes"
    )
  if not 0 <= flags.process_id < flags.num_processes:
    parser.error(
      f"--process_id must be from 0 to {flags.num_processes - 1} (num_processes"
      f" - 1), got {flags.process_id}; number the processes from 0"
    )
  try:
    return coordinator.bind_address(flags.coordinator_address, flags.process_id)
  except ValueError as error:
    parser.error(str(error))


def _choose_devices(flags: argparse.Namespace, bind: str | None) -> bool:
  """Joins the other processes, or makes several devices of a CPU.

  Returns:
    Whether devices were made, if there is no other platform than the CPU.
  """
  config: Any = jax.config  # its type leaves out the options
  if flags.coordinator_address is not None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      flags.coordinator_address,
      flags.num_processes,
      flags.process_id,
      coordinator_bind_address=bind,
    )
    return False
  is_set = config.jax_num_cpu_devices >= 0
  if is_set or "device_count" in os.environ.get("XLA_FLAGS", ""):
    return False
  jax.config.update("jax_num_cpu_devices", _CPU_DEVICES)
  return jax.default_backend() == "cpu"


def _test(limit: _TimeLimit, made: bool) -> int:
  """Prints the report, the traps, and the result of each check."""
  limit.part = "report"
  _say(f"edgc_jax   {edgc_jax.__version__}\n{installation.report()}")
  _say(f"\nknown traps on {jax.default_backend()}")
  for trap in installation.traps():
    text = textwrap.fill(
      trap, _WIDTH, initial_indent="- ", subsequent_indent="  ",
      break_on_hyphens=False,
    )  # fmt: skip
    _say(text)
  _say(f"\nself-test{' on devices made of one CPU' if made else ''}")
  # Compiles in half the time, to the same collectives.
  jax.config.update("jax_disable_most_optimizations", True)
  failed = 0
  for name, check in self_test.checks(jax.devices()).items():
    limit.part = name
    try:
      _say(f"{name:12} {check()}")
    except Exception as error:
      failed += 1
      print(f"{name:12} FAILED: {type(error).__name__}: {error}", flush=True)
  _say(f"{failed} FAILED" if failed else "passed")
  if failed and jax.process_count() > 1:
    os._exit(1)  # an orderly exit waits for the others, which may hang
  return 1 if failed else 0


def _advise(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> int:
  """Prints the table of methods, and the choice as code."""
  try:
    shapes = shapes_of(flags.shapes)
    link, replicas = _link(parser, flags)
    advice = edgc_jax.advise(
      shapes,
      link,
      flags.step_seconds,
      replicas,
      optimizer=flags.optimizer or "adamw",
    )
  except ValueError as error:
    parser.error(str(error))
  sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
  _say(f"{sum(sizes):,} parameters in {len(sizes)} arrays")
  _say(str(advice))
  return 0


def _link(
  parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> tuple[edgc_jax.LinkModel, int]:
  """Returns the link that the flags describe, or measures it."""
  if flags.gbit is not None:
    link = edgc_jax.LinkModel.of_uplink(
      1e3 * flags.gbit, 1e-3 * flags.round_trip_ms, flags.replicas
    )
    return link, flags.replicas
  count = jax.device_count()
  if count == 1 or (
    jax.default_backend() == "cpu" and jax.process_count() == 1
  ):
    parser.error(
      "one device, or devices of one CPU, have no link to measure; give --gbit,"
      " --round_trip_ms and --replicas, or start a process on each host"
    )
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((count,), ("data",), axis_types=axis_types)
  return edgc_jax.measure_link(mesh), count


def _say(text: str) -> None:
  """Prints in the first process."""
  if jax.process_index() == 0:
    print(text, flush=True)


if __name__ == "__main__":
  sys.exit(main())
