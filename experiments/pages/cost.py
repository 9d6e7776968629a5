"""The table of docs/growth.md, from docs/growth.json."""

import json
import pathlib
from collections.abc import Sequence

import pandas as pd

_FILE = pathlib.Path(__file__).resolve().parents[2] / "docs/growth.json"


def _growth() -> Sequence[str]:
  """Returns the cost of the reducers by size of the model, and its origin."""
  found = json.loads(_FILE.read_text())
  table = pd.DataFrame(found["lines"])
  about = found["about"]
  return [
    table.to_markdown(index=False, disable_numparse=True),
    "",
    f"`{about['command']}`, commit {about['commit']}; {about['device']};"
    f" {about['versions']}; medians of {about['rounds']} rounds.",
  ]


TABLES = {"growth": _growth}
