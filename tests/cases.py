"""The layers, posteriors, priors and samplers that the contract tests combine."""

from functools import partial

import torch

import zeromean as zm

LAYERS = {
    "Linear": (lambda **o: zm.Linear(6, 4, **o), lambda: torch.randn(3, 6)),
    "Conv1d": (lambda **o: zm.Conv1d(4, 6, 3, padding=1, **o), lambda: torch.randn(3, 4, 7)),
    "Conv2d": (
        lambda **o: zm.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), groups=2, **o),
        lambda: torch.randn(3, 4, 7, 6),
    ),
    "Conv3d": (lambda **o: zm.Conv3d(2, 3, 2, dilation=2, **o), lambda: torch.randn(3, 2, 4, 5, 4)),
    "ConvTranspose2d": (
        lambda **o: zm.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, **o),
        lambda: torch.randn(3, 4, 4, 3),
    ),
    "Embedding": (
        lambda **o: zm.Embedding(9, 5, padding_idx=2, **o),
        lambda: torch.tensor([[1, 2, 8], [3, 3, 0]]),
    ),
}

POSTERIORS = {
    "ZeroMean": zm.ZeroMean,
    "ZeroMean-rademacher": partial(zm.ZeroMean, noise=zm.rademacher),
    "ZeroMean-uniform": partial(zm.ZeroMean, noise=zm.uniform),
    "Multiplicative-layer": partial(zm.Multiplicative, share="layer", log_alpha=-1.0),
    "Multiplicative-neuron": partial(zm.Multiplicative, share="neuron", log_alpha=-1.0),
    "Multiplicative-weight": partial(zm.Multiplicative, share="weight", log_alpha=-1.0),
    "Multiplicative-rademacher": partial(zm.Multiplicative, noise=zm.rademacher, log_alpha=-1.0),
    "Additive": partial(zm.Additive, log_variance=-3.0),
    "Additive-uniform": partial(zm.Additive, noise=zm.uniform, log_variance=-3.0),
    "DropConnect-uniform": partial(zm.DropConnect, p=0.5),
    "Gamma": partial(zm.Gamma, log_alpha=-1.0),
    "Exponential": zm.Exponential,
}

PRIORS = {
    "None": None,
    "LogUniform": zm.LogUniform(),
    "LogUniform-approx": zm.LogUniform(kl="approx"),
    "LogUniform-sample": zm.LogUniform(kl="sample"),
    "StudentT": zm.StudentT(df=1e-3),
    "StudentT-sample": zm.StudentT(df=1e-3, kl="sample"),
    "ARD": zm.ARD(),
    "Normal": zm.Normal(scale=0.5),
    "Normal-learn": zm.Normal(learn=True),
    "Normal-neuron": zm.Normal(learn=True, per="neuron"),
    "Normal-hyperprior": zm.Normal(learn=True, per="weight", hyperprior=zm.InverseGamma(2.0, 0.1)),
    "GammaPrior": zm.GammaPrior(2.0, scale=0.5),
    "GammaPrior-learn": zm.GammaPrior(learn=True),
}

SAMPLERS = {
    "local": zm.local,
    "weight": zm.weight,
    "moment_matched": zm.moment_matched,
    "flipout": zm.flipout,
    "mean": zm.mean,
    "auto": zm.auto,
}


def is_positive(posterior: str) -> bool:
    return posterior in ("Gamma", "Exponential")


def is_normal(posterior: str) -> bool:
    return not posterior.endswith(("rademacher", "uniform")) and not is_positive(posterior)


def is_allowed(posterior: str, prior: str, sampler: str) -> bool:
    """What the theory covers: closed-form KLs and local reparameterization need normal noise."""
    asymmetric = posterior.startswith("DropConnect") or is_positive(posterior)
    if asymmetric and sampler == "flipout":
        return False
    if prior != "None" and is_positive(posterior) != prior.startswith("GammaPrior"):
        return False
    if is_positive(posterior):
        return sampler != "local"
    return is_normal(posterior) or (prior == "None" and sampler != "local")


def build(layer: str, posterior: str, prior: str = "None", sampler: str = "weight", **options):
    return LAYERS[layer][0](
        posterior=POSTERIORS[posterior],
        prior=PRIORS[prior],
        sampler=SAMPLERS[sampler],
        **options,
    )
