"""Every key of a configuration, with its unit; files beside this set values."""

from ml_collections import ConfigDict


def base(reducer: str) -> ConfigDict:
  """What all configurations share.

  Args:
    reducer: edgc, powersgd, allreduce, topk, randomk, quantize or signsgd;
      or auto, for what is found to suit the link.

  Returns:
    A configuration whose sizes are those of GPT-2 with 124M parameters.
  """
  return ConfigDict(
    {
      "name": "run",
      "run_dir": "",  # empty: runs/<name>-<reducer>-seed<seed>
      "reducer": reducer,  # a function of edgc_jax, sections below; or auto
      "steps": 1000,
      "seed": 0,  # of parameters, order of the data and first factors
      "batch_size": 32,  # sequences a step, over all replicas
      "log_every": 10,  # steps
      "init_from": "",  # a run's folder, to begin with its parameters
      "resume": True,  # go on from the run folder's checkpoint; or refuse
      # Steps between checkpoints (0: only when told to stop), and how many of
      # the newest to keep, beside that of the lowest held-out loss.
      "checkpoint": {"every": 1000, "keep": 2},
      # Steps from one comparison of the replicas to the next, and what to do
      # where they have parted: stop, or follow the first replica and go on.
      "sentinel": {"every": 100, "action": "stop"},
      # Empty: the standard library's sources. Else a text file, a folder of
      # them, or a folder with train.bin and val.bin (uint16 tokens).
      "data": {"path": ""},
      # Replicas, pipeline stages, and pmap or shard_map (for stages).
      "mesh": {"data": 4, "stage": 1, "backend": "pmap"},
      "pipeline": {
        "microbatches": 4,  # of a replica's batch
        "align": "slack",  # or none: stages follow their own entropy
        "backward_seconds": 0.0,  # of a microbatch on a stage; 0: measured
      },
      # All-reduces over the replicas: bytes a second (0: measured, with all
      # else here), seconds each, and seconds of computing an exchange.
      "link": {
        "bandwidth": 0.0,
        "latency": 0.0,
        "compression_base": 0.0,
        "compression_per_rank": 0.0,
      },
      "model": {
        "vocab_size": 50304,
        "context": 1024,  # tokens
        "width": 768,
        "num_layers": 12,
        "num_heads": 12,
        "dtype": "float32",  # of activations; parameters are float32
        "unroll": 1,  # blocks per turn of the scan
        "objective": "next_token",  # or masked: the last id is the mask
      },
      "optimizer": {  # AdamW; linear warm-up, then a cosine
        "lr": 6e-4,  # at its peak
        "warmup_steps": 100,
        "final_lr_ratio": 0.1,  # of lr, at the last step
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.1,
        "clip_norm": 1.0,  # of the averaged gradient
        "max_consecutive_skips": 10,  # non-finite steps, then the run stops
      },
      "evaluation": {"every": 100, "batches": 8},  # steps; of batch_size
      # Arguments of edgc_jax.edgc, with its defaults, and of the others.
      "edgc": {
        "rank_max": 32,  # 0: found from the times on the link
        "rank_min": 8,  # 0: a quarter of rank_max
        "window": 1000,  # steps; 0: in proportion to the run's steps
        "warmup_steps": 1000,
        "min_ratio": 2.0,
        "wire_dtype": "float32",  # or bfloat16, native_bfloat16
        "sampling": {
          "step_rate": 0.1,  # share of steps sampled
          "entry_rate": 0.25,  # share of entries read
          "estimator": "gaussian",  # or histogram
          "bins": 1000,
        },
        "rule": {
          "name": "cqm",  # or linear
          "exponent": 2.0,
          "rank_multiple": 4,
          "max_rank_step": 4,  # 0: 4, or the step of the ladder
          "warmup_rank": "max",  # of the ladder; or a rank, or dense
          "max_warmup_steps": 2000,  # 0: twice warmup_steps
        },
        "allocation": {
          "granularity": "matrix",  # or stage: all matrices on one rank
          "curves": "calibrated",  # or energy, entropy
          "scale_exponent": 1.0,  # of sigma: 0 absolute errors, 2 relative
        },
      },
      "powersgd": {
        # A fraction is a mean over all steps: 11.3 is rank 12 for three tenths
        # of them and then 11.
        "rank": 32.0,
        "final_rank": 0,  # 0: as rank; else it moves there in equal steps
        "warmup_steps": 1000,
        "min_ratio": 2.0,
        "wire_dtype": "float32",
      },
      "allreduce": {"wire_dtype": "float32"},
      # Shares of the entries; a threshold's sample (0: the exact k largest).
      "topk": {"density": 0.01, "sample_rate": 0.0},
      "randomk": {"density": 0.05, "error_feedback": True},
      "quantize": {"bits": 8, "block": 256, "error_feedback": False},
      "signsgd": {"block": 256},
    }
  )
