"""Runs whose parameters are sharded within each replica.

They resume in tests/runs/other_shards_test.py.
"""

import numpy as np
import pytest
from helpers import cut_runs

from experiments.trainer.models import gpt2, gpt2_shards
from experiments.trainer.training.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]


def config_of(folder, reducer, data=2, fsdp=2):
  config = cut_runs.config_of(folder, reducer, backend="jit")
  config.mesh.update(data=data, fsdp=fsdp)
  return config


def test_dense_is_unsharded(tmp_path):
  """Sharding changes neither gradients nor losses."""
  whole, sharded = (
    cut_runs.run(config_of(tmp_path / str(n), "allreduce", 2, n))
    for n in (1, 2)
  )
  lines = [cut_runs.lines_of(trainer)[-1] for trainer in (whole, sharded)]
  for name in ("loss", "val_loss"):
    assert np.isclose(lines[0][name], lines[1][name], rtol=1e-5)
  summary = sharded.folder.summary()
  assert summary["shards"] == 2
  assert summary["params"] == whole.folder.summary()["params"]
  assert summary["traces"] == 1


def test_local_steps_agree(tmp_path):
  """Blocks of 8 bits are of a shard's part of a matrix."""
  losses = []
  for fsdp, backend in ((1, "vmap"), (2, "jit")):
    config = cut_runs.config_of(tmp_path / backend, "quantize", backend)
    config.log_every = 1
    config.local.update(every=3, momentum=0.5)
    config.mesh.update(data=4, fsdp=fsdp)
    trainer = cut_runs.run(config)
    losses.append([line["loss"] for line in cut_runs.lines_of(trainer)])
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
  assert trainer.parallel.traces == 1


def test_rank_by_times(tmp_path):
  """A slow link allows ranks on shards, too."""
  config = config_of(tmp_path / "run", "edgc")
  config.edgc.update(rank_max=None, rank_min=None)
  config.link.update(bandwidth=1e6, latency=1e-3)
  trainer = Trainer(config)
  leaves = trainer._leaves
  assert "on each shard of fsdp" in leaves
  assert "as factors of rank" in leaves


def test_specs_divide_the_longer_side():
  model = gpt2.GPT2Config(128, 64, 64, 2, 2)
  specs = gpt2_shards.param_specs(gpt2.param_shapes(model), 4)
  kernels = specs["blocks"]
  assert tuple(specs["embedding"]) == ("fsdp",)
  assert tuple(kernels["mlp_in"]["kernel"]) == (None, None, "fsdp")
  assert tuple(kernels["mlp_out"]["kernel"]) == (None, "fsdp")
  assert not tuple(specs["final_norm"]["scale"])
