"""Modules that hold a posterior, a prior and a sampler."""

from zeromean.layers.attention import MultiheadAttention
from zeromean.layers.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from zeromean.layers.embedding import Embedding
from zeromean.layers.linear import Linear
from zeromean.layers.norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm
from zeromean.layers.recurrent import GRU, LSTM
from zeromean.layers.stochastic_layer import StochasticLayer, stochastic_layers

__all__ = [
    "GRU",
    "LSTM",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Embedding",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "MultiheadAttention",
    "StochasticLayer",
    "stochastic_layers",
]
