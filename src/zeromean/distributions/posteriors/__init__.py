"""Distributions of a weight, one a file: how it is drawn, its moments, what the KL term needs."""

from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.drop_connect import DropConnect
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.full_covariance import FullCovariance
from zeromean.distributions.posteriors.low_rank import LowRank
from zeromean.distributions.posteriors.multiplicative import Multiplicative
from zeromean.distributions.posteriors.positive import Exponential, Gamma, PositivePosterior
from zeromean.distributions.posteriors.posterior import (
    Posterior,
    PosteriorFactory,
    WeightLayout,
)
from zeromean.distributions.posteriors.zero_mean import ZeroMean

__all__ = [
    "Additive",
    "DropConnect",
    "Exponential",
    "FactorizedPosterior",
    "FullCovariance",
    "Gamma",
    "LowRank",
    "Multiplicative",
    "PositivePosterior",
    "Posterior",
    "PosteriorFactory",
    "WeightLayout",
    "ZeroMean",
]
