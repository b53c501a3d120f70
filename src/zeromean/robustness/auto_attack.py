"""AutoAttack's attacks (Croce and Hein, 2020) through pyautoattack, for random networks too.

APGD, FAB and Square keep the first point that one noisy look found misclassified, and stop there.
On a random network that is the luck of a draw, and the stronger attack looks weaker than plain PGD.
So APGD is asked here for the point of the highest loss, over as many draws as the adapter has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer, require_seed, shown
from zeromean.extras import how_to_install
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.randomness import forked_generators
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import MeanClassifier
from zeromean.robustness.examples import AdversarialExamples, within
from zeromean.robustness.pgd import prepared
from zeromean.robustness.progress import progress_bar
from zeromean.robustness.requirements import require_epsilon
from zeromean.training.randomness import derived_seed

ATTACKS = ("apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square")
VERSIONS = {
    "rand": ("apgd-ce", "apgd-dlr"),
    "standard": ("apgd-ce", "apgd-t", "fab-t", "square"),
}
# Classes that the differences of sorted logits in a loss need.
_FEWEST_CLASSES = {"apgd-dlr": 3, "apgd-t": 4}


def autoattack(
    model: Source,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    attacks: Literal["rand", "standard"] | Sequence[str] = "rand",
    num_samples: int | None = None,
    num_steps: int = 100,
    num_queries: int = 5000,
    num_targets: int = 9,
    keep: Literal["highest loss", "first error"] | None = None,
    noise: Literal["fresh", "fixed"] = "fresh",
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
) -> list[AdversarialExamples]:
    """Run AutoAttack's attacks, each on all images; `judge` takes the worst for every image.

    What is not named here is as in `eot_pgd`.

    Args:
        attacks: "rand" (APGD on cross-entropy and DLR), "standard", or names: apgd-ce, apgd-dlr,
            apgd-t, fab, fab-t, square.
        num_steps: Gradients of APGD and FAB.
        num_queries: Queries of Square.
        num_targets: Classes that apgd-t and fab-t try, at most all but one.
        keep: What apgd-ce and apgd-dlr return: their points of the highest loss, by default where
            the model draws noise, or the first ones that were misclassified, as they are run by
            their authors. The other attacks know the latter only.
    """
    names = _names(attacks)
    epsilon = require_epsilon(epsilon)
    num_steps = require_integer("num_steps", num_steps, at_least=1)
    num_queries = require_integer("num_queries", num_queries, at_least=1)
    num_targets = require_integer("num_targets", num_targets, at_least=1)
    batch_size = require_integer("batch_size", batch_size, at_least=1)
    seed = require_seed(seed)
    if keep not in (None, "highest loss", "first error"):
        raise ValueError(f"keep must be 'highest loss' or 'first error', got {shown(keep)}.")
    library = _pyautoattack()
    networks, num_samples = prepared(model, images, labels, None, num_samples, outputs)
    if keep is None:
        keep = "highest loss" if num_samples > 1 else "first error"
    classifier = MeanClassifier(networks, num_samples, noise=noise, seed=seed, outputs=outputs)
    with torch.no_grad():
        num_classes = classifier(images[:1]).shape[-1]
    for name in names:
        if num_classes < _FEWEST_CLASSES.get(name, 2):
            raise ValueError(
                f"{name} needs at least {_FEWEST_CLASSES[name]} classes, got {num_classes}; leave "
                "it out of attacks=."
            )
    made = []
    total = len(names) * math.ceil(len(images) / batch_size)
    with progress_bar("AutoAttack", total, progress) as advance:
        for name in names:
            parts = []
            for index, x in enumerate(images.split(batch_size)):
                y = labels[index * batch_size : index * batch_size + len(x)]
                run = library.AutoAttack(
                    _Images(classifier, x.shape[1:]),
                    attacks=[name],
                    version="custom",
                    eps=epsilon,
                    device=x.device,
                    seed=derived_seed(seed % 2**64, index),
                )
                targets = min(num_targets, num_classes - 1)
                # They seed the global generators.
                with forked_generators(classifier):
                    found = _run(run, name, x, y, keep, num_steps, num_queries, targets)
                parts.append(within(found.detach().to(x.dtype), x, epsilon))
                advance()
            steps = num_queries if name == "square" else num_steps
            made.append(AdversarialExamples(torch.cat(parts), name, epsilon, num_samples, steps))
    return made


class _Images(nn.Module):
    """The classifier on images of four dimensions, which is what the attacks make of any."""

    def __init__(self, classifier: MeanClassifier, shape: torch.Size):
        super().__init__()
        self.classifier = classifier
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x.reshape(-1, *self.shape))


def _run(
    library: Any,
    name: str,
    images: Tensor,
    labels: Tensor,
    keep: str,
    num_steps: int,
    num_queries: int,
    num_targets: int,
) -> Tensor:
    x = images if images.dim() == 4 else images.reshape(len(images), 1, 1, -1)
    seed = library.seed
    if name in ("apgd-ce", "apgd-dlr"):
        attack = library.apgd
        _set_steps(attack, num_steps)
        attack.loss, attack.n_restarts, attack.seed = name.removeprefix("apgd-"), 1, seed
        torch.manual_seed(seed)  # With best_loss it does not do so itself.
        found = attack.perturb(x, labels, best_loss=keep == "highest loss")
    elif name == "apgd-t":
        attack = library.apgd_targeted
        _set_steps(attack, num_steps)
        attack.n_target_classes, attack.seed = num_targets, seed
        found = attack.perturb(x, labels)
    elif name == "square":
        attack = library.square
        attack.n_queries, attack.seed = num_queries, seed
        with torch.no_grad():
            found = attack.perturb(x, labels)
    else:
        attack = library.fab
        attack.targeted, attack.n_restarts = name == "fab-t", 1
        attack.n_iter, attack.n_target_classes, attack.seed = num_steps, num_targets, seed
        found = attack.perturb(x, labels)
    return found.reshape(images.shape)


def _set_steps(attack: Any, num_steps: int) -> None:
    """As its constructor would: the checkpoints follow from the number of steps."""
    attack.n_iter = attack.n_iter_orig = num_steps
    attack.n_iter_2 = max(int(0.22 * num_steps), 1)
    attack.n_iter_min = max(int(0.06 * num_steps), 1)
    attack.size_decr = max(int(0.03 * num_steps), 1)


def _names(attacks: Any) -> tuple[str, ...]:
    if isinstance(attacks, str):
        attacks = VERSIONS.get(attacks, (attacks,))
    names = tuple(attacks)
    unknown = [name for name in names if name not in ATTACKS]
    if unknown or not names:
        raise ValueError(
            f"attacks must be 'rand', 'standard' or some of {', '.join(ATTACKS)}, got "
            f"{shown(unknown[0] if unknown else names)}."
        )
    return names


def _pyautoattack() -> Any:
    try:
        import pyautoattack
    except ImportError as error:
        raise ImportError(how_to_install("AutoAttack needs pyautoattack", "attacks")) from error
    return pyautoattack
