"""SHA-256 of a checkpoint's files, kept beside them."""

import hashlib
import json
import pathlib

_SUMS = "sha256.json"
_TIMES = "_CHECKPOINT_METADATA"  # orbax writes it again later


def write(folder: pathlib.Path) -> None:
  """Notes what the files of a folder are."""
  (folder / _SUMS).write_text(json.dumps(_sums(folder)))


def damage(folder: pathlib.Path) -> str:
  """What is wrong with the files, in words; empty if nothing is."""
  try:
    expected = json.loads((folder / _SUMS).read_text())
    found = _sums(folder)
  except (OSError, ValueError) as error:
    return f"{type(error).__name__}: {error}"
  wrong = [name for name in expected if expected[name] != found.get(name)]
  if not wrong:
    return ""
  more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
  return f"{wrong[0]}{more} is not what was written"


def _sums(folder: pathlib.Path) -> dict[str, str]:
  files = {str(f.relative_to(folder)): f for f in folder.rglob("*")}
  return {
    name: _sum(file)
    for name, file in sorted(files.items())
    if file.is_file() and name not in (_SUMS, _TIMES)
  }


def _sum(file: pathlib.Path) -> str:
  with open(file, "rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
