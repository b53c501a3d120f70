"""Uncertainty for a trained network in one call."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from zeromean.arguments import (
    require_integer,
    require_model,
    require_numbers,
    require_seed,
    shown,
)
from zeromean.layers.stochastic_module import stochastic_modules
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import Data, data_source, require_data
from zeromean.training.devices import Accelerator, device_of
from zeromean.training.likelihoods import (
    GaussianLikelihood,
    HeteroscedasticGaussianLikelihood,
    Likelihood,
)
from zeromean.training.post_hoc.candidates import Call, contest_of
from zeromean.training.post_hoc.contest import Contest, Entry
from zeromean.training.post_hoc.examples import (
    Examples,
    foreign_inputs,
    held_out,
    moved,
)
from zeromean.training.post_hoc.report import AS_IT_WAS, AddedUncertainty
from zeromean.training.post_hoc.tasks import (
    Numbers,
    Task,
    fitted_scale,
    samples_of,
    task_for,
    wrapped,
)
from zeromean.training.post_hoc.verdict import judged, why_worse
from zeromean.training.randomness import derived_seed, isolated
from zeromean.training.trainer import require_lightning
from zeromean.training.training_sets import refuse_training_data

if TYPE_CHECKING:
    from zeromean.data.batches import Augmentation, EpochAugmentation

DEFAULT_CONFIG = TrainingConfig(epochs=5, batch_size=128, lr=3e-4, log_alpha_lr=1e-2)


def add_uncertainty(
    model: nn.Module,
    train: Data,
    validation: Data,
    *,
    likelihood: Likelihood | None = None,
    config: TrainingConfig | None = None,
    max_cost: float = 2.0,
    num_samples: int = 20,
    kl_weights: Sequence[float] = (),
    foreign: Any = None,
    augment: Augmentation | EpochAugmentation | None = None,
    accelerator: Accelerator = "auto",
    folder: Path | str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> AddedUncertainty:
    """Make a trained network predict with uncertainty, and return nothing that is worse.

    The model is trained on, by the recipe of `config`, with nothing random. The candidates are what
    can be read off the networks before and after: each with a temperature, the average of their
    weights, both together (two passes for a prediction), and the best single one of these with
    Laplace's approximation of its last layer, or with noise on the weights of its last layers. Half
    of the validation examples choose. The other half says what came of it, before and after, and
    whether anything is returned but the model as it was. Only then both halves fit the temperature
    of what is returned. The model itself is left untouched.

    Targets of whole numbers are classes. Floating-point ones make a regression: the model returned
    gives means and log-variances, as `zm.HeteroscedasticGaussianLikelihood` wants them.

    Dropout is on while the model is trained on, and off in predictions of what is returned.

    Args:
        train: What the model was trained on, as in `fit`.
        validation: Examples that it was not trained on, at least 20, the more the better.
        likelihood: For regressions `zm.HeteroscedasticGaussianLikelihood()` where the model returns
            log-variances already. A model that returns means is trained on by their squared error,
            or by `zm.GaussianLikelihood()`.
        config: The recipe of the training on: give it the optimizer and the rates that the model
            was trained with. Its `epochs` are the passes over the training set. Its `beta` and
            `seed` are not used. Default: five passes of Adam.
        max_cost: Passes of the network that a prediction may cost, counted in operations: what
            comes before the first random layer is computed once. Below 2, no two networks.
        num_samples: Draws for a prediction at most; where several layers are random, and costly,
            it may be as few as five.
        kl_weights: Weights of the KL term. For each the model is trained on once more, for as many
            passes, with the best noise there from the start, under a normal prior whose scale is
            learned layer by layer.
        foreign: Inputs that the model should be unsure of; they choose nothing, and add AUROC to
            the table.
        augment: As in `fit`.
        accelerator: As in `fit`, for the training on.
        folder: Where trainings are kept, so that a call that was interrupted goes on; the same
            arguments are needed. Default: nothing is kept.
        seed: Of the halves, the noise and the training on.
        progress: Show progress bars where the output is a terminal.
    """
    require_lightning()
    require_model(model)
    require_data("train", train)
    if stochastic_modules(model):
        raise ValueError(
            "The model is random already; add_uncertainty takes a plain one: "
            "zm.to_deterministic(model)."
        )
    config = _checked_config(config)
    require_numbers(max_cost=max_cost)
    if not 1 <= max_cost < math.inf:
        raise ValueError(f"max_cost must be at least 1, the plain network's, got {max_cost}.")
    num_samples = require_integer("num_samples", num_samples, at_least=2)
    seed = require_seed(seed)
    device = device_of(model)
    refuse_training_data(train, validation)
    examples = held_out("validation", validation).to(device)
    if likelihood is not None and not isinstance(
        likelihood, (GaussianLikelihood, HeteroscedasticGaussianLikelihood)
    ):
        raise TypeError(
            "likelihood must be zm.GaussianLikelihood() or zm.HeteroscedasticGaussianLikelihood(), "
            f"got {shown(likelihood)}."
        )
    task = task_for(model, examples, likelihood)
    chooses, reports = examples.halves(seed)
    others = None if foreign is None else moved(foreign_inputs(foreign), device)
    with _folder(folder) as place, isolated(derived_seed(abs(seed))):
        call = Call(
            train=train,
            task=task,
            has_variance=isinstance(likelihood, HeteroscedasticGaussianLikelihood),
            loss=_loss(task, likelihood),
            config=replace(config, seed=derived_seed(abs(seed), config.seed)),
            num_data=data_source(train, config).num_data,
            max_cost=float(max_cost),
            num_samples=num_samples,
            kl_weights=_checked_weights(kl_weights),
            augment=augment,
            accelerator=accelerator,
            folder=place,
            progress=progress,
        )
        contest = contest_of(copy.deepcopy(model).eval(), call, chooses, seed)
        return _result(model, contest, task, chooses, reports, others)


def _loss(task: Task, likelihood: Likelihood | None) -> Any:
    """What a model is trained on with; means alone by their squared error, as most are."""
    if not isinstance(task, Numbers):
        return None
    return F.mse_loss if likelihood is None else copy.deepcopy(likelihood)


def _result(
    model: nn.Module,
    contest: Contest,
    task: Task,
    chooses: Examples,
    reports: Examples,
    foreign: Any,
) -> AddedUncertainty:
    """The best candidate, if the examples that chose nothing agree that it is not worse."""
    plain = contest.first
    entries = {
        "before": replace(plain, scale=1.0),
        "temperature": plain,
        "trained on": contest.trained,
        "best": contest.best,
    }
    verdicts = {
        name: judged(task, entry, reports, foreign, contest.seed) for name, entry in entries.items()
    }
    rejected: list[str] = []
    for name in ("best", "trained on", "temperature"):
        entry = entries[name]
        why = why_worse(verdicts["before"], verdicts[name])
        if why is None:
            break
        rejected.append(f"not returned: {entry.row.name}; {why} than before")
    else:
        name, entry = "before", None
    returned = partial(_calibrated, task, chooses, reports, seed=contest.seed)
    return AddedUncertainty(
        model=model if entry is None else returned(entry),
        chosen=AS_IT_WAS if entry is None else entry.row.name,
        num_samples=1 if entry is None else entry.num_samples or 1,
        likelihood=None if entry is None else task.likelihood,
        before=verdicts["before"].table,
        temperature=verdicts["temperature"].table,
        trained_on=verdicts["trained on"].table,
        after=verdicts[name].table,
        candidates=tuple(contest.rows),
        rejected=tuple(dict.fromkeys(rejected)),
        chosen_on=len(chooses),
        reported_on=len(reports),
    )


def _calibrated(
    task: Task, chooses: Examples, reports: Examples, entry: Entry, *, seed: int
) -> nn.Module:
    """The model of an entry, wrapped, with a temperature from all validation examples.

    It has been judged with that of a half, which is as good but for chance.
    """
    parts = chooses, reports
    samples = [samples_of(entry.model, part.inputs, entry.num_samples, seed) for part in parts]
    targets = torch.cat([part.targets for part in parts])
    scale = fitted_scale(task, torch.cat(samples, 1), targets)
    return wrapped(task, entry.model, scale).eval()


@contextmanager
def _folder(folder: Path | str | None) -> Iterator[Path]:
    """The folder, or one that is gone afterwards."""
    if folder is not None:
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def _checked_config(config: TrainingConfig | None) -> TrainingConfig:
    if config is None:
        return DEFAULT_CONFIG
    if not isinstance(config, TrainingConfig):
        raise TypeError(
            f"config must be a TrainingConfig, got {shown(config)}; build one: "
            "TrainingConfig(epochs=5)."
        )
    if config.monitor is not None:
        raise ValueError(
            f"config must not monitor {config.monitor!r}: validation examples choose among "
            "candidates here, not among epochs."
        )
    if config.optimizer == "sgd" and config.log_alpha_lr is None:
        return replace(config, log_alpha_lr=DEFAULT_CONFIG.log_alpha_lr)
    return config


def _checked_weights(weights: Sequence[float]) -> tuple[float, ...]:
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise TypeError(
            f"kl_weights must be a list of numbers, got {shown(weights)}; for one weight pass "
            "(1.0,), for none ()."
        )
    require_numbers(**{f"kl_weights[{i}]": weight for i, weight in enumerate(weights)})
    for weight in weights:
        if not 0 <= weight < math.inf:
            raise ValueError(f"kl_weights must be at least 0, got {weight}.")
    return tuple(float(weight) for weight in dict.fromkeys(weights))
