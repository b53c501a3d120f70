"""What trained classifiers are asked: accuracies, the bound's data term, log α, dropped means."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import functional
from zeromean.conversion.certificate import effective_log_alpha
from zeromean.distributions.posteriors.factorized import independent
from zeromean.experiments.networks import small_networks

if TYPE_CHECKING:
    from zeromean.data import ImageSet

EVALUATION_BATCH = 1000


def probabilities(
    model: nn.Module,
    data: ImageSet,
    num_samples: int,
    *,
    sampler: Any = None,
    seed: int | None = None,
) -> Tensor:
    """Averaged probabilities, `(images, classes)`."""
    return torch.cat(
        [
            zm.predict_proba(model, batch, num_samples, sampler=sampler, seed=seed)
            for batch, _ in _batches(data)
        ]
    )


def top_accuracy(proba: Tensor, labels: Tensor, k: int = 1) -> float:
    """Per cent of images whose label is among the k classes of the highest probability."""
    best = proba.topk(min(k, proba.shape[-1])).indices
    return 100 * (best == labels.unsqueeze(-1)).any(-1).double().mean().item()


def accuracy(
    model: nn.Module,
    data: ImageSet,
    num_samples: int,
    *,
    sampler: Any = None,
    seed: int | None = None,
) -> float:
    """Per cent of images that averaged probabilities classify."""
    proba = probabilities(model, data, num_samples, sampler=sampler, seed=seed)
    return small_networks.accuracy(proba, data.labels)


def sampled_probabilities(
    model: nn.Module, data: ImageSet, num_samples: int, *, sampler: Any = None, seed: int = 0
) -> Tensor:
    """Probabilities by every sample, `(num_samples, images, classes)`.

    The seed is the same for all batches: with `zm.weight` a sample is one network for all images.
    """
    parts = [
        zm.sample_outputs(model, batch, num_samples, sampler=sampler, seed=seed, chunk_size=5)
        for batch, _ in _batches(data)
    ]
    return torch.cat(parts, 1).softmax(-1)


@torch.no_grad()
def log_likelihood(model: nn.Module, data: ImageSet, num_samples: int = 10) -> float:
    """E log p(T | X, W), summed over the examples, by samples of the noise for each."""
    total = 0.0
    for batch, labels in _batches(data):
        log_proba = zm.sample_outputs(model, batch, num_samples).log_softmax(-1)
        chosen = log_proba.gather(-1, labels.expand(num_samples, -1).unsqueeze(-1))
        total += chosen.double().sum().item() / num_samples
    return total


@torch.no_grad()
def log_alphas(model: nn.Module) -> dict[str, float]:
    """log α of every layer that has means, in the mean over its weights."""
    return {
        name: effective_log_alpha(layer.weight)
        for name, layer in zm.stochastic_layers(model).items()
        if layer.weight.has_mean
    }


def drop_means(model: nn.Module, inputs: Tensor) -> tuple[nn.Module | None, Tensor]:
    """A copy without means and its certificate for every input; None where there are no means."""
    names = [n for n, m in zm.stochastic_layers(model).items() if m.weight.has_mean]
    if not names:
        return None, torch.zeros(())
    dropped = copy.deepcopy(model)
    certificate = zm.zero_mean_(
        dropped, where=lambda name, layer: name in names, inputs=inputs, num_samples=5, seed=0
    )
    return dropped, certificate.per_input


def expecting_means(model: nn.Module, data: ImageSet) -> nn.Module:
    """A copy whose BatchNorm expects what it sees when means are propagated.

    Noise, that of dropout and that of the weights, adds variance to what BatchNorm sees in training
    and in training alone.
    """
    model = copy.deepcopy(model).eval()
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with zm.sampling(model, zm.mean):
            zm.recalibrate_batchnorm_(model, data.images.split(500))
    return model


def look(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    """What Figures 3 and 8 show of an epoch, on a few images."""
    row: dict[str, Any] = {
        "accuracy_mean": accuracy(model, few, 1, sampler=zm.mean),
        "accuracy_sample": accuracy(model, few, 1, seed=epoch),
        "accuracy_ensemble": accuracy(model, few, 10, seed=epoch),
    }
    if alphas := log_alphas(model):
        row["log_alpha"] = alphas
    dropped, certificate = drop_means(model, few.images[:200])
    if dropped is not None:
        images, draws = few.images[:200], 200
        # The same noise for both, so that their difference is known better than either.
        before = zm.sample_outputs(model, images, draws, seed=epoch).softmax(-1)
        after = zm.sample_outputs(dropped, images, draws, seed=epoch).softmax(-1)
        change, error = (before - after).mean(0).abs(), (before - after).std(0) / draws**0.5
        row |= {
            "accuracy_zero_mean": accuracy(dropped, few, 10, seed=epoch),
            "certificate": float(certificate.mean()),
            "change": float(change.amax(1).mean()),
            # Image by image. Of as many comparisons as there are images, classes and epochs, not
            # one lies five standard errors off by chance.
            "excess": float(((change - 5 * error).amax(1) - certificate).max()),
        }
    return row


def approximate_kl(layer: zm.StochasticLayer) -> float:
    """The KL to the log-uniform prior by the sigmoid fit, whatever the layer's own prior is."""
    if not layer.weight.has_mean:
        return 0.0
    log_alpha = independent(layer.weight, "log α").log_alpha_per_weight()
    return functional.log_uniform_kl_approx(log_alpha).sum().item()


def _batches(data: ImageSet) -> list[tuple[Tensor, Tensor]]:
    return list(
        zip(data.images.split(EVALUATION_BATCH), data.labels.split(EVALUATION_BATCH), strict=True)
    )
