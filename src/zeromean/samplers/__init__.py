"""How op(x, W) is drawn: by its own distribution, or by drawing W."""

from zeromean.registry import SAMPLERS
from zeromean.samplers.kinds import Draws, draws
from zeromean.samplers.outputs import local, moment_matched
from zeromean.samplers.sampler import Sampler
from zeromean.samplers.weights import auto, flipout, mean, weight

__all__ = [
    "SAMPLERS",
    "Draws",
    "Sampler",
    "auto",
    "draws",
    "flipout",
    "local",
    "mean",
    "moment_matched",
    "weight",
]
