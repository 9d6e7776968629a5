"""A convolutional network on handwritten digits."""

from experiments.trainer.models import vision
from experiments.trainer.tasks._digits import DigitsTask


class Conv(DigitsTask):
  """Classifies digits by `vision.Convolution`."""

  network = vision.Convolution


TASK = Conv
