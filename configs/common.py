"""All keys of a configuration, with units; the other files override values."""

from ml_collections import ConfigDict, config_dict


def _number(default: int | None = None) -> config_dict.FieldReference:
  """Returns an integer that may be None: whatever it configures chooses."""
  return config_dict.FieldReference(default, int)


def base(reducer: str) -> ConfigDict:
  """Returns the base of all configurations.

  Args:
    reducer: A name of `edgc_jax.REDUCERS`, or of a method of others in
      experiments/lab/peers/, which experiments/lab/train.py knows; or auto,
      which chooses for the measured link among the methods that exchange at
      every step.

  Returns:
    A configuration with the sizes of GPT-2 with 124M parameters.
  """
  return ConfigDict(
    {
      "name": "run",
      # A file in experiments/trainer/tasks/: model, loss and data.
      "task": "gpt2",
      "run_dir": "",  # empty: runs/<name>-<reducer>-seed<seed>
      "reducer": reducer,  # sections below; or auto
      "steps": 1000,
      "seed": 0,  # of parameters, data order and initial factors
      "batch_size": 32,  # sequences per step, over all replicas
      "log_every": 10,  # steps
      "init_from": "",  # a run folder whose parameters to start from
      "resume": True,  # resume from the run folder's checkpoint; False: refuse
      # Steps between checkpoints (0: only when the run is interrupted), and
      # how many of the newest to keep, in addition to the best one (by
      # evaluation.metric, of those at steps that are evaluated).
      "checkpoint": {"every": 1000, "keep": 2},
      # Steps between comparisons of the replicas (with local steps at
      # exchanges), and what to do if they differ: stop, or follow (all copy
      # the first replica and continue).
      "sentinel": {"every": 100, "action": "stop"},
      # Empty: the standard library's sources. Otherwise a text file, a folder
      # of text files, or a folder with train.bin and val.bin (uint16 tokens).
      "data": {"path": ""},
      # Replicas, pipeline stages, devices that share each stage, shards of a
      # replica without stages; and pmap, jit (stages and shards need it) or
      # vmap, which simulates replicas on one device.
      "mesh": {
        "data": 4,
        "stage": 1,
        "tensor": 1,
        "fsdp": 1,
        "backend": "pmap",
      },
      "pipeline": {
        "microbatches": 4,  # parts of a replica's batch
        "align": "slack",  # or none: each stage follows its own entropy
        "backward_seconds": 0.0,  # per microbatch and stage; 0: measured
      },
      # All-reduces over the replicas: bytes per second (0: measure this whole
      # section), seconds per all-reduce, and seconds to compute an exchange.
      "link": {
        "bandwidth": 0.0,
        "latency": 0.0,
        "compression_base": 0.0,
        "compression_per_rank": 0.0,
      },
      "model": {  # of GPT-2; each task has its own
        "vocab_size": 50304,
        "context": 1024,  # tokens
        "width": 768,
        "num_layers": 12,
        "num_heads": 12,
        "dtype": "float32",  # of activations; parameters are float32
        "unroll": 1,  # blocks per iteration of the scan
      },
      # Local steps: replicas train alone, and exchange what they have moved.
      "local": {
        "every": 0,  # steps between exchanges; 0: gradients, at each step
        "lr": 1.0,  # of the outer SGD; 1 without momentum averages
        "momentum": 0.0,  # of the outer SGD, Nesterov's
        "overlap": 0,  # steps after which the result of an exchange is applied
        # A baseline: gradients are exchanged at each step, and the outer step
        # sends nothing.
        "lookahead": False,
      },
      # Training together with other sites through a bucket, as `edgc_jax.Site`,
      # whose arguments these are; its key is the environment's EDGC_SITE_KEY.
      "site": {
        "url": "",  # empty: no other sites; a bucket's, or a folder
        "name": "",  # of this site
        "every": _number(),  # steps of a round; or
        "seconds": config_dict.placeholder(float),  # of a round
        "density": config_dict.FieldReference(1 / 64, float),  # None: all
        "bits": 2,
        "residual_decay": 0.95,
        "lr": 1.0,  # of the outer SGD
        "momentum": 0.0,
        "patience": 60.0,  # seconds to wait for other sites
        "least": 1,  # sites of a round
      },
      "optimizer": {  # linear warm-up, then cosine decay
        # Or muon (not with mesh.tensor): kernels by Muon (momentum 0.95), the
        # rest by Adam with Nesterov's momentum and without decay; or sign: a
        # step of lr in each entry.
        "name": "adamw",
        "lr": 6e-4,  # the peak
        "warmup_steps": 100,
        "final_lr_ratio": 0.1,  # of lr, at the last step
        "b1": 0.9,
        "b2": 0.95,
        "weight_decay": 0.1,
        "clip_norm": 1.0,  # of the mean gradient; in local steps, a replica's
        "max_consecutive_skips": 10,  # non-finite steps until the run stops
      },
      # Steps between evaluations, batches of batch_size, and the metric by
      # which the best checkpoint is chosen.
      "evaluation": {"every": 100, "batches": 8, "metric": "loss"},
      # Arguments of edgc_jax.edgc, with its defaults, and of the others. With
      # local steps a reducer's steps are exchanges.
      "edgc": {
        "rank_max": _number(32),  # None: derived from the measured times
        "rank_min": _number(),  # None: a quarter of rank_max
        "window": _number(),  # steps; None: a fortieth of the run's steps
        "warmup_steps": 100,
        "min_ratio": 2.0,
        "wire_dtype": "int4",  # or float32, bfloat16, int8
        "sampling": {
          "step_rate": 0.1,  # fraction of steps sampled
          "entry_rate": 0.25,  # fraction of entries read
          "estimator": "gaussian",  # or histogram
          "bins": 1000,
        },
        "rule": "cqm",  # or linear, reverse (training/rules.py)
        "exponent": 2.0,  # of cqm
        "rank_multiple": 4,
        "max_rank_step": _number(4),  # None: 4, or the step of the ladder
        "warmup_rank": "max",  # the top of the ladder; a rank; or dense
        "max_warmup_steps": _number(),  # None: twice warmup_steps
        "allocation": "error",  # or uniform: one rank for all matrices
        "scale_exponent": 1.0,  # of sigma; 0: absolute errors, 2: relative
      },
      "powersgd": {
        # A fraction is the mean over all steps: 11.3 is rank 12 for the first
        # three tenths of the run, then rank 11.
        "rank": 32.0,
        "final_rank": 0,  # 0: constant; otherwise the last of up to eight
        # Of the way to it: below 1 most of it comes first, above 1 last.
        "final_exponent": 1.0,
        "warmup_steps": 0,  # dense
        "min_ratio": 2.0,
        "wire_dtype": "int4",
        "allocation": "uniform",  # or error, as for edgc
        "scale_exponent": 1.0,
        "window": 100,  # steps between two allocations by error
      },
      "allreduce": {"wire_dtype": "float32"},
      "topk": {
        "density": 0.01,  # share of the entries that is sent
        "chunk": _number(),  # None: the whole tensor
        "bits": 32,  # or 2, in chunks
        "residual_decay": 1.0,
      },
      "randomk": {"density": 0.05, "error_feedback": True},
      "quantize": {
        "bits": 8,
        "block": 256,
        "error_feedback": False,
        "rotate": config_dict.placeholder(bool),  # None: 2 and 1 bits only
        "residual_decay": 1.0,
      },
      "demo": {"count": 32, "momentum": 0.999},  # of 4,096 frequencies
      "sparse_loco": {"count": 64, "residual_decay": 0.95},  # of 4,096 entries
      "late": {"start": 0},  # the first step whose mean is applied late
    }
  )
