"""What can be said of a random weight: how much is left, its noise, its signal, its KL."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from zeromean.compression.sparsity import weight_name
from zeromean.conversion.certificate import effective_log_alpha
from zeromean.distributions.posteriors.factorized import FactorizedPosterior
from zeromean.distributions.posteriors.posterior import Posterior
from zeromean.files.contents import RandomWeight
from zeromean.layers.stochastic_module import own_sampler, stochastic_modules
from zeromean.prediction.randomness import seeded
from zeromean.registry import LAYERS, NOISES, POSTERIORS, SAMPLERS


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A posterior in numbers.

    Attributes:
        parameters: Learned numbers.
        kept: Weights that are not pruned.
        log_alpha: log α of each kept weight; None where the mean is zero, so that α is infinite.
        log10_scale: Of each kept weight, the logarithm of its standard deviation.
        effective_log_alpha: Of all variances together over all squared means.
    """

    shape: tuple[int, ...]
    parameters: int
    kept: int
    log_alpha: np.ndarray | None
    log10_scale: np.ndarray
    effective_log_alpha: float

    @property
    def sparsity(self) -> float:
        count = int(np.prod(self.shape))
        return 1 - self.kept / count if count else 0.0

    @property
    def log10_snr(self) -> np.ndarray | None:
        """Signal-to-noise: |mean| over the standard deviation, 1/√α."""
        return None if self.log_alpha is None else -0.5 * self.log_alpha / np.log(10)


def weights_in(model: nn.Module) -> dict[str, RandomWeight]:
    """The random weights of a network, as `files.contents` finds them in a file."""
    found: dict[str, RandomWeight] = {}
    owners: dict[nn.Module, str] = {}
    for layer, module in stochastic_modules(model).items():
        for part, posterior in module.distributions().items():
            if not isinstance(posterior, Posterior):
                continue  # Noise on units.
            described = POSTERIORS.name_of(type(posterior)) or type(posterior).__name__
            noise = NOISES.name_of(posterior.noise) or "other"
            name = weight_name(layer, part)
            found[name] = RandomWeight(
                layer=LAYERS.name_of(type(module)) or type(module).__name__,
                described=described if noise == "normal" else f"{described} of {noise} noise",
                posterior=posterior,
                prior=getattr(module, "prior", None),
                sampler=SAMPLERS.name_of(own_sampler(module)),
                tied_to=owners.get(posterior),
            )
            owners.setdefault(posterior, name)
    return found


@torch.no_grad()
def measure(posterior: Posterior) -> Measured:
    """The numbers of a posterior."""
    mask = posterior.mask
    mean, variance = posterior.moments()
    log_alpha = None
    if mean is not None:
        if isinstance(posterior, FactorizedPosterior):
            log_alpha = posterior.log_alpha_per_weight()
        else:
            tiny = torch.finfo(mean.dtype).tiny
            log_alpha = (variance / mean.square().clamp_min(tiny)).log()
    variance = variance.double().clamp_min(torch.finfo(torch.float64).tiny)
    return Measured(
        shape=tuple(posterior.shape),
        parameters=sum(parameter.numel() for parameter in posterior.parameters()),
        kept=posterior.numel() if mask is None else int(mask.sum()),
        log_alpha=None if log_alpha is None else _of_kept(log_alpha, mask),
        log10_scale=_of_kept(0.5 * variance.log10(), mask),
        effective_log_alpha=effective_log_alpha(posterior),
    )


@torch.no_grad()
def kl_of(weight: RandomWeight) -> float | None:
    """Its KL, in nats; None where there is none, or the file does not say enough."""
    if weight.prior is None or weight.posterior is None or not weight.knows_layout:
        return None
    with seeded(0, weight.posterior):  # Some priors draw a sample.
        return float(weight.prior.kl(weight.posterior))


def _of_kept(values: Tensor, mask: Tensor | None) -> np.ndarray:
    return (values if mask is None else values[mask]).double().flatten().cpu().numpy()
