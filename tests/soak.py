"""Kills runs at random times and compares what they end with. A script.

  python tests/soak.py --kills=20 --reducers=edgc,powersgd,allreduce

Each reducer trains once undisturbed, and once more with the same command given
again after every SIGKILL. Parameters, optimiser state and lines of metrics have
to be equal, bit for bit; times are left out. With --stages=2, on a pipeline.
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from absl import app, flags

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import orbax.checkpoint as ocp

from experiments.checkpoints import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[1]
_KILLS = flags.DEFINE_integer("kills", 20, "Of each run.")
_REDUCERS = flags.DEFINE_list("reducers", "edgc,powersgd,allreduce", "Which.")
_STAGES = flags.DEFINE_integer("stages", 1, "Pipeline stages.")
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the times of the kills.")

SETTINGS = {
  "batch_size": 8, "log_every": 5, "checkpoint.every": 7,
  "evaluation.every": 50, "evaluation.batches": 1, "model.context": 16,
  "model.width": 32, "model.num_layers": 2, "model.num_heads": 2,
  "edgc.rank_max": 8, "edgc.rank_min": 4, "edgc.rank_multiple": 2,
  "edgc.min_ratio": 1.5, "edgc.warmup_steps": 40, "edgc.max_warmup_steps": 80,
  "powersgd.rank": 4,
}  # fmt: skip
_CLOCK = ("seconds", "tokens_per_second")


def main(argv: list[str]) -> None:
  """Soaks one reducer after the other; exits with 1 if one differs."""
  del argv
  times = random.Random(_SEED.value)
  with tempfile.TemporaryDirectory() as folder:
    verdicts = [
      _soak(reducer, pathlib.Path(folder), times) for reducer in _REDUCERS.value
    ]
  sys.exit(0 if all(verdicts) else 1)


def _soak(reducer: str, folder: pathlib.Path, times: random.Random) -> bool:
  whole, killed = (folder / f"{reducer}-{name}" for name in ("whole", "killed"))
  started = time.monotonic()
  _start(reducer, whole).wait()
  seconds = time.monotonic() - started
  progress = []
  while len(progress) < _KILLS.value:
    process = _start(reducer, killed)
    try:
      process.wait(timeout=times.uniform(0.0, 1.2 * seconds))
      print(f"{reducer}: ended after {len(progress)} kills; give more --steps")
      break
    except subprocess.TimeoutExpired:
      process.kill()  # SIGKILL
      process.wait()
      progress.append(
        max(Checkpoints(killed / "checkpoints", 2).steps() or [0])
      )
  code = _start(reducer, killed).wait()
  is_equal = code == 0 and is_same(whole, killed)
  print(
    f"{reducer}: {len(progress)} kills, after checkpoints of steps {progress};"
    f" {'bit-equal' if is_equal else 'DIFFERENT'}",
    flush=True,
  )
  return is_equal


def _start(reducer: str, folder: pathlib.Path) -> subprocess.Popen:
  stages = _STAGES.value
  settings = {"steps": _STEPS.value, "run_dir": folder, **SETTINGS}
  config = "gpt2_tiny"
  if stages > 1:
    config = "gpt2_tiny_pipeline"
    settings |= {"mesh.stage": stages, "pipeline.microbatches": 2}
  command = [
    sys.executable,
    str(ROOT / "experiments" / "train_gpt2.py"),
    f"--config={ROOT}/configs/{config}.py:{reducer}",
    *(f"--config.{key}={value}" for key, value in settings.items()),
  ]
  # Compiled once, so that kills find runs at work.
  cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
  with open(folder.parent / "output.txt", "a") as output:
    return subprocess.Popen(
      command, stdout=output, stderr=output, env=os.environ | cache
    )


def is_same(one: pathlib.Path, other: pathlib.Path) -> bool:
  """Whether two runs ended with the same state and the same lines."""
  (step, arrays), (last, others) = map(_newest, (one, other))
  if step != last or arrays.keys() != others.keys():
    return False
  equal = [np.array_equal(arrays[name], others[name]) for name in arrays]
  return all(equal) and lines_of(one) == lines_of(other)


def _newest(folder: pathlib.Path) -> tuple[int, dict[str, np.ndarray]]:
  """Step and arrays of the newest checkpoint, whatever they are."""
  checkpoints = Checkpoints(folder / "checkpoints", 2)
  step = checkpoints.steps()[0]
  with ocp.PyTreeCheckpointer() as reader:
    trees = {
      name: reader.restore(checkpoints.path / str(step) / name)
      for name in ("params", "opt_state")
    }
  return step, {
    f"{name}.{path}": np.asarray(x)
    for name, tree in trees.items()
    for path, x in tree.items()
  }


def lines_of(folder: pathlib.Path) -> list[dict]:
  """A run's lines of metrics, times left out."""
  text = (folder / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  return [{k: v for k, v in x.items() if k not in _CLOCK} for x in lines]


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  app.run(main)
