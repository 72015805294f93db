r"""The papers' runs, with their hyperparameters, one page each.

An experiment is a value: the settings of a training run. `postil train --experiment NAME` starts from it,
and any flag changes what it names.

![Bits per character of a part of the validation text, over tokens read: all models had the same number of
them.](/benchmarks/results/comparison.json)
"""

from postil.experiments import aft, algorithmic, demo, feedback, transformer
from postil.training.settings import TrainSettings

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, TrainSettings] = {
    "demo": demo.SETTINGS,
    "transformer": transformer.SETTINGS,
    **aft.VARIANTS,
    **feedback.VARIANTS,
    "algorithmic": algorithmic.SETTINGS,
}
