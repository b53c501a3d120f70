"""What adversarial examples are worth: scored with fresh noise, the worst attack for every image.

An attack that stops at the first draw that was misclassified reports the luck of that draw. So
none of an attack's own numbers is used: its images are, with noise that it has not seen, and with
more draws than it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeromean.arguments import require_integer, require_seed, shown
from zeromean.prediction.classification import predict_proba
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import draws_noise, kept_networks
from zeromean.robustness.examples import AdversarialExamples
from zeromean.robustness.requirements import (
    require_epsilon,
    require_images,
    require_labels,
    require_targets,
)
from zeromean.text_table import text_table
from zeromean.training.randomness import derived_seed

# Rounding of images that were moved back and forth.
_SLACK = 1e-5


@dataclass(frozen=True)
class Judgement:
    """Which images are still classified correctly, by attack. `print` shows a table.

    Attributes:
        clean: Whether each image is classified correctly as it is, `(images,)`.
        correct: The same after each attack, by its name.
        hits: Of attacks with targets, whether each image is taken for its target.
        num_samples: Draws that every verdict averaged over.
    """

    clean: Tensor
    correct: dict[str, Tensor]
    hits: dict[str, Tensor]
    num_samples: int

    @property
    def robust(self) -> Tensor:
        """Whether each image survives all attacks, and is classified correctly without one."""
        robust = self.clean
        for correct in self.correct.values():
            robust = robust & correct
        return robust

    @property
    def clean_accuracy(self) -> float:
        return self.clean.double().mean().item()

    @property
    def robust_accuracy(self) -> float:
        return self.robust.double().mean().item()

    def accuracy(self, attack: str) -> float:
        """The part of the images that are classified correctly after one attack."""
        return self.correct[attack].double().mean().item()

    def success(self, attack: str) -> float:
        """The part of the images that an attack makes what it wants: its target, or an error."""
        done = self.hits[attack] if attack in self.hits else ~self.correct[attack]
        return done.double().mean().item()

    def rows(self) -> list[list[str]]:
        rows = [["attack", "accuracy", "± s.e.", "target hit"]]
        rows.append(["none", *_percent(self.clean), ""])
        for name, correct in self.correct.items():
            hit = _percent(self.hits[name])[0] if name in self.hits else ""
            rows.append([name, *_percent(correct), hit])
        return [*rows, ["worst for each image", *_percent(self.robust), ""]]

    def __str__(self) -> str:
        draws = "draw" if self.num_samples == 1 else "fresh draws"
        title = f"{len(self.clean)} images, {self.num_samples} {draws} a verdict"
        return "\n".join([title, *text_table(self.rows())])


def judge(
    model: Source,
    images: Tensor,
    labels: Tensor,
    attacked: AdversarialExamples
    | Sequence[AdversarialExamples]
    | Mapping[str, Tensor | AdversarialExamples],
    *,
    epsilon: float | None = None,
    num_samples: int | None = None,
    outputs: OutputKind | None = None,
    seed: int = 1_000_003,
    batch_size: int = 500,
) -> Judgement:
    """Classify what attacks have made, with fresh noise and more draws than they had.

    Args:
        model: Any classifier, or several: a list, an `Ensemble`, `zm.States`.
        images: Before the attacks, in [0, 1].
        labels: The true classes.
        attacked: What attacks returned, or images by the names of what made them.
        epsilon: Refuse images that have gone farther than this. Default: than the attack says.
        num_samples: Draws a verdict. Default: 100, or five times those of the attack if that is
            more, and 1 where the model draws no noise.
        outputs: "logits" or "probabilities": what the model returns, as in `zm.predict_proba`.
        seed: Of the noise; another one than the attacks'.
        batch_size: Images at once.
    """
    require_images(images)
    networks = kept_networks(model)
    named = _named(attacked, images)
    seed = require_seed(seed)
    batch_size = require_integer("batch_size", batch_size, at_least=1)
    epsilon = None if epsilon is None else require_epsilon(epsilon)
    most = max((made.num_samples for made in named.values()), default=0)
    noisy = draws_noise(networks, images)
    if not noisy:
        num_samples = 1
    elif num_samples is None:
        num_samples = max(100, 5 * most)
    else:
        num_samples = require_integer("num_samples", num_samples, at_least=1)
        if num_samples <= most:
            raise ValueError(
                f"The judge needs more draws than the attack averaged over, {most}, got "
                f"num_samples={num_samples}; leave it out, or raise it."
            )

    def predicted(x: Tensor, number: int) -> Tensor:
        parts = []
        for index, part in enumerate(x.split(batch_size)):
            own = derived_seed(seed % 2**64, number, index)
            parts.append(predict_proba(networks, part, num_samples, seed=own, outputs=outputs))
        return torch.cat(parts)

    probabilities = predicted(images, 0)
    require_labels(labels, images, probabilities.shape[-1])
    correct: dict[str, Tensor] = {}
    hits: dict[str, Tensor] = {}
    for number, (name, made) in enumerate(named.items(), 1):
        _require_within(name, made, images, epsilon)
        if made.targets is not None:
            require_targets(made.targets, labels, images, probabilities.shape[-1])
        classes = predicted(made.images, number).argmax(-1)
        correct[name] = classes == labels
        if made.targets is not None:
            hits[name] = classes == made.targets
    return Judgement(probabilities.argmax(-1) == labels, correct, hits, num_samples)


def _named(attacked: object, images: Tensor) -> dict[str, AdversarialExamples]:
    """Adversarial examples by name; two runs of one attack count as two."""
    if isinstance(attacked, AdversarialExamples):
        attacked = [attacked]
    named: dict[str, AdversarialExamples] = {}
    if isinstance(attacked, Mapping):
        for name, made in attacked.items():
            if isinstance(made, Tensor):
                made = AdversarialExamples(made, str(name), None, num_samples=0, num_steps=0)
            named[str(name)] = made
    elif isinstance(attacked, Sequence) and not isinstance(attacked, (str, bytes)):
        for made in attacked:
            name = getattr(made, "attack", "")
            count = sum(other == name or other.startswith(f"{name} (") for other in named)
            named[f"{name} ({count + 1})" if count else name] = made
    else:
        raise TypeError(
            "attacked must be what an attack returned, a list of that, or images by name, got "
            f"{shown(attacked)}."
        )
    for name, made in named.items():
        if not isinstance(made, AdversarialExamples):
            raise TypeError(f"{name or 'attacked'} must be AdversarialExamples, got {shown(made)}.")
        require_images(made.images, f"what {name} made")
        if made.images.shape != images.shape:
            raise ValueError(
                f"What {name} made must be {len(images)} images of the shape "
                f"{tuple(images.shape[1:])}, got {tuple(made.images.shape)}."
            )
    return named


def _require_within(
    name: str, made: AdversarialExamples, images: Tensor, epsilon: float | None
) -> None:
    bounds = [bound for bound in (epsilon, made.epsilon) if bound is not None]
    farthest = float((made.images - images).abs().amax())
    if bounds and farthest > min(bounds) + _SLACK:
        raise ValueError(
            f"{name} moved a pixel by {farthest:.4g}, more than epsilon={min(bounds):.4g}; judge "
            "it at its own epsilon, or attack within this one."
        )


def _percent(values: Tensor) -> list[str]:
    mean = values.double().mean().item()
    return [f"{100 * mean:.1f}%", f"{100 * math.sqrt(mean * (1 - mean) / len(values)):.1f}"]
