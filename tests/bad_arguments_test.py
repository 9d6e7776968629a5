"""Bad arguments of the package: each is refused by one clear error of its own.

Each validator refuses all its bad values, and each option one or two of them;
Hypothesis looks for further ones. What mistakes do that pass these checks is
tested in tests/reducer/mistakes_test.py.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.refusals import allowed_or_clear, drawn, refused
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax import validation

NAN, INF = float("nan"), float("inf")
PARAMS = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}
LINK = edgc_jax.LinkModel(0.0, 1e8)
REDUCERS = tuple(edgc_jax.REDUCERS)
SGD = optax.sgd(0.1)
OUTER = optax.chain(edgc_jax.allreduce(), SGD)

# By function of the validation: arguments after the value, and bad values.
VALIDATORS = {
  "require_int": (
    (1,), (0, -1, 1.5, "4", NAN, None, True, [4], np.int64(4), 2**31, 2**70)
  ),
  "require_seed": ((), (-1, 1.5, "4", NAN, None, True, 2**70, [1])),
  "require_several": ((4,), (8, "88", (8,), (8, 8), (4, 5), (4, 1.5), (8, 0))),
  "require_number": ((), ("1", None, True, [1.0], np.float32(1))),
  "require_finite": (
    ("use 2",), (-1.0, NAN, INF, "1", None, True, [1.0], np.float32(1))
  ),
  "require_share": (
    (), (0, -0.1, 1.5, NAN, INF, "0.1", None, True, np.float32(0.1), [0.1])
  ),
  "require_flag": ((), (1, 0.0, "True", [], None, np.True_)),
  "require_one_of": ((("a", "b"),), ("", None, 3, ["a"], True)),
  "require_kind": (
    (edgc_jax.Sampling, "pass one of them"), (0.1, "gaussian", {}, 0)
  ),
  "require_function": (("a path",), ("", 3, (1, 2, 3), {})),
  "require_transformation": (
    (), (None, "sgd", 3, optax.sgd, {"init": 1})
  ),
}  # fmt: skip
AXES = ("", None, 3, (), [], ("a", "a"), ("a", None), b"data")  # of no name

# Two values for each option that calls a validator.
NO_COUNT = (0, 1.5)
NO_INDEX = (-1, 1.5)
NO_SHARE = (1.5, "0.1")
NO_SECONDS = (-1.0, "1")
NO_FLAG = (1,)
NO_FUNCTION = (3,)
NO_TRANSFORMATION = ("sgd",)
NO_AXIS = ("", None)
NO_MESH = ("data",)
NOT_NONE = (None,)

# By validator: the options that call it.
CALLERS = {
  NO_COUNT: """
    edgc.rank_max edgc.rank_min edgc.rank_multiple edgc.total_steps
    edgc.window edgc.max_rank_step powersgd.rank powersgd.window topk.chunk
    topk.min_size randomk.min_size quantize.block quantize.min_size
    Sampling.bins accumulate.every skip_nonfinite.max_consecutive
    local_steps.every local_steps.fragments split_local_steps.overlap
    split_local_steps.every describe.replicas wire_bytes.replicas
    advise.replicas advise.most_steps advise.shards measure_link.repeats
    measure_compression.repeats measure_backward.repeats
    measure_computing.replicas measure_computing.repeats resize_replicas.old
    resize_replicas.new resize_replicas.stages
  """,
  NO_INDEX: """
    edgc.warmup_steps edgc.max_warmup_steps powersgd.warmup_steps
    scanned.axis local_steps.overlap wire_bytes.rank
  """,
  NO_SHARE: """
    topk.density topk.residual_decay randomk.density quantize.residual_decay
    Sampling.step_rate Sampling.entry_rate
  """,
  NO_FLAG: """
    randomk.error_feedback quantize.error_feedback quantize.rotate
    value_and_grad.has_aux value_and_grad.is_local value_and_grad.averages
  """,
  NO_SECONDS: """
    Stages.backward_seconds clip_by_global_norm.max_norm
    wire_bytes.min_ratio advise.step_seconds advise.tolerance
    measure_link.budget edgc.min_ratio powersgd.min_ratio
  """,
  NO_FUNCTION: """
    value_and_grad.loss_fn scanned.view advise.matrix_view
    measure_backward.stage_fn
  """,
  NO_AXIS: """
    value_and_grad.axis_name clip_by_global_norm.stage_axis
    local_steps.axis_name state_specs.axis_name measure_link.axis_name
  """,
  NOT_NONE: """
    randomk.error_feedback quantize.error_feedback value_and_grad.loss_fn
    value_and_grad.has_aux value_and_grad.is_local value_and_grad.averages
    scanned.view accumulate.every skip_nonfinite.max_consecutive
    local_steps.every wire_bytes.rank advise.step_seconds
    measure_backward.stage_fn
  """,
  NO_TRANSFORMATION: """
    accumulate.tx skip_nonfinite.tx over_shards.tx local_steps.inner
    local_steps.outer describe.tx state_specs.tx
  """,
  NO_MESH: "local_steps.mesh describe.mesh state_specs.mesh",
}
# Further values of options.
FURTHER = {
  "mean_over.axis_name": AXES,
  "measure_compression.params": (None, {}),
  "advise.params": (None, {}),
  "wire_bytes.params": (None, {}),
  "edgc.rank_max": (10,),
  "edgc.rank_min": (10, 64),
  "edgc.warmup_rank": ("min", 0, 1.5),
  "edgc.rule": ("cqm", None),
  "edgc.sampling": (0.1, 0),
  "edgc.link": (1e8,),
  "edgc.compression": (1e8,),
  "powersgd.rank": (None, {}, {1: 4}, {0: -1}, {"0": 4}),
  "topk.chunk": (6, 5000),
  "topk.bits": (0, 3, 2, 32.0, None),
  "quantize.bits": (3, 0, 16, 2, 8.0, None),
  "quantize.block": (7,),
  "Sampling.estimator": ("",),
  "Stages.axis_name": ("", None, 3, ("a",)),
  "Stages.placement": ("own", None),
  "Stages.align": ("",),
  "ErrorAllocation.scale_exponent": (-0.1, 2.1, NAN, "1", jnp.float32(1)),
  "value_and_grad.mesh": (None, "data", {"data": 8}),
  "value_and_grad.axis_name": ("replica",),
  "clip_by_global_norm.max_norm": (0, None),
  "accumulate.param_specs": (P(),),
  "skip_nonfinite.axis_name": ("",),
  "local_steps.fragments": (3,),
  "local_steps.overlap": (5,),
  "split_local_steps.overlap": (5,),
  "describe.tx": (SGD,),
  "describe.params": (None, {}, "params", {"w": None}),
  "describe.param_specs": (P(), "data"),
  "wire_bytes.wire_dtype": ("float16", None, 3),
  "advise.link": (None, 1e8, (0.0, 1e8)),
  "advise.replicas": (1, None),
  "advise.computing": ([1.0], {"dense": NAN}, {"dense": "1"}),
  "measure_link.mesh": (None, "data", AbstractMesh((8,), ("data",))),
  "measure_link.axis_name": ("replica",),
  "measure_link.sizes": ((), (1024,), (1024, 1024), (4, 5), (2, 1024)),
  "measure_compression.ranks": ((8,), (8, 8), (0, 8)),
  "measure_compression.mesh": ("data", AbstractMesh((8,), ("data",))),
  "measure_backward.mesh": ("data", AbstractMesh((8,), ("data",))),
  "measure_computing.mesh": ("data", AbstractMesh((8,), ("data",))),
  "metrics.opt_state": (None, (), SGD.init(PARAMS)),
  "after_update.opt_state": (None, SGD.init(PARAMS)),
  "local_params.opt_state": (None, SGD.init(PARAMS)),
  "restore.path": (None, "", "/nowhere", __file__),
  "edgc.allocation": ("matrix", None),
  "powersgd.allocation": ("matrix", None),
  "edgc.wire_dtype": ("float16", None),
  "powersgd.wire_dtype": ("float16", None),
  "allreduce.wire_dtype": ("float16", None),
}  # fmt: skip
for name in REDUCERS:
  FURTHER |= {
    f"{name}.axis_name": ("",), f"{name}.check_every": (0, None),
    f"{name}.matrix_view": (3,), f"{name}.stages": ("stage", ""),
    f"{name}.mesh": ("data",), f"{name}.param_specs": (P("x"), "x"),
  }  # fmt: skip
for name in ("edgc", "powersgd", "quantize", "randomk"):
  FURTHER[f"{name}.seed"] = (-1, None)
OPTIONS = {}
for values, options in CALLERS.items():
  for option in options.split():
    OPTIONS[option] = (*OPTIONS.get(option, ()), *values)
for option, values in FURTHER.items():
  OPTIONS[option] = (*OPTIONS.get(option, ()), *values)


def mesh_of(*names):
  sizes = {1: (8,), 2: (2, 4)}[len(names)]
  return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def arguments(name):
  """Returns arguments with which a function of the package works."""
  reducer = edgc_jax.powersgd(4)
  outer = optax.chain(reducer, SGD)
  inner = {"inner": SGD, "outer": outer, "every": 4}
  params = {"params": PARAMS}
  return {
    "value_and_grad": lambda: {
      "loss_fn": lambda p, x: x.mean(), "mesh": mesh_of("data"),
    },
    "scanned": lambda: {"axis": 1},
    "clip_by_global_norm": lambda: {"max_norm": 1.0, "stage_axis": "stage"},
    "mean_over": lambda: {"axis_name": "data"},
    "accumulate": lambda: {"tx": SGD, "every": 2},
    "skip_nonfinite": lambda: {"tx": SGD},
    "over_shards": lambda: {"tx": SGD, "param_specs": P()},
    "local_steps": lambda: inner,
    "split_local_steps": lambda: inner | {"overlap": 1},
    "describe": lambda: params | {"tx": reducer},
    "wire_bytes": lambda: params | {"rank": 4},
    "state_specs": lambda: params | {"tx": reducer},
    "advise": lambda: params | {
      "link": LINK, "step_seconds": 0.1, "replicas": 2,
    },
    "measure_link": lambda: {"mesh": mesh_of("data")},
    "measure_compression": lambda: params,
    "measure_backward": lambda: params | {
      "stage_fn": lambda p, x: x, "inputs": 1.0,
    },
    "measure_computing": lambda: params | {"replicas": 2},
    "resize_replicas": lambda: {
      "opt_state": np.arange(8.0), "specs": P("data"), "old": 4, "new": 2,
    },
    "after_update": lambda: {"tree": 1.0},
    "local_params": lambda: params,
    "restore": lambda: params | {"tx": reducer, "mesh": mesh_of("data")},
  }.get(name, dict)()  # fmt: skip


def named(value):
  """Returns a short name, the same in each process: without addresses."""
  return getattr(value, "__name__", f"{value!r:.40}")


@pytest.mark.parametrize("name", VALIDATORS)
def test_a_validator_refuses_all_bad_values(name):
  rest, values = VALIDATORS[name]
  for value in values:
    refused(
      lambda value=value: getattr(validation, name)("option", value, *rest),
      "`option`",
      "got ",
    )


def test_every_validator_is_in_the_table():
  found = {name for name in vars(validation) if name.startswith("require_")}
  assert found == set(VALIDATORS)


CASES = [
  pytest.param(*option.split("."), value, id=f"{option}-{named(value)}")
  for option, values in OPTIONS.items()
  for value in values
]


@pytest.mark.parametrize("name, option, value", CASES)
def test_a_bad_option_is_refused(name, option, value):
  given = arguments(name) | {option: value}
  refused(lambda: getattr(edgc_jax, name)(**given), "`", "got ")


def test_every_option_is_in_the_table():
  """A new option of a reducer gets its values here."""
  for name in REDUCERS:
    options = inspect.signature(edgc_jax.REDUCERS[name]).parameters
    assert {f"{name}.{option}" for option in options} <= set(OPTIONS)


@pytest.mark.parametrize(
  "call, parts",
  [
    (lambda: edgc_jax.edgc(sampling=0.1), ["`sampling`", "edgc_jax.Sampling"]),
    (lambda: edgc_jax.topk(stages=""), ["`stages`", "edgc_jax.Stages"]),
    (lambda: edgc_jax.edgc(rule=2.0), ["`rule` must be a function of a"]),
    (lambda: edgc_jax.edgc(rank_max=8, rank_min=16), ["`rank_min`", "16"]),
    (lambda: edgc_jax.quantize(2), ["`error_feedback`"]),
    (lambda: edgc_jax.quantize(8, rotate=True), ["`rotate`"]),
    (
      lambda: edgc_jax.quantize(2, block=2**16, error_feedback=True),
      ["`block`", "4096"],
    ),
    (lambda: edgc_jax.edgc(max_warmup_steps=5), ["`max_warmup_steps`", "5"]),
    (lambda: edgc_jax.topk(bits=2), ["`bits`", "chunk"]),
    (lambda: edgc_jax.edgc("replica", mesh=mesh_of("data")), ["'replica'"]),
    (
      lambda: edgc_jax.powersgd(
        mesh=mesh_of("data"), stages=edgc_jax.Stages("stage")
      ),
      ["`mesh`", "stages"],
    ),
    (lambda: edgc_jax.Sampling.for_window("a"), ["`window`", "'a'"]),
    (lambda: edgc_jax.Sampling.for_window(0), ["`window`", "0"]),
    (lambda: edgc_jax.LinkModel(NAN, 1.0), ["`latency`", "nan"]),
    (lambda: edgc_jax.LinkModel(0.0, 0.0), ["`bandwidth`", "0.0"]),
    (lambda: edgc_jax.LinkModel(0.0, "fast"), ["`bandwidth`", "'fast'"]),
    (lambda: edgc_jax.LinkModel.of_uplink(-1, 0.1, 2), ["`megabits`", "-1"]),
    (lambda: edgc_jax.LinkModel.of_uplink(1, 0.1, 1), ["`replicas`", "1"]),
    (lambda: edgc_jax.CompressionModel(0.0, INF), ["`per_rank`", "inf"]),
  ],
)
def test_options_that_do_not_go_together(call, parts):
  refused(call, *parts)


@pytest.mark.parametrize(
  "window, period", [(5, 1), (15, 1), (20, 2), (35, 3), (1000, 10)]
)
def test_ten_samples_in_a_window(window, period):
  sampling = edgc_jax.Sampling.for_window(window)
  assert sampling.period == period
  assert sampling.entry_rate == pytest.approx(0.025 * period, rel=0, abs=5e-8)
  assert window // period >= min(window, 10)


# Trees.


def state_of(params, tx=None):
  return (tx or edgc_jax.powersgd(4)).init(params)


def stacked(tree, replicas=2):
  return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * replicas), tree)


def update(gradients, state, params=None, tx=None):
  """Traces an update on replicas that `vmap` binds; computes nothing."""
  tx = tx or edgc_jax.powersgd(4)
  bound = jax.vmap(tx.update, axis_name="data", in_axes=(0, None, None))
  jax.eval_shape(bound, stacked(gradients), state, params)


@pytest.mark.parametrize(
  "leaf",
  [
    jnp.zeros((64, 32), jnp.int32), jnp.zeros((64, 32), jnp.complex64),
    jnp.zeros((64, 32), bool), jax.random.key(0), 3, "text", object(),
    np.array([None, 1]), np.array(["a"]), len,
  ],
  ids=range(10),
)  # fmt: skip
def test_leaves_that_are_no_floats(leaf):
  message = refused(lambda: state_of({"w": leaf}), "at ['w']", "optax.masked")
  assert "real floating" in message


@pytest.mark.parametrize(
  "params",
  [
    None, {}, [], {"w": None}, {"w": jnp.zeros((0, 4))}, {"w": jnp.zeros(())},
    {"w": jnp.zeros((4, 0)), "b": jnp.zeros(3)},
  ],
  ids=lambda params: f"{jax.tree.map(jnp.shape, params)}",
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:No leaf saves")
@pytest.mark.parametrize("reducer", ["powersgd", "topk", "quantize"])
def test_trees_without_values_have_a_state(reducer, params):
  """As those that a mask leaves: they are sent without an error."""
  tx = edgc_jax.REDUCERS[reducer]()
  state = tx.init(params)
  if jax.tree.leaves(params):
    update(params, state, tx=tx)


W, B = PARAMS["w"], PARAMS["b"]


@pytest.mark.parametrize(
  "gradients, state, params, parts",
  [
    ({"v": W, "b": B}, None, None, ["none at ['w']"]),
    ({"w": W, "b": B, "c": B}, None, None, ["one more at ['c']"]),
    ([W, B], None, None, ["`updates`"]),
    ({"w": W.T, "b": B}, None, None, ["(32, 64)"]),
    ({"w": W, "b": B.astype(int)}, None, None, ["int32 at ['b']"]),
    (PARAMS, (), None, ["`state`", "tuple"]),
    (PARAMS, None, {"w": W}, ["`params`", "1 arrays"]),
    (PARAMS, None, {"w": B, "b": W}, ["`params`", "(64,"]),
    (PARAMS, SGD.init(PARAMS), None, ["`state`"]),
    (PARAMS, edgc_jax.topk().init(PARAMS), None, ["`state`", "other options"]),
    (PARAMS, state_of({"w": W.T, "b": B}), None, ["`state`"]),
    (PARAMS, (state_of(PARAMS),), None, ["`state`", "whole chain"]),
  ],
)
def test_arguments_of_update(gradients, state, params, parts):
  state = state_of(PARAMS) if state is None else state
  refused(lambda: update(gradients, state, params), *parts)


def test_frozen_parameters_without_gradients():
  """As those that a filter leaves: None for a gradient, the array beside it."""
  trained = {"w": W, "b": None}
  update(trained, state_of(trained), PARAMS)


def test_an_axis_that_is_not_bound():
  tx = edgc_jax.powersgd(4)
  refused(lambda: tx.update(PARAMS, tx.init(PARAMS)), "`axis_name`", "mesh=")
  refused(lambda: edgc_jax.follow_first_replica(PARAMS), "`axis_name`")


@pytest.mark.parametrize(
  "view",
  ["a", (64, 32), (1, 2, 3), (1.0, 64.0, 32.0), 3, (1, None, 32), [[1, 64]]],
)
def test_views_that_are_no_matrices(view):
  tx = edgc_jax.powersgd(4, matrix_view=lambda path, shape: view)
  refused(lambda: tx.init({"w": W}), "`matrix_view`", "['w']")


@pytest.mark.parametrize(
  "specs, parts",
  [
    ({"v": P()}, ["tree like the parameters"]),
    ({"w": "x", "b": P()}, ["'x'", "['w']"]),
    ({"w": 3, "b": P()}, ["3", "['w']"]),
    ({"w": P("y"), "b": P()}, ["'y'"]),
    ({"w": P(None, None, "x"), "b": P()}, ["(64, 32)"]),
    ({"w": P(), "b": P("x")}, ["(30,)"]),
    (P("data"), ["replicas"]),
    ({"w": P(("data", "x")), "b": P()}, ["replicas"]),
  ],
)
def test_specs_that_do_not_fit(specs, parts):
  params, tx = {"w": W, "b": jnp.zeros(30)}, edgc_jax.powersgd(4)
  how = {"mesh": mesh_of("data", "x"), "param_specs": specs}
  for call in (
    lambda: edgc_jax.powersgd(4, **how).init(params),
    lambda: edgc_jax.describe(tx, params, **how),
    lambda: edgc_jax.state_specs(tx, params, **how),
  ):
    refused(call, "`param_specs`", *parts)


# The loss.


@pytest.mark.parametrize(
  "loss_fn, has_aux",
  [
    (lambda p, x: x @ p["w"], False),
    (lambda p, x: jnp.int32(1), False),
    (lambda p, x: None, False),
    (lambda p, x: "loss", False),
    (lambda p, x: (jnp.float32(1), 2), False),
    (lambda p, x: jnp.float32(1), True),
    (lambda p, x: (x @ p["w"], 2), True),
    (lambda p, x: (jnp.float32(1), 2, 3), True),
  ],
  ids=range(8),
)
def test_losses_that_are_no_numbers(loss_fn, has_aux):
  grad = edgc_jax.value_and_grad(loss_fn, mesh_of("data"), has_aux=has_aux)
  refused(lambda: grad(PARAMS, X), "`loss_fn`", "has_aux")


X = jnp.zeros((8, 64))


@pytest.mark.parametrize(
  "params, batch, options",
  [
    *(
      (PARAMS, x, {})
      for x in (jnp.zeros((9, 64)), None, "batch", jax.random.PRNGKey(0))
    ),
    *((PARAMS, X, {"in_axes": axes}) for axes in (1, (0, 0), "a", None)),
    (PARAMS, X, {"is_local": True}),
    ({"w": W.astype(int)}, X, {}),
    ({"w": "text"}, X, {}),
  ],
  ids=range(11),
)
def test_arguments_of_a_loss(params, batch, options):
  grad = edgc_jax.value_and_grad(
    lambda p, x: jnp.mean(x @ p["w"]), mesh_of("data"), **options
  )
  refused(lambda: grad(params, batch))


# Arguments of states.


@pytest.mark.parametrize(
  "call, parts",
  [
    (
      lambda: edgc_jax.resize_replicas(np.arange(7.0), P("data"), 2, 4),
      ["`old`", "(7,)"],
    ),
    (
      lambda: edgc_jax.resize_replicas(np.float32(1), P("data"), 2, 4),
      ["`old`", "()"],
    ),
    (
      lambda: edgc_jax.resize_replicas({"a": W}, {"b": P("data")}, 2, 4),
      ["`specs`"],
    ),
    (lambda: edgc_jax.metrics((state_of(PARAMS),) * 2), ["`opt_state`", "2"]),
    *(
      (lambda tx=tx: tx.update(PARAMS, SGD.init(PARAMS), PARAMS), ["`state`"])
      for tx in (edgc_jax.accumulate(SGD, 2), edgc_jax.skip_nonfinite(SGD))
    ),
    (
      lambda: (tx := edgc_jax.accumulate(SGD, 2)).update(
        {**PARAMS, "w": None}, tx.init(PARAMS), PARAMS
      ),
      ["`updates`", "['w']", "None"],
    ),
    (
      lambda: (tx := edgc_jax.local_steps(SGD, OUTER, 2)).update(
        {**PARAMS, "w": None}, tx.init(PARAMS), PARAMS, local_params=PARAMS
      ),
      ["`updates`", "['w']", "None"],
    ),
    (lambda: edgc_jax.allreduce(["data"]), ["`axis_name`", "tuple"]),
    (
      lambda: edgc_jax.local_steps(SGD, SGD, 2).init(PARAMS),
      ["`outer`", "allreduce"],
    ),
    (
      lambda: edgc_jax.local_steps(SGD, OUTER, 4, fragments=4).init(PARAMS),
      ["`fragments`", "at most 2"],
    ),
    (
      lambda: edgc_jax.powersgd(4, mesh=mesh_of("data")).update(
        PARAMS, state_of(PARAMS), PARAMS
      ),
      ["`updates`", "stacked"],
    ),
    (
      lambda: edgc_jax.apply_stages(lambda p, x: x, W, W),
      ["`axis_name`", "stage"],
    ),
  ],
)
def test_states(call, parts):
  refused(call, *parts)


def test_restore_of_what_is_no_checkpoint(tmp_path):
  given = {"tx": edgc_jax.powersgd(4), "params": PARAMS}
  given["mesh"] = mesh_of("data")
  (tmp_path / "_METADATA").write_text("{")
  refused(lambda: edgc_jax.restore(tmp_path, **given), "`path`", str(tmp_path))


# Any values.

VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=5)
  | st.binary(max_size=3)
  | st.sampled_from(["data", "error", "int8", "max", np.dtype("int8")]),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.integers(0, 3), inner, max_size=2)
  ),
  max_leaves=4,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:No leaf saves")
@drawn(300)
@given(st.data())
def test_any_options_of_a_reducer(data):
  """A reducer takes any values, or refuses them by a clear error."""
  make = edgc_jax.REDUCERS[data.draw(st.sampled_from(REDUCERS))]
  names = st.sampled_from(list(inspect.signature(make).parameters))
  options = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
  tx = allowed_or_clear(lambda: make(**options))
  if tx is not None:
    allowed_or_clear(lambda: jax.eval_shape(tx.init, PARAMS))


def test_long_values_are_cut():
  message = refused(lambda: edgc_jax.powersgd(np.zeros((100, 100))))
  assert len(message) < 600
