"""Sites as processes, killed at random; and sites in object stores."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import environments, object_stores
from helpers.environments import QUICK
from helpers.local_processes import free_port, run_together
from helpers.site_runs import impatient, require_equal, sites, together

import edgc_jax
from edgc_jax.sites import bucket
from edgc_jax.sites.payload import Layout
from edgc_jax.sites.run import Rule, Run, SiteError

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.soak("edgc_jax/sites", "tests/sites")
KILLS, NAMES = 100, ("a", "b", "c")


def start(folder, name):
  command = [
    sys.executable,
    ROOT / "tests/helpers/site_worker.py",
    folder,
    name,
  ]
  cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
  environment = {**os.environ, **QUICK, **cache, "PYTHONPATH": str(ROOT)}
  with (folder / f"{name}.log").open("a") as log:
    return subprocess.Popen(
      [*map(str, command)], text=True, stdout=subprocess.PIPE, stderr=log,
      env=environment,
    )  # fmt: skip


def rounds_in(folder):
  return [int(x.parent.name) for x in folder.glob("run/rounds/*/manifest")]


def joined(folder):
  return {x.name.split(".")[0] for x in folder.glob("run/sites/*")}


def test_a_hundred_kills(tmp_path):
  """No round that has a manifest is lost, and all sites end equal."""
  chance = random.Random(0)
  running = {name: start(tmp_path, name) for name in NAMES}
  try:
    for _ in range(KILLS):
      # Killed at any time after it has joined: in steps and in rounds alike.
      while not (there := joined(tmp_path)):
        time.sleep(0.01)
      time.sleep(chance.uniform(0.0, 1.0))
      name = chance.choice(sorted(there))
      running[name].send_signal(signal.SIGKILL)
      running[name].communicate()
      for entry in (tmp_path / "run/sites").glob(f"{name}.*"):
        entry.unlink()  # so that it is seen to join again
      running[name] = start(tmp_path, name)
    last = max(rounds_in(tmp_path))
    (tmp_path / "end").write_text(str(last + 30))
    ends = {p.communicate(timeout=300)[0].strip() for p in running.values()}
  finally:
    for process in running.values():
      process.kill()
  assert sorted(rounds_in(tmp_path)) == list(
    range(max(rounds_in(tmp_path)) + 1)
  )
  assert len(rounds_in(tmp_path)) > KILLS
  layout = Layout({"['w']": (64, 64)}, None, 4)
  own = [np.zeros((64, 64), np.float32)]
  run = Run(
    bucket.open_bucket(tmp_path / "run"), "", layout, Rule(1.0, 0.0, 10.0),
    None, own,
  )  # fmt: skip
  assert f"{run.round} {run.hash}" in ends
  assert len({re.sub(r".* ", "", x) for x in ends}) == 1


@pytest.fixture(params=[object_stores.s3, object_stores.gs])
def url(request, monkeypatch):
  monkeypatch.setattr(bucket.Store, "poll", 0.05)
  with request.param() as found:
    yield f"{found}/sites"


def test_rounds_in_a_store(url):
  """Equal after every round; one that was away, and a new one, come in."""
  a, b = sites(url, "ab", checkpoint_every=2)
  for _ in range(3):
    together(a.step, b.step)
    require_equal(a, b)
    assert a.site.last.members == ("a", "b")
  with impatient(a):
    a.step()
  assert a.site.last.late == ("b",)
  (again, new) = (sites(url, x, checkpoint_every=2)[0] for x in "bc")
  with pytest.raises(SiteError, match="`name` must be of one process"):
    b.step()
  for _ in range(4):
    together(a.step, again.step, new.step)
    require_equal(a, again, new)
  assert a.site.last.members == ("a", "b", "c")
  a.site.leave()
  assert a.site._bucket.sizes("sites").keys() == {
    x for x in a.site._bucket.sizes("sites") if x[0] in "bc"
  }


def test_the_first_writer_decides_in_a_store(url):
  store = bucket.open_bucket(url)
  assert store.sizes("x") == {} and store.folders("x") == []
  store.create("x/one", b"first")
  with pytest.raises(FileExistsError):
    store.create("x/one", b"second")
  assert store.read("x/one") == b"first" and store.sizes("x") == {"one": 5}
  with pytest.raises(FileNotFoundError):
    store.read("x/two")
  store.create("y/deep/one", b"")
  assert store.folders("y") == ["deep"]
  store.remove(["y/deep", "x/one", "x/two"])
  assert store.sizes("x") == {} and store.folders("y") == []


def test_a_damaged_change_in_a_store(url):
  a, bad = sites(url, ("a", "bad"))
  bad.site._run.add("bad", b"nonsense")
  assert a.step().members == ("a",)


def test_a_site_of_two_processes(tmp_path):
  """It joins a run that goes on, and all of its processes know the round."""
  options = {"density": None, "bits": 32, "residual_decay": 1.0, "every": 1}
  solo = edgc_jax.Site(tmp_path / "run", "solo", **options)
  params = solo.join({"w": np.zeros((8, 4), np.float32)})
  for _ in range(2):
    params = solo.exchange({"w": params["w"] + 1})
  solo.leave()
  port = free_port()
  program = sys.executable, "-m", "helpers.two_process_site"
  commands = [[*program, tmp_path / "run", port, i] for i in range(2)]
  environment = environments.of_users() | QUICK
  paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
  run_together(tmp_path, commands, [environment | paths] * 2, 120)
  found = [
    json.loads(line)
    for i in range(2)
    for line in (tmp_path / f"output_{i}.txt").read_text().splitlines()
    if line.startswith("[[")
  ]
  assert found[0] == found[1]
  rounds, whole = found[0]
  assert rounds == [2, 3, 4, 5]
  # Two of solo, three of the pair, and its step beside the last exchange.
  np.testing.assert_allclose(whole, 6.0)
  solo = edgc_jax.Site(tmp_path / "run", "solo", **options)
  np.testing.assert_allclose(solo.join(params)["w"], 5.0)
