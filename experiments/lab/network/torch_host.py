"""A host of the network benchmark that runs DistributedDataParallel.

It has the same shapes, batch, optimiser and threads as `jax_host`, over Gloo.
The PowerSGD hook gets one bucket for all gradients, because with several the
hook of PyTorch 2.13 hangs or aborts over Gloo. Other methods use DDP's own
buckets, which are sent during the backward pass.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
  default_hooks,
  powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from experiments.lab.network import calls

_ONE_BUCKET = 1000  # MB


class _GPT2(nn.Module):
  """Maps token ids [batch, time] to logits, with a tied embedding."""

  def __init__(self, model: dict[str, Any]):
    super().__init__()
    width = model["width"]
    self.embedding = nn.Embedding(model["vocab_size"], width)
    self.positions = nn.Parameter(0.02 * torch.randn(model["context"], width))
    block = nn.TransformerEncoderLayer(
      width, model["num_heads"], 4 * width, dropout=0.0, norm_first=True,
      activation=functools.partial(F.gelu, approximate="tanh"),
      batch_first=True,
    )  # fmt: skip
    self.blocks = nn.TransformerEncoder(
      block,
      model["num_layers"],
      nn.LayerNorm(width),
      enable_nested_tensor=False,
    )

  def forward(self, tokens: torch.Tensor) -> torch.Tensor:
    x = self.embedding(tokens) + self.positions
    mask = nn.Transformer.generate_square_subsequent_mask(len(self.positions))
    x = self.blocks(x, mask, is_causal=True)
    return F.linear(x, self.embedding.weight)


def _bf16_hook(
  state: object, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
  """Calls PyTorch's bf16 hook, which DDP refuses by its name without NCCL."""
  return default_hooks.bf16_compress_hook(state, bucket)


class TorchHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group(
      "gloo", init_method=f"tcp://{address}", rank=index, world_size=count
    )
    self._steps: dict[str, Callable[[], None]] = {}

  def settle(self, num_bytes: int) -> float:
    """Returns the seconds of an all-reduce of so many bytes."""
    values = torch.zeros(num_bytes // 4)
    return calls.seconds_of(lambda: dist.all_reduce(values), 1)[0][0]

  def build(
    self, name: str, config: dict[str, Any], hook: str, rank: int = 0
  ) -> dict[str, Any]:
    """Makes a model and its optimiser.

    Args:
      name: A name of the method for later calls.
      config: The whole configuration.
      hook: "dense", "bf16", "powersgd", or "none", which exchanges nothing.
      rank: The rank of "powersgd".

    Returns:
      The number of parameters.
    """
    torch.manual_seed(0)  # for the parameters; DDP copies the first host's
    options = config["optimizer"]
    module = _GPT2(config["model"])
    buckets = {"bucket_cap_mb": _ONE_BUCKET} if hook == "powersgd" else {}
    model = DistributedDataParallel(
      module, gradient_as_bucket_view=True, **buckets
    )
    if hook == "bf16":
      model.register_comm_hook(None, _bf16_hook)
    elif hook == "powersgd":
      state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        min_compression_rate=2,
      )
      model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    # Weight decay is for matrices only, as in `optimizer`.
    groups = [
      {
        "params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix],
        "weight_decay": is_matrix * options["weight_decay"],
      }
      for is_matrix in (True, False)
    ]
    adamw = torch.optim.AdamW(
      groups,
      lr=options["lr"],
      betas=(options["b1"], options["b2"]),
      fused=True,
    )
    replicas = dist.get_world_size()
    shape = (
      config["batch_size"] // replicas,
      config["model"]["context"] + 1,
    )
    torch.manual_seed(dist.get_rank())
    rows = torch.randint(config["model"]["vocab_size"], shape)
    local = model.no_sync if hook == "none" else contextlib.nullcontext

    def step() -> None:
      adamw.zero_grad(set_to_none=True)
      with local():
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
      nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
      adamw.step()
      loss.item()

    self._steps[name] = step
    return {"params": sum(p.numel() for p in module.parameters())}

  def run(self, name: str, part: str, count: int) -> dict[str, Any]:
    """Times steps and returns the seconds of each."""
    if part != "step":
      raise ValueError(f"`part` must be step here, got {part}.")
    return {"seconds": calls.seconds_of(self._steps[name], count)[0]}


if __name__ == "__main__":
  calls.serve(TorchHost)
