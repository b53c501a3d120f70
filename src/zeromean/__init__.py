"""Networks whose weights are random: variance networks, variational dropout and around them."""

from zeromean.batchnorm import recalibrate_batchnorm_
from zeromean.certificate import zero_mean_
from zeromean.compression.compress import compress
from zeromean.compression.report import compression_report
from zeromean.convert import make_stochastic_, to_deterministic
from zeromean.convolutions import Conv1d, Conv2d, Conv3d, ConvTranspose2d
from zeromean.dropout import GaussianDropout, LogNormalDropout, UnitNoise
from zeromean.int8 import to_int8
from zeromean.layers import Embedding, Linear, StochasticLayer, stochastic_layers
from zeromean.likelihoods import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from zeromean.noise import factorized, normal, rademacher, uniform
from zeromean.objectives import (
    clip_log_alpha_,
    cosine_warmup,
    elbo_loss,
    kl_by_layer,
    kl_divergence,
    linear_warmup,
    parameter_groups,
    require_optimized,
)
from zeromean.posteriors import Additive, Multiplicative, Posterior, ZeroMean
from zeromean.prediction import (
    predict_moments,
    predict_proba,
    predictive_uncertainty,
    sample_outputs,
)
from zeromean.priors import ARD, LogUniform, Normal, Prior, StudentT
from zeromean.prune import prune_
from zeromean.quantize import quantize_
from zeromean.ranks import seed_ranks
from zeromean.recurrent import GRU, LSTM
from zeromean.samplers import auto, flipout, local, mean, moment_matched, weight
from zeromean.sampling import draw_noise, held_noise, sampling
from zeromean.serialization import load, save
from zeromean.sparsity import sparsity

__version__ = "0.2.0"

__all__ = [
    "ARD",
    "GRU",
    "LSTM",
    "Additive",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "Embedding",
    "GaussianDropout",
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "Linear",
    "LogNormalDropout",
    "LogUniform",
    "Multiplicative",
    "Normal",
    "Posterior",
    "Prior",
    "StochasticLayer",
    "StudentT",
    "UnitNoise",
    "ZeroMean",
    "auto",
    "clip_log_alpha_",
    "compress",
    "compression_report",
    "cosine_warmup",
    "draw_noise",
    "elbo_loss",
    "factorized",
    "flipout",
    "held_noise",
    "kl_by_layer",
    "kl_divergence",
    "linear_warmup",
    "load",
    "local",
    "make_stochastic_",
    "mean",
    "moment_matched",
    "normal",
    "parameter_groups",
    "predict_moments",
    "predict_proba",
    "predictive_uncertainty",
    "prune_",
    "quantize_",
    "rademacher",
    "recalibrate_batchnorm_",
    "require_optimized",
    "sample_outputs",
    "sampling",
    "save",
    "seed_ranks",
    "sparsity",
    "stochastic_layers",
    "to_deterministic",
    "to_int8",
    "uniform",
    "weight",
    "zero_mean_",
]
