"""Records of runs: one file a run, small enough for git.

Run folders are large and stay on the machine that made them. A record holds
everything that the run was told and everything that it logged; pages are made
from records alone, and a recorded run is not repeated.
"""

import functools
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pandas as pd
from flax import traverse_util
from ml_collections import ConfigDict

from configs import common
from edgc_jax.validation import shown
from experiments.trainer import tasks
from experiments.trainer.runs.run_folder import stopped, write
from experiments.trainer.runtime.json_files import read_json
from experiments.trainer.training import reducers

# Keys that do not change what a run computes, up to rounding.
_FREE = ("name", "run_dir", "resume", "log_every", "checkpoint.", "sentinel.",
         "mesh.backend")  # fmt: skip
_DIGITS = 5  # of logged numbers

Flat = Mapping[str, Any]


class Record(dict[str, Any]):
  """What a run was told and what it logged.

  Its keys are those of the file: `config`, `changed` (keys that were not at
  their defaults), `summary` (as summary.json), and `lines` (each number of
  metrics.jsonl as a list over the lines; None where a line lacks it). A run
  that diverged has `error` in place of the last two.
  """

  @property
  def is_finished(self) -> bool:
    return "summary" in self

  @functools.cached_property
  def flat(self) -> Flat:
    """All keys of the configuration that make the run what it is."""
    return _flat(self["config"])

  @property
  def is_current(self) -> bool:
    """Whether the method and the task still give the results of this run.

    One that diverged is taken for current: `forget_diverged` is for these.
    """
    if not self.is_finished:
      return True
    config, summary = self["config"], self["summary"]
    return summary.get("versions") == {
      "task": tasks.version_of(config.get("task", "gpt2")),
      **reducers.versions_of(summary["reducer"], config.get("local", {})),
    }

  def is_of(self, new: Flat) -> bool:
    """Returns whether it is of a run of these keys, as `Records.find` says."""
    old, reducer = self.flat, self["config"]["reducer"]
    # Most are of another run; the rest takes longer.
    if any(old[key] != new[key] for key in ("seed", "reducer")):
      return False
    defaults = _defaults(reducer)
    return all(
      old[key] == new[key]
      if key in old and key in new
      else key not in self["changed"]
      if key in old
      else key in defaults and new[key] == defaults[key]
      for key in old.keys() | new.keys()
    )

  @property
  def curve(self) -> pd.DataFrame:
    """The scalars of each logged line."""
    lines = {k: v for k, v in self["lines"].items() if "/" not in k}
    return pd.DataFrame(lines)

  @property
  def bits(self) -> float:
    """Bits a parameter a step: payload of an all-reduce, over the whole run."""
    summary = self["summary"]
    return 8 * sum(summary["wire_bytes_per_step"]) / summary["params"]


class Records:
  """All records below a folder."""

  def __init__(self, folder: str | pathlib.Path):
    """Reads the records.

    Raises:
      ValueError: if a file is no record.
      NotADirectoryError: if `folder` is a file.
    """
    self.folder = pathlib.Path(folder)
    if self.folder.exists() and not self.folder.is_dir():
      raise NotADirectoryError(
        f"`records` must be a folder, got {self.folder}, which is none; give"
        " another one."
      )
    self._all = {
      file: _read(file) for file in sorted(self.folder.rglob("*.json"))
    }

  def find(self, config: ConfigDict) -> Record | None:
    """Returns the record of a run of this configuration.

    It is the same run if all keys are equal; keys that only one of the two has
    must be at their defaults. A finished run comes before one that diverged.
    """
    own = _flat(config)
    diverged = None
    for each in self._all.values():
      if each.is_of(own):
        if each.is_finished:
          return each
        diverged = each
    return diverged

  def add(self, config: ConfigDict, found: Mapping[str, Any]) -> pathlib.Path:
    """Writes the record of a run, in place of earlier ones.

    Those of other defaults have another name; their files go.

    Args:
      config: The configuration.
      found: From `numbers_of`.

    Returns:
      The file.
    """
    file = self.folder / config.name / f"{name_of(config)}.json"
    changed = sorted(_changed(config))
    values = {"config": _kept(config), "changed": changed, **found}
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
    own = _flat(config)
    for other in [f for f, each in self._all.items() if each.is_of(own)]:
      del self._all[other]
      if other != file:
        other.unlink()
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, "{\n" + ",\n".join(lines) + "\n}\n")
    self._all[file] = Record(json.loads(file.read_text()))
    return file

  def forget_diverged(self) -> None:
    """Forgets runs that diverged; their files stay until they end again."""
    self._all = {f: each for f, each in self._all.items() if each.is_finished}


def _read(file: pathlib.Path) -> Record:
  """Reads a record, and raises ValueError if it is damaged."""
  remedy = "restore it, or remove it to run again"
  values = read_json(file, "records", remedy)
  kinds = {"config": dict, "config.seed": int, "config.reducer": str,
           "changed": list}  # fmt: skip
  if "error" not in values:
    kinds |= {"summary": dict, "lines": dict}
  found = traverse_util.flatten_dict(values, sep=".") | values
  for key, kind in kinds.items():
    if not isinstance(found.get(key), kind):
      raise ValueError(
        f"`records` must hold records with {', '.join(kinds)}, got {file}"
        f" with {shown(found.get(key))} for {key}; {remedy}."
      )
  return Record(values)


def name_of(config: ConfigDict) -> str:
  """Returns a name of a run: its reducer, a hash of its settings, its seed."""
  text = json.dumps(_changed(config), sort_keys=True)
  digest = hashlib.sha256(text.encode()).hexdigest()[:10]
  return f"{config.reducer}-{digest}-seed{config.seed}"


def numbers_of(folder: str | pathlib.Path) -> dict[str, Any]:
  """Reads what a finished run has logged from its folder.

  Returns:
    `summary` and `lines` of a `Record`; or `error`, why the run could not
    continue or has no loss.

  Raises:
    OSError: if the run has not ended.
    ValueError: if its files are damaged.
  """
  folder = pathlib.Path(folder)
  if reason := stopped(folder):
    return {"error": reason}
  try:
    summary = json.loads((folder / "summary.json").read_text())
    text = (folder / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
  except RecursionError:  # of a file that is nested without end
    summary, found = None, []
  if not all(isinstance(line, dict) for line in [summary, *found]):
    raise ValueError("summary.json or metrics.jsonl is damaged")
  if "val_loss" not in summary:
    return {"error": "the held-out loss is not finite"}
  lines = [_short(traverse_util.flatten_dict(x, sep="/")) for x in found]
  names = dict.fromkeys(name for line in lines for name in line)
  columns = {name: [line.get(name) for line in lines] for name in names}
  return {"summary": summary, "lines": columns}


def _short(value: Any) -> Any:
  """Rounds the numbers in lists and dictionaries."""
  if isinstance(value, dict):
    return {key: _short(each) for key, each in value.items()}
  if isinstance(value, list):
    # Of a run without stages, the list over stages has one entry.
    values = [_short(each) for each in value]
    return values[0] if len(values) == 1 else values
  if isinstance(value, float):
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short
  return value


def _kept(config: ConfigDict) -> dict[str, Any]:
  """Returns a configuration without the sections of other reducers."""
  values = json.loads(config.to_json())
  for other in reducers.by_name().keys() - {config.reducer}:
    values.pop(other, None)
  values["run_dir"] = ""  # a path of this machine
  return values


def _flat(config: ConfigDict | Mapping[str, Any]) -> Flat:
  """Returns all keys that make a run what it is."""
  if isinstance(config, ConfigDict):
    config = _kept(config)
  flat = traverse_util.flatten_dict(config, sep=".")
  return {k: v for k, v in flat.items() if not k.startswith(_FREE)}


@functools.cache
def _defaults(reducer: str) -> Flat:
  return _flat(common.base(reducer))


def _changed(config: ConfigDict) -> Flat:
  """Returns what is not at its default."""
  own, defaults = _flat(config), _defaults(config.reducer)
  return {k: v for k, v in own.items() if k not in defaults or v != defaults[k]}
