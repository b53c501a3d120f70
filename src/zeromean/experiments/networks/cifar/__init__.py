"""Networks on CIFAR: what the experiments with them have in common.

The networks are the papers', the recipe is ours, for CPUs. Networks that several experiments need
are trained once, in the folder of models. The smoke sizes run on scikit-learn's digits, enlarged
and coloured.
"""

from zeromean.experiments.networks.cifar.architecture import (
    DETERMINISTIC,
    DROPOUT,
    LAST_LAYERS,
    VARIANCE,
    Network,
)
from zeromean.experiments.networks.cifar.measures import Trained, look, look_closely, measure
from zeromean.experiments.networks.cifar.recipe import (
    BOUNDS,
    images,
    train,
    train_and_measure,
    train_any,
)
from zeromean.experiments.networks.cifar.settings import (
    ARCHITECTURES,
    QUICK,
    SMOKE,
    Settings,
    bits,
    precision_of,
)

__all__ = [
    "ARCHITECTURES",
    "BOUNDS",
    "DETERMINISTIC",
    "DROPOUT",
    "LAST_LAYERS",
    "QUICK",
    "SMOKE",
    "VARIANCE",
    "Network",
    "Settings",
    "Trained",
    "bits",
    "images",
    "look",
    "look_closely",
    "measure",
    "precision_of",
    "train",
    "train_and_measure",
    "train_any",
]
