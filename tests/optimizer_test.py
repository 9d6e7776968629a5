"""What a configuration's words mean to a reducer."""

from configs import gpt2_tiny
from experiments import optimizer


def test_warmup_rank_of_a_configuration():
  assert optimizer._warmup_rank("dense") is None
  assert optimizer._warmup_rank("max") == "max"
  assert optimizer._warmup_rank("12") == 12
  assert gpt2_tiny.get_config().edgc.warmup_rank == "max"
