"""The last layer in closed form: its features, its Laplace posterior, and a head for variances."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zeromean.conversion.make_stochastic import make_stochastic_
from zeromean.distributions.posteriors.additive import Additive
from zeromean.distributions.posteriors.full_covariance import MOST_WEIGHTS, FullCovariance
from zeromean.distributions.priors import Normal
from zeromean.layers.blocks import monte_carlo_modes, sampling
from zeromean.layers.surgery import replace_modules_
from zeromean.prediction.inputs import as_arguments, logits_in
from zeromean.samplers.weights import mean as by_mean
from zeromean.training.mini_batches import split_batch
from zeromean.training.post_hoc.tasks import Classes, Numbers, Task

# Training examples that are enough for a curvature.
MOST_EXAMPLES = 10_000
# Part of the squared weights of a variance head that is added to its loss, by standardized feature.
PENALTY = 1.0
# Further than this from a multiple of the last layer's outputs, the model does more to them.
_SLACK = 1e-3


@dataclass(frozen=True)
class Head:
    """The last layer, which is dense, with what it gets and gives for training examples.

    Attributes:
        scale: The model's outputs are this times those of the layer.
        share: Part of the training set that these examples are.
    """

    name: str
    features: Tensor
    outputs: Tensor
    targets: Tensor
    scale: float
    share: float


def head_of(model: nn.Module, name: str, batches: Iterable[Any], num_data: int) -> Head | None:
    """What goes into the last layer; None where it is not dense, or more follows than a factor."""
    layer = model.get_submodule(name)
    if type(layer) is not nn.Linear:
        return None
    columns: tuple[list[Tensor], ...] = ([], [], [], [])
    seen: list[tuple[Any, Any]] = []
    handle = layer.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    device = layer.weight.device
    count = 0
    try:
        with _predicting(model):
            for batch in batches:
                inputs, targets = split_batch(tree_map_only(Tensor, lambda t: t.to(device), batch))
                args, kwargs = as_arguments(inputs)
                seen.clear()
                outputs = logits_in(model(*args, **kwargs))
                if len(seen) != 1 or seen[0][0].dim() != 2 or outputs.shape != seen[0][1].shape:
                    return None
                for column, each in zip(columns, (*seen[0], outputs, targets), strict=True):
                    column.append(each)
                count += len(targets)
                if count >= MOST_EXAMPLES:
                    break
    finally:
        handle.remove()
    features, given, outputs, targets = map(torch.cat, columns)
    scale = float((given * outputs).sum() / given.square().sum().clamp_min(1e-30))
    if (outputs - scale * given).norm() > _SLACK * outputs.norm():
        return None
    return Head(name, features, outputs, targets, scale, min(1.0, len(features) / num_data))


def variance_head(model: nn.Module, head: Head, *, by_input: bool = True) -> nn.Module | None:
    """A copy that returns log-variances behind its means, fitted to the training residuals.

    They are linear in the features of the last layer, and shrunk towards one variance for all.
    None where the model does more to the outputs of its last layer than return them.

    Args:
        by_input: False for one variance for all.
    """
    if abs(head.scale - 1) > _SLACK:
        return None
    squared = (head.targets - head.outputs).square().double()
    center, spread = head.features.double().mean(0), head.features.double().std(0)
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (head.features - center) / spread
    with torch.enable_grad():
        weight = standard.new_zeros(squared.shape[1], standard.shape[1]).requires_grad_()
        bias = squared.mean(0).clamp_min(1e-30).log().requires_grad_()
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            log_variance = standard @ weight.T + bias
            nll = 0.5 * (squared * (-log_variance).exp() + log_variance).sum(1).mean()
            penalized = nll + PENALTY * weight.square().sum()
            penalized.backward()
            return penalized

        if by_input:
            optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    copied = copy.deepcopy(model)
    layer: Any = copied.get_submodule(head.name)
    rows = (weight / spread).detach()
    offsets = (bias - (weight / spread) @ center).detach()
    wider = nn.Linear(
        layer.in_features,
        2 * layer.out_features,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    with torch.no_grad():
        wider.weight.copy_(torch.cat([layer.weight.double(), rows]))
        old = torch.zeros_like(offsets) if layer.bias is None else layer.bias.double()
        wider.bias.copy_(torch.cat([old, offsets]))
    return replace_modules_(copied, {layer: wider})


class Laplace:
    """The posterior of the last layer's weight: the inverse of the curvature and of a prior's.

    The curvature is that of Gauss and Newton (for these likelihoods Fisher's information), over all
    weights together, or by weight.

    Args:
        full: Over all weights together; by default where there are few.
    """

    def __init__(self, model: nn.Module, head: Head, task: Task, *, full: bool | None = None):
        self.model = model
        self.name = head.name
        layer: Any = model.get_submodule(head.name)
        self.full = layer.weight.numel() <= MOST_WEIGHTS if full is None else full
        self.mean_square = float(layer.weight.detach().square().mean())
        by_output = _information(head.outputs, task) * head.scale**2 / head.share
        self.curvature = _curvature(head.features, by_output, full=self.full)

    def candidate(self, prior_scale: float) -> nn.Module:
        """A copy of the model; the prior's standard deviation is in those of the weights."""
        variance = prior_scale**2 * max(self.mean_square, 1e-12)
        model = copy.deepcopy(self.model)
        make_stochastic_(
            model,
            posterior=FullCovariance if self.full else Additive,
            prior=Normal(variance**0.5),
            where=lambda name, _: name == self.name,
        )
        weight: Any = model.get_submodule(self.name).weight
        with torch.no_grad():
            if self.full:
                precision = (
                    self.curvature + torch.eye(len(self.curvature)).to(self.curvature) / variance
                )
                covariance = torch.cholesky_inverse(torch.linalg.cholesky(precision))
                factor = torch.linalg.cholesky(covariance)
                weight.log_diagonal.copy_(factor.diagonal().log())
                weight.below.copy_(factor.tril(-1))
            else:
                weight.log_variance.copy_(-(self.curvature + 1 / variance).log())
        return model


def _information(outputs: Tensor, task: Task) -> Tensor:
    """Of the outputs of each example, `(examples, outputs, outputs)`."""
    if isinstance(task, Numbers):
        _, log_variance = outputs.chunk(2, -1)
        return torch.cat(
            [(-log_variance).exp(), torch.full_like(log_variance, 0.5)], 1
        ).diag_embed()
    assert isinstance(task, Classes)
    p = outputs.softmax(-1)
    return p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)


def _curvature(features: Tensor, information: Tensor, *, full: bool) -> Tensor:
    """Of the weight `(outputs, features)`, flattened; or its diagonal, in the weight's shape."""
    if not full:
        weights = information.diagonal(dim1=1, dim2=2)
        return weights.T @ features.square()
    num_outputs, num_features = information.shape[1], features.shape[1]
    blocks = features.new_zeros(num_outputs, num_features, num_outputs, num_features)
    for row in range(num_outputs):
        for column in range(row + 1):
            weights = information[:, row, column]
            if not weights.any():
                continue
            block = (features * weights.unsqueeze(1)).T @ features
            blocks[row, :, column] = blocks[column, :, row] = block
    size = num_outputs * num_features
    return blocks.view(size, size).double()


@contextmanager
def _predicting(model: nn.Module) -> Iterator[None]:
    """One network, that of the means, without gradients and without training's modes."""
    with sampling(model, by_mean), monte_carlo_modes(model), torch.no_grad():
        yield
