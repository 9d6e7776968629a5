"""Runs on replicas and on stages train the same on any mesh."""

import contextlib
import functools
import json
import warnings

import chex
import jax
import numpy as np
import pytest
from helpers import cut_runs
from helpers.collective_order import unordered
from helpers.four_processes_worker import small, write_text
from helpers.meshes import between_hosts

import edgc_jax
from experiments.trainer.parallel import backend, backends
from experiments.trainer.reporting import run_page
from experiments.trainer.training import times
from experiments.trainer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("without_cache")

STEPS = 6
# All is float32. Meshes differ in the order of sums, by about 1e-7 in a step,
# which Adam rescales. The observed difference is 1e-7 after eight steps.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Returns the folder of runs, with a text to train on."""
  folder = tmp_path_factory.mktemp("runs")
  write_text(folder)
  return folder


def run(config):
  """Returns the lines and the summary of a run."""
  trainer = Trainer(config)
  summary = trainer.run()
  text = (trainer.folder.path / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()], summary


@pytest.fixture(scope="module")
def replicas(folder):
  """Returns a run on four replicas under shard_map, without compression."""
  return run(small(folder, "replicas", "allreduce", 4))


@contextlib.contextmanager
def compiled_steps():
  """Yields a list that holds the programs of steps that are compiled."""
  programs, compile_step = [], backend.Backend.compile_step

  def kept(*args):
    programs.append(compile_step(*args))
    return programs[-1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(backend.Backend, "compile_step", kept)
    yield programs


def assert_in_order(programs):
  (program,) = (program.as_text() for program in programs)
  assert " conditional(" in program
  assert unordered(program) == []


def assert_same_training(one, other):
  """Compares losses of all steps and of the held-out batch, to rounding."""
  for lines in (one[0], other[0]):
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "val_loss" in line] == [3, 6]
  for name in ("loss", "val_loss"):
    a, b = ([x[name] for x in y[0] if name in x] for y in (one, other))
    np.testing.assert_allclose(a, b, rtol=TOLERANCE, err_msg=name)
  losses = [line["loss"] for line in one[0]]
  assert losses[-1] < losses[0] - 0.5, "nothing was learned: nothing is tested"


def test_backends_agree(folder):
  """Dense steps, then compressed ones."""
  runs = []
  for kind in backends.BACKENDS:
    config = small(folder, f"edgc_{kind}", "edgc", 4, kind=kind)
    config.edgc.min_ratio = 3.1  # the largest kernels and the embedding only
    runs.append(run(config))
  for other in runs[1:]:
    assert_same_training(runs[0], other)
  for lines, summary in runs:
    assert summary["rank_history"] == [[1, [0]], [3, [8]]]
    assert summary["traces"] == 1 and summary["times"] == {}
    assert lines[-1]["relative_error"][0] > 0
    for name in ("params", "wire_bytes_per_step"):
      assert summary[name] == runs[0][1][name]
  entropies = [[line["entropy"] for line in lines] for lines, _ in runs]
  for other in entropies[1:]:
    np.testing.assert_allclose(entropies[0], other, rtol=1e-4)


def test_stages_train_as_replicas_do(folder, replicas):
  """With equal devices, batch and seed, only the order of sums differs.

  As between CPU hosts: small leaves are joined, and no collective overtakes the
  check of replicas, nor one in a branch or loop another.
  """
  config = small(folder, "dense_stages", "allreduce", 2, stage=2)
  with between_hosts(), compiled_steps() as programs:
    staged = run(config)
  assert_in_order(programs)
  assert_same_training(staged, replicas)
  (_, summary), (_, alone) = staged, replicas
  assert summary["params"] == alone["params"]
  assert summary["traces"] == 1 and summary["rank_history"] == [[1, [0, 0]]]
  # Each stage has half of the layers and tokens, and all shared leaves.
  shared = 4 * (16 * 32 + 2 * 32)
  dense = alone["dense_bytes_per_step"] + shared
  assert summary["dense_bytes_per_step"] == dense


def test_devices_share_stages(folder, replicas):
  """Two stages of two replicas of two devices train as four replicas do."""
  config = small(folder, "shared_stages", "allreduce", 2, stage=2)
  config.mesh.tensor = 2
  shared = run(config)
  assert_same_training(shared, replicas)
  assert shared[1]["params"] == replicas[1]["params"]
  assert shared[1]["tensor"] == 2


def test_resumed_on_shared_stages(folder):
  """Ranks differ by stage, and are equal on its devices."""
  runs = []
  for name, cuts in (("whole", []), ("cut", [3])):
    config = small(folder, f"shared_edgc_{name}", "edgc", 2, stage=2)
    config.mesh.tensor, config.checkpoint.every = 2, 3
    config.edgc.rank_min = 4
    for step in cuts:
      cut_runs.run(config, cut_after=step)
    runs.append(cut_runs.run(config, compiles=False))
  whole, cut = map(cut_runs.lines_of, runs)
  assert whole == cut
  chex.assert_trees_all_equal(*map(cut_runs.newest, runs))
  assert runs[0].folder.summary()["rank_history"][-1] == [5, [4, 8]]
  (ranks, *_) = whole[-1]["matrix_rank"].values()
  assert np.shape(ranks) == (2, 2)  # stages, and matrices of all devices


@pytest.mark.parametrize(
  "wire_dtype, stage, kind", [("float32", 1, "pmap"), ("bfloat16", 2, "jit")]
)
def test_order_of_collectives(folder, wire_dtype, stage, kind):
  """None in a branch or loop can be overtaken, also between hosts."""
  with between_hosts(), compiled_steps() as programs:
    config = small(folder, f"order_{stage}", "edgc", 2, stage, kind)
    config.edgc.wire_dtype = wire_dtype
    parallel = Trainer(config).parallel
    parallel.compile_step(*parallel.init(jax.random.key(0)), 8)
  assert_in_order(programs)


def test_numbers_of_every_stage(folder, monkeypatch):
  """An edgc run on two stages of two replicas, with fake times."""
  config = small(folder, "staged", "edgc", 2, stage=2)
  config.link.bandwidth = config.pipeline.backward_seconds = 0.0
  config.edgc.rank_min = 4
  link = edgc_jax.LinkModel(1e-6, 1e6, r_squared=0.5)
  fake = {
    "link": link,
    "compression": edgc_jax.CompressionModel(1e-5, 1e-6),
    "backward": 15e-3,
  }
  for name, time in fake.items():
    monkeypatch.setattr(
      edgc_jax, f"measure_{name}", lambda *_, found=time, **options: found
    )
  path, (lines, summary) = folder / "staged", run(config)
  assert json.loads((path / "summary.json").read_text()) == summary
  assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
  for line in lines:
    for name in (
      "entropy", "rank", "wire_bytes", "relative_error",
      "predicted_error", "residual_norm",
    ):  # fmt: skip
      assert len(line[name]) == 2, name
    assert np.all(np.isfinite(line["entropy"]))
    assert line["entropy"][0] != line["entropy"][1]
    assert isinstance(line["loss"], float)
  assert summary["traces"] == 1
  assert (summary["replicas"], summary["stages"]) == (2, 2)
  assert summary["val_loss"] == lines[-1]["val_loss"] > 0
  assert len(summary["wire_bytes_per_step"]) == 2
  np.testing.assert_allclose(
    summary["wire_bytes_per_step"],
    np.mean([line["wire_bytes"] for line in lines], axis=0),
  )
  assert summary["compression_ratio"] > 1
  # Stage 0 follows the rule; stage 1 has time to send more.
  assert summary["rank_history"] == [[1, [0, 0]], [3, [8, 8]], [5, [4, 8]]]
  dense, same, apart = (np.array(lines[i]["wire_bytes"]) for i in (1, 3, 5))
  assert np.all(same < dense)
  assert np.all(apart <= same) and apart[0] < apart[1]
  assert lines[5]["predicted_error"][0] > lines[5]["predicted_error"][1] > 0
  found = summary["times"]
  link = {"latency": 1e-6, "bandwidth": 1e6, "r_squared": 0.5}
  assert found["link"] == link
  np.testing.assert_allclose(found["compression"]["base"], 1e-5)
  np.testing.assert_allclose(found["compression"]["per_rank"], 1e-6)
  np.testing.assert_allclose(found["backward_seconds"], 15e-3)
  page = run_page.write_report([path]).read_text()
  assert "stage 1: dense" in page and '"name":"stage 1"' in page


def test_zeros_are_measured(folder, monkeypatch):
  """Few repeats; measured numbers may be anything on a busy machine."""
  config = small(folder, "measured", "edgc", 2, stage=2)
  config.link.bandwidth = config.pipeline.backward_seconds = 0.0
  measure_compression = edgc_jax.measure_compression

  def of_one_kernel(params, **options):
    kernel = params["blocks"]["mlp_in"]["kernel"]
    assert kernel.shape == (1, 32, 128), "one stage holds one layer"
    assert params["embedding"].shape == (64, 32), "and half of the vocabulary"
    return measure_compression({"kernel": kernel}, (4, 8), repeats=2, **options)

  link = functools.partial(
    edgc_jax.measure_link, sizes=(2**10, 2**18), repeats=2
  )
  backward = functools.partial(edgc_jax.measure_backward, repeats=2)
  monkeypatch.setattr(edgc_jax, "measure_link", link)
  monkeypatch.setattr(edgc_jax, "measure_backward", backward)
  monkeypatch.setattr(edgc_jax, "measure_compression", of_one_kernel)
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "All-reduces of", RuntimeWarning)
    found = times.as_numbers(Trainer(config).times)
  assert found["link"]["bandwidth"] > 0 and found["link"]["latency"] >= 0
  assert found["backward_seconds"] > 0
  assert min(found["compression"].values()) >= 0
  assert not (folder / "measured").exists()


def test_unneeded_times_are_not_measured(folder, monkeypatch):
  def refuse(*args, **options):
    raise AssertionError("measured")

  for name in ("link", "compression", "backward"):
    monkeypatch.setattr(edgc_jax, f"measure_{name}", refuse)
  for changes in (
    {"reducer": "powersgd"},
    {"pipeline.align": "none"},
    {"mesh.stage": 1},
    {"link.bandwidth": 1e6, "pipeline.backward_seconds": 1e-3},
  ):
    config = small(folder, "never", "edgc", 2, stage=2)
    config.powersgd.update(rank=8, min_ratio=1.5)
    config.link.bandwidth = config.pipeline.backward_seconds = 0.0
    config.update_from_flattened_dict(changes)
    Trainer(config)
