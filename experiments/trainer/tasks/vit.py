"""A vision transformer on handwritten digits."""

from experiments.trainer.models import vision
from experiments.trainer.tasks._digits import DigitsTask


class Vit(DigitsTask):
  """Classifies digits by `vision.VisionTransformer`."""

  network = vision.VisionTransformer


TASK = Vit
