"""Reads token corpora, and draws batches of windows from them.

Text is read as bytes (256 tokens), a nanoGPT-style pair of `.bin` files as
tokens. Every batch holds windows of `context + 1` tokens: the first `context`
are the inputs, the last `context` the targets.
"""

import hashlib
import os
import pathlib
import platform
import re
import sysconfig
from typing import NamedTuple

import grain
import numpy as np

from experiments.trainer.data import batches

# Ends every file of a folder; unambiguous, because text files hold no NUL.
_SEPARATOR = b"\0"
_HELD_OUT_FILES = 20  # One file in this many of a folder is held out.
_HASHED_BYTES = 64 << 20  # At each end of a part too large to hash in full.
_HIDDEN = re.compile(r"\.")
# Left out of the standard library: tests are bulky and missing from some
# installs; config-* and _sysconfigdata* differ between builds of one version.
_NOT_STDLIB = re.compile(
  r"(site-packages|dist-packages|tests?|idle_test|idlelib|__pycache__)$"
  r"|config-|_sysconfigdata|\."
)
_REMEDY = "give UTF-8 text, or a folder that holds train.bin and val.bin."


class Corpus(NamedTuple):
  """Tokens to train on and tokens to evaluate on.

  Attributes:
    train: Training tokens, uint8 (bytes) or uint16 (`.bin`), `[tokens]`.
    held_out: Evaluation tokens of the same type, `[tokens]`.
    name: Short name for reports.
    sha256: Hash of the train part, then of the held-out part: the length and
      the tokens, or only their first and last 64 MiB if there are more.
  """

  train: np.ndarray
  held_out: np.ndarray
  name: str
  sha256: str


def load_corpus(path: str | None = None, *, context: int) -> Corpus:
  """Loads a corpus and splits it into a train and a held-out part.

  Args:
    path: One of
      - None or "": the `.py` files of the running Python's standard library.
        It differs between versions of Python, and with it `Corpus.sha256`.
      - a folder with `train.bin` and `val.bin`, or that `train.bin`: raw
        little-endian uint16 tokens, memory-mapped. Other files are ignored.
      - any other folder: its non-empty UTF-8 files, without hidden and binary
        ones, in the order of their relative paths. Every 20th file is held
        out, or the last one of fewer than 20 files.
      - a text file, or a folder with just one: the last 10 % is held out.
    context: Length of a model input; each part needs one token more.

  Returns:
    The corpus; it does not depend on the machine's locale.

  Raises:
    FileNotFoundError: if `path`, or one file of a `.bin` pair, is missing.
    ValueError: if the data is empty, not text, of odd size or too short.
  """
  root = pathlib.Path(os.path.expanduser(path or sysconfig.get_path("stdlib")))
  if not os.path.exists(root):
    raise FileNotFoundError(
      f"`data.path` must exist, got {str(root)!r}, which does not; give a file"
      " or folder, or leave it empty for the Python standard library."
    )
  root = pathlib.Path(os.path.abspath(root))  # Gives even "." a name.
  if root.name == "train.bin":
    root = root.parent
  name, pair = root.name, (root / "train.bin", root / "val.bin")
  try:
    if not path:
      name = f"Python {platform.python_version()} standard library"
      train, held_out = _load_folder(root, ".py", _NOT_STDLIB)
    elif root.is_file():
      train, held_out = _split_text(root, root.read_bytes())
    elif any(file.exists() for file in pair):
      train, held_out = map(_load_bin, pair)
    else:
      train, held_out = _load_folder(root)
  except PermissionError as error:
    raise PermissionError(
      f"`data.path` must be readable, got {str(root)!r} ({error.strerror} for"
      f" {error.filename}); give this user access to it."
    ) from error
  for part, tokens in (("train", train), ("held-out", held_out)):
    if len(tokens) < context + 1:
      raise ValueError(
        f"`data.path`: the {part} part of {name!r} must have at least context +"
        f" 1 = {context + 1} tokens, got {len(tokens)}; give more text or lower"
        " model.context."
      )
  return Corpus(train, held_out, name, _sha256(train, held_out))


def check_vocab(corpus: Corpus, vocab_size: int, reserved: int = 0) -> None:
  """Raises unless every token of the corpus has a row in the embedding.

  JAX raises no error itself: it clamps or fills indices out of bounds.

  Args:
    corpus: The corpus to check.
    vocab_size: Number of token ids of the model.
    reserved: How many of the last ids must not occur in the corpus.

  Raises:
    ValueError: if a token id at or above `vocab_size - reserved` occurs.
  """
  largest = max(int(part.max()) for part in (corpus.train, corpus.held_out))
  least = largest + 1 + reserved
  if vocab_size < least:
    extra = f" by more than {reserved}, for the mask" if reserved else ""
    raise ValueError(
      f"`model.vocab_size` must exceed the largest token id ({largest} in"
      f" {corpus.name!r}){extra}, got {vocab_size}; set it to {least} or more."
    )


def train_batches(
  tokens: np.ndarray,
  *,
  context: int,
  batch_size: int,
  seed: int,
  rows: slice | None = None,
) -> grain.DatasetIterator:
  """Returns an endless iterator over shuffled training batches.

  The tokens are cut into `(len(tokens) - 1) // context` windows that share only
  their end tokens; `batches.shuffled` says how they are drawn.

  Args:
    tokens: Tokens, `[tokens]`.
    context: Length of a model input.
    batch_size: Number of windows in a batch.
    seed: Non-negative seed of the order.
    rows: The windows of each batch that this process reads; None for all.

  Returns:
    An iterator of int32 batches, `[rows, context + 1]`.
  """
  tokens = np.asarray(tokens)  # Slicing an array is faster than a memmap.
  span = np.arange(context + 1)
  return batches.shuffled(
    (len(tokens) - 1) // context,
    lambda index: tokens[index[:, None] * context + span].astype(np.int32),
    batch_size=batch_size,
    seed=seed,
    rows=rows,
  )


def held_out_batches(
  tokens: np.ndarray, *, context: int, batch_size: int, num_batches: int
) -> np.ndarray:
  """Returns evaluation batches, evenly spread and the same in every run.

  The windows range from the first token to the last. If there are too few
  tokens for `num_batches` batches whose windows share no target, it returns
  fewer; if there are too few for a single batch, its windows overlap.

  Args:
    tokens: Tokens, `[tokens]`.
    context: Length of a model input.
    batch_size: Number of windows in a batch.
    num_batches: Number of batches, at most.

  Returns:
    int32 batches, `[num_batches or fewer, batch_size, context + 1]`.
  """
  windows = (len(tokens) - 1) // context
  index = batches.spread(
    windows, batch_size=batch_size, num_batches=num_batches
  )
  last = len(tokens) - 1 - context
  starts = index[..., None] * last // max(1, index.size - 1)
  return np.asarray(tokens)[starts + np.arange(context + 1)].astype(np.int32)


def _sha256(*parts: np.ndarray) -> str:
  digest = hashlib.sha256()
  for tokens in parts:
    digest.update(f"{len(tokens)}\n".encode())
    size = min(_HASHED_BYTES // tokens.itemsize, (len(tokens) + 1) // 2)
    digest.update(tokens[:size])
    digest.update(tokens[size:][-size:])
  return digest.hexdigest()


def _load_bin(path: pathlib.Path) -> np.ndarray:
  """Memory-maps little-endian uint16 tokens."""
  if not path.is_file():
    raise FileNotFoundError(
      "`data.path` must hold both train.bin and val.bin, got no"
      f" {str(path)!r}; write both files to one folder."
    )
  size = path.stat().st_size
  if size == 0 or size % 2:
    raise ValueError(
      f"`data.path` must hold uint16 tokens, got {size} bytes in"
      f" {str(path)!r}; write the tokens as raw little-endian uint16."
    )
  return np.memmap(path, dtype="<u2", mode="r")


def _text_length(data: bytes) -> int:
  """Returns the number of leading bytes that are UTF-8 without NUL."""
  end = len(data)
  try:
    data.decode()
  except UnicodeDecodeError as error:
    end = error.start
  nul = data.find(0, 0, end)
  return end if nul < 0 else nul


def _split_text(path: pathlib.Path, data: bytes) -> list[np.ndarray]:
  """Holds out the last 10 % of one text."""
  if not data:
    raise ValueError(
      f"`data.path` must hold text, got an empty {str(path)!r}; {_REMEDY}"
    )
  if (offset := _text_length(data)) < len(data):
    raise ValueError(
      f"`data.path` must hold text, got {str(path)!r}, whose byte at offset"
      f" {offset} is NUL or not valid UTF-8; {_REMEDY}"
    )
  tokens = np.frombuffer(data, np.uint8)
  return np.split(tokens, [len(tokens) - len(tokens) // 10])


def _load_folder(
  root: pathlib.Path, suffix: str = "", skipped: re.Pattern = _HIDDEN
) -> list[np.ndarray]:
  """Reads the text files below a folder and splits them by file."""

  def refuse(error: OSError) -> None:
    if isinstance(error, PermissionError):
      raise error  # os.walk would leave the folder out

  paths = []
  for folder, folders, files in os.walk(root, onerror=refuse):
    folders[:] = [name for name in folders if not skipped.match(name)]
    names = [name for name in files if not skipped.match(name)]
    paths += [pathlib.Path(folder, n) for n in names if n.endswith(suffix)]
  # The operating system lists a folder in no particular order.
  paths.sort(key=lambda path: path.relative_to(root).as_posix())
  read = [(path, path.read_bytes()) for path in paths if path.is_file()]
  texts = [(p, text) for p, text in read if 0 < len(text) == _text_length(text)]
  if not texts:
    raise ValueError(
      f"`data.path` must hold text, got no text file in {str(root)!r};"
      f" {_REMEDY}"
    )
  if len(texts) == 1:
    return _split_text(*texts[0])
  every = min(_HELD_OUT_FILES, len(texts))
  parts = ([], [])
  for index, (_, text) in enumerate(texts, 1):
    parts[index % every == 0].append(text + _SEPARATOR)
  return [np.frombuffer(b"".join(part), np.uint8) for part in parts]
