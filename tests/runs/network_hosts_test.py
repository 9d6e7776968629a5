"""The network benchmark on two virtual hosts; needs root and iproute2."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import jax
import pytest

from configs import gpt2_tiny
from edgc_jax.sites.payload import Layout
from experiments.lab.network import results, virtual_hosts
from experiments.trainer import tasks

# These measure times. Each takes a minute or more, and two cores.
pytestmark = [pytest.mark.alone, pytest.mark.soak("experiments/lab/network")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 900
SMALL = (
  "--config.model.width=64", "--config.model.num_layers=2",
  "--config.model.num_heads=2", "--layout=2 replicas", "--row=no exchange",
  "--row=dense", "--row=dense, bf16",
)  # fmt: skip

# Holds two hosts, with a process on one of them that prints its id.
HOLDER = """
import subprocess
from experiments.lab.network.virtual_hosts import VirtualHosts
with VirtualHosts(2) as network:
  command = ["sh", "-c", "echo $$; exec sleep 30"]
  subprocess.run([*network.inside(1), *command])
"""


def marked(folder):
  """Returns an environment that all processes of a program inherit.

  They compile quickly, as in conftest, and import what is in `folder`.
  """
  own = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(folder)}
  return os.environ | own | {"MARK": str(folder)}


def processes_of(folder):
  """Returns the processes with such an environment; they hold all hosts."""
  found = []
  for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):  # it has ended
      if f"MARK={folder}".encode() in (process / "environ").read_bytes():
        found.append(process)
  return found


@pytest.fixture
def network():
  """Skips the test if virtual hosts cannot be made."""
  reason = virtual_hosts.why_not()
  if reason:
    pytest.skip(reason)


def run(folder, *arguments):
  """Runs a module without a failure, and returns what it prints."""
  done = subprocess.run(
    [sys.executable, "-m", *arguments], cwd=ROOT, env=marked(folder),
    capture_output=True, text=True, timeout=SECONDS, check=False,
  )  # fmt: skip
  logs = (*folder.rglob("*.log"), *folder.rglob("*.host_*.txt"))
  texts = [done.stdout, done.stderr, *(x.read_text()[-2000:] for x in logs)]
  assert done.returncode == 0, "".join(texts)
  assert not processes_of(folder)
  return done.stdout


def measured(folder, *options):
  """Runs a small benchmark without a failure.

  Returns:
    What the JSON file holds, and its cells by row for each layout.
  """
  output = folder / "network.json"
  run(
    folder, "experiments.lab.network", "--config=configs/gpt2_tiny.py",
    "--config.model.unroll=1", "--nopeer", "--rounds=2", f"--output={output}",
    f"--folder={folder / 'logs'}", *options,
  )  # fmt: skip
  found = json.loads(output.read_text())
  assert not found["failures"]
  cells = results.cells_of(output)
  return found, {
    layout: dict(zip(own["row"], own.itertuples(), strict=True))
    for layout, own in cells.groupby("layout")
  }


METHODS = (
  "dense", "quantize, 8 bits", "powersgd 21.8, int4, error",
  "edgc 26 to 20, int4",
)  # fmt: skip
# Python imports a file of this name first.
SITE_CUSTOMIZE = """
import json, pathlib
read_text = pathlib.Path.read_text

def few(path, *args, **options):
  text = read_text(path, *args, **options)
  if path.name != "evidence.json":
    return text
  return json.dumps([x for x in json.loads(text) if x["name"] in %r])

pathlib.Path.read_text = few
"""


def test_two_hosts(tmp_path, network):
  """A small benchmark runs, and its uplinks have the given rate.

  The advice is of the few methods that are measured, of the protocol's 44.
  """
  (tmp_path / "sitecustomize.py").write_text(SITE_CUSTOMIZE % (METHODS,))
  found, cells = measured(tmp_path, *SMALL, "--rate=20", "--advised=.")
  rows = cells["2 replicas"]
  (factors,) = (row for name, row in rows.items() if "powersgd" in name)
  dense = rows["dense"]
  # Sent bytes include headers, acknowledgements and the loss.
  assert 1.0 < dense.sent_bytes / dense.wire_bytes < 1.15
  assert factors.sent_bytes < dense.sent_bytes / 2
  # The uplink has the given rate, apart from the tokens in its bucket.
  for row in (dense, rows["dense, bf16"]):  # each has its own collectives
    assert row.communicate > (row.wire_bytes - 2**16) * 8 / 20e6
  assert factors.exchange < dense.exchange
  # The advice predicts the times of the methods that are measured.
  (advice,) = found["advice"]
  assert advice["seconds"].keys() == advice["steps"].keys()
  assert advice["choice"] in advice["seconds"]
  compared = advice["seconds"].keys() & rows.keys()
  kinds = {name.split(",")[0] for name in compared}
  assert kinds == {"dense", "quantize", "powersgd", "edgc"}
  for name in compared:
    assert 0.4 < advice["seconds"][name] / rows[name].step < 2.5


def test_two_hosts_that_are_far_apart(tmp_path, network):
  """Every exchange takes the round trips that it needs, and few more."""
  if reason := virtual_hosts.why_no_delay():
    pytest.skip(reason)
  found, cells = measured(
    tmp_path, *SMALL, "--rate=100", "--round_trip=100", "--advised=",
    "--rounds=4",
  )  # fmt: skip
  rows = cells["2 replicas"]
  assert {row.round_trip for row in rows.values()} == {100.0}
  link = rows["dense"].wire_bytes * 8 / 100e6  # seconds
  # A busy machine and TCP's congestion window only add to what an exchange
  # needs, now and then a round trip or two: the shortest one needs the fewest.
  shortest = {
    entry["row"]: min(entry["seconds"])
    for entry in found["rows"]
    if entry["part"] == "communicate"
  }
  # An all-reduce has two round trips; in halves it has the same, and what is
  # sent in float32 follows.
  assert 0.2 < shortest["dense"] < 0.3 + 3 * link
  assert 0.3 < shortest["dense, bf16"] < 0.6 + 3 * link


STUDY = """
CONFIG = "configs/gpt2_tiny.py"
TABLES = {"All": {"dense": {
  "reducer": "allreduce", "steps": 6, "log_every": 1, "mesh.data": 2,
  "model.width": 64, "model.num_layers": 2, "model.num_heads": 2,
  "model.unroll": 1, "evaluation.every": 2, "evaluation.batches": 2,
}}}
SEEDS = (0,)
"""


def test_a_whole_run(tmp_path, network):
  """Two hosts train an arm of a study to the end, once."""
  study, output = tmp_path / "study.py", tmp_path / "whole.json"
  study.write_text(STUDY)
  command = (
    "experiments.lab.network.whole_runs", f"--study={study}", "--arm=dense",
    "--rate=100", f"--output={output}", f"--records={tmp_path / 'records'}",
    f"--folder={tmp_path / 'runs'}",
  )  # fmt: skip
  assert run(tmp_path, *command) == "--- 100 Mbit/s, 0 ms: dense\n"
  assert run(tmp_path, *command) == ""
  (whole,) = json.loads(output.read_text())["runs"]
  evaluated = [x for x in whole["lines"]["val_loss"] if x is not None]
  assert len(evaluated) == 3 and evaluated[-1] == pytest.approx(
    whole["loss"], abs=1e-4
  )
  assert whole["lines"]["seconds"] == sorted(whole["lines"]["seconds"])


def test_sites(tmp_path, network):
  """Sites share a store, and changes take the time of both directions."""
  pytest.importorskip("moto")
  output, config = tmp_path / "sites.json", gpt2_tiny.get_config("allreduce")
  params = jax.eval_shape(tasks.make(config).init, jax.random.key(0))
  shapes = {
    jax.tree_util.keystr(path): x.shape
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  run(
    tmp_path, "experiments.lab.network.sites", "--hosts=2", "--rounds=1",
    "--config=configs/gpt2_tiny.py", "--rate=0.5", "--rate=inf",
    "--round_trip=0", f"--output={output}", f"--folder={tmp_path / 'logs'}",
  )  # fmt: skip
  found = json.loads(output.read_text())
  assert len(found["lines"]) == 4
  for line in found["lines"]:
    (seconds,), (sent,) = line["seconds"], line["sent"]
    assert sent <= line["uplink"][0] < 1.5 * sent + 50_000
    assert line["received"] == [sent]
    # A change is received after it was sent; each bucket passes some at once.
    assert seconds > (2 * sent - 2**17) * 8 / (line["rate"] * 1e6)
    density = None if line["code"].startswith("all") else 1 / 64
    header = sent - Layout(shapes, density, 2).num_bytes
    assert 0 < header < 1000, "the bytes that the code counts"


def test_site_runs(tmp_path, network):
  """The same run by sites and by local steps."""
  pytest.importorskip("moto")
  output = tmp_path / "runs.json"
  run(
    tmp_path, "experiments.lab.network.site_runs", "--steps=12", "--every=3",
    "--config=configs/gpt2_tiny.py", "--rate=100", "--round_trip=0",
    f"--output={output}", f"--folder={tmp_path / 'runs'}",
  )  # fmt: skip
  one, other = json.loads(output.read_text())["lines"]
  assert (one["way"], other["way"]) == ("sites", "local steps")
  assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
  assert max(one["loss"], other["loss"]) < 5.0  # of 5.5 before training
  # A site writes its first parameters into the bucket.
  assert one["sent"] - 4 * 1.85e6 < other["sent"] * 5


def test_a_killed_program_leaves_nothing(tmp_path, network):
  """Neither processes nor the namespaces that they hold."""
  with subprocess.Popen(
    [sys.executable, "-c", HOLDER], cwd=ROOT, env=marked(tmp_path),
    stdout=subprocess.PIPE, text=True,
  ) as program:  # fmt: skip
    pid = int(program.stdout.readline())
    own, theirs = (os.readlink(f"/proc/{p}/ns/net") for p in ("self", pid))
    assert own != theirs
    assert len(processes_of(tmp_path)) == 1 + 3 + 1  # with the bridge's
    program.kill()
  for _ in range(100):
    if not processes_of(tmp_path):
      return
    time.sleep(0.1)
  pytest.fail("a process is left")


def test_only_the_exchange_of_shards_crosses_the_link(tmp_path, network):
  """Two hosts of four shards send what is predicted."""
  rows = ("no exchange", "dense", "dense, bf16", "powersgd, rank 8",
          "edgc, rank 8")  # fmt: skip
  layout = "2 replicas of 4 shards"
  found, cells = measured(
    tmp_path, f"--layout={layout}", "--rate=20",
    "--config.model.num_layers=2", *(f"--row={row}" for row in rows),
  )  # fmt: skip
  cells = cells[layout]
  nothing, dense = cells.pop("no exchange"), cells["dense"]
  # The shards gather some megabytes in each step, inside their hosts.
  assert nothing.sent_bytes < 50_000
  assert dense.wire_bytes > 4 * found["params"]
  assert cells.keys() == {*rows[1:]}
  for row, cell in cells.items():
    assert 1.0 < cell.sent_bytes / cell.ring_bytes < 1.1, row
  # Rank 8 sends an eighth of the bytes.
  assert cells["powersgd, rank 8"].exchange < dense.exchange
