"""Two inputs that attend to each other: the halves of handwritten digits.

It stands in for data of two kinds, such as images and questions about them.
The data is made here: the left and the right half of each image of
scikit-learn's digits are the two inputs, and the digit is the class.
"""

from experiments.trainer.models import vision
from experiments.trainer.tasks._digits import SIDE, DigitsTask


class CoAttention(DigitsTask):
  """Classifies digits by `vision.CoAttention`."""

  network = vision.CoAttention
  side = SIDE // 2


TASK = CoAttention
