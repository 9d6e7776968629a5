"""BERT's task: GPT-2's model predicts masked tokens from all others."""

from experiments.trainer.tasks.gpt2 import Gpt2


class Bert(Gpt2):
  """GPT-2 with attention in both directions; the last token id is the mask."""

  axes = Gpt2.axes - {"stage", "tensor"}
  is_masked = True


TASK = Bert
