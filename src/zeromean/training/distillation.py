"""Distillation: one network learns what the samples of another, or of many, say together.

Balan, Rathod, Murphy and Welling (2015), "Bayesian dark knowledge".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zeromean.arguments import (
    require_choice,
    require_integer,
    require_model,
    require_numbers,
    shown,
)
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.prediction.classification import PredictiveUncertainty
from zeromean.prediction.inputs import InputsOrLoader
from zeromean.prediction.probabilities import require_logits
from zeromean.prediction.regression import NoiseModel, PredictiveMoments
from zeromean.prediction.samples import sample_outputs
from zeromean.prediction.sources import Source, States, is_one, networks_of
from zeromean.samplers.weights import mean as by_mean
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import Data, checksum
from zeromean.training.student_likelihoods import (
    CategoricalLikelihood,
    DirichletLikelihood,
    SplitVarianceLikelihood,
    TotalVarianceLikelihood,
)

if TYPE_CHECKING:
    from zeromean.training.trainer import FitResult

Learn = Literal["predictions", "uncertainty"]
StudentLikelihood = (
    CategoricalLikelihood | DirichletLikelihood | TotalVarianceLikelihood | SplitVarianceLikelihood
)


@dataclass(frozen=True)
class Distilled:
    """A student, and how to read what it returns."""

    model: nn.Module
    """The student that was given, trained in place."""
    likelihood: StudentLikelihood
    """Has `predictive_uncertainty(outputs)` or `predictive_moments(outputs)`, where there are."""
    fit: FitResult
    """Of the training."""

    def predictive_uncertainty(
        self, inputs: InputsOrLoader, *, batch_size: int | None = None
    ) -> PredictiveUncertainty:
        """Entropies and mutual information from one pass of the student, in closed form."""
        if not isinstance(self.likelihood, (DirichletLikelihood, SplitVarianceLikelihood)):
            raise ValueError(
                "This student has learned the averaged prediction and nothing of what it is the "
                "average of; distill with learn='uncertainty'."
            )
        return self.likelihood.predictive_uncertainty(self._outputs(inputs, batch_size))

    def predict_moments(
        self, inputs: InputsOrLoader, *, batch_size: int | None = None
    ) -> PredictiveMoments:
        """Mean, aleatoric and epistemic variance of a regression from one pass of the student."""
        if not isinstance(self.likelihood, (TotalVarianceLikelihood, SplitVarianceLikelihood)):
            raise ValueError("This student predicts classes; use zm.predict_proba(student.model).")
        return self.likelihood.predictive_moments(self._outputs(inputs, batch_size))

    def _outputs(self, inputs: InputsOrLoader, batch_size: int | None) -> Tensor:
        # A student that is random itself may have no means worth a look.
        sampler = None if stochastic_modules(self.model) else by_mean
        return sample_outputs(self.model, inputs, 1, batch_size=batch_size, sampler=sampler)[0]


def distill(
    student: nn.Module,
    teacher: Source,
    data: Data | Tensor,
    config: TrainingConfig,
    *,
    folder: Path | str,
    learn: Learn | StudentLikelihood = "predictions",
    likelihood: NoiseModel | None = None,
    num_samples: int = 4,
    input_noise: float = 0.0,
    **options: Any,
) -> Distilled:
    """Train a student to predict in one pass what a teacher predicts by many; resumes by itself.

    For every batch the teacher draws new samples, and the student's expected log-likelihood under
    these is maximised by `zeromean.training.fit`, with all that it can do. The labels of the data
    are not used, so that data without any will do.

    Args:
        student: Any module. It returns what a network of the teacher returns, logits, or
            means and log-variances where a likelihood is given; to learn the uncertainty of a
            regression means, log-variances of the noise and log-variances of the mean, in the
            last dimension.
        teacher: What predictions take: a module with noise, a list of modules (an ensemble), or
            `zm.States`. It is left as it is.
        data: What `fit` takes, or inputs alone, a tensor.
        config: Of the student's training.
        folder: Folder of this run only.
        learn: "predictions": the average over the samples. "uncertainty": how the samples are
            distributed, for `Distilled.predictive_uncertainty`. Or the likelihood itself that the
            student is to be trained by, such as `DirichletLikelihood("likelihood")`.
        likelihood: The teacher's likelihood, for a regression. Default: classes.
        num_samples: Draws of the teacher for a batch, of its noise or of its networks. The paper
            has one, which needs more steps.
        input_noise: Standard deviation of normal noise that is added to the inputs, for teacher
            and student alike: the student sees the teacher between the examples too. `augment=`
            serves the same end.
        options: As `fit` takes them: validation and test (with labels), accelerator, devices,
            augment, callbacks, ….
    """
    from zeromean.training.trainer import fit

    require_model(student, "student")
    head = _head(learn, regression=likelihood is not None)
    differ = isinstance(head, (DirichletLikelihood, SplitVarianceLikelihood))
    samples = Samples(teacher, likelihood, num_samples, input_noise, differ=differ)
    if any(student is module for part in samples.modules() for module in part.modules()):
        raise ValueError("The student is a part of the teacher, which would learn from itself.")
    if isinstance(data, Tensor):
        data = data, torch.zeros(len(data), dtype=torch.long)
    places = {part: next(part.parameters(), torch.empty(0)).device for part in samples.modules()}
    try:
        result = fit(
            student, data, config, folder=folder, likelihood=head, on_batch=samples, **options
        )
    finally:
        for part, place in places.items():
            part.to(place)
    return Distilled(student, head, result)


def _head(learn: Learn | StudentLikelihood, *, regression: bool) -> StudentLikelihood:
    heads: dict[str, type[StudentLikelihood]] = {
        "predictions": TotalVarianceLikelihood if regression else CategoricalLikelihood,
        "uncertainty": SplitVarianceLikelihood if regression else DirichletLikelihood,
    }
    if not isinstance(learn, get_args(StudentLikelihood)):
        require_choice("learn", learn, get_args(Learn))
        return heads[str(learn)]()
    if not isinstance(learn, tuple(heads.values())):
        what = "a regression" if regression else "classes, without a likelihood= of the teacher"
        raise ValueError(f"{type(learn).__name__} is not for {what}; use learn='uncertainty'.")
    return learn


class Samples:
    """What a teacher says of a batch, in place of its labels: `(examples, samples, …)`.

    Args:
        differ: Refuse samples that are all the same.
    """

    def __init__(
        self,
        teacher: Source,
        likelihood: NoiseModel | None,
        num_samples: int,
        input_noise: float,
        *,
        differ: bool,
    ):
        if isinstance(teacher, Iterator):
            raise TypeError(
                "A teacher is asked for every batch, and a generator gives its networks once; "
                "collect them in a list, or their state dicts in zm.States."
            )
        method = getattr(likelihood, "mean_and_log_variance", None)
        if likelihood is not None and (isinstance(likelihood, type) or not callable(method)):
            raise TypeError(
                "likelihood must have a method mean_and_log_variance(outputs), as "
                f"zm.GaussianLikelihood() has, got {shown(likelihood)}."
            )
        require_numbers(input_noise=input_noise)
        if not 0 <= input_noise < math.inf:
            raise ValueError(f"input_noise must be at least 0, got {input_noise}.")
        self.teacher = teacher
        self.likelihood = likelihood
        self.num_samples = require_integer("num_samples", num_samples, at_least=1)
        self.input_noise = float(input_noise)
        self.differ = differ
        self.num_networks = sum(1 for _ in networks_of(teacher))
        self.description = _described(teacher)

    def __call__(self, inputs: Any, labels: Tensor) -> tuple[Any, Tensor]:
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        if self.input_noise > 0:
            inputs = tree_map_only(Tensor, self._noisy, inputs)
        for module in self.modules():
            module.to(next(t for t in tree_leaves(inputs) if isinstance(t, Tensor)).device)
        drawn = self._draw(inputs)
        if drawn.dim() < 3 or drawn.shape[1] != len(labels):
            raise ValueError(
                f"The teacher must return a row for each of {len(labels)} examples, got outputs of "
                f"shape {tuple(drawn.shape[1:])}."
            )
        if self.likelihood is not None:
            with torch.no_grad():
                drawn = torch.cat(self.likelihood.mean_and_log_variance(drawn), -1)
        if self.differ and len(drawn) > 1 and (drawn == drawn[0]).all():
            raise ValueError(
                "All samples of the teacher are the same, so that there is no uncertainty to "
                "learn; give a teacher with noise or with several networks, or use "
                "learn='predictions'."
            )
        return inputs, drawn.movedim(0, 1)

    def modules(self) -> list[nn.Module]:
        """What has to be where the inputs are."""
        parts = self.teacher
        if isinstance(parts, States):
            parts = [parts.model]
        found = [parts] if isinstance(parts, nn.Module) else parts
        found = [*found] if isinstance(found, Sequence) else []
        return [part for part in (*found, self.likelihood) if isinstance(part, nn.Module)]

    def _draw(self, inputs: Any) -> Tensor:
        """`(samples, examples, …)`, of other networks each time where there are many."""
        if is_one(self.teacher):
            networks: Any = self.teacher
            each = self.num_samples
        else:
            count = min(self.num_samples, self.num_networks)
            networks = _some(self.teacher, set(torch.randperm(self.num_networks)[:count].tolist()))
            each = self.num_samples // count
        drawn = sample_outputs(networks, inputs, each)
        if self.likelihood is None:
            # Of several networks the numbers have to tell.
            shown_by = self.teacher if isinstance(self.teacher, nn.Module) else nn.Identity()
            require_logits(shown_by, drawn[0])
        return drawn

    def _noisy(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor + self.input_noise * torch.randn_like(tensor)

    def __repr__(self) -> str:
        likelihood = "" if self.likelihood is None else f", {self.likelihood!r}"
        noise = f", input noise {self.input_noise:g}"
        return f"{self.num_samples} samples of {self.description}{likelihood}{noise}"


def _some(teacher: Any, chosen: set[int]) -> Any:
    """Some networks of a source, by their places in it."""
    if isinstance(teacher, States):
        return States(teacher.model, [teacher.states[index] for index in sorted(chosen)])
    return (network for index, network in enumerate(teacher) if index in chosen)


def _described(teacher: Any) -> str:
    """What tells one teacher from another, as far as that can be seen: a run has the same one."""
    states: list[Any] = []
    if is_one(teacher):
        states = [teacher.state_dict()]
    elif isinstance(teacher, States):
        states = [teacher.model.state_dict(), *teacher.states]
    elif isinstance(teacher, (Sequence, nn.ModuleList)):
        states = [network.state_dict() for network in teacher]
    tensors = [t.reshape(-1) for s in states for t in s.values() if isinstance(t, Tensor)]
    return f"{type(teacher).__name__}, checksum {checksum(*tensors)}"
