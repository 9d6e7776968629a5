"""Advice follows the models of time, and what methods cost in steps."""

import jax
import numpy as np
import pytest
from helpers import float32

import edgc_jax
from edgc_jax import LinkModel
from edgc_jax.measure import advice, timing
from edgc_jax.measure.evidence import Evidence

PARAMS = {
  "bias": jax.ShapeDtypeStruct((512,), "float32"),
  "kernel": jax.ShapeDtypeStruct((4, 512, 1024), "float32"),
}
SIZE = 512 + 4 * 512 * 1024
FACTORS = {"wire_dtype": "int4", "allocation": "error", "min_ratio": 1.0}


def evidence(name, reducer, options, bits, steps, every=1):
  outer = {"learning_rate": 0.7, "momentum": 0.9} if every > 1 else {}
  return Evidence(
    name,
    "adamw",
    reducer,
    options,
    every,
    outer,
    bits,
    bits,
    0.0,
    0.0,
    steps,
    3,
    True,
  )


JUDGED = (
  evidence("dense", "allreduce", {}, 32.0, 1.0),
  evidence(
    "dense, bfloat16", "allreduce", {"wire_dtype": "bfloat16"}, 16.0, 1.02
  ),
  evidence("powersgd 40", "powersgd", {**FACTORS, "rank": 40.0}, 2.0, 1.1),
  evidence("powersgd 20", "powersgd", {**FACTORS, "rank": 20.0}, 1.0, 1.2),
  evidence("dense, every 8", "allreduce", {}, 4.0, 1.4, every=8),
  evidence("powersgd 20, every 8", "powersgd", {**FACTORS, "rank": 20.0},
           0.125, 1.6, every=8),
)  # fmt: skip
NAMES = (
  "dense", "dense, bfloat16", "powersgd, rank 168, int4, error",
  "powersgd, rank 84, int4, error", "dense, every 8",
  "powersgd, rank 84, int4, error, every 8",
)  # fmt: skip


@pytest.fixture(scope="module")
def found_once():
  """Returns candidates from a cache: they do not depend on the link."""
  found, find = {}, advice._judged

  def judged_for(params, replicas, view, optimizer):
    key = str(params), replicas, view, optimizer, id(advice.of_protocol)
    if key not in found:
      found[key] = advice.of_protocol, find(params, replicas, view, optimizer)
    return found[key][1]

  return judged_for


def judged_methods():
  return {"adamw": JUDGED, "muon": JUDGED[::2]}


@pytest.fixture(autouse=True)
def judged(monkeypatch, found_once):
  monkeypatch.setattr(advice, "of_protocol", judged_methods)
  monkeypatch.setattr(advice, "_judged", found_once)


def advise(link, step_seconds=0.1, replicas=4, params=PARAMS, **options):
  return advice.advise(params, link, step_seconds, replicas, **options)


def by_name(found):
  return {method.name: method for method in found.methods}


def test_ranks_send_the_bits_that_the_protocol_judged():
  found = by_name(advise(LinkModel(1e-3, 1e7)))
  assert tuple(found) == NAMES
  for name, bits in (
    (NAMES[2], 2.0), (NAMES[3], 1.0), (NAMES[5], 0.125),
  ):  # fmt: skip
    assert found[name].bits == pytest.approx(bits, rel=0.03)
    # One rank more would send too much.
    own = {k: v for k, v in FACTORS.items() if k != "allocation"}
    sent, more = (
      8 / SIZE * float32.wire_bytes(PARAMS, rank, replicas=4, **own)
      for rank in (found[name].options["rank"], found[name].options["rank"] + 1)
    )
    every = found[name].every
    assert sent / every <= 1.02 * bits < more / every
  assert found["dense"].wire_bytes == 4 * SIZE
  narrow = edgc_jax.wire_bytes(PARAMS, 0, wire_dtype="bfloat16", replicas=4)
  assert found["dense, bfloat16"].wire_bytes == narrow


def test_seconds_by_hand():
  link = LinkModel(1e-3, 1e7)
  computing = {name: 0.01 * i for i, name in enumerate(NAMES)}
  found = by_name(advise(link, computing=computing))
  # Collectives in sequence; encoded values are reduced in parts.
  for name, trips, every, steps in zip(
    NAMES, (1, 2, 3, 3, 1, 3), (1, 1, 1, 1, 8, 8),
    (1.0, 1.02, 1.1, 1.2, 1.4, 1.6), strict=True,
  ):  # fmt: skip
    method = found[name]
    own = computing[name.removesuffix(", every 8")]
    exchange = trips * 1e-3 + own + method.wire_bytes / 1e7
    assert method.seconds == pytest.approx(0.1 + exchange / every)
    assert (method.every, method.steps) == (every, steps)
    assert method.time == pytest.approx(steps * method.seconds)


def test_the_choice_has_the_fewest_steps_of_the_soon_ones():
  for bandwidth in 10.0 ** np.arange(4, 12):
    for tolerance in (0.0, 0.1, 0.5):
      found = advise(LinkModel(1e-4, bandwidth), tolerance=tolerance)
      steps = [method.steps for method in found.methods]
      assert steps == sorted(steps)
      limit = (1 + tolerance) * min(method.time for method in found.methods)
      soon = [method for method in found.methods if method.time <= limit]
      assert found.choice == soon[0], (bandwidth, tolerance)


@pytest.mark.parametrize("latency", [1e-3, 0.1])
def test_break_even(latency):
  """At the break-even bandwidth a method takes as long as dense."""
  checked = 0
  for method in advise(LinkModel(latency, 1e7)).methods[1:]:
    if not 0 < method.break_even < np.inf:
      continue
    again = by_name(advise(LinkModel(latency, method.break_even)))
    assert again[method.name].time == pytest.approx(again["dense"].time)
    checked += 1
  assert checked >= 3


def test_methods_without_a_rank_of_so_few_bits_are_left_out():
  params = {"kernel": jax.ShapeDtypeStruct((8, 12), "float32")}
  names = list(by_name(advise(LinkModel(1e-3, 1e7), params=params)))
  assert names == ["dense", "dense, bfloat16", "dense, every 8"]


def test_a_table_for_people():
  link = LinkModel.of_uplink(100, 0.01, replicas=4, shards=2)
  found = advise(link, shards=2)
  text = str(found).splitlines()
  assert text[0] == (
    "4 replicas, uplinks of 100 Mbit/s, 30 ms an all-reduce, 0.1 s a step"
    " without exchange"
  )
  assert len(text) == 2 + len(NAMES) + 2 + len(found.assumptions)
  for line, method in zip(text[2:], found.methods, strict=False):
    assert line.startswith(method.name)
    megabytes = line.removeprefix(method.name).split()[1]
    assert float(megabytes) == pytest.approx(
      2 * method.wire_bytes / 1e6, abs=0.01
    )
  assert f"choice: {found.choice.name}" in text
  assert "- Computing an exchange takes no time" in text[-1]
  measured = advise(link, computing=dict.fromkeys(NAMES, 0.0))
  assert "takes no time" not in str(measured)
  fast = advise(LinkModel.of_uplink(40_000, 0.01, replicas=4))
  assert "uplinks of 40 Gbit/s," in str(fast)


@pytest.fixture
def among(monkeypatch):
  """Returns a function: names of what is left among judged methods."""

  def names(judged, **options):
    monkeypatch.setattr(advice, "of_protocol", lambda: {"adamw": judged})
    return set(by_name(advise(LinkModel(1e-3, 1e6), **options)))

  return names


def test_methods_are_those_judged_with_the_optimizer():
  link = LinkModel(1e-3, 1e6)
  found = advise(link, optimizer="muon")
  assert tuple(by_name(found)) == NAMES[::2]
  assert "judged with muon" in str(found)
  assert "judged with adamw" in str(advise(link))


def test_methods_that_another_one_beats_are_left_out(among):
  """In steps, bits and collectives alike, among rounds of this length."""
  # It has as many bits and collectives as the other allocation.
  options = {**FACTORS, "rank": 40.0, "allocation": "uniform"}
  uniform = evidence("powersgd 40, uniform", "powersgd", options, 2.0, 1.05)
  found = among((*JUDGED, uniform))
  assert found == {*NAMES, NAMES[2].replace("error", "uniform")} - {NAMES[2]}
  worse = evidence("dense, every 7", "allreduce", {}, 32 / 7, 1.5, every=7)
  equal = evidence("as dense, every 8", "allreduce", {}, 4.0, 1.4, every=8)
  every = (*JUDGED, worse, equal)
  assert among(every) == {*NAMES, equal.name}
  assert among(every, most_steps=7) == {*NAMES[:4], worse.name}
  assert among(every, most_steps=1) == {*NAMES[:4]}


def test_methods_that_cost_nothing_are_always_sooner(monkeypatch):
  free = [one._replace(steps=1.0) for one in JUDGED]
  monkeypatch.setattr(advice, "of_protocol", lambda: {"adamw": free})
  found = advise(LinkModel(0.0, 1e12))
  assert {m.break_even for m in found.methods[1:]} == {np.inf}
  assert "no speed" in str(found)


@pytest.mark.slow
def test_computing_is_the_time_beyond_passing_gradients_on(monkeypatch):
  params = {"kernel": jax.ShapeDtypeStruct((128, 256), "float32")}
  medians = timing.medians

  def run(calls, repeats):
    assert repeats == 1
    (passed_on, _), (averaged, _), *others = (call() for call in calls)
    np.testing.assert_allclose(passed_on["kernel"], averaged["kernel"] / 2)
    measured = medians(calls, repeats)
    assert len(measured) == len(calls) and np.all(measured > 0)
    return np.array([0.25, 0.75, 0.2, *(1.25 for _ in others[1:])])

  monkeypatch.setattr(timing, "medians", run)
  seconds = edgc_jax.measure_computing(params, 4, repeats=1)
  assert seconds["dense"] == 0.5 and seconds["dense, bfloat16"] == 0
  assert set(list(seconds.values())[2:]) == {1.0}
  # All candidates are measured.
  link = LinkModel(1e-3, 1e7)
  found = advise(link, params=params, computing=seconds)
  assert {m.exchanged_by for m in found.methods} == set(seconds)
  with pytest.raises(
    ValueError, match=r"`computing` must be .*bfloat16.*; pas"
  ):
    advise(link, params=params, computing={"dense": 0.0})


@pytest.mark.parametrize("most, least", [(26, 20), (52, 40)])
def test_ranks_of_edgc_keep_their_range(most, least):
  options = {"rank_max": most, "rank_min": least, "wire_dtype": "int4"}
  for rank in (1, 2, 7, 23, 100, 455):
    found = advice._edgc_at(options, rank)
    float32.edgc(**found)
    most, least = found["rank_max"], found["rank_min"]
    assert 1 <= least <= rank <= most or rank < 3
    assert (most + least) / 2 == pytest.approx(rank, abs=1, rel=0.03)
    assert (most - least) // found["rank_multiple"] <= 7
