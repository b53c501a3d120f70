"""Class probabilities from what a model returns: logits, or probabilities already.

A softmax of probabilities still looks like probabilities, and nobody notices: 0.9996 of two classes
becomes 0.73. So what a model returns is looked at, in its last module and in its numbers, and
nothing is turned into probabilities twice unless someone says so.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from zeromean.layers.stochastic_layer import StochasticLayer

Link = Literal["softmax", "sigmoid"]
OutputKind = Literal["logits", "probabilities"]

# Fewer outputs than these may lie between 0 and 1 by chance.
_SUSPICIOUS_COUNT = 64


class ToProbabilities:
    """Turns outputs, which come in chunks `(samples, *output)`, into probabilities.

    Args:
        model: Where the outputs come from; None where something has been picked from them.
        dim: Dimension of the classes in one output.
        link: "softmax" for one of several classes, "sigmoid" for yes or no in every output.
        outputs: What the model returns; None: logits, unless they prove to be something else.
        num_examples: Examples that the outputs are of: None where there may be one without a
            dimension of examples, "any" where there is that dimension, but of unknown size.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        dim: int,
        link: Link,
        outputs: OutputKind | None,
        num_examples: int | Literal["any"] | None = None,
    ):
        _require_one_of("link", link, ("softmax", "sigmoid"))
        if outputs is not None:
            _require_one_of("outputs", outputs, ("logits", "probabilities"))
        self.dim = dim
        self.link = link
        self.num_examples = num_examples
        self.given = outputs == "probabilities"
        # Until it is known what the outputs are: whether all so far could be probabilities.
        self.may_sum_to_one = self.may_be_fractions = False
        self.count = 0
        # A model that knows nothing returns its biases, which may well be between 0 and 1.
        self.varied, self.first = False, None
        if outputs is None:
            last = None if model is None else last_module(model)
            _refuse_probabilities(last, link)
            if not isinstance(last, _RETURNS_LOGITS):
                self.may_sum_to_one = link == "softmax"
                self.may_be_fractions = True

    def check(self, outputs: Tensor) -> None:
        """Refuse outputs that are not what they are taken for."""
        self._require_classes(outputs)
        if self.given:
            _require_probabilities(outputs, None if self.link == "sigmoid" else self.dim)
        elif self.may_be_fractions:
            self._look_at(outputs)

    def __call__(self, outputs: Tensor) -> Tensor:
        self.check(outputs)
        # Half precision has too few digits for probabilities.
        wide = outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs
        if self.given:
            return wide
        return wide.sigmoid() if self.link == "sigmoid" else wide.softmax(sample_dim(self.dim))

    def finish(self) -> None:
        """Raise, or warn, if all outputs turned out to be probabilities: after the last chunk."""
        if self.may_sum_to_one and self.count:
            raise ValueError(
                "The model's outputs are probabilities already: all of them are between 0 and 1 "
                f"and sum to 1 over dimension {self.dim}. A second softmax would flatten them; "
                "pass outputs='probabilities', or outputs='logits' if they are logits after all."
            )
        if self.may_be_fractions and self.varied and self.count >= _SUSPICIOUS_COUNT:
            warnings.warn(
                f"All {self.count:,} outputs of the model are between 0 and 1, as if they were "
                f"probabilities already, but are taken as logits (a {self.link} follows). If the "
                "model ends in a sigmoid, pass link='sigmoid', outputs='probabilities'; if these "
                "are logits, outputs='logits'.",
                stacklevel=4,  # The caller of the prediction.
            )

    def _require_classes(self, outputs: Tensor) -> None:
        if not outputs.is_floating_point():
            raise TypeError(
                f"Probabilities need outputs of floating point, got {outputs.dtype}; return logits."
            )
        if self.link == "sigmoid":
            return
        shape = tuple(outputs.shape[1:])
        if not -outputs.dim() < self.dim < outputs.dim() - 1:
            raise ValueError(f"dim={self.dim} is not a dimension of outputs of shape {shape}.")
        if len(shape) == 1 and self.num_examples in ("any", shape[0]):
            raise ValueError(
                f"The model returned one number for each of {shape[0]} examples, over which "
                "a softmax would go; pass link='sigmoid' if it says yes or no, or return logits of "
                "the shape (examples, classes)."
            )
        if outputs.shape[sample_dim(self.dim)] < 2:
            raise ValueError(
                f"The model must return logits of at least 2 classes in dimension {self.dim}, got "
                f"outputs of shape {shape}; set dim=, or pass link='sigmoid' if one output says "
                "yes or no."
            )

    def _look_at(self, outputs: Tensor) -> None:
        if outputs.numel() == 0:
            return
        self.count = outputs[0].numel()  # Samples are too much alike to count.
        self.may_be_fractions = bool((outputs.amin() >= 0) & (outputs.amax() <= 1))
        dim = sample_dim(self.dim)
        self.may_sum_to_one = (
            self.may_sum_to_one
            and self.may_be_fractions
            and _sums_to_one(outputs, dim, _rounding(outputs, dim))
        )
        if self.may_be_fractions and not self.varied:
            self.first = outputs[:1, :1] if self.first is None else self.first
            self.varied = not bool((outputs == self.first).all())


def sample_dim(dim: int) -> int:
    """A dimension of one output, counted in a chunk that has the samples in front."""
    return dim if dim < 0 else dim + 1


def cross_entropy(probabilities: Tensor, other: Tensor, link: Link, dim: int) -> Tensor:
    """−Σ p log(other) in nats, over the classes along `dim`, or over yes and no."""
    if link == "sigmoid":
        return -(torch.xlogy(probabilities, other) + torch.xlogy(1 - probabilities, 1 - other))
    return -torch.xlogy(probabilities, other).sum(dim)


def last_module(model: Any) -> nn.Module:
    """The module whose output is the model's, as far as containers show it."""
    while True:
        if type(model).forward is nn.Sequential.forward and len(model._modules):
            model = list(model._modules.values())[-1]
        elif type(model).__name__ == "OptimizedModule":  # torch.compile
            model = model.get_submodule("_orig_mod")
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def require_logits(model: nn.Module, outputs: Tensor, dim: int = 1) -> None:
    """Refuse outputs that are not logits, before a loss that would take their softmax.

    Args:
        model: Where the outputs come from; its last module is looked at.
        outputs: A batch of them, `(batch, …)`.
        dim: Dimension of the classes.
    """
    last = last_module(model)
    probabilities = isinstance(last, (nn.Softmax, nn.Softmax2d, nn.Sigmoid))
    if not probabilities and not isinstance(last, _RETURNS_LOGITS) and outputs.numel():
        inside = bool((outputs.amin() >= 0) & (outputs.amax() <= 1))
        several = outputs.dim() > dim and outputs.shape[dim] > 1
        probabilities = (
            inside
            and several
            and len(outputs) > 1
            and _sums_to_one(outputs, dim, _rounding(outputs, dim))
        )
    if probabilities:
        raise ValueError(
            "Cross-entropy takes logits, but the model returns probabilities: training would go "
            "through two softmaxes. Remove the softmax (or sigmoid) at its end; zm.predict_proba "
            "adds it. nn.LogSoftmax may stay: its softmax is the same."
        )


def _refuse_probabilities(last: nn.Module | None, link: str) -> None:
    softmax = isinstance(last, (nn.Softmax, nn.Softmax2d))
    if not softmax and not isinstance(last, nn.Sigmoid):
        return
    own = "softmax" if softmax else "sigmoid"
    say = f"link='{own}', " if own != link else ""
    raise ValueError(
        f"The model ends in nn.{type(last).__name__}, so that its outputs are probabilities "
        f"already, and a {link} behind it would be wrong; pass {say}outputs='probabilities'."
    )


def _require_probabilities(outputs: Tensor, dim: int | None) -> None:
    slack = max(1e-3, 16 * torch.finfo(outputs.dtype).eps)
    low, high = (outputs.amin(), outputs.amax()) if outputs.numel() else (0.0, 1.0)
    if low < -slack or high > 1 + slack:
        raise ValueError(
            f"outputs='probabilities' needs outputs between 0 and 1, got {float(low):.4g} to "
            f"{float(high):.4g}; pass outputs='logits' if they are logits."
        )
    if dim is not None and not _sums_to_one(outputs, sample_dim(dim), slack):
        raise ValueError(
            f"outputs='probabilities' needs outputs that sum to 1 over dimension {dim}; set dim=, "
            "pass link='sigmoid' if every output is a probability by itself, or outputs='logits'."
        )


def _sums_to_one(outputs: Tensor, dim: int, tolerance: float) -> bool:
    wide = outputs.double() if outputs.dtype == torch.float64 else outputs.float()
    return bool(((wide.sum(dim) - 1).abs() <= tolerance).all())


def _rounding(outputs: Tensor, dim: int) -> float:
    """How far the sum of rounded probabilities may be from 1."""
    return 4 * torch.finfo(outputs.dtype).eps * math.sqrt(max(outputs.shape[dim], 1))


def _require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        choices = " or ".join(map(repr, known))
        raise ValueError(f"{name} must be {choices}, got {value!r}.")


# Affine layers have no bounds, so that a look at the numbers could only be wrong; the logarithms of
# probabilities are logits.
_RETURNS_LOGITS = (nn.Linear, nn.LogSoftmax, _ConvNd, StochasticLayer)
