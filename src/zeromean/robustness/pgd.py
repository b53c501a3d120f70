"""Attacks by the sign of gradients, which average over the noise (expectation over transformation).

Goodfellow et al. (2014) and Kurakin et al. (2016) for the iterated fast sign, Madry et al. (2018)
for projected gradients, Athalye et al. (2018) for gradients of averages.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.arguments import (
    require_choice,
    require_integer,
    require_numbers,
    require_seed,
)
from zeromean.prediction.probabilities import OutputKind
from zeromean.prediction.sources import Source
from zeromean.robustness.adapter import MeanClassifier, draws_noise, kept_networks
from zeromean.robustness.examples import AdversarialExamples, noise_in_ball, within
from zeromean.robustness.progress import progress_bar
from zeromean.robustness.requirements import (
    require_epsilon,
    require_images,
    require_labels,
    require_targets,
)
from zeromean.training.randomness import derived_seed

Loss = Literal["cross-entropy", "margin"]
NOISY_SAMPLES = 20


def eot_pgd(
    model: Source,
    images: Tensor,
    labels: Tensor,
    *,
    epsilon: float,
    targets: Tensor | None = None,
    num_steps: int = 40,
    step: float | None = None,
    num_samples: int | None = None,
    random_start: bool = True,
    loss: Loss = "cross-entropy",
    noise: Literal["fresh", "fixed"] = "fresh",
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
) -> AdversarialExamples:
    """Projected gradients of the log mean probability over fresh draws, within ±epsilon a pixel.

    The point after the last step is what counts: which of many noisy points was the best one, one
    noisy number could only guess.

    Args:
        model: Any classifier, or several: a list, an `Ensemble`, `zm.States`.
        images: In [0, 1].
        labels: The true classes.
        epsilon: The largest change of a pixel.
        targets: Classes to be taken for. Default: any but the true one.
        num_steps: Gradients.
        step: How far a pixel goes in one. Default: 2.5 epsilon / num_steps.
        num_samples: Draws of the noise that a gradient averages over. Default: 20, and 1 where the
            model draws no noise.
        random_start: Begin anywhere within ±epsilon, in place of the image.
        loss: "margin" is of log probabilities, and also moves networks that are very sure.
        noise: "fixed" attacks the same draws in every step; see `MeanClassifier`.
        outputs: "logits" or "probabilities": what the model returns, as in `zm.predict_proba`.
        seed: Of the start and of the noise; the global generator is left alone.
        batch_size: Images that are attacked at once.
        progress: Show a bar, where the output is a terminal and rich is installed.
    """
    epsilon = require_epsilon(epsilon)
    num_steps = require_integer("num_steps", num_steps, at_least=1)
    step = usual_step(epsilon, num_steps) if step is None else _require_step(step)
    require_choice("loss", loss, ("cross-entropy", "margin"))
    seed = require_seed(seed)
    batch_size = require_integer("batch_size", batch_size, at_least=1)
    networks, num_samples = prepared(model, images, labels, targets, num_samples, outputs)
    found = []
    with progress_bar("EoT-PGD", -(-len(images) // batch_size) * num_steps, progress) as advance:
        for index, x in enumerate(images.split(batch_size)):
            here = slice(index * batch_size, index * batch_size + len(x))
            aims = labels[here] if targets is None else targets[here]
            of_batch = derived_seed(seed % 2**64, index)
            classifier = MeanClassifier(
                networks, num_samples, noise=noise, seed=of_batch, outputs=outputs
            )
            changed = x
            if random_start:
                changed = within(x + noise_in_ball(x, epsilon, of_batch), x, epsilon)
            for _ in range(num_steps):
                _, gradient = _log_probabilities_and_gradient(
                    classifier, changed, aims, loss, towards=targets is not None
                )
                changed = within(changed + step * gradient.sign(), x, epsilon)
                advance()
            found.append(changed)
    kind = "EoT-PGD" if num_samples > 1 else "PGD"
    name = kind if targets is None else f"targeted {kind}"
    return AdversarialExamples(torch.cat(found), name, epsilon, num_samples, num_steps, targets)


def iterative_fast_sign(
    model: Source,
    images: Tensor,
    labels: Tensor,
    targets: Tensor,
    *,
    num_steps: int = 50,
    step: float = 0.5 / 255,
    epsilon: float | None = None,
    num_samples: int | None = None,
    outputs: OutputKind | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
) -> AdversarialExamples:
    """The targeted attack of the variance networks' Figure 7, and its success by step.

    x ← clip(x + step · sign(∇ log p(target | x))), from the image itself, where p is the mean over
    `num_samples` draws. Before each step, success is taken from the draws of that step's gradient,
    which no step so far has seen.

    Args:
        step: The paper's, in pixels of [0, 1].
        epsilon: Default: no bound but the number of steps.
        num_samples: The paper's 10 for networks that draw noise, by default, and 1 for others.

    The other arguments are those of `eot_pgd`.
    """
    epsilon = None if epsilon is None else require_epsilon(epsilon)
    num_steps = require_integer("num_steps", num_steps, at_least=1)
    step = _require_step(step)
    seed = require_seed(seed)
    batch_size = require_integer("batch_size", batch_size, at_least=1)
    networks, num_samples = prepared(
        model, images, labels, targets, num_samples, outputs, by_default=10
    )
    found = []
    successes = torch.zeros(num_steps + 1, dtype=torch.float64)
    total = -(-len(images) // batch_size) * num_steps
    with progress_bar("iterative fast sign", total, progress) as advance:
        for index, x in enumerate(images.split(batch_size)):
            aims = targets[index * batch_size : index * batch_size + len(x)]
            classifier = MeanClassifier(
                networks, num_samples, seed=derived_seed(seed % 2**64, index), outputs=outputs
            )
            changed = x
            for iteration in range(num_steps):
                logs, gradient = _log_probabilities_and_gradient(
                    classifier, changed, aims, "cross-entropy", towards=True
                )
                successes[iteration] += (logs.argmax(-1) == aims).sum().cpu()
                changed = within(changed + step * gradient.sign(), x, epsilon)
                advance()
            with torch.no_grad():
                successes[num_steps] += (classifier(changed).argmax(-1) == aims).sum().cpu()
            found.append(changed)
    return AdversarialExamples(
        torch.cat(found),
        "iterative fast sign",
        epsilon,
        num_samples,
        num_steps,
        targets,
        successes / len(images),
    )


def prepared(
    model: Source,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None,
    num_samples: int | None,
    outputs: OutputKind | None,
    *,
    by_default: int = NOISY_SAMPLES,
) -> tuple[list, int]:
    """The networks that are attacked and the draws of each, with what was given checked."""
    require_images(images)
    networks = kept_networks(model)
    noisy = draws_noise(networks, images)
    if num_samples is None:
        num_samples = by_default if noisy else 1
    num_samples = require_integer("num_samples", num_samples, at_least=1)
    if num_samples > 1 and not noisy:
        warnings.warn(
            f"The model draws no noise, so that {num_samples} draws are all alike; the attack "
            "takes one, as on a deterministic network.",
            stacklevel=3,
        )
        num_samples = 1
    with torch.no_grad():
        num_classes = MeanClassifier(networks, 1, seed=0, outputs=outputs)(images[:1]).shape[-1]
    require_labels(labels, images, num_classes)
    if targets is not None:
        require_targets(targets, labels, images, num_classes)
    return networks, num_samples


def usual_step(epsilon: float, num_steps: int) -> float:
    """Far enough to come from one end of ±epsilon to the other, and back a little."""
    return 2.5 * epsilon / num_steps


def _log_probabilities_and_gradient(
    classifier: MeanClassifier, images: Tensor, classes: Tensor, loss: Loss, *, towards: bool
) -> tuple[Tensor, Tensor]:
    """Which way is up: towards these classes, or away from them."""
    x = images.detach().requires_grad_()
    with torch.enable_grad():
        logs = classifier(x)
        if loss == "margin":
            own = F.one_hot(classes, logs.shape[-1]).bool()
            best_other = logs.masked_fill(own, -torch.inf).amax(-1)
            ascent = logs.gather(-1, classes.unsqueeze(-1)).squeeze(-1) - best_other
        else:
            ascent = -F.nll_loss(logs, classes, reduction="none")
        (gradient,) = torch.autograd.grad(ascent.sum() if towards else -ascent.sum(), x)
    return logs.detach(), gradient


def _require_step(step: float) -> float:
    require_numbers(step=step)
    if not 0 < step <= 1:
        raise ValueError(f"step, in pixels of [0, 1], must be in (0, 1], got {step}.")
    return float(step)
