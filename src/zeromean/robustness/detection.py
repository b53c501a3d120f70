"""Telling adversarial inputs by the uncertainty of their predictions."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from zeromean.prediction.classification import predictive_uncertainty
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import kept_networks
from zeromean.robustness.examples import AdversarialExamples
from zeromean.robustness.requirements import require_images
from zeromean.uncertainty.detection import auroc

# What rounding makes of a difference of equal entropies, in nats.
_ROUNDING = 1e-6


class Detection(NamedTuple):
    """Areas under the ROC curve: 1 tells every adversarial input from a clean one, 0.5 none.

    Below 0.5 the network is surer of adversarial inputs than of clean ones.
    """

    entropy: float
    """By the entropy of the averaged probabilities."""
    mutual_information: float
    """By how much the draws disagree; 0.5 for one network without noise, whose draws do not."""


def detect(
    model: Source,
    clean: Tensor,
    adversarial: Tensor | AdversarialExamples,
    *,
    num_samples: int = 50,
    outputs: OutputKind | None = None,
    seed: int = 2_000_003,
    batch_size: int = 500,
) -> Detection:
    """How well uncertainty tells adversarial from clean inputs.

    An attacker who knows of the detector would attack it too: what is measured here is one who does
    not.

    Args:
        model: Any classifier, or several: a list, an `Ensemble`, `zm.States`.
        clean: Inputs as they are.
        adversarial: What an attack made of them. Keep those that fool the network, as `judge`
            tells, to ask whether *these* are noticed.
        num_samples: Draws of the noise.
    """
    networks = kept_networks(model)
    if isinstance(adversarial, AdversarialExamples):
        adversarial = adversarial.images
    scores = []
    for offset, images in enumerate((clean, adversarial)):
        require_images(images, ("clean", "adversarial")[offset])
        uncertainty = predictive_uncertainty(
            networks,
            images,
            num_samples,
            seed=seed + offset,
            batch_size=batch_size,
            outputs=outputs,
        )
        disagreement = uncertainty.mutual_information
        disagreement = disagreement.where(disagreement > _ROUNDING, 0)
        scores.append((uncertainty.predictive_entropy, disagreement))
    (entropy, information), (other_entropy, other_information) = scores
    return Detection(auroc(entropy, other_entropy), auroc(information, other_information))
