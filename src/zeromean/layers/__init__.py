"""Modules that hold a posterior, a prior and a sampler."""

from zeromean.layers.embedding import Embedding
from zeromean.layers.linear import Linear
from zeromean.layers.stochastic_layer import StochasticLayer, stochastic_layers

__all__ = ["Embedding", "Linear", "StochasticLayer", "stochastic_layers"]
