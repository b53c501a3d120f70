"""Active learning: which examples to label next, by the probabilities of sampled networks.

Every function takes samples `(num_samples, examples, classes)`, such as
`zm.sample_outputs(model, pool, 50).softmax(-1)`, and returns positions in them with their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromean.arguments import require_function, require_integer, require_seed, shown
from zeromean.prediction.probabilities import cross_entropy
from zeromean.uncertainty.arrays import ArrayLike, as_samples, as_tensor, like, require_count

# Numbers of joint probabilities that are held at once.
_AT_ONCE = 20_000_000


class Acquired(NamedTuple):
    """What to label next, the best first, in the form of the samples."""

    indices: Any
    """Positions of the examples in the samples."""
    scores: Any
    """What each was chosen for."""


def entropy(samples: ArrayLike, count: int) -> Acquired:
    """The examples with the highest predictive entropy, in nats: those that are unclear."""
    numbers = as_samples(samples)
    average = numbers.mean(0)
    return _highest(cross_entropy(average, average, "softmax", -1), count, samples)


def variation_ratios(samples: ArrayLike, count: int) -> Acquired:
    """The examples whose most probable class is least probable."""
    return _highest(1 - as_samples(samples).mean(0).amax(-1), count, samples)


def bald(samples: ArrayLike, count: int) -> Acquired:
    """The examples on which the samples disagree most (Houlsby et al., 2011).

    By the mutual information of label and weights, in nats. Each example is judged by itself, so
    that several of them may tell the same: see `batch_bald`.
    """
    numbers = as_samples(samples)
    average = numbers.mean(0)
    total = cross_entropy(average, average, "softmax", -1)
    # Jensen makes the difference non-negative; rounding may not.
    return _highest((total - _expected_entropy(numbers)).clamp_min(0), count, samples)


def at_random(samples: ArrayLike, count: int, *, seed: int | None = None) -> Acquired:
    """Any examples: what the other functions must be better than.

    Args:
        seed: Default: the global generator goes on.
    """
    numbers = as_samples(samples)
    return _highest(torch.rand(numbers.shape[1], generator=_generator(seed)), count, samples)


def batch_bald(
    samples: ArrayLike, count: int, *, num_configurations: int = 10_000, seed: int | None = 0
) -> Acquired:
    """The examples that tell most together (Kirsch et al., 2019): each adds to those before it.

    Greedy, by the mutual information of all their labels and the weights. The labels of the first
    few are enumerated; beyond `num_configurations` of them, so many are drawn. The scores are the
    mutual information of an example and all before it.

    A sample must be one network for all examples, or nothing can be said of them together: draw
    with `sampler=zm.weight` and one seed. torch's Dropout draws another network for each example.

    Args:
        count: How many to choose. Time grows with it.
        num_configurations: Joint labels that are looked at; time and memory grow with it.
        seed: Of the drawn ones; None: the global generator goes on.
    """
    numbers = as_samples(samples)
    num_samples, num_examples, num_classes = numbers.shape
    count = min(require_count("count", count), num_examples)
    num_configurations = require_integer("num_configurations", num_configurations, at_least=1)
    generator = _generator(seed)
    conditional = _expected_entropy(numbers)
    chosen: list[int] = []
    scores: list[Tensor] = []
    # p(labels of the chosen | weights) of every configuration, (num_samples, configurations).
    joint = torch.ones(num_samples, 1, dtype=torch.float64)
    exact = True
    while True:
        weight = torch.ones(joint.shape[1]) if exact else 1 / (joint.mean(0) * joint.shape[1])
        information = _joint_entropy(joint, weight, numbers) - conditional
        information -= conditional[chosen].sum()
        information[chosen] = -torch.inf
        best = int(information.argmax())
        chosen.append(best)
        scores.append(information[best].clamp_min(0))
        if len(chosen) == count:
            break
        exact = exact and joint.shape[1] * num_classes <= num_configurations
        if exact:
            joint = (joint[:, :, None] * numbers[:, best, None]).flatten(1)
        else:
            joint = _drawn(numbers[:, chosen], num_configurations, generator)
    return Acquired(like(torch.tensor(chosen), samples), like(torch.stack(scores), samples))


Acquire = Callable[[Tensor, int], Acquired]


def active_learning(
    pool_size: int,
    sample: Callable[[Tensor], Tensor],
    *,
    initial: ArrayLike,
    count: int,
    acquire: Acquire = bald,
    candidates: int | None = None,
) -> Iterator[Tensor]:
    """Yield the positions of all examples that are labelled, more and more of them.

    Training stands in the body of the loop, and is yours; `sample` is called when the body ends:

        for labelled in active_learning(len(pool), sample, initial=range(20), count=10):
            model = train(pool[labelled], ask_for_labels(labelled))
            if len(labelled) >= 200:
                break

    It ends where the pool does.

    Args:
        pool_size: How many examples there are.
        sample: Gives the samples of the current model, `(num_samples, examples, classes)`, for the
            positions of the examples without a label.
        initial: Positions that are labelled from the start.
        count: How many are labelled in a round.
        acquire: `bald`, `batch_bald`, `entropy`, `variation_ratios`, `at_random`, or a function of
            samples and count that returns `Acquired`.
        candidates: How many examples without a label are looked at in a round, drawn anew by the
            global generator. Default: all.
    """
    pool_size = require_count("pool_size", pool_size)
    count = require_count("count", count)
    candidates = pool_size if candidates is None else require_count("candidates", candidates)
    if candidates < count:
        raise ValueError(f"candidates must be at least count, {count}, got {candidates}.")
    for name, function in (("sample", sample), ("acquire", acquire)):
        require_function(name, function, "a function that is given")
    labelled = as_tensor("initial", initial if hasattr(initial, "__len__") else list(initial))
    labelled = labelled.flatten().long()
    outside = len(labelled) and not 0 <= int(labelled.min()) <= int(labelled.max()) < pool_size
    if outside or len(labelled.unique()) < len(labelled):
        raise ValueError(
            f"initial must be different positions from 0 to {pool_size - 1}, got {shown(initial)}."
        )
    return _rounds(pool_size, sample, labelled, count, acquire, candidates)


def _rounds(
    pool_size: int,
    sample: Callable[[Tensor], Tensor],
    labelled: Tensor,
    count: int,
    acquire: Acquire,
    candidates: int,
) -> Iterator[Tensor]:
    while True:
        yield labelled
        waiting = torch.ones(pool_size, dtype=torch.bool)
        waiting[labelled] = False
        rest = waiting.nonzero()[:, 0]
        if not len(rest):
            return
        if candidates < len(rest):
            rest = rest[torch.randperm(len(rest))[:candidates]]
        samples = sample(rest)
        if len(as_samples(samples)[0]) != len(rest):
            raise ValueError(
                f"sample must return samples of the {len(rest)} examples that it was given, got "
                f"shape {tuple(samples.shape)}."
            )
        new = as_tensor("indices", acquire(samples, min(count, len(rest))).indices)
        labelled = torch.cat([labelled, rest[new]])


def _highest(scores: Tensor, count: int, samples: ArrayLike) -> Acquired:
    count = min(require_count("count", count), len(scores))
    best = scores.topk(count)
    return Acquired(like(best.indices, samples), like(best.values, samples))


def _expected_entropy(samples: Tensor) -> Tensor:
    return cross_entropy(samples, samples, "softmax", -1).mean(0)


def _joint_entropy(joint: Tensor, weight: Tensor, samples: Tensor) -> Tensor:
    """Entropy of the labels of the chosen and of each example together, `(examples,)`."""
    num_samples, _, num_classes = samples.shape
    step = max(_AT_ONCE // (joint.shape[1] * num_classes), 1)
    parts = []
    for part in samples.split(step, 1):
        both = joint.T @ part.flatten(1) / num_samples
        surprise = -torch.xlogy(both, both).view(-1, part.shape[1], num_classes).sum(-1)
        parts.append(weight.double() @ surprise)
    return torch.cat(parts)


def _drawn(of_chosen: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """Configurations that the samples draw, equally many each: p(configuration | weights)."""
    num_samples, num_chosen, _ = of_chosen.shape
    each = -(-count // num_samples)
    # An own draw for every sample and example: (num_samples, num_chosen, each).
    labels = of_chosen.flatten(0, 1).multinomial(each, replacement=True, generator=generator)
    labels = labels.view(num_samples, num_chosen, each).transpose(0, 1).reshape(num_chosen, -1)
    joint = torch.ones(num_samples, labels.shape[1], dtype=torch.float64)
    for i in range(num_chosen):
        joint = joint * of_chosen[:, i, labels[i]]
    return joint


def _generator(seed: int | None) -> torch.Generator | None:
    return None if seed is None else torch.Generator().manual_seed(require_seed(seed))
