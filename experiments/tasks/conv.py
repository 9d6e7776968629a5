"""A convolutional network on handwritten digits."""

from experiments.models import vision
from experiments.tasks._digits import DigitsTask


class Conv(DigitsTask):
  """Classifies digits by `vision.Convolution`."""

  network = vision.Convolution


TASK = Conv
