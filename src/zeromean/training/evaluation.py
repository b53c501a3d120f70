"""How good a model is on data that it is not trained on: one draw of the noise for each batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromean.prediction.classification import predict_proba
from zeromean.prediction.samples import sample_outputs
from zeromean.training.data_sources import Data, evaluation_batches
from zeromean.training.distributed import Group
from zeromean.training.likelihoods import Likelihood, require_classes_of
from zeromean.training.mini_batches import split_batch


def evaluate(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood | None,
    *,
    seed_of: Callable[[int], int],
    device: torch.device,
    group: Group,
) -> dict[str, float]:
    """`accuracy` (%) and `nll`; with a likelihood `nll`, and what else it knows of.

    That is `accuracy` where it has a method `probabilities(outputs)`, with classes along dimension
    1, and `rmse` where it has a mean.

    The batches are divided among the processes. Each has noise of its own, so that the numbers do
    not depend on how many there are.
    """
    totals: dict[str, float] = dict.fromkeys(_names(likelihood), 0.0)
    count = 0
    for index, batch in enumerate(evaluation_batches(data)):
        if index % group.world_size != group.rank:
            continue
        on_device = tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), batch)
        inputs, targets = split_batch(on_device)
        sums = (_of_classes if likelihood is None else _of_likelihood(likelihood))(
            model, inputs, targets, seed_of(index)
        )
        for name, value in sums.items():
            totals[name] += value
        count += len(targets)
    *sums, num_examples = group.sums([*totals.values(), count])
    if num_examples == 0:
        raise ValueError("A set of data to evaluate on gave no batch.")
    means = {n: value / num_examples for n, value in zip(totals, sums, strict=True)}
    if "accuracy" in means:
        means["accuracy"] *= 100
    if "rmse" in means:
        means["rmse"] **= 0.5
    return means


def _names(likelihood: Likelihood | None) -> tuple[str, ...]:
    if likelihood is None or _probabilities_of(likelihood) is not None:
        return ("accuracy", "nll")
    return ("nll", "rmse") if _mean_of(likelihood) is not None else ("nll",)


def _of_classes(model: nn.Module, inputs: Any, targets: Tensor, seed: int) -> Mapping[str, float]:
    probabilities = predict_proba(model, inputs, num_samples=1, seed=seed, dim=1)
    hits = _hits(probabilities, targets)
    chosen = probabilities.gather(1, targets.unsqueeze(1).long())
    nll = -float(chosen.clamp_min(torch.finfo(chosen.dtype).tiny).log().sum())
    return {"accuracy": hits, "nll": nll / _labels_of_each(targets)}


def _hits(probabilities: Tensor, targets: Tensor) -> float:
    """Examples whose most probable class is theirs; of pixels and tokens, the share of each."""
    require_classes_of(probabilities, targets)
    return int((probabilities.argmax(1) == targets).sum()) / _labels_of_each(targets)


def _labels_of_each(targets: Tensor) -> int:
    return max(targets.numel() // len(targets), 1)  # Pixels or tokens, if any.


def _of_likelihood(likelihood: Likelihood) -> Callable[..., Mapping[str, float]]:
    mean_of, probabilities_of = _mean_of(likelihood), _probabilities_of(likelihood)

    def sums(model: nn.Module, inputs: Any, targets: Tensor, seed: int) -> Mapping[str, float]:
        outputs = sample_outputs(model, inputs, num_samples=1, seed=seed)[0]
        with torch.no_grad():
            found = {"nll": float(likelihood.nll(outputs, targets)) * len(targets)}
            if probabilities_of is not None:
                found["accuracy"] = _hits(probabilities_of(outputs), targets)
            elif mean_of is not None:
                squared = (mean_of(outputs)[0] - targets).square()
                found["rmse"] = float(squared.mean()) * len(targets)
        return found

    return sums


def _mean_of(likelihood: Likelihood) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    return getattr(likelihood, "mean_and_log_variance", None)


def _probabilities_of(likelihood: Likelihood) -> Callable[[Tensor], Tensor] | None:
    return getattr(likelihood, "probabilities", None)
