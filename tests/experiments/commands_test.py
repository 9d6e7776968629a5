"""What all commands share: files from any folder, and the devices there are."""

import jax
import pytest

import experiments
from configs import gpt2_tiny, gpt2_tiny_hsdp
from experiments.trainer.parallel import meshes
from experiments.trainer.runtime import command_line


def test_files_of_the_repository_are_found_from_any_folder(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  name = "configs/gpt2_tiny.py"
  assert experiments.from_root(name) == str(experiments.ROOT / name)
  for other in ("", "configs", "none.py", "/none.py"):
    assert experiments.from_root(other) == other
  (tmp_path / "configs").mkdir()
  (tmp_path / name).touch()  # the user's own comes first
  assert experiments.from_root(name) == name


@pytest.mark.parametrize(
  "flag, is_given",
  [
    ("--config.mesh.data=2", True), ("-config.mesh.data=2", True),
    ("--config.mesh.data", True), ("--config.mesh.database=2", False),
    ("--config.run_dir=a--config.mesh.data=2", False),
  ],
)  # fmt: skip
def test_keys_that_a_command_gives(monkeypatch, flag, is_given):
  monkeypatch.setattr("sys.argv", ["train_gpt2.py", flag])
  assert command_line.is_given("mesh.data") == is_given


@pytest.mark.parametrize(
  "devices, processes, backend, replicas",
  [
    (1, 1, "gpu", 1), (3, 1, "gpu", 2), (4, 1, "gpu", 4), (7, 1, "gpu", 4),
    (16, 1, "gpu", 16), (16, 2, "gpu", 16), (12, 2, "gpu", 4), (8, 1, "cpu", 4),
  ],
)  # fmt: skip
def test_replicas_fit_the_accelerators(
  monkeypatch, devices, processes, backend, replicas
):
  """And divide the batch, of 16 rows."""
  for name, value in (
    ("default_backend", backend), ("device_count", devices),
    ("process_count", processes),
  ):  # fmt: skip
    monkeypatch.setattr(jax, name, lambda value=value: value)
  config = gpt2_tiny.get_config()
  meshes.fit_replicas(config)
  assert config.mesh.data == replicas
  for config in (gpt2_tiny_hsdp.get_config(), gpt2_tiny.get_config()):
    config.mesh.backend = "vmap" if config.mesh.fsdp == 1 else "jit"
    before = config.mesh.data
    meshes.fit_replicas(config)
    assert config.mesh.data == before
