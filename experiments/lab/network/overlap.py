"""Measures how much of an exchange of local steps runs beside inner steps.

  sudo python -m experiments.lab.network.overlap --config=configs/gpt2_tiny.py

Trains on two virtual hosts (needs Linux, root and iproute2), which exchange
differences of parameters, dense: as replicas of one job over Gloo, and as sites
through an object store of S3. Seconds of a step go to --output as JSON, whose
table `make pages` makes: medians of rounds in which all ways to exchange take
turns, so that other load on the machine hits them all.
"""

import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.lab import benchmarks
from experiments.lab.network import object_store, virtual_hosts
from experiments.lab.network.calls import Hosts
from experiments.lab.network.results import (
  ALONE,
  OVERLAP,
  SITES_ALONE,
  SITES_WAIT,
  WAITS,
)
from experiments.lab.network.virtual_hosts import VirtualHosts

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_tiny.py", "A file in configs/."
)
_RATES = flags.DEFINE_multi_float(
  "rate", [100.0, 10.0], "A speed of the links in Mbit/s.", lower_bound=1e-3
)
_EVERY = flags.DEFINE_integer("every", 5, "Steps of a round.", lower_bound=1)
_OVERLAPS = flags.DEFINE_multi_integer(
  "overlap", [1, 3, 5], "Steps beside an exchange, of two programs, at most"
  " --every.", lower_bound=1,
)  # fmt: skip
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Timed rounds.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", str(OVERLAP), "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/overlap", "The folder of logs.")
_HOSTS, _TIMEOUT = 2, 600.0  # seconds for a call
_SITES_PORT = 12350
# Whether sites exchange, and whether beside the steps.
_AT_SITES = {
  SITES_ALONE: (False, False), SITES_WAIT: (True, False),
  "sites, begin and finish": (True, True),
}  # fmt: skip


def main(argv: Sequence[str]) -> None:
  """Measures all ways to exchange, and writes the file."""
  del argv
  virtual_hosts.exit_unless_possible()
  object_store.exit_unless_installed()
  if (most := max(_OVERLAPS.value)) > _EVERY.value:
    sys.exit(
      f"error: `--overlap` must be at most --every ({_EVERY.value}), got"
      f" {most}; lower it."
    )
  config = _config_of(_CONFIG.value)
  ways = {
    ALONE: {"is_split": True, "overlap": None},
    WAITS: {"is_split": False, "overlap": 0},
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
  lines = []
  with (
    VirtualHosts(_HOSTS, has_store=True) as network,
    object_store.serving(network, _HOSTS, folder / "store.log") as clients,
  ):
    hosts = network.start("overlap", own, folder)
    sites = network.start("sites", own | clients, folder, _SITES_PORT)
    try:
      for name, way in ways.items():
        hosts.call(
          "build", timeout=_TIMEOUT, name=name, config=config.to_dict(),
          every=_EVERY.value, **way,
        )  # fmt: skip
      alone = _config_of(_CONFIG.value)
      alone.batch_size //= _HOSTS
      for i, (name, own) in enumerate(_AT_SITES.items()):
        sites.call(
          "build_training", timeout=_TIMEOUT, name=name, every=_EVERY.value,
          url=f"{object_store.BUCKET}/{i}", config=alone.to_dict(),
          exchanges=own[0], is_hidden=own[1],
        )  # fmt: skip
      calls = dict.fromkeys(ways, hosts) | dict.fromkeys(_AT_SITES, sites)
      for name, each in calls.items():
        each.call("round", timeout=_TIMEOUT, name=name)
        print(f"{name}: built", flush=True)
      for each in (hosts, sites):
        each.call("built", timeout=_TIMEOUT)
      for rate in _RATES.value:
        network.shape(rate * 1e6)
        for name, seconds in _measured(calls).items():
          print(f"{rate:g} Mbit/s, {name}: {seconds:.3f} s", flush=True)
          lines.append({"rate": rate, "way": name, "seconds": seconds})
    finally:
      hosts.close()
      sites.close()
  benchmarks.write(
    _OUTPUT.value, "network.overlap", lines, config=config.name,
    every=_EVERY.value, rounds=_ROUNDS.value, hosts=_HOSTS,
    cores=len(os.sched_getaffinity(0)),
  )  # fmt: skip


def _config_of(config: ConfigDict) -> ConfigDict:
  """Returns the configuration on two hosts; the batch per replica is kept."""
  config = config.copy_and_resolve_references()
  config.batch_size = config.batch_size // config.mesh.data * _HOSTS
  config.mesh.update(data=_HOSTS, stage=1, tensor=1, fsdp=1, backend="jit")
  return config


def _measured(calls: Mapping[str, Hosts]) -> Mapping[str, float]:
  """Returns the median seconds of a step of each way."""
  names = list(calls)
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for number in range(_ROUNDS.value):
    first = number * len(names) // _ROUNDS.value
    for name in (*names[first:], *names[:first]):
      found = calls[name].call("round", timeout=_TIMEOUT, name=name)
      seconds[name].append(max(found))
  return {name: statistics.median(own) for name, own in seconds.items()}


if __name__ == "__main__":
  app.run(main)
