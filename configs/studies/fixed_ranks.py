"""edgc beside PowerSGD at three ranks. 15 runs, about an hour on 2 cores."""

CONFIG = "configs/gpt2_tiny.py"
TABLES = {
  "": {
    "allreduce": {"reducer": "allreduce"},
    "edgc": {"reducer": "edgc"},
    **{
      f"powersgd, rank {rank}": {"reducer": "powersgd", "powersgd.rank": rank}
      for rank in (8, 20, 32)
    },
  }
}
