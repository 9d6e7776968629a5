"""Draws batches of rows: shuffled without end, or evenly spread."""

from collections.abc import Callable
from typing import Any

import grain
import numpy as np
from grain.experimental import index_shuffle

Read = Callable[[np.ndarray], Any]  # from indices of rows to a batch of them


def shuffled(
  count: int,
  read: Read,
  *,
  batch_size: int,
  seed: int,
  rows: slice | None = None,
) -> grain.DatasetIterator:
  """Returns an endless iterator over shuffled batches.

  Each epoch visits all rows in a new order, and a batch may span two epochs, so
  none is short. A batch depends only on the arguments and its index;
  `get_state` and `set_state` save and restore that index, which does not depend
  on `rows`.

  Args:
    count: Number of rows in the data.
    read: Reads rows, from int64 [rows].
    batch_size: Number of rows in a batch.
    seed: Non-negative seed of the order.
    rows: The rows of each batch that this process reads; None for all.
  """
  # Epoch e has the seed `seed + e`. Without the hash, seeds 0 and 1 would have
  # the same orders, shifted by one epoch.
  seed = int(np.random.SeedSequence(seed).generate_state(1)[0])

  def batch(number: int) -> Any:
    # One call a batch: a data set of rows takes three times as long.
    first = number * batch_size
    drawn = range(first, first + batch_size)[rows or slice(None)]
    index = [
      index_shuffle(i % count, count - 1, (seed + i // count) % 2**32, 4)
      for i in drawn
    ]
    return read(np.array(index, np.int64))

  return iter(
    grain.MapDataset.range(1)
    .repeat()
    .map_with_index(lambda number, _: batch(number))
    .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
  )


def spread(most: int, *, batch_size: int, num_batches: int) -> np.ndarray:
  """Returns the rows of evaluation batches, the same in every run.

  Args:
    most: Number of rows that share nothing. If they are too few for
      `num_batches` batches there are fewer, but at least one.
    batch_size: Number of rows in a batch.
    num_batches: Number of batches, at most.

  Returns:
    int64 [batches, batch_size]: evenly spread counts, from 0.
  """
  num_batches = max(1, min(num_batches, most // batch_size))
  return np.arange(num_batches * batch_size).reshape(num_batches, batch_size)
