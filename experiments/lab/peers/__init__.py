"""Methods of others, for comparison; importing this tells the trainer."""

from experiments.lab.peers.demo import demo
from experiments.lab.peers.late import late
from experiments.lab.peers.sparse_loco import sparse_loco
from experiments.trainer.training import reducers

for _make in (demo, late, sparse_loco):
  reducers.add(_make.__name__, _make)
