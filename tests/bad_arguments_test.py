"""Bad arguments of the package: each is refused by one clear error of its own.

Each validator refuses all its bad values, and each option one of them;
Hypothesis looks for further ones. What mistakes do that pass these checks is
tested in tests/reducer/mistakes_test.py.
"""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.meshes import mesh_of
from helpers.refusals import allowed_or_clear, drawn, refused
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
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

# By bad value: the options that have to refuse it.
OPTIONS = {
  0: """
    edgc.rank_max edgc.rank_min edgc.rank_multiple edgc.total_steps edgc.window
    edgc.max_rank_step edgc.sampling powersgd.window topk.chunk topk.min_size
    randomk.min_size quantize.block quantize.min_size Sampling.bins
    clip_by_global_norm.max_norm accumulate.every skip_nonfinite.max_consecutive
    local_steps.every split_local_steps.overlap
    split_local_steps.every describe.replicas wire_bytes.replicas
    advise.replicas advise.most_steps advise.shards measure_link.repeats
    measure_compression.repeats measure_backward.repeats
    measure_computing.replicas measure_computing.repeats
  """,
  -1: """
    edgc.warmup_steps edgc.max_warmup_steps edgc.seed edgc.min_ratio
    powersgd.seed powersgd.min_ratio quantize.seed
    randomk.seed scanned.axis local_steps.overlap wire_bytes.rank
    wire_bytes.min_ratio Stages.backward_seconds clip_by_global_norm.max_norm
    advise.step_seconds advise.tolerance measure_link.budget
  """,
  1.5: """
    topk.density topk.residual_decay randomk.density quantize.residual_decay
    Sampling.step_rate Sampling.entry_rate randomk.error_feedback
    quantize.error_feedback quantize.rotate value_and_grad.has_aux
    value_and_grad.is_local value_and_grad.averages
  """,
  3: """
    edgc.rule value_and_grad.loss_fn scanned.view advise.matrix_view
    measure_backward.stage_fn topk.bits quantize.bits Stages.placement
  """,
  "": """
    value_and_grad.axis_name clip_by_global_norm.stage_axis Stages.axis_name
    local_steps.axis_name state_specs.axis_name measure_link.axis_name
    skip_nonfinite.axis_name restore.path Sampling.estimator Stages.align
  """,
  None: """
    edgc.allocation edgc.wire_dtype powersgd.rank powersgd.allocation
    powersgd.wire_dtype allreduce.wire_dtype wire_bytes.wire_dtype
    wire_bytes.params describe.params measure_compression.params advise.params
    advise.link measure_link.mesh restore.path
    metrics.opt_state after_update.opt_state local_params.opt_state
  """,
  "sgd": """
    advise.optimizer measure_computing.optimizer
    accumulate.tx skip_nonfinite.tx on_mesh.tx local_steps.inner
    local_steps.outer describe.tx state_specs.tx edgc.warmup_rank edgc.link
    edgc.compression
  """,
  "data": """
    local_steps.mesh describe.mesh state_specs.mesh value_and_grad.mesh
    measure_link.mesh measure_compression.mesh measure_backward.mesh
    measure_computing.mesh describe.param_specs
  """,
}
# Of other rules, by option.
FURTHER = {
  "mean_over.axis_name": (3, (), [], ("a", "a"), ("a", None), b"data"),
  "measure_compression.params": ({},),
  "edgc.rank_max": (10,), "edgc.rank_min": (10, 64), "edgc.warmup_rank": (0,),
  "powersgd.rank": (0, 1.5, {0: 0}, {}, {1: 4}, {0: -1}, {"0": 4}),
  "edgc.allocation": ("matrix",), "allreduce.wire_dtype": ("float16",),
  "after_update.opt_state": (SGD.init(PARAMS),),
  "topk.chunk": (6, 5000), "quantize.block": (7,),
  "Stages.axis_name": (("a",),),
  "ErrorAllocation.scale_exponent": (-0.1, 2.1, NAN, "1", jnp.float32(1)),
  "value_and_grad.axis_name": ("replica",),
  "accumulate.param_specs": (3,), "local_steps.param_specs": (3,),
  "on_mesh.param_specs": (3, {"w": "x"}), "on_mesh.axis_name": ("",),
  "on_mesh.mesh": ("data",),
  "local_steps.overlap": (5,),
  "split_local_steps.overlap": (5,),
  "describe.tx": (SGD,), "describe.params": ({"w": None},),
  "advise.replicas": (1,),
  "advise.computing": ([1.0], {"dense": NAN}, {"dense": "1"}),
  "measure_link.axis_name": ("replica",),
  "measure_link.sizes": ((1024,), (2, 1024)),
  "measure_compression.ranks": ((8, 8),),
  "metrics.opt_state": (SGD.init(PARAMS),),
  "local_params.opt_state": (SGD.init(PARAMS),),
  "restore.path": ("/nowhere", __file__),
}  # fmt: skip
for name in ("link", "compression", "backward", "computing"):
  FURTHER[f"measure_{name}.mesh"] = (AbstractMesh((8,), ("data",)),)
for name in REDUCERS:
  FURTHER |= {
    f"{name}.axis_name": ("",), f"{name}.check_every": (0,),
    f"{name}.matrix_view": (3,), f"{name}.stages": ("stage",),
  }  # fmt: skip
CASES = [
  *((x, value) for value, text in OPTIONS.items() for x in text.split()),
  *((x, value) for x, values in FURTHER.items() for value in values),
]


def arguments(name):
  """Returns arguments with which a function of the package works."""
  data, reducer = mesh_of((8,)), edgc_jax.powersgd(4)
  inner = {"inner": SGD, "outer": optax.chain(reducer, SGD), "every": 4}
  params = {"params": PARAMS}
  return {
    "value_and_grad": {"loss_fn": lambda p, x: x.mean(), "mesh": data},
    "scanned": {"axis": 1},
    "clip_by_global_norm": {"max_norm": 1.0, "stage_axis": "stage"},
    "mean_over": {"axis_name": "data"},
    "accumulate": {"tx": SGD, "every": 2},
    "skip_nonfinite": {"tx": SGD},
    "on_mesh": {"tx": reducer, "param_specs": P()},
    "local_steps": inner,
    "split_local_steps": inner | {"overlap": 1},
    "describe": params | {"tx": reducer},
    "wire_bytes": params | {"rank": 4},
    "state_specs": params | {"tx": reducer},
    "advise": params | {"link": LINK, "step_seconds": 0.1, "replicas": 2},
    "measure_link": {"mesh": data},
    "measure_compression": params,
    "measure_backward": params | {"stage_fn": lambda p, x: x, "inputs": 1.0},
    "measure_computing": params | {"replicas": 2},
    "after_update": {"tree": 1.0},
    "local_params": params,
    "restore": params | {"tx": reducer, "mesh": data},
  }.get(name, {})  # fmt: skip


@pytest.mark.parametrize("name", VALIDATORS)
def test_a_validator_refuses_all_bad_values(name):
  (rest, values), require = VALIDATORS[name], getattr(validation, name)
  for value in values:
    refused(lambda v=value: require("option", v, *rest), "`option`", "got ")


@pytest.mark.parametrize(
  "option, value", CASES, ids=(f"{x}-{n}" for n, (x, _) in enumerate(CASES))
)
def test_a_bad_option_is_refused(option, value):
  name, option = option.split(".")
  given = arguments(name) | {option: value}
  refused(lambda: getattr(edgc_jax, name)(**given), "`", "got ")


def test_validators_and_options_are_in_the_tables():
  """A new one gets its values here."""
  found = {name for name in vars(validation) if name.startswith("require_")}
  assert found == set(VALIDATORS)
  for name in REDUCERS:
    options = inspect.signature(edgc_jax.REDUCERS[name]).parameters
    assert {f"{name}.{x}" for x in options} <= {case[0] for case in CASES}


@pytest.mark.parametrize(
  "window, period", [(5, 1), (15, 1), (20, 2), (35, 3), (1000, 10)]
)
def test_ten_samples_in_a_window(window, period):
  sampling = edgc_jax.Sampling.for_window(window)
  assert sampling.period == period
  assert sampling.entry_rate == pytest.approx(0.025 * period, rel=0, abs=5e-8)
  assert window // period >= min(window, 10)


TX = edgc_jax.powersgd(4)


def update(gradients, tx, params=None, *, state=None):
  """Traces an update on replicas that `vmap` binds; computes nothing."""
  state = tx.init(PARAMS) if state is None else state
  both = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), gradients)
  bound = jax.vmap(tx.update, axis_name="data", in_axes=(0, None, None))
  jax.eval_shape(bound, both, state, params)


@pytest.mark.parametrize(
  "leaf",
  [
    jnp.zeros(4, int), jnp.zeros(4, complex), jnp.zeros(4, bool),
    jax.random.key(0), 3, 1.0, "text", object(), np.array([None, 1]), len,
  ],
  ids=range(10),
)  # fmt: skip
def test_leaves_that_are_no_floats(leaf):
  parts = "at ['w']", "real floating", "optax.masked"
  refused(lambda: TX.init({"w": leaf}), *parts)


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
    update(params, tx, state=state)


W, B = PARAMS["w"], PARAMS["b"]


def test_frozen_parameters_without_gradients():
  """As those that a filter leaves: None for a gradient, the array beside it."""
  trained = {"w": W, "b": None}
  update(trained, TX, PARAMS, state=TX.init(trained))


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
  params = {"w": W, "b": jnp.zeros(30)}
  how = {"mesh": mesh_of(names=("data", "x")), "param_specs": specs}
  for call in (
    lambda: edgc_jax.on_mesh(TX, **how).init(params),
    lambda: edgc_jax.describe(TX, params, **how),
    lambda: edgc_jax.state_specs(TX, params, **how),
  ):
    refused(call, "`param_specs`", *parts)


X, Y = jnp.zeros((8, 64)), {**PARAMS, "w": None}
OTHER = {"w": W.T, "b": B}
ONE, DATA = jnp.float32(1), "data"
grad = edgc_jax.value_and_grad


@pytest.mark.parametrize(
  "loss_fn, has_aux",
  [
    (lambda p, x: x @ p["w"], False), (lambda p, x: jnp.int32(1), False),
    (lambda p, x: None, False), (lambda p, x: (ONE, 2), False),
    (lambda p, x: ONE, True), (lambda p, x: (x @ p["w"], 2), True),
    (lambda p, x: (ONE, 2, 3), True),
  ],
  ids=range(7),
)  # fmt: skip
def test_losses_that_are_no_numbers(loss_fn, has_aux):
  loss = grad(loss_fn, mesh_of((8,)), has_aux=has_aux)
  refused(lambda: loss(PARAMS, X), "`loss_fn`", "has_aux")


@pytest.mark.parametrize(
  "params, batch, options",
  [
    (PARAMS, jnp.zeros((9, 64)), {}), (PARAMS, None, {}),
    (PARAMS, "batch", {}), (PARAMS, jax.random.PRNGKey(0), {}),
    *((PARAMS, X, {"in_axes": axes}) for axes in (1, (0, 0), "a", None)),
    (PARAMS, X, {"is_local": True}), ({"w": W.astype(int)}, X, {}),
  ],
  ids=range(10),
)  # fmt: skip
def test_arguments_of_a_loss(params, batch, options):
  loss = grad(lambda p, x: jnp.mean(x @ p["w"]), mesh_of((8,)), **options)
  refused(lambda: loss(params, batch))


@pytest.mark.parametrize(
  "call, parts",
  [
    # Options.
    (lambda: edgc_jax.topk(stages=""), ["`stages`", "edgc_jax.Stages"]),
    (lambda: edgc_jax.edgc(max_rank_step=2), ["`max_rank_step`", "2"]),
    (lambda: edgc_jax.edgc(max_warmup_steps=5), ["`max_warmup_steps`", "5"]),
    (
      lambda: edgc_jax.edgc(window=48, sampling=edgc_jax.Sampling(1 / 49)),
      ["`window` must be at least 1 / step_rate"],
    ),
    (
      lambda: edgc_jax.edgc(warmup_rank=4).init({"w": jnp.zeros((80, 80))}),
      ["`warmup_rank`", "at least", "8"],
    ),
    (lambda: edgc_jax.quantize(2), ["`error_feedback`"]),
    (lambda: edgc_jax.quantize(8, rotate=True), ["`rotate`"]),
    (
      lambda: edgc_jax.quantize(2, block=2**16, error_feedback=True),
      ["`block`", "4096"],
    ),
    (lambda: edgc_jax.topk(bits=2), ["`bits`", "chunk"]),
    (
      lambda: edgc_jax.on_mesh(TX, mesh_of((8,)), axis_name="replica"),
      ["'replica'"],
    ),
    (
      lambda: edgc_jax.on_mesh(OUTER, mesh_of((8,))).init(PARAMS),
      ["`tx`", "a reducer alone"],
    ),
    (
      lambda: edgc_jax.on_mesh(
        edgc_jax.powersgd(2, "replica"), mesh_of((8,))
      ).init(PARAMS),
      ["`axis_name`", "'replica'"],
    ),
    (lambda: edgc_jax.extend.reducer(print), ["edgc_jax.extend.Method"]),
    *(
      (lambda tx=tx: tx.init(PARAMS), ["`param_specs`", "jax.set_mesh"])
      for tx in (
        edgc_jax.on_mesh(edgc_jax.powersgd(4), param_specs=P()),
        edgc_jax.accumulate(SGD, 2, param_specs=P()),
        edgc_jax.local_steps(
          SGD, optax.chain(edgc_jax.powersgd(4), SGD), 2, param_specs=P()
        ),
      )
    ),
    (lambda: edgc_jax.Sampling.for_window("a"), ["`window`", "'a'"]),
    (lambda: edgc_jax.LinkModel(NAN, 1.0), ["`latency`", "nan"]),
    (lambda: edgc_jax.LinkModel(0.0, 0.0), ["`bandwidth`", "0.0"]),
    (lambda: edgc_jax.LinkModel(0.0, INF), ["`bandwidth`", "inf"]),
    (lambda: edgc_jax.LinkModel(0.0, "fast"), ["`bandwidth`", "'fast'"]),
    (lambda: edgc_jax.LinkModel.of_uplink(-1, 0.1, 2), ["`megabits`", "-1"]),
    (lambda: edgc_jax.LinkModel.of_uplink(1, 0.1, 1), ["`replicas`", "1"]),
    (lambda: edgc_jax.CompressionModel(0.0, INF), ["`per_rank`", "inf"]),
    (lambda: edgc_jax.CompressionModel(-1.0, 0.0), ["`base`", "-1.0"]),
    (lambda: edgc_jax.allreduce(["data"]), ["`axis_name`", "tuple"]),
    # Gradients, parameters and states.
    (lambda: update({"v": W, "b": B}, TX), ["none at ['w']"]),
    (lambda: update({"w": W, "b": B, "c": B}, TX), ["one more at ['c']"]),
    (lambda: update([W, B], TX), ["`updates`"]),
    (lambda: update(OTHER, TX), ["(1, 32, 64)"]),
    (lambda: update({"w": W, "b": B.astype(int)}, TX), ["int32 at ['b']"]),
    (lambda: update(PARAMS, TX, {"w": W}), ["`params`", "1 arrays"]),
    (lambda: update(PARAMS, TX, {"w": B, "b": W}), ["`params`", "(64,"]),
    (lambda: update(PARAMS, TX, state=()), ["`state`", "tuple"]),
    (lambda: update(PARAMS, TX, state=SGD.init(PARAMS)), ["`state`"]),
    (
      lambda: update(PARAMS, TX, state=edgc_jax.topk().init(PARAMS)),
      ["`state`", "other options"],
    ),
    (lambda: update(PARAMS, TX, state=TX.init(OTHER)), ["`state`"]),
    (
      lambda: update(PARAMS, TX, state=(TX.init(PARAMS),)),
      ["`state`", "whole chain"],
    ),
    *(
      (
        lambda update=update: update(PARAMS, TX.init(PARAMS)),
        ["`axis_name`", "'data'", "jax.set_mesh", "pmap"],
      )
      for update in (TX.update, jax.jit(TX.update))
    ),
    (lambda: edgc_jax.follow_first_replica(PARAMS), ["`axis_name`"]),
    (lambda: edgc_jax.metrics((TX.init(PARAMS),) * 2), ["`opt_state`", "2"]),
    *(
      (lambda tx=tx: tx.update(PARAMS, SGD.init(PARAMS), PARAMS), ["`state`"])
      for tx in (edgc_jax.accumulate(SGD, 2), edgc_jax.skip_nonfinite(SGD))
    ),
    (
      lambda: (tx := edgc_jax.accumulate(SGD, 2)).update(
        Y, tx.init(PARAMS), PARAMS
      ),
      ["`updates`", "['w']", "None"],
    ),
    (
      lambda: (tx := edgc_jax.local_steps(SGD, OUTER, 2)).update(
        Y, tx.init(PARAMS), PARAMS, local_params=PARAMS
      ),
      ["`updates`", "['w']", "None"],
    ),
    (
      lambda: edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh_of((8,))).update(
        PARAMS, TX.init(PARAMS), PARAMS
      ),
      ["`updates`", "stacked"],
    ),
  ],
  ids=itertools.count(),
)  # fmt: skip
def test_arguments_that_do_not_go_together(call, parts):
  refused(call, *parts)


def test_restore_of_what_is_no_checkpoint(tmp_path):
  (tmp_path / "_METADATA").write_text("{")
  call = lambda: edgc_jax.restore(tmp_path, **arguments("restore"))  # noqa: E731
  refused(call, "`path`", str(tmp_path))


VALUES = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
  | st.sampled_from(["data", "error", "int8", "max", b"0", np.dtype("int8")]),
  lambda inner: (
    st.lists(inner, max_size=3) | st.tuples(inner, inner)
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
