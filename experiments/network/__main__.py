"""Measures step times on hosts with slow links, compared with PyTorch.

  sudo python -m experiments.network --config=configs/gpt2_10m.py

Creates virtual hosts, each with a shaped uplink (needs Linux, root and
iproute2) and one process per framework, and times training steps. At every link
speed all methods take turns, round after round, so that other load on the
machine hits them all. Everything is removed at the end, also after Ctrl-C. The
measurements go to --output as JSON, of which `make pages` makes tables.
To measure one layout again and keep the others of the file, such as shards:

  sudo python -m experiments.network --keep --hosts= --nostages
"""

import pathlib
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_flags

from experiments.network import virtual_hosts
from experiments.network.benchmark import Benchmark, Options
from experiments.network.results import ROWS, Layout

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_10m.py", "A file in configs/."
)
_HOSTS = flags.DEFINE_list(
  "hosts", ["2", "4"], "Numbers of hosts, one replica each; may be empty."
)
_STAGES = flags.DEFINE_bool("stages", True, "Also 2 stages of 2 replicas.")
_SHARDS = flags.DEFINE_bool("shards", True, "Also 2 replicas of 4 shards.")
_RATES = flags.DEFINE_list(
  "rates", ["50", "100", "300", "1000"], "Speeds of an uplink in Mbit/s."
)
_MANY_RATES = flags.DEFINE_list(
  "many_rates", ["100", "300", "1000"], "Speeds with more than 2 hosts."
)
_STAGE_RATES = flags.DEFINE_list(
  "stage_rates", ["100"], "Speeds with stages, which take long to compile."
)
_SHARD_RATES = flags.DEFINE_list("shard_rates", ["100"], "Speeds with shards.")
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Number of timed rounds.", lower_bound=1
)
_THREADS = flags.DEFINE_integer(
  "threads", 0, "Threads per host; 0 for its share of cores.", lower_bound=0
)
_PEER = flags.DEFINE_bool("peer", True, "Also PyTorch, if it is installed.")
_ADVISE = flags.DEFINE_bool("advise", True, "Also compare the advice.")
_ROWS = flags.DEFINE_multi_string("row", [], "A row to measure; default: all.")
_KEEP = flags.DEFINE_bool(
  "keep", False, "Keep what --output has of layouts that are not measured."
)
_OUTPUT = flags.DEFINE_string("output", "docs/network.json", "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/network", "The folder of logs.")


def main(argv: Sequence[str]) -> None:
  """Measures all layouts and writes the JSON file."""
  del argv
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
      # Raises SystemExit, so that `with` cleans up.
      signal.signal(number, lambda number, _: sys.exit(128 + number))
  unknown = set(_ROWS.value) - {row.name for row in ROWS}
  if unknown:
    names = ", ".join(repr(row.name) for row in ROWS if row.framework == "jax")
    sys.exit(f"error: `--row` must be among {names}, got {unknown.pop()!r}.")
  reason = virtual_hosts.why_not()
  if reason:
    sys.exit(f"error: virtual hosts are not possible here: {reason}.")
  output = pathlib.Path(_OUTPUT.value)
  options = Options(
    _ROWS.value, _ROUNDS.value, _THREADS.value, _PEER.value, _ADVISE.value,
    _KEEP.value, pathlib.Path(_FOLDER.value),
  )  # fmt: skip
  command = shlex.join(["python", "-m", "experiments.network", *sys.argv[1:]])
  try:
    benchmark = Benchmark(_CONFIG.value, options, output, command)
  except ValueError as error:
    sys.exit(f"error: {error}")
  counts = _numbers(_HOSTS, int, 2) if _HOSTS.value else []
  rates, many, staged, sharded = (
    _numbers(flag, float, 1e-3)
    for flag in (_RATES, _MANY_RATES, _STAGE_RATES, _SHARD_RATES)
  )
  if not counts + [flag for flag in (_STAGES, _SHARDS) if flag.value]:
    sys.exit("error: `--hosts` must not be empty without stages and shards.")
  layouts = {Layout(n): many if n > 2 else rates for n in counts}
  if _STAGES.value:
    layouts[Layout(4, stages=2)] = staged
  if _SHARDS.value:
    layouts[Layout(2, shards=4)] = sharded
  for layout, each in layouts.items():
    benchmark.measure(layout, each)


def _numbers(
  flag: flags.FlagHolder, kind: type[int | float], least: float
) -> list[Any]:
  """Parses the numbers of a flag; exits if they are not valid."""
  try:
    numbers = [kind(text) for text in flag.value]
  except ValueError:
    numbers = []
  if not numbers or min(numbers) < least:
    sys.exit(
      f"error: `--{flag.name}` must be numbers ({kind.__name__}) of at least"
      f" {least:g}, separated by commas, got {','.join(flag.value)!r}; see"
      " --help."
    )
  return numbers


if __name__ == "__main__":
  app.run(main)
