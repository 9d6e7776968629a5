"""Measures the rounds of sites on hosts with slow links.

  sudo python -m experiments.lab.network.sites

Virtual hosts are sites, and a further one is an object store of S3 (moto's,
installed with `make .venv/emulators`). Both directions of a host's link have
the same speed. Rounds of all codes, and an all-gather of the same bytes over
Gloo, take turns. The measurements go to --output as JSON, of which `make pages`
makes a table.
"""

import itertools
import math
import os
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import config_flags

from experiments.lab import benchmarks
from experiments.lab.network import object_store, virtual_hosts
from experiments.lab.network.calls import Hosts
from experiments.lab.network.results import SITE_ROUNDS, link_name
from experiments.lab.network.virtual_hosts import ONE_THREAD, VirtualHosts

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_10m.py", "A file in configs/."
)
_HOSTS = flags.DEFINE_integer(
  "hosts", 4, "Number of sites.", lower_bound=2, upper_bound=100
)
_RATES = flags.DEFINE_multi_float(
  "rate", [10.0, 100.0, math.inf], "Speed of the links in Mbit/s.",
  lower_bound=1e-3,
)  # fmt: skip
_ROUND_TRIPS = flags.DEFINE_multi_float(
  "round_trip", [0.0, 50.0], "A round-trip time in ms.", lower_bound=0.0,
  upper_bound=6e4,
)  # fmt: skip
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Timed rounds.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", str(SITE_ROUNDS), "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/sites", "The folder of logs.")
_TIMEOUT = 900.0
_LINKS_PORT = 12348
CODES: Mapping[str, Mapping[str, Any]] = {
  "1/64 of the entries in 2 bits": {"density": 1 / 64, "bits": 2},
  "all entries in 2 bits": {"density": None, "bits": 2},
}


def main(argv: Sequence[str]) -> None:
  """Measures all links and writes the file."""
  del argv
  virtual_hosts.exit_unless_possible(_ROUND_TRIPS.value)
  object_store.exit_unless_installed()
  count, logs = _HOSTS.value, pathlib.Path(_FOLDER.value)
  lines: list[dict[str, Any]] = []
  with (
    VirtualHosts(count, has_store=True) as network,
    object_store.serving(network, count, logs / "store.log") as clients,
  ):
    sites = network.start("sites", ONE_THREAD | clients, logs)
    links = network.start("links", ONE_THREAD, logs, _LINKS_PORT)
    try:
      params, sizes = _build(sites, links)
      for round_trip, rate in itertools.product(
        _ROUND_TRIPS.value, _RATES.value
      ):
        network.shape(rate * 1e6, round_trip / 1e3)
        link = {"rate": rate, "round_trip": round_trip}
        for code, found in _measured(network, sites, links, sizes).items():
          lines.append({**link, "code": code, **found})
          print(
            f"{link_name(**link)}, {code}:"
            f" {statistics.median(found['seconds']):.2f} s,"
            f" all-gather {statistics.median(found['gather']):.2f} s",
            flush=True,
          )
    finally:
      sites.close()
      links.close()
  benchmarks.write(
    _OUTPUT.value, "network.sites", lines, params=params, hosts=count,
    rounds=_ROUNDS.value, cores=len(os.sched_getaffinity(0)),
  )  # fmt: skip


def _build(sites: Hosts, links: Hosts) -> tuple[int, Mapping[str, int]]:
  """Compiles all; returns the parameters, and a change's bytes by code."""
  sizes, params = {}, 0
  for code, options in CODES.items():
    url = f"{object_store.BUCKET}/{options['density'] is None:d}"
    params, *_ = sites.call(
      "build", timeout=_TIMEOUT, code=code, url=url, options=options,
      config=_CONFIG.value.to_dict(),
    )  # fmt: skip
    sizes[code] = sites.call("run", timeout=_TIMEOUT, code=code)[0]["sent"]
    links.call(
      "build", timeout=_TIMEOUT, kind="gather", num_bytes=_gathered(sizes[code])
    )
  for hosts in (sites, links):
    hosts.call("built", timeout=_TIMEOUT)
  return params, sizes


def _gathered(size: int) -> int:
  """Returns the bytes of all hosts' changes, each a whole number of floats."""
  return _HOSTS.value * 4 * -(-size // 4)


def _measured(
  network: VirtualHosts, sites: Hosts, links: Hosts, sizes: Mapping[str, int]
) -> Mapping[str, dict[str, Any]]:
  """Returns times and bytes by code; one round before adapts to the link."""
  found: dict[str, dict[str, Any]] = {code: {} for code in sizes}
  for number, (code, size) in itertools.product(
    range(_ROUNDS.value + 1), sizes.items()
  ):
    before = network.sent_bytes(0)
    answers = sites.call("run", timeout=_TIMEOUT, code=code)
    uplink = network.sent_bytes(0) - before
    gathers = links.call(
      "run", timeout=_TIMEOUT, kind="gather", num_bytes=_gathered(size), count=1
    )
    if not number:
      continue
    assert all(x["members"] == _HOSTS.value for x in answers)
    values = {
      "seconds": max(x["seconds"] for x in answers),
      "encoded": float(np.median([x["encoded"] for x in answers])),
      "waited": float(np.median([x["waited"] for x in answers])),
      "sent": answers[0]["sent"],
      "received": answers[0]["received"],
      "uplink": uplink,
      "gather": max(x[0] for x in gathers),
    }
    for key, value in values.items():
      found[code].setdefault(key, []).append(value)
  return found


if __name__ == "__main__":
  app.run(main)
