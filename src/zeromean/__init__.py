"""Networks whose weights are random: variance networks, variational dropout, Bayesian networks.

Public names are imported when they are first used. So `import zeromean` takes hardly any time, and
compression, export and training are loaded only by those who use them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeromean.moved import MOVED, Package

if TYPE_CHECKING:
    from zeromean.compression.add_unit_noise import add_unit_noise_
    from zeromean.compression.compress import compress
    from zeromean.compression.int8 import to_int8
    from zeromean.compression.lora_rank import prune_lora_
    from zeromean.compression.prune import prune_
    from zeromean.compression.quantize import quantize_
    from zeromean.compression.report import compression_report
    from zeromean.compression.sparse_runtimes import sparse_runtimes
    from zeromean.compression.sparsity import sparsity
    from zeromean.compression.summary import summary
    from zeromean.conversion.batchnorm import recalibrate_batchnorm_
    from zeromean.conversion.become_prior import become_prior_
    from zeromean.conversion.certificate import zero_mean_
    from zeromean.conversion.lora import add_lora_
    from zeromean.conversion.make_stochastic import make_stochastic_
    from zeromean.conversion.monte_carlo_batchnorm import monte_carlo_batchnorm
    from zeromean.conversion.replace_dropout import replace_dropout_
    from zeromean.conversion.share_log_alpha import share_log_alpha_
    from zeromean.conversion.to_deterministic import to_deterministic
    from zeromean.distributions.from_posterior import FromPosterior
    from zeromean.distributions.gamma_prior import GammaPrior
    from zeromean.distributions.hyperprior import InverseGamma
    from zeromean.distributions.noise import factorized, normal, rademacher, uniform
    from zeromean.distributions.posteriors.additive import Additive
    from zeromean.distributions.posteriors.drop_connect import DropConnect
    from zeromean.distributions.posteriors.factorized import FactorizedPosterior
    from zeromean.distributions.posteriors.full_covariance import FullCovariance
    from zeromean.distributions.posteriors.low_rank import LowRank
    from zeromean.distributions.posteriors.multiplicative import Multiplicative
    from zeromean.distributions.posteriors.positive import Exponential, Gamma
    from zeromean.distributions.posteriors.posterior import Posterior
    from zeromean.distributions.posteriors.zero_mean import ZeroMean
    from zeromean.distributions.priors import ARD, LogUniform, Normal, Prior, StudentT
    from zeromean.files.model import load, save
    from zeromean.layers.attention import MultiheadAttention
    from zeromean.layers.blocks import draw_noise, held_noise, sampling
    from zeromean.layers.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose2d
    from zeromean.layers.dropout.binary import BinaryDropout
    from zeromean.layers.dropout.gaussian import GaussianDropout
    from zeromean.layers.dropout.log_normal import LogNormalDropout
    from zeromean.layers.dropout.unit_noise import UnitNoise
    from zeromean.layers.embedding import Embedding
    from zeromean.layers.linear import Linear
    from zeromean.layers.norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm
    from zeromean.layers.recurrent import GRU, LSTM
    from zeromean.layers.stochastic_layer import StochasticLayer, stochastic_layers
    from zeromean.prediction.classification import predict_proba, predictive_uncertainty
    from zeromean.prediction.propagated import propagate_moments
    from zeromean.prediction.regression import predict_moments
    from zeromean.prediction.samples import sample_outputs
    from zeromean.prediction.sources import Augmented, States
    from zeromean.registry import register
    from zeromean.samplers.outputs import local, moment_matched
    from zeromean.samplers.weights import auto, flipout, mean, weight
    from zeromean.training.likelihoods import GaussianLikelihood, HeteroscedasticGaussianLikelihood
    from zeromean.training.objective import (
        clip_log_alpha_,
        cosine_warmup,
        elbo_loss,
        kl_by_layer,
        kl_divergence,
        linear_warmup,
    )
    from zeromean.training.parameter_groups import parameter_groups, require_optimized
    from zeromean.training.ranks import seed_ranks
    from zeromean.training.reinforce import reinforce_term

__version__ = "0.2.0"

__all__ = [
    "ARD",
    "GRU",
    "LSTM",
    "Additive",
    "Augmented",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BinaryDropout",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "DropConnect",
    "Embedding",
    "Exponential",
    "FactorizedPosterior",
    "FromPosterior",
    "FullCovariance",
    "Gamma",
    "GammaPrior",
    "GaussianDropout",
    "GaussianLikelihood",
    "GroupNorm",
    "HeteroscedasticGaussianLikelihood",
    "InverseGamma",
    "LayerNorm",
    "Linear",
    "LogNormalDropout",
    "LogUniform",
    "LowRank",
    "MultiheadAttention",
    "Multiplicative",
    "Normal",
    "Posterior",
    "Prior",
    "States",
    "StochasticLayer",
    "StudentT",
    "UnitNoise",
    "ZeroMean",
    "add_lora_",
    "add_unit_noise_",
    "auto",
    "become_prior_",
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
    "monte_carlo_batchnorm",
    "normal",
    "parameter_groups",
    "predict_moments",
    "predict_proba",
    "predictive_uncertainty",
    "propagate_moments",
    "prune_",
    "prune_lora_",
    "quantize_",
    "rademacher",
    "recalibrate_batchnorm_",
    "register",
    "reinforce_term",
    "replace_dropout_",
    "require_optimized",
    "sample_outputs",
    "sampling",
    "save",
    "seed_ranks",
    "share_log_alpha_",
    "sparse_runtimes",
    "sparsity",
    "stochastic_layers",
    "summary",
    "to_deterministic",
    "to_int8",
    "uniform",
    "weight",
    "zero_mean_",
]

# Where each of them lives, as above.
_HOMES = {
    "compression.add_unit_noise": ("add_unit_noise_",),
    "compression.compress": ("compress",),
    "compression.int8": ("to_int8",),
    "compression.lora_rank": ("prune_lora_",),
    "compression.prune": ("prune_",),
    "compression.quantize": ("quantize_",),
    "compression.report": ("compression_report",),
    "compression.sparse_runtimes": ("sparse_runtimes",),
    "compression.sparsity": ("sparsity",),
    "compression.summary": ("summary",),
    "conversion.batchnorm": ("recalibrate_batchnorm_",),
    "conversion.become_prior": ("become_prior_",),
    "conversion.certificate": ("zero_mean_",),
    "conversion.lora": ("add_lora_",),
    "conversion.make_stochastic": ("make_stochastic_",),
    "conversion.monte_carlo_batchnorm": ("monte_carlo_batchnorm",),
    "conversion.replace_dropout": ("replace_dropout_",),
    "conversion.share_log_alpha": ("share_log_alpha_",),
    "conversion.to_deterministic": ("to_deterministic",),
    "distributions.from_posterior": ("FromPosterior",),
    "distributions.noise": (
        "factorized",
        "normal",
        "rademacher",
        "uniform",
    ),
    "distributions.posteriors.additive": ("Additive",),
    "distributions.posteriors.drop_connect": ("DropConnect",),
    "distributions.posteriors.factorized": ("FactorizedPosterior",),
    "distributions.posteriors.full_covariance": ("FullCovariance",),
    "distributions.posteriors.low_rank": ("LowRank",),
    "distributions.posteriors.multiplicative": ("Multiplicative",),
    "distributions.posteriors.positive": (
        "Exponential",
        "Gamma",
    ),
    "distributions.posteriors.posterior": ("Posterior",),
    "distributions.posteriors.zero_mean": ("ZeroMean",),
    "distributions.hyperprior": ("InverseGamma",),
    "distributions.gamma_prior": ("GammaPrior",),
    "distributions.priors": (
        "ARD",
        "LogUniform",
        "Normal",
        "Prior",
        "StudentT",
    ),
    "files.model": (
        "load",
        "save",
    ),
    "layers.attention": ("MultiheadAttention",),
    "layers.blocks": (
        "draw_noise",
        "held_noise",
        "sampling",
    ),
    "layers.convolution": (
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose2d",
    ),
    "layers.dropout.binary": ("BinaryDropout",),
    "layers.dropout.gaussian": ("GaussianDropout",),
    "layers.dropout.log_normal": ("LogNormalDropout",),
    "layers.dropout.unit_noise": ("UnitNoise",),
    "layers.embedding": ("Embedding",),
    "layers.linear": ("Linear",),
    "layers.norm": (
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "GroupNorm",
        "LayerNorm",
    ),
    "layers.recurrent": (
        "GRU",
        "LSTM",
    ),
    "layers.stochastic_layer": (
        "StochasticLayer",
        "stochastic_layers",
    ),
    "prediction.classification": (
        "predict_proba",
        "predictive_uncertainty",
    ),
    "prediction.propagated": ("propagate_moments",),
    "prediction.regression": ("predict_moments",),
    "prediction.samples": ("sample_outputs",),
    "prediction.sources": ("Augmented", "States"),
    "registry": ("register",),
    "samplers.outputs": (
        "local",
        "moment_matched",
    ),
    "samplers.weights": (
        "auto",
        "flipout",
        "mean",
        "weight",
    ),
    "training.likelihoods": (
        "GaussianLikelihood",
        "HeteroscedasticGaussianLikelihood",
    ),
    "training.objective": (
        "clip_log_alpha_",
        "cosine_warmup",
        "elbo_loss",
        "kl_by_layer",
        "kl_divergence",
        "linear_warmup",
    ),
    "training.parameter_groups": (
        "parameter_groups",
        "require_optimized",
    ),
    "training.ranks": ("seed_ranks",),
    "training.reinforce": ("reinforce_term",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
# Packages that are used as `zm.training.fit`, without an import of their own.
_PACKAGES = (
    "compression",
    "conversion",
    "data",
    "distributions",
    "ensembles",
    "estimators",
    "export",
    "files",
    "functional",
    "layers",
    "models",
    "moments",
    "prediction",
    "robustness",
    "samplers",
    "training",
    "uncertainty",
)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f"zeromean.{_MODULE_OF[name]}"), name)
        globals()[name] = value  # From now on an attribute like any other.
        return value
    if name in _PACKAGES or name in MOVED:
        return import_module(f"zeromean.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


# So that an import of an old path cannot hide a function of that name (`zeromean.sampling`).
sys.modules[__name__].__class__ = Package
