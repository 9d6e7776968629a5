"""Bad configurations: each is refused by one clear error before it trains.

Every key gets values of other types and out of range, as they may come from
JSON, and Hypothesis looks for further ones.
"""

import functools
import math

import pytest
from helpers.refusals import allowed_or_clear, drawn, refused, unchanged
from helpers.small_runs import small, small_task
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from experiments.lab.study.together import prepare
from experiments.trainer.training import checks, optimizer, reducers
from experiments.trainer.training.trainer import Trainer

NAN, INF = math.nan, math.inf
REDUCERS = tuple(reducers.by_name())
TASKS = ("gpt2", "bert", "vit", "conv", "coattention", "diffusion")
OF_TYPE = {
  int: (1.5, "4", NAN, [4], True, 2**31, -(2**40)),
  float: ("0.1", NAN, INF, -INF, 1e39, [0.1], True),
  str: (3, 0.5, ["a"], True),
  bool: (1, 0.0, "True", [True]),
  tuple: (3, "8", ()),
}


STAGES = {
  "mesh.stage": 2, "mesh.data": 2, "mesh.backend": "jit",
  "model.num_layers": 2, "pipeline.microbatches": 2,
}  # fmt: skip
AHEAD = {"local.every": 4, "local.lookahead": True}


@functools.cache
def base(reducer="allreduce", task="gpt2"):
  return small_task("unused", task, reducer, backend="vmap")


def changed(config, changes):
  """Returns a copy with other values, of any type, as from JSON."""
  values = config.to_dict()
  for key, value in changes.items():
    *sections, name = key.split(".")
    inner = functools.reduce(lambda part, each: part[each], sections, values)
    inner[name] = value
  return ConfigDict(values)


def make(config):
  """Does what a run does before it compiles and writes, without its data."""
  task = checks.task_of(config)
  tx = optimizer.make_optimizer(config, task, {})
  checks.require_memory(task.layout({"data": config.mesh.data}).shapes)
  return tx


def keys_of(config, start=""):
  """Yields the keys of a configuration with their types."""
  for name in config:
    if isinstance(config[name], ConfigDict):
      yield from keys_of(config[name], f"{start}{name}.")
    else:
      yield f"{start}{name}", config.get_type(name), config[name]


# None is a value of these: something else is chosen then.
OPTIONAL = {
  "edgc.rank_max", "edgc.rank_min", "edgc.window", "edgc.max_rank_step",
  "edgc.max_warmup_steps", "site.density",
}  # fmt: skip
KEYS = {
  key: (kind, value)
  for key, kind, value in keys_of(base())
  if kind in OF_TYPE and value is not None
}


@pytest.mark.parametrize("key", KEYS)
def test_values_of_another_type(key):
  kind, _ = KEYS[key]
  for value in (*OF_TYPE[kind], *([] if key in OPTIONAL else [None]), {}):
    message = refused(lambda v=value: make(changed(base(), {key: v})))
    assert f"`{key.split('.')[0]}" in message, value


@pytest.mark.parametrize("key", [key for key in KEYS if "model" not in key])
def test_missing_keys(key):
  values = base().to_dict()
  *sections, name = key.split(".")
  inner = functools.reduce(lambda part, each: part[each], sections, values)
  del inner[name]
  refused(lambda: make(ConfigDict(values)), f"`{key.split('.')[0]}")


# Out of range, by reducer.
RANGES = {
  "steps": (0, -1), "batch_size": (0, -8, 7), "log_every": (0,), "seed": (-1,),
  "task": ("", "gpt3", "base", "_digits", "../gpt2"),
  "reducer": ("", "magic", "edgc,topk"),
  "checkpoint.every": (-1,), "checkpoint.keep": (0, -1),
  "sentinel.every": (0,), "sentinel.action": ("", "hope"),
  "evaluation.every": (-1,), "evaluation.batches": (0,),
  "evaluation.metric": ("", "accuracy"),
  "mesh.data": (0, -4, 3), "mesh.stage": (0, 2), "mesh.fsdp": (0, 2),
  "mesh.tensor": (0, 2), "mesh.backend": ("", "xmap"),
  "pipeline.microbatches": (0,), "pipeline.backward_seconds": (-1.0,),
  "link.bandwidth": (-1.0,), "link.latency": (-1.0,),
  "link.compression_base": (-1.0,), "link.compression_per_rank": (-1.0,),
  "model.vocab_size": (0, -1, 2**31 - 1), "model.context": (0,),
  "model.width": (0, 33, 2 * 10**9), "model.num_layers": (0, 10**9),
  "model.num_heads": (0, 3, -2), "model.dtype": ("", "float23"),
  "model.unroll": (0,),
  "local.every": (-1,), "local.lr": (-1.0,), "local.momentum": (-0.1, 1.0),
  "local.overlap": (-1, 1),
  "local.lookahead": (True,),
  "optimizer.name": ("", "adam"), "optimizer.lr": (-1e-3,),
  "optimizer.warmup_steps": (-1,), "optimizer.final_lr_ratio": (-0.1,),
  "optimizer.b1": (-0.1, 1.0), "optimizer.b2": (-0.1, 1.5),
  "optimizer.weight_decay": (-0.1,), "optimizer.clip_norm": (0.0, -1.0),
  "optimizer.max_consecutive_skips": (0,),
}  # fmt: skip
OF_REDUCER = {
  "edgc": {
    "rank_max": (-4, 9), "rank_min": (-4, 16), "rank_multiple": (0, 3),
    "window": (-1,), "warmup_steps": (-1,), "max_warmup_steps": (-1, 1),
    "max_rank_step": (-1, 1), "min_ratio": (-1.0,),
    "wire_dtype": ("", "int3", "native_bfloat16"), "rule": ("", "stage"),
    "exponent": (0.0, -2.0), "warmup_rank": ("", "min", "-4", "0"),
    "allocation": ("", "matrix"), "scale_exponent": (-1.0, 3.0),
    "sampling.step_rate": (0.0, -1.0, 1.5), "sampling.entry_rate": (0.0, 2.0),
    "sampling.estimator": ("", "normal"), "sampling.bins": (0, -1),
  },
  "powersgd": {
    "rank": (0.0, -8.0, 0.5), "final_rank": (-1,),
    "final_exponent": (0.0, -1.0), "warmup_steps": (-1,), "min_ratio": (-1.0,),
    "wire_dtype": ("", "int3"), "allocation": ("", "matrix"), "window": (0,),
  },
  "allreduce": {"wire_dtype": ("", "int8")},
  "topk": {
    "density": (0.0, -0.1, 1.5), "chunk": (0, 5, 5000), "bits": (0, 2, 3),
    "residual_decay": (0.0, 1.5),
  },
  "randomk": {"density": (0.0, 2.0)},
  "quantize": {
    "bits": (0, 3, 2), "block": (0, 3), "rotate": (True,),
    "residual_decay": (0.0,),
  },
  "demo": {"count": (0, 3, 5000), "momentum": (0.0, 1.5)},
  "late": {"start": (-1,)},
  "sparse_loco": {"count": (0, 6, 8192), "residual_decay": (0.0, 1.5)},
}  # fmt: skip
SITE = {"site.url": "bucket", "site.name": "here", "site.every": 5}
OF_SITE = {
  "name": ("", "a/b"), "every": (0, -1), "seconds": (1.0,),
  "density": (0.0, 1.5), "bits": (0, 3, 4), "residual_decay": (0.0, 1.5),
  "lr": (-1.0,), "momentum": (-0.5, 1.0), "patience": (-1.0,), "least": (0,),
}  # fmt: skip
CASES = [
  pytest.param("allreduce", {key: value}, id=f"{key}={value}")
  for key, values in RANGES.items()
  for value in values
] + [
  pytest.param(name, {f"{name}.{key}": value}, id=f"{name}.{key}={value}")
  for name, options in OF_REDUCER.items()
  for key, values in options.items()
  for value in values
]


@pytest.mark.parametrize("reducer, changes", CASES)
def test_values_out_of_range(reducer, changes):
  (key,) = changes
  name = "model" if key.startswith("model.") else key.split(".")[-1]
  refused(lambda: make(changed(base(reducer), changes)), name)


@pytest.mark.parametrize(
  "key, value", [(k, x) for k, values in OF_SITE.items() for x in values]
)
def test_options_of_a_site(key, value):
  make(changed(base(), SITE))
  changes = SITE | {f"site.{key}": value}
  names = {"seconds": "every"}
  refused(
    lambda: make(changed(base(), changes)), f"`{names.get(key, key)}` must be"
  )
  if value == base().site[key]:
    return
  message = refused(lambda: make(changed(base(), {f"site.{key}": value})))
  assert message.startswith("`site.url` must be given with other options")


@pytest.mark.parametrize("reducer", ["allreduce", *OF_REDUCER])
def test_without_the_change_it_is_accepted(reducer):
  make(base(reducer))


def test_all_keys_are_in_the_tables():
  free = {"name", "run_dir", "init_from", "resume", "data.path"}
  free.add("pipeline.align")  # other reducers do not read it
  free |= {"site.url", *(f"site.{key}" for key in OF_SITE)}
  of_reducers = {key for key in KEYS if key.split(".")[0] in REDUCERS}
  assert KEYS.keys() - of_reducers - free == RANGES.keys()
  assert {"url", *OF_SITE} == set(base().site)
  for key in of_reducers:
    reducer, option = key.split(".", 1)
    is_flag = KEYS[key][0] is bool
    assert is_flag or option in OF_REDUCER[reducer] or "exponent" in option, key


@pytest.mark.parametrize(
  "task, changes, parts",
  [
    ("vit", {"model.patch": 0}, ["`model.patch`"]),
    ("vit", {"model.patch": 3}, ["`model.patch`", "divisor of 8"]),
    ("coattention", {"model.patch": 8}, ["`model.patch`", "divisor of 4"]),
    ("vit", {"model.width": 0}, ["`model.width`"]),
    ("vit", {"model.num_heads": 3}, ["`model.num_heads`"]),
    ("vit", {"model.num_layers": 10**9}, ["`model.num_layers`", "10000"]),
    ("vit", {"model.num_heads": 0}, ["`model.num_heads`", "1 to"]),
    ("vit", {"model.dropout": 1.0}, ["`model.dropout`"]),
    ("conv", {"model.dropout": "0.1"}, ["`model.dropout`"]),
    ("conv", {"model.dropout": NAN}, ["`model.dropout`"]),
    ("conv", {"model.channels": ()}, ["`model.channels`"]),
    ("conv", {"model.channels": (32, 3)}, ["`model.channels`"]),
    ("conv", {"model.channels": 32}, ["`model.channels`"]),
    ("vit", {"task": "conv"}, ["`model` must have the options of the task"]),
    ("gpt2", {"model.depth": 3}, ["`model`", "depth"]),
    ("gpt2", {"model": {}}, ["`model"]),
    ("gpt2", {"model.width": {"size": 32}}, ["`model.width"]),
    ("vit", {"model.width": {"size": 32}}, ["`model.width"]),
    ("bert", {"mesh.stage": 2, "mesh.backend": "jit"},
     ["`mesh.stage` must be 1 for the task 'bert'"]),
    ("conv", {"mesh.fsdp": 2, "mesh.backend": "jit", "mesh.data": 2},
     ["`mesh.fsdp` must be 1 for the task 'conv', whose model has no shards"]),
    ("vit", {"evaluation.metric": "perplexity"}, ["one of loss, accuracy, wh"]),
    ("edgc", {"edgc.rank_min": 16}, ["`rank_min`", "rank_max (8)"]),
    ("powersgd", {"powersgd.rank": 4.5, "powersgd.final_rank": 2}, ["4.5"]),
    ("gpt2", {"batch_size": 6}, ["by mesh.data (4), got 6; use 8"]),
    ("gpt2", {"mesh.data": 16, "mesh.backend": "pmap"},
     ["(8 cpu)", "got 16 times 1", "NUM_CPU_DEVICES=16"]),
    ("gpt2", STAGES | {"model.num_layers": 3},
     ["`model.num_layers`", "mesh.stage (2), got 3"]),
    ("gpt2", STAGES | {"batch_size": 6},
     ["mesh.data * pipeline.microbatches (4), got 6; use 8"]),
    ("gpt2", STAGES | {"mesh.backend": "pmap"},
     ["`mesh.backend` must be jit", "(mesh.stage is 2), got 'pmap'"]),
    ("gpt2", STAGES | {"mesh.tensor": 2, "model.num_heads": 1},
     ["`mesh.tensor` must be a divisor of model.num_heads (1), got 2"]),
    ("gpt2", STAGES | {"mesh.tensor": 2, "optimizer.name": "muon"},
     ["`optimizer.name` must not be muon with mesh.tensor (2)"]),
    ("edgc", STAGES | {"pipeline.align": "slacks"}, ["`align` must be one of"]),
    ("edgc", STAGES | {"mesh.data": 1},
     ["`mesh.data` must be at least 2", "got 1 with", "give link.bandwidth"]),
    ("gpt2", {"mesh.fsdp": 2, "mesh.data": 2, "mesh.backend": "pmap"},
     ["`mesh.fsdp` must be 1 on", "got 2 with pmap"]),
    ("gpt2", STAGES | {"mesh.fsdp": 2}, ["`mesh.fsdp` must be 1 on pipeline"]),
    ("gpt2", {"local.every": 4, "local.overlap": 5}, ["`overlap`"]),
    ("gpt2", {"local.momentum": 0.5}, ["must be at least 1 with other"]),
    ("gpt2", AHEAD | {"local.overlap": 1}, ["`local.lookahead` must be"]),
    ("gpt2", AHEAD | {"init_from": "runs/other"}, ["`init_from` must be"]),
    ("gpt2", STAGES | {"local.every": 4},
     ["`local.every` must be 0 on pipeline stages", "4 with mesh.stage=2"]),
    ("auto", {"local.every": 4}, ["`local.every`", "auto"]),
    ("gpt2", SITE | {"local.every": 4}, ["`local.every` must be 0 at a site"]),
    ("gpt2", {"link.bandwith": 1e8}, ["`link.bandwith`", "bandwidth"]),
    ("gpt2", {"stepz": 3}, ["`stepz`", "steps"]),
    ("gpt2", {"mesh": {"data": 4}}, ["`mesh."]),
    ("gpt2", {"mesh": 4}, ["`mesh"]),
    ("gpt2", {"optimizer": None}, ["`optimizer"]),
  ],
)  # fmt: skip
def test_parts_that_do_not_fit(task, changes, parts):
  """Of a task, or of GPT-2 with a reducer."""
  own = base(task=task) if task in TASKS else base(task)
  refused(lambda: make(changed(own, changes)), *parts)


# No run begins.


@pytest.mark.parametrize(
  "changes",
  [
    {"optimizer.lr": NAN},
    {"steps": "8"},
    {"model.width": 2 * 10**9, "model.num_heads": 1},
    {"model.vocab_size": 100},
    {"data.path": "/nowhere"},
    {"init_from": "/nowhere"},
    {"init_from": __file__},
  ],
  ids=str,
)
def test_nothing_is_written(tmp_path, changes):
  (tmp_path / "text.txt").write_text("some words to read " * 40)
  config = small(tmp_path / "run", "allreduce")
  config.data.path = str(tmp_path / "text.txt")
  config = changed(config, changes)
  kinds = (TypeError, ValueError, OSError, RuntimeError)
  with unchanged(tmp_path):
    refused(lambda: Trainer(config), kinds=kinds)


def test_runs_of_one_program(tmp_path):
  """Of each run all keys are checked, not of the first alone."""
  for changes in ({"optimizer.lr": -1.0}, {"stepz": 8}, {"mesh.data": 3}):
    configs = [small(tmp_path / f"run_{i}", "allreduce") for i in range(2)]
    for config in configs:
      config.mesh.backend = "vmap"
    configs[1] = changed(configs[1], changes)
    with unchanged(tmp_path):
      refused(lambda own=configs: prepare(own))


# Any values.

VALUES = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.integers(-2, 9)
  | st.floats()
  | st.floats(-1, 2)
  | st.text(max_size=5)
  | st.lists(st.integers(0, 9), max_size=2)
  | st.sampled_from(["max", "dense", "error", "int4", "linear", "jit", "sign"])
)


@pytest.mark.filterwarnings("ignore:No leaf saves")
@drawn(150)
@given(st.data())
def test_any_values(data):
  """A configuration is taken, or refused by a clear error."""
  reducer = data.draw(st.sampled_from([*REDUCERS, "auto"]))
  config = base(reducer, data.draw(st.sampled_from(TASKS)))
  keys = [key for key, *_ in keys_of(config)]
  own = [key for key in keys if key.startswith((f"{reducer}.", "model."))]
  key = st.sampled_from(keys) | st.sampled_from(own)
  changes = data.draw(st.dictionaries(key, VALUES, min_size=1, max_size=2))
  allowed_or_clear(lambda: checks.task_of(changed(config, changes)))
  if reducer != "auto":
    allowed_or_clear(lambda: make(changed(config, changes)))
