"""Noise on units instead of weights."""

from zeromean.layers.dropout.binary import BinaryDropout
from zeromean.layers.dropout.gaussian import GaussianDropout
from zeromean.layers.dropout.log_normal import LogNormalDropout
from zeromean.layers.dropout.unit_noise import UnitNoise

__all__ = ["BinaryDropout", "GaussianDropout", "LogNormalDropout", "UnitNoise"]
