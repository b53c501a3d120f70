"""The data term of deterministic variational inference: expected, where others draw it.

Wu et al. (2019). Its gradient has no variance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from zeromean.arguments import shown
from zeromean.functional.random_logits import expected_softmax
from zeromean.moments import RandomTensor
from zeromean.moments.random_tensor import FULL_UP_TO
from zeromean.training.likelihoods import Likelihood, as_likelihood, require_classes_of

# For a covariance of the logits: the average over so many is within 1e-2, and always the same.
_NUM_POINTS = 256


def expected_nll(
    outputs: Tensor,
    targets: Tensor,
    likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Expected negative log-likelihood of normal outputs, averaged over the examples.

    Of classes it is E log Σ e^z − E z, of `zm.GaussianLikelihood` and
    `zm.HeteroscedasticGaussianLikelihood` the closed form.

    Args:
        outputs: What a model returns inside `zeromean.moments.propagated`.
        targets: Classes, or what the likelihood asks for.
        likelihood: As of `fit`: one with a method `expected_nll(outputs, targets)`. Default:
            classes, along dimension 1.
        label_smoothing: Part of every label's probability that goes to all classes alike.
    """
    chosen: Any = as_likelihood(likelihood)
    if not isinstance(outputs, RandomTensor):
        outputs = RandomTensor(outputs, outputs * 0)
    if chosen is not None:
        method: Any = getattr(chosen, "expected_nll", None)
        if not callable(method):
            raise TypeError(
                "objective='moments' needs a likelihood with a method expected_nll(outputs, "
                f"targets), as zm.GaussianLikelihood() has, got {shown(likelihood)}; use "
                "objective='samples'."
            )
        nll: Any = method(outputs, targets)
        return nll
    mean, variance = outputs.moments()
    require_classes_of(mean, targets)
    known = outputs.covariance_of
    if known is not None and mean.dim() == 2 and mean.shape[1] <= FULL_UP_TO:
        found = expected_softmax(mean, covariance=known(), num_points=_NUM_POINTS)
    else:
        found = expected_softmax(mean.movedim(1, -1), variance=variance.movedim(1, -1))
    chosen_logits = mean.gather(1, targets.clamp_min(0).unsqueeze(1).long()).squeeze(1)
    counted = targets >= 0  # -100 is what torch's cross-entropy leaves out.
    nll = (found.log_normalizer - chosen_logits)[counted].mean()
    if label_smoothing == 0:
        return nll
    uniform = (found.log_normalizer - mean.mean(1))[counted].mean()
    return (1 - label_smoothing) * nll + label_smoothing * uniform
