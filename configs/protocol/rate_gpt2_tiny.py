"""Tunes the learning rate of gpt2_tiny, over the whole run."""

CONFIG = "configs/gpt2_tiny.py"
SEEDS = ()
TUNING = {
  "key": "optimizer.lr",
  "start": (2e-3, 4e-3),
  "factor": 2,
  "seed": 100,
  "tolerance": 0.01,
  "settings": {
    "mesh.backend": "vmap",
    "evaluation.every": 0,
    "checkpoint.every": 0,
  },
}
TABLES = {
  "gpt2_tiny": {
    "dense": {"reducer": "allreduce"},
    "edgc 28 to 22, float32": {
      "reducer": "edgc",
      "edgc.wire_dtype": "float32",
      "edgc.rank_min": 22,
    },
  }
}
