"""The Dirichlet distribution by its log-concentrations: a density, and entropies in closed form.

Concentrations are α = e^z, so that the mean is softmax(z): logits keep their meaning, and what they
have in common, which a softmax does not see, says how sure that mean is.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dirichlet_nll(
    log_concentration: Tensor, mean_log_probability: Tensor, *, dim: int = -1
) -> Tensor:
    """−log of the density, averaged over samples of which only the mean of log p counts.

    Args:
        log_concentration: z, with the classes along `dim`.
        mean_log_probability: log p, or its average over several samples p, in the same shape.
    """
    z = _precise(log_concentration)
    concentration = z.exp()
    total = concentration.sum(dim)
    powers = ((concentration - 1) * mean_log_probability.to(z)).sum(dim)
    nll = concentration.lgamma().sum(dim) - total.lgamma() - powers
    return nll.to(log_concentration.dtype)


def dirichlet_entropies(log_concentration: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Expected entropy of the probabilities, and mutual information of class and probabilities.

    With p = α/α₀ these are Σ p (ψ(α₀ + 1) − ψ(α + 1)) and what is missing to the entropy of p. Both
    are computed by themselves: their sum hides the second where α₀ is large.
    """
    z = _precise(log_concentration)
    log_total = z.logsumexp(dim, keepdim=True)
    probability = (z - log_total).exp()
    of_total = (log_total.exp() + 1).digamma()
    of_each = (z.exp() + 1).digamma()
    expected = (probability * (of_total - of_each)).sum(dim)
    # The entropy of p is Σ p (log α₀ − log α).
    information = (probability * ((of_each - z) - (of_total - log_total))).sum(dim)
    dtype = log_concentration.dtype
    return expected.to(dtype), information.clamp_min(0).to(dtype)


def _precise(z: Tensor) -> Tensor:
    """In float64, where the device has it: log-gammas of large numbers cancel."""
    return z if z.device.type == "mps" else z.to(torch.float64)
