"""The numbers behind the figures, on data of known answers."""

import json

import numpy as np
import pytest

from edgc_jax.budget.entropy import ESTIMATORS
from experiments.benchmarks.measurements import ENTRY_RATES, FULL_PASS, PERIODS
from experiments.figures import page, panels
from experiments.figures.numbers import (
  cost_ratios,
  gaussian_error,
  histogram,
  model_error,
  rank_after,
  sampling_error,
  svd_error,
  window_means,
)
from experiments.figures.sources import RecordedRun, collect, rounded

NAMES = ("blocks.attention_out.kernel", "blocks.attention_in.kernel",
         "blocks.mlp_in.kernel", "embedding")  # fmt: skip


def test_svd_error_of_known_singular_values():
  random = np.random.default_rng(0)
  u, v = (np.linalg.qr(random.standard_normal((n, 3)))[0] for n in (5, 7))
  matrix = u @ np.diag([3.0, 2.0, 1.0]) @ v.T
  errors = svd_error(np.stack([matrix, 10 * matrix]))
  assert errors.shape == (2, 6)
  expected = np.sqrt([1, 5 / 14, 1 / 14, 0, 0, 0])
  np.testing.assert_allclose(errors, [expected] * 2, atol=1e-12)


def test_the_model_holds_for_gaussian_matrices():
  drawn = gaussian_error(64, 160, draws=4).mean(axis=0)
  model = model_error(64, 160)
  np.testing.assert_allclose(model[:49], drawn[:49], rtol=0.02)


def test_rank_after_a_fall():
  errors = np.exp(-0.1 * np.arange(41))
  after = rank_after(errors, 30, fall=0.5)
  assert after == pytest.approx(25, abs=0.1)
  assert rank_after(errors, 30, fall=9.0) == 0


@pytest.mark.parametrize(
  "draw, kurtosis, tolerance", [("normal", 0, 0.1), ("laplace", 3, 0.4)]
)
def test_histogram(draw, kurtosis, tolerance):
  values = getattr(np.random.default_rng(0), draw)(size=(100, 1000))
  values[3] = 0  # a row that no token touched
  values[4, :2] = np.nan, np.inf
  found = histogram(0.01 * values)
  used = values[np.isfinite(values) & (values != 0)]
  assert found["rms"] == pytest.approx(0.01 * np.sqrt(np.mean(used**2)))
  assert found["excess_kurtosis"] == pytest.approx(kurtosis, abs=tolerance)
  width = found["centres"][1] - found["centres"][0]
  inside = np.sum(found["densities"]) * width
  assert inside == pytest.approx(1 - found["beyond"])
  assert found["centres"][60] == pytest.approx(0, abs=1e-12)


def test_window_means():
  middles, means = window_means(range(1, 8), range(1, 8), 3)
  np.testing.assert_array_equal(middles, [2, 5, 8])
  np.testing.assert_array_equal(means, [2, 5, 7])


def test_sampling_error_by_hand():
  full = np.array([1.0, 3.0, 5.0, 7.0, 99.0])  # the last window is not whole
  assert sampling_error(full, full, 2, 1) == 0
  # Either step of a window is 1 away from the mean of both.
  assert sampling_error(full, full, 2, 2) == pytest.approx(1)
  assert sampling_error(full + 0.5, full, 4, 1) == 0.5
  # Steps 1 and 3 are 1 below the mean, steps 2 and 4 are 1 above it.
  assert sampling_error(full + 0.5, full, 4, 2) == pytest.approx(
    np.sqrt((0.5**2 + 1.5**2) / 2)
  )


def test_cost_ratios_are_of_rounds():
  seconds = {"all": [1.0, 10.0, 2.0], "one": [0.1, 1.0, 0.6]}
  ratios = cost_ratios(seconds, "all")
  assert ratios == {"one": pytest.approx(0.1)}


def run(rule, val_loss):
  """A made-up run of 8 steps, windows of 4."""
  random = np.random.default_rng(1)
  steps = range(1, 9)
  gradients = {
    step: {
      f"{kind} {name}": random.standard_normal((2, 12, 20)) / step
      for kind in ("local", "mean")
      for name in NAMES
    }
    for step in (1, 8)
  }
  samplings = [f"{name} {rate}" for name in ESTIMATORS for rate in ENTRY_RATES]
  return RecordedRun(
    {
      "edgc": {
        "window": 4,
        "rank_max": 8,
        "rank_min": 4,
        "rank_multiple": 2,
        "max_rank_step": 4,
      },
      "model": {"width": 12},
      "seed": 5,
    },
    {
      "val_loss": val_loss,
      "compression_ratio": 3.0,
      "params": 1234,
      "steps": 8,
      "replicas": 2,
      "seconds": 60.0,
      "environment": {
        "commit": f"abc-{rule}", "device": "cpu", "cores": 2,
        "versions": {"jax": "0.0"}, "python": "3",
      },
      "corpus": {"name": "made up", "sha256": "f" * 64},
    },
    [
      {"step": s, "entropy": [-float(s)], "rank": [8 if s < 5 else 4]}
      for s in steps
    ],
    gradients,
    {
      str(s): {
        sampling + end: -float(s)
        for sampling in samplings
        for end in ("", *(f" every {period}" for period in PERIODS))
      }
      for s in steps
    },
    {FULL_PASS: [1.0, 1.0], **{key: [0.25, 0.25] for key in samplings}},
  )  # fmt: skip


def test_page_and_pictures_show_the_measurements():
  runs = {
    "gpt2-cqm": run("cqm", 2.125),
    "bert-cqm": run("bert", 3.5),
    "gpt2-linear": run("linear", 2.25),
  }
  sources = collect(runs)
  assert sources["entropy"]["GPT"]["window_mean"] == [-2.5, -6.5]
  assert sources["ranks"]["linear"]["rank"] == [8, 4]
  # The middle of 4 steps of slope 1: 1.5 and 0.5 away, on either side.
  error = sources["sampling"]["errors"]["gaussian"]["0.25"][0]
  assert error == pytest.approx(np.sqrt((1.5**2 + 0.5**2) / 2))
  text = page.page(sources, runs, "the command")
  for expected in (
    "2.1250", "2.2500", "3.5000", "The rank changed 1 times", "25.0%",
    "abc-linear", "-6.50 in the last", "the command", "1,234",
  ):  # fmt: skip
    assert expected in text
  assert "nan" not in text and "the same ranks" in text
  for name, numbers in sources.items():
    json.dumps(rounded(numbers), allow_nan=False)
    assert f"figures/{name}.png" in text
    figure = panels.DRAW[name](numbers)
    assert all(axes.has_data() for axes in figure.axes)


def test_numbers_are_rounded():
  value = {1: [0.1234567, np.float64(2.0), 3], "x": (1e-9 / 3,)}
  assert rounded(value) == {
    "1": [0.12346, 2.0, 3], "x": [3.3333e-10],
  }  # fmt: skip
