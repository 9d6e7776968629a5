"""Statistics of a study's judged runs: differences paired by seed."""

import numpy as np
import pandas as pd

from experiments.lab.study.records import Record, Records
from experiments.lab.study.study import MATCHED, Study

SURE = 3  # standard errors from which on a difference is called one
MANY = 8  # seeds whose own scatter is trusted


def judged(study: Study, records: Records) -> pd.DataFrame:
  """Returns a line for each judged run that is finished.

  Returns:
    table, arm, seed, loss, bits (sent a parameter and step), gap (to dense with
    the same seed, nats), saved (the share of its steps that dense has left when
    it first reaches the loss of the arm; 0 if it never does), value (of the
    tuned key), beside (gap to the matched arm), is_current, record.
  """
  lines = []
  seeds = (*study.seeds, *study.more)
  all_dense = study.all_judged(study.dense, seeds, records)
  for table, arm in ((t, a) for t in study.tables for a in study.table_of(t)):
    others = [(None, None)] * len(seeds)
    if arm in study.matched:
      others = study.all_judged(arm + MATCHED, seeds, records)
    for seed, (run, record), (_, dense), (_, other) in zip(
      seeds, study.all_judged(arm, seeds, records), all_dense, others,
      strict=True,
    ):  # fmt: skip
      if run is None or record is None or not record.is_finished:
        continue
      loss = record["summary"]["val_loss"]
      has_dense = dense is not None and dense.is_finished
      lines.append(
        {
          "table": table, "arm": arm, "seed": seed, "loss": loss,
          "bits": record.bits,
          "gap": loss - dense["summary"]["val_loss"] if has_dense else np.nan,
          "saved": saved(dense, loss) if has_dense else np.nan,
          "value": run.config[study.tuning.key] if study.tuning else np.nan,
          "beside": loss - other["summary"]["val_loss"]
          if other is not None and other.is_finished else np.nan,
          "is_current": record.is_current, "record": record,
        }
      )  # fmt: skip
  return pd.DataFrame(lines)


def saved(dense: Record, loss: float) -> float:
  """Returns the share of its steps that dense could save to reach a loss."""
  evaluated = dense.curve.dropna(subset="val_loss")
  step = reached(evaluated, loss)
  return 0.0 if np.isnan(step) else float(1 - step / evaluated["step"].iloc[-1])


def reached(curve: pd.DataFrame, loss: float, column: str = "step") -> float:
  """Returns where a run first reaches a loss: a step, or another column.

  Between two evaluations, by linear interpolation; NaN if it never does.
  """
  evaluated = curve.dropna(subset="val_loss")
  losses = evaluated["val_loss"].to_numpy()
  values = evaluated[column].to_numpy()
  below = np.flatnonzero(losses <= loss)
  if not below.size:
    return np.nan
  i = below[0]
  if i == 0:
    return float(values[0])
  share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
  return float(values[i - 1] + share * (values[i] - values[i - 1]))


def by_arm(frame: pd.DataFrame) -> pd.DataFrame:
  """Returns a line for each arm: means, and standard errors of differences.

  Few seeds may agree by chance, and one has no scatter. An arm of fewer than
  eight has at least the scatter of the median arm that has eight, or of all if
  none has.

  Args:
    frame: From `judged`.

  Returns:
    By (table, arm), in the order of the study: seeds, loss, bits, gap,
    gap_error, dense_pairs (seeds with dense), saved, beside, beside_error,
    pairs (seeds with a matched arm), value, is_current.
  """
  groups = frame.groupby(["table", "arm"], sort=False)
  found = groups[["loss", "bits", "gap", "saved", "beside", "value"]].mean()
  found = found.assign(
    seeds=groups.size(),
    dense_pairs=groups["gap"].count(),
    pairs=groups["beside"].count(),
    is_current=groups["is_current"].all(),
  )
  scatter = groups[["gap", "beside"]].std()
  scatter = scatter[scatter > 0]  # not dense beside itself
  counts = groups[["gap", "beside"]].count()
  has_many = counts >= MANY
  least = _least_scatter(scatter["gap"], has_many["gap"])
  scatter = scatter.where(has_many | (scatter >= least), least)
  errors = (scatter / counts.where(counts > 0) ** 0.5).add_suffix("_error")
  errors.loc[found["gap"] == 0, "gap_error"] = 0.0
  return found.join(errors)


def beside(
  frame: pd.DataFrame, arm: str, other: str
) -> tuple[float, float, int]:
  """Returns the mean difference of two arms, paired by seed, and its error.

  Args:
    frame: From `judged`.
    arm: One of its arms.
    other: The arm that is subtracted.

  Returns:
    Nats, their standard error by the rule of `by_arm`, and the pairs; NaN
    without pairs.
  """
  gaps = frame.drop_duplicates(["arm", "seed"]).pivot(
    index="seed", columns="arm", values="gap"
  )
  if not {arm, other} <= set(gaps):
    return np.nan, np.nan, 0
  scatter, counts = gaps.std(), gaps.count()
  pairs = (gaps[arm] - gaps[other]).dropna()
  own = pairs.std()
  if len(pairs) < MANY:
    least = _least_scatter(scatter[scatter > 0], counts >= MANY)
    own = np.fmax(own, least)  # one pair has no scatter
  return pairs.mean(), own / max(1, len(pairs)) ** 0.5, len(pairs)


def _least_scatter(scatter: pd.Series, has_many: pd.Series) -> float:
  """Returns the median scatter of arms of many seeds, or of all arms."""
  trusted = scatter[has_many.reindex(scatter.index)]
  return (trusted if trusted.notna().any() else scatter).median()


def verdict(difference: float, error: float) -> str:
  """Says whether a difference of losses is one: ahead, behind or open."""
  if not np.isfinite(error) or abs(difference) < SURE * error:
    return "open"
  return "ahead" if difference < 0 else "behind"
