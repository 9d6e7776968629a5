"""Measures how much of an exchange of local steps runs beside inner steps.

  sudo python -m experiments.lab.network.overlap --config=configs/gpt2_tiny.py

Trains on two virtual hosts (needs Linux, root and iproute2), which exchange
differences of parameters, dense, and prints seconds of a step as rows of the
table in docs/local_steps.md: medians of rounds in which all ways to exchange
take turns, so that other load on the machine hits them all.
"""

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.lab.network import virtual_hosts
from experiments.lab.network.calls import Hosts
from experiments.lab.network.virtual_hosts import VirtualHosts

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_tiny.py", "A file in configs/."
)
_RATES = flags.DEFINE_multi_float(
  "rate", [100.0, 10.0], "A speed of the uplinks in Mbit/s.", lower_bound=1e-3
)
_EVERY = flags.DEFINE_integer("every", 5, "Steps of a round.", lower_bound=1)
_OVERLAPS = flags.DEFINE_multi_integer(
  "overlap", [1, 3, 5], "Steps beside an exchange, of two programs, at most"
  " --every.", lower_bound=1,
)  # fmt: skip
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed rounds.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", "runs/overlap", "The folder of logs.")
_HOSTS, _TIMEOUT = 2, 600.0  # seconds for a call
_ALONE, _WAITS = "no exchange", "exchange waits"


def main(argv: Sequence[str]) -> None:
  """Measures all ways to exchange, and prints a table."""
  del argv
  virtual_hosts.exit_unless_possible()
  if (most := max(_OVERLAPS.value)) > _EVERY.value:
    sys.exit(
      f"error: `--overlap` must be at most --every ({_EVERY.value}), got"
      f" {most}; lower it."
    )
  config = _config_of(_CONFIG.value)
  ways = {
    _ALONE: {"is_split": True, "overlap": None},
    _WAITS: {"is_split": False, "overlap": 0},
    "one program, overlap=1": {"is_split": False, "overlap": 1},
  } | {
    f"two programs, overlap={n}": {"is_split": True, "overlap": n}
    for n in _OVERLAPS.value
  }
  folder = pathlib.Path(_FOLDER.value)
  # Two threads: one waits in the exchange while the other computes.
  own = {
    "JAX_PLATFORMS": "cpu", "NPROC": "2", "JAX_NUM_CPU_DEVICES": "1",
    # Ways share programs.
    "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
  }  # fmt: skip
  with VirtualHosts(_HOSTS) as network:
    hosts = network.start("overlap", own, folder)
    try:
      for name, way in ways.items():
        hosts.call(
          "build", timeout=_TIMEOUT, name=name, config=config.to_dict(),
          every=_EVERY.value, **way,
        )  # fmt: skip
        hosts.call("round", timeout=_TIMEOUT, name=name)
        print(f"{name}: built", flush=True)
      hosts.call("built", timeout=_TIMEOUT)
      for rate in _RATES.value:
        network.shape(rate * 1e6)
        _print_table(rate, _measured(hosts, list(ways)))
    finally:
      hosts.close()


def _config_of(config: ConfigDict) -> ConfigDict:
  """Returns the configuration on two hosts; the batch per replica is kept."""
  config = config.copy_and_resolve_references()
  config.batch_size = config.batch_size // config.mesh.data * _HOSTS
  config.mesh.update(data=_HOSTS, stage=1, tensor=1, fsdp=1, backend="jit")
  return config


def _measured(hosts: Hosts, names: Sequence[str]) -> Mapping[str, float]:
  """Returns the median seconds of a step of each way."""
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for number in range(_ROUNDS.value):
    first = number * len(names) // _ROUNDS.value
    for name in (*names[first:], *names[:first]):
      found = hosts.call("round", timeout=_TIMEOUT, name=name)
      seconds[name].append(max(found))
  return {name: statistics.median(own) for name, own in seconds.items()}


def _print_table(rate: float, seconds: Mapping[str, Any]) -> None:
  """Prints seconds of a step, and the share of an exchange that is hidden."""
  exchange = seconds[_WAITS] - seconds[_ALONE]
  for name, own in seconds.items():
    hidden = 1 - (own - seconds[_ALONE]) / exchange
    share = "-" if name in (_ALONE, _WAITS) else f"{hidden:.0%}"
    print(f"| {rate:g} | {name} | {own:.3f} | {share} |", flush=True)


if __name__ == "__main__":
  app.run(main)
