"""Corpora, their split and their batches."""

import json
import os
import pathlib
import re

import chex
import grain
import numpy as np
import pytest
from helpers.refusals import refused

from experiments.trainer.data import batches, text

_CONTEXT = 4


def _write(root: pathlib.Path, files: dict[str, bytes]) -> str:
  for name, content in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)
  return str(root)


def _write_bin(root: pathlib.Path, train: np.ndarray, val: np.ndarray) -> str:
  files = {"train.bin": train, "val.bin": val}
  return _write(root, {k: v.astype("<u2").tobytes() for k, v in files.items()})


def _texts(count: int) -> dict[str, bytes]:
  return {f"{i:02}.txt": f"file number {i}\n".encode() for i in range(count)}


def _joined(texts) -> bytes:
  return b"".join(text + b"\0" for text in texts)


def _load(path) -> text.Corpus:
  return text.load_corpus(str(path), context=_CONTEXT)


def _iterator(tokens, *, batch_size=3, seed=0):
  return text.train_batches(
    tokens, context=_CONTEXT, batch_size=batch_size, seed=seed
  )


def _take(iterator, count: int) -> np.ndarray:
  return np.stack([next(iterator) for _ in range(count)])


# Loading text.


def test_default_corpus():
  corpus = text.load_corpus(context=128)
  again = text.load_corpus("", context=128)
  assert len(corpus.train) > 5e6
  assert 0.02 < len(corpus.held_out) / len(corpus.train) < 0.1
  assert max(corpus.train.max(), corpus.held_out.max()) < 256
  assert "standard library" in corpus.name
  assert corpus.sha256 == again.sha256
  chex.assert_trees_all_equal(corpus[:2], again[:2])


def test_default_corpus_skips_tests_and_build_files(tmp_path, monkeypatch):
  kept = {"a.py": b"first file", "json/b.py": b"second file"}
  dropped = {
    f"{folder}/c.py": b"dropped"
    for folder in ("site-packages", "test", "json/tests", "config-3.11-x86")
  }
  dropped |= {"_sysconfigdata_x.py": b"dropped", "notes.txt": b"dropped"}
  _write(tmp_path, kept | dropped)
  monkeypatch.setattr(text.sysconfig, "get_path", lambda _: str(tmp_path))
  corpus = text.load_corpus(context=_CONTEXT)
  assert corpus.train.tobytes() == b"first file\0"
  assert corpus.held_out.tobytes() == b"second file\0"


def test_text_file_holds_out_its_end(tmp_path):
  text = "".join(map(chr, range(33, 123))).encode() + b"0123456789"
  corpus = _load(_write(tmp_path, {"a.txt": text}) + "/a.txt")
  assert corpus.train.tobytes() == text[:90]
  assert corpus.held_out.tobytes() == text[90:]
  assert corpus.train.dtype == np.uint8
  assert corpus.name == "a.txt"


@pytest.mark.parametrize(
  "count, held_out", [(2, [1]), (19, [18]), (45, [19, 39])]
)
def test_folder_is_split_by_file(tmp_path, count, held_out):
  texts = _texts(count)
  corpus = _load(_write(tmp_path, texts))
  contents = list(texts.values())
  train = [t for i, t in enumerate(contents) if i not in held_out]
  assert corpus.train.tobytes() == _joined(train)
  assert corpus.held_out.tobytes() == _joined(contents[i] for i in held_out)


def test_folder_order_is_by_relative_path(tmp_path, monkeypatch):
  names = ["b/a.txt", "a.txt", "b.txt", "b/c/z.md", "Z.py", "c.rst"]
  texts = {name: f"this is {name}".encode() for name in names}
  path = _write(tmp_path, texts)
  corpus = _load(path)
  *train, held_out = sorted(names)
  assert corpus.train.tobytes() == _joined(texts[n] for n in train)
  assert corpus.held_out.tobytes() == _joined([texts[held_out]])

  walk = os.walk

  def reversed_walk(root, **options):
    for folder, folders, files in walk(root, **options):
      folders.sort(reverse=True)
      yield folder, folders, sorted(files, reverse=True)

  monkeypatch.setattr(text.os, "walk", reversed_walk)
  chex.assert_trees_all_equal(corpus, _load(path))


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
  for name in ("open", "closed"):
    (tmp_path / name).mkdir()
    (tmp_path / name / "some.txt").write_text("text " * 99)
  scandir = os.scandir

  def refusing(path):
    if str(path).endswith("closed"):
      raise PermissionError(13, "Permission denied", str(path))
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refusing)
  with pytest.raises(PermissionError, match=r"`data.path` .* for .*closed\);"):
    _load(tmp_path)


def test_folder_skips_hidden_binary_and_empty_files(tmp_path):
  skipped = {
    ".hidden.txt": b"hidden", ".git/config.txt": b"hidden",
    "00-image.png": b"\x89PNG\xff", "00-nul.txt": b"a\0b", "99-empty.txt": b"",
  }  # fmt: skip
  texts = _texts(3)
  corpus = _load(_write(tmp_path / "some", texts | skipped))
  *train, held_out = texts.values()
  assert corpus.train.tobytes() == _joined(train)
  assert corpus.held_out.tobytes() == _joined([held_out])
  # A folder with one text is that text.
  files = {"a.txt": b"0123456789" * 10, "b.png": b"\xff\xff"}
  path = _write(tmp_path / "one", files)
  chex.assert_trees_all_equal(_load(path)[:2], _load(path + "/a.txt")[:2])


# Loading token files.


@pytest.mark.parametrize("file", ["", "/train.bin"])
def test_bin_pair_round_trip(tmp_path, file):
  train, val = np.arange(1000) % 700, np.array([5, 40_000, 6, 7, 8, 9])
  path = _write_bin(tmp_path / "owt", train, val)
  _write(tmp_path / "owt", {"input.txt": b"The token files win over this."})
  corpus = _load(path + file)
  for tokens, expected in ((corpus.train, train), (corpus.held_out, val)):
    assert isinstance(tokens, np.memmap)
    assert tokens.dtype == np.uint16
    np.testing.assert_array_equal(tokens, expected)
  assert corpus.name == "owt"
  text.check_vocab(corpus, 40_001)  # the largest is in the held-out part
  with pytest.raises(ValueError, match=r"40000 in 'owt'.* set it to 40001"):
    text.check_vocab(corpus, 40_000)
  assert next(_iterator(corpus.train)).max() < 700


def test_bin_file_may_be_a_link(tmp_path):
  tokens = np.arange(8, dtype="<u2")
  _write(tmp_path, {"blob0": tokens.tobytes(), "blob1": tokens.tobytes()})
  (tmp_path / "snapshot").mkdir()
  for i, name in enumerate(["train.bin", "val.bin"]):
    (tmp_path / "snapshot" / name).symlink_to(tmp_path / f"blob{i}")
  corpus = _load(tmp_path / "snapshot" / "train.bin")
  np.testing.assert_array_equal(corpus.held_out, tokens)


def test_hash_of_large_files_reads_their_ends(tmp_path, monkeypatch):
  """That of small files reads all, and the split."""
  tokens = np.arange(100)
  folders = [_write_bin(tmp_path / "same", tokens, tokens)]
  for changed in (0, 50, 99):
    other = tokens.copy()
    other[changed] += 1
    folders.append(_write_bin(tmp_path / str(changed), other, other))
  for n in (48, 49):
    folders.append(_write_bin(tmp_path / f"s{n}", *np.split(tokens, [n])))
  hashes = [_load(folder).sha256 for folder in folders]
  assert len(set(hashes)) == len(folders)
  monkeypatch.setattr(text, "_HASHED_BYTES", 8)
  same, first, middle, last, *_ = (_load(folder).sha256 for folder in folders)
  assert same == middle and len({same, first, last}) == 3


# Errors.

_LONG = b"long enough to be a text, " * 4
_TOKENS = bytes(40)
_FEW = r"{} must have at least context \+ 1 = 5 .*, got {}; give more"
_PAIR = "must hold both .*got no .*{}'; write both"


@pytest.mark.parametrize(
  "files, path, message",
  [
    ({}, "none.txt", "must exist, got .*none.txt.*; give"),
    ({"a.txt": b""}, "a.txt", "empty .*a.txt'; give UTF-8"),
    ({"a": b"\xff", "b": b""}, "", "no text file.*give UTF-8"),
    ({"a.txt": b"words\xc3"}, "a.txt", "a.txt.*offset 5 .*give UTF-8"),
    ({"a.gz": b"\x1f\x8b\x08" * 40}, "a.gz", "a.gz.*offset 1 .*give UTF-8"),
    (
      {"a.txt": b"nul\0" + b"\xff"}, "a.txt",
      "a.txt.*offset 3 .*give UTF-8 text.*train.bin",
    ),
    (
      {"a.txt": b"a" * 40}, "a.txt", _FEW.format("held-out part of 'a.txt'", 4)
    ),
    (
      {"a.txt": b"abc", "b.txt": b"long enough"}, "",
      _FEW.format("train part of .*", 4) + ".*model.context",
    ),
    (
      {"train.bin": _TOKENS + b"0", "val.bin": _TOKENS}, "",
      "got 41 bytes in .*train.bin'; write the tokens .*uint16",
    ),
    (
      {"train.bin": _TOKENS, "val.bin": b""}, "",
      "got 0 bytes in .*val.bin'; write the tokens",
    ),
    ({"train.bin": _TOKENS}, "train.bin", _PAIR.format("val.bin")),
    (
      {"val.bin": _TOKENS, "input.txt": _LONG}, "", _PAIR.format("train.bin")
    ),
  ],
)  # fmt: skip
def test_load_errors(tmp_path, files, path, message):
  is_absent = "exist" in message or "both" in message
  error = refused(
    lambda: _load(pathlib.Path(_write(tmp_path, files)) / path),
    kinds=FileNotFoundError if is_absent else ValueError,
  )
  assert re.search(rf"(?s)^`data\.path`.*{message}", error), error


def test_batches_need_one_window(tmp_path):
  """A corpus is refused without one, and one is enough for both kinds."""
  enough, few = np.arange(_CONTEXT + 1), np.arange(_CONTEXT)
  corpus = _load(_write_bin(tmp_path / "enough", enough, enough))
  np.testing.assert_array_equal(next(_iterator(corpus.train)), [enough] * 3)
  held_out = text.held_out_batches(
    corpus.held_out, context=_CONTEXT, batch_size=1, num_batches=1
  )
  np.testing.assert_array_equal(held_out, [[enough]])
  for name, parts in (("train", (few, enough)), ("held-out", (enough, few))):
    with pytest.raises(ValueError, match=f"{name} .*\\+ 1 = 5.* got 4;"):
      _load(_write_bin(tmp_path / name, *parts))


# Batches.


def test_targets_are_inputs_shifted_by_one():
  tokens = np.arange(200, dtype=np.uint16)
  batch = next(_iterator(tokens, batch_size=8))
  chex.assert_shape(batch, (8, _CONTEXT + 1))
  assert batch.dtype == np.int32
  assert type(batch) is np.ndarray
  inputs, targets = batch[:, :-1], batch[:, 1:]
  np.testing.assert_array_equal(targets, inputs + 1)
  np.testing.assert_array_equal(inputs[:, 0] % _CONTEXT, 0)


def test_the_order_depends_on_the_seed_alone():
  """Not on the size of batches; each epoch and seed has its own order."""
  windows, epochs = 30, 3
  tokens = np.arange((windows + 1) * _CONTEXT)  # the last three are in none

  def orders(seed, size):
    batches = _take(
      _iterator(tokens, batch_size=size, seed=seed), windows * epochs // size
    )
    ids = batches[..., 0] // _CONTEXT
    return np.reshape(ids, (epochs, windows)).tolist()

  found = [orders(seed, windows) for seed in range(3)]
  for size in (1, 3, windows):
    assert orders(1, size) == found[1]
  assert len({tuple(x) for own in found for x in own}) == 3 * epochs
  assert all(sorted(x) == [*range(windows)] != x for own in found for x in own)


def test_restored_iterator_continues():
  tokens = np.arange(35 * _CONTEXT + 1)
  original = _iterator(tokens)
  _take(original, 30)  # an epoch has 11.7 batches
  state = json.loads(json.dumps(original.get_state()))
  expected = _take(original, 25)
  fresh = _iterator(tokens)
  for each in (fresh, original):  # also backwards, past what it has prefetched
    each.set_state(state)
    chex.assert_trees_all_equal(_take(each, 25), expected)


# Held-out batches.


@pytest.mark.parametrize(
  "windows, num_batches, expected",
  [(100, 4, 4), (12, 4, 4), (11, 4, 3), (3, 4, 1), (2, 4, 1), (1, 1, 1)],
)
def test_held_out_batches(windows, num_batches, expected):
  tokens = np.arange(windows * _CONTEXT + 2, dtype=np.uint16)
  make = lambda: text.held_out_batches(  # noqa: E731
    tokens, context=_CONTEXT, batch_size=3, num_batches=num_batches
  )
  batches = make()
  chex.assert_shape(batches, (expected, 3, _CONTEXT + 1))
  assert batches.dtype == np.int32
  chex.assert_trees_all_equal(batches, make())
  np.testing.assert_array_equal(batches[..., 1:], batches[..., :-1] + 1)

  starts = batches[..., 0].ravel()
  assert starts[0] == 0
  assert batches.max() == len(tokens) - 1
  steps = np.diff(starts)
  assert steps.max() - steps.min() <= 1  # Evenly spread.
  if windows >= batches[..., 0].size:
    assert steps.min() >= _CONTEXT  # No target is counted twice.


@pytest.mark.parametrize("count, batch_size", [(10, 4), (3, 7)])
def test_batches_have_grains_order(count, batch_size):
  """Records and checkpoints hold for this order; some batches span epochs."""
  drawn = batches.shuffled(
    count, lambda index: index, batch_size=batch_size, seed=5
  )
  seed = int(np.random.SeedSequence(5).generate_state(1)[0])
  rows = grain.MapDataset.range(count).shuffle(seed).repeat()
  expected = [rows[i] for i in range(6 * batch_size)]
  np.testing.assert_array_equal(_take(drawn, 6).ravel(), expected)
