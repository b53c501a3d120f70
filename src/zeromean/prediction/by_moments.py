"""The predictions with `method="moments"`: what samples would average to, computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from zeromean.arguments import require_choice
from zeromean.functional.random_logits import expected_sigmoid
from zeromean.moments import RandomTensor
from zeromean.moments.attention import softmax_moments
from zeromean.prediction.inputs import InputsOrLoader
from zeromean.prediction.probabilities import ToProbabilities
from zeromean.prediction.propagated import outputs_of
from zeromean.prediction.sources import Source, networks_of

Method = Literal["samples", "moments"]


class Outputs(NamedTuple):
    """Where the outputs of a prediction come from."""

    model: Source
    inputs: InputsOrLoader
    batch_size: int | None
    select: Callable[[Any], Tensor] | None

    def of_networks(self) -> Iterator[tuple[nn.Module, list[RandomTensor]]]:
        """Each network, and its outputs for all batches."""
        for network in networks_of(self.model):
            yield network, list(outputs_of(network, self.inputs, self.batch_size, self.select))


def wants_moments(
    method: str, sampler: Any, seed: Any, chunk_size: Any, devices: Any, return_stderr: bool
) -> bool:
    """Whether moments are asked for; refuses what is for samples alone then."""
    require_choice("method", method, get_args(Method))
    if method == "samples":
        return False
    if return_stderr:
        raise ValueError(
            "method='moments' draws no samples, and so has no standard errors; to see how far it "
            "is off, call zm.propagate_moments(…, compare_with_samples=10_000)."
        )
    given = {"sampler": sampler, "seed": seed, "chunk_size": chunk_size, "devices": devices}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}= is for samples, and method='moments' draws none; omit it.")
    return True


@torch.no_grad()
def probabilities(
    outputs: Outputs, checks_of: Callable[[nn.Module], ToProbabilities]
) -> tuple[Tensor, Tensor | None]:
    """Expected probabilities, and expected entropies where the outputs are logits.

    Args:
        checks_of: What looks at the outputs of a network, and knows what they are.
    """
    means: list[Tensor] = []
    entropies: list[Tensor | None] = []
    for network, batches in outputs.of_networks():
        checks = checks_of(network)
        # For its errors: a softmax too many, outputs that are no classes.
        shown = _joined([batch.moments()[0] for batch in batches])
        checks.check(shown.unsqueeze(0))
        checks.finish()
        if checks.given:
            means.append(shown)
            entropies.append(None)
            continue
        of_batches = (_of_logits(batch, checks) for batch in batches)
        parts = zip(*of_batches, strict=True)
        mean, entropy = map(_joined, parts)
        means.append(mean)
        entropies.append(entropy)
    known = [entropy for entropy in entropies if entropy is not None]
    return _average(means), _average(known) if len(known) == len(means) else None


@torch.no_grad()
def regression(
    outputs: Outputs, noise_of: Callable[[Tensor], tuple[Tensor, Tensor]] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, aleatoric and epistemic variance of the mixture of all networks.

    Args:
        noise_of: Mean and log-variance of the targets, from the outputs.
    """
    found = []
    for _, batches in outputs.of_networks():
        parts = [_of_targets(batch, noise_of) for batch in batches]
        found.append([_joined(part) for part in zip(*parts, strict=True)])
    means, noises, variances = (torch.stack(part) for part in zip(*found, strict=True))
    return means.mean(0), noises.mean(0), variances.mean(0) + means.var(0, correction=0)


def _of_logits(logits: RandomTensor, checks: ToProbabilities) -> tuple[Tensor, Tensor]:
    wide = logits
    if logits.dtype in (torch.float16, torch.bfloat16):
        wide = logits.float()
    assert isinstance(wide, RandomTensor)
    if checks.link == "sigmoid":
        mean, _, entropy = expected_sigmoid(*wide.moments())
        return mean, entropy
    found = softmax_moments(wide, checks.dim)
    return found.mean.movedim(-1, checks.dim), found.expected_entropy


def _of_targets(
    outputs: RandomTensor, noise_of: Callable[[Tensor], tuple[Tensor, Tensor]] | None
) -> tuple[Tensor, Tensor, Tensor]:
    if noise_of is None:
        mean, variance = outputs.moments()
        return mean, torch.zeros_like(mean), variance
    targets, log_variance = noise_of(outputs)
    noise = log_variance.exp()
    mean, variance = _moments_of(targets)
    return mean, _moments_of(noise)[0], variance


def _moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.moments() if isinstance(x, RandomTensor) else (x, torch.zeros_like(x))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Batches, one after the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _average(parts: list[Tensor]) -> Tensor:
    """Over networks that count alike."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
