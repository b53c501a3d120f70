"""A random classifier as a module that any attack library can differentiate."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import require_choice, require_integer, require_seed
from zeromean.prediction.monte_carlo import Consumer, draw_outputs
from zeromean.prediction.probabilities import OutputKind, ToProbabilities
from zeromean.prediction.sources import Source, is_one, networks_of
from zeromean.samplers.weights import weight
from zeromean.training.randomness import derived_seed


class MeanClassifier(nn.Module):
    """log of the mean probability over draws of the noise, `(batch, classes)`: logits of a kind.

    Gradients go through all draws at once. What no noise has reached is computed, and
    differentiated, once for all of them. Attack libraries take this module where they take a plain
    classifier.

    Args:
        source: Any classifier: a module, or several that count alike (a list, an `Ensemble`,
            `zm.States`, what yields modules). Copies are made of networks that exist one at a time.
        num_samples: Draws of the noise of each network.
        noise: "fresh" draws in every call, as whoever is attacked does. "fixed" is the same
            `num_samples` networks in every call, drawn once by `seed`: weights are then drawn as
            with `zm.weight`; the masks of Dropout belong to the place of an example in its batch.
        seed: Makes a sequence of calls reproducible, without touching the global generator. Fixed
            noise needs one, 0 by default.
        outputs: "logits" or "probabilities": what the networks return, as in `zm.predict_proba`.
    """

    def __init__(
        self,
        source: Source,
        num_samples: int = 20,
        *,
        noise: Literal["fresh", "fixed"] = "fresh",
        seed: int | None = None,
        outputs: OutputKind | None = None,
    ):
        super().__init__()
        self.num_samples = require_integer("num_samples", num_samples, at_least=1)
        require_choice("noise", noise, ("fresh", "fixed"))
        self.noise = noise
        self.seed = require_seed(seed) if seed is not None else (0 if noise == "fixed" else None)
        self.outputs: OutputKind | None = outputs
        self.networks = nn.ModuleList(kept_networks(source))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        totals: list[Tensor] = []
        counts: list[int] = []
        classes: list[ToProbabilities] = []

        def consumer(network: nn.Module) -> Consumer:
            looked_at = ToProbabilities(
                network, dim=-1, link="softmax", outputs=self.outputs, num_examples=len(x)
            )
            classes.append(looked_at)

            def take(chunk: Tensor) -> None:
                looked_at(chunk.detach())
                # In one step from logits: a float32 has no probabilities below 1e-45.
                logs = chunk.clamp_min(1e-30).log() if looked_at.given else chunk.log_softmax(-1)
                totals.append(logs.logsumexp(0))
                counts.append(len(chunk))

            return Consumer(take, (looked_at.finish,))

        draw_outputs(
            self.networks if len(self.networks) > 1 else self.networks[0],
            x,
            self.num_samples,
            consumer,
            sampler=weight if self.noise == "fixed" else None,
            seed=self._next_seed(),
            # One chunk draws the same weights whatever the batch.
            chunk_size=self.num_samples if self.noise == "fixed" else None,
            differentiable=torch.is_grad_enabled(),
        )
        return torch.stack(totals).logsumexp(0) - math.log(sum(counts))

    def extra_repr(self) -> str:
        return f"num_samples={self.num_samples}, noise={self.noise!r}, seed={self.seed}"

    def _next_seed(self) -> int | None:
        if self.seed is None or self.noise == "fixed":
            return self.seed
        self.num_calls += 1
        return derived_seed(self.seed % 2**64, self.num_calls)


def kept_networks(source: Source) -> list[nn.Module]:
    """The networks of a source, all there at the same time."""
    if is_one(source) or isinstance(source, (Sequence, nn.ModuleList)):
        return list(networks_of(source))
    # One network whose weights change would change under the gradients of the draws before.
    return [copy.deepcopy(network) for network in networks_of(source)]


@torch.no_grad()
def draws_noise(source: Source, images: Tensor) -> bool:
    """Whether two predictions of the same images differ.

    By trial, since noise that is drawn in a `forward` shows in no list of modules.
    """
    for network in networks_of(source):
        drawn: list[Tensor] = []
        draw_outputs(network, images[:8], 2, lambda _, take=drawn.append: Consumer(take), seed=0)
        first, second = torch.cat(drawn)
        if not torch.equal(first, second):
            return True
    return False
