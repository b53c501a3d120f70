"""An ensemble, one of its networks, and a student of all of them: how good, how sure, how dear."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import uncertainty
from zeromean.experiments.networks import evaluation, shared_networks, small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import MOLCHANOV, ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog

if TYPE_CHECKING:
    from zeromean.data import ImageSet
    from zeromean.training import Distilled, TrainingConfig

TITLE = "Distillation: one network, its student and the ensemble, on MNIST"
SOURCE = "Molchanov, lecture: distillation; Balan et al. (2015), Bayesian dark knowledge"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("molchanov: distillation",)
LABELS = {
    "single": "one network",
    "student": "student",
    "dirichlet": "Dirichlet student",
    "ensemble": "ensemble",
}
TIMINGS = ("*.milliseconds",)
# Members of one run's ensemble have seeds that no other run's have.
SEEDS_APART = 1000
NOTES = (
    "All networks have two hidden layers of {setting hidden} units and {setting epochs} passes "
    "over 55,000 images. One network stands for the mean over the ensemble's {setting members}; "
    "students see the training images with noise of standard deviation {setting input_noise}, and "
    "no labels. Times are those of a thousand images.",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Five members and two students."""

    hidden: tuple[int, ...] = (400, 400)
    """Units of the hidden layers, as Balan et al. have them."""
    members: int = 5
    """Networks in the ensemble."""
    epochs: int = 40
    """Passes over the training set, of every network."""
    batch_size: int = 200
    """Images in a mini-batch."""
    lr: float = 1e-3
    """Adam's learning rate; it falls linearly to zero."""
    num_samples: int = 5
    """Networks of the ensemble that a student hears of for a batch."""
    input_noise: float = 0.1
    """Standard deviation of the noise on what students see."""
    train_size: int | None = None
    """Images to train on; None for all."""
    evaluate: str = "test"
    """Images that are measured on."""
    data: str = "mnist"
    """Data set."""
    seed: int = 0
    """Seed of the networks, the batches and the noise."""

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(f"members must be at least 2, got {self.members}.")


QUICK = Config(members=3, epochs=8, train_size=10_000, num_samples=3)
SMOKE = Config(hidden=(32,), members=2, epochs=2, batch_size=100, num_samples=2, data="digits")
CLAIMS = [
    Claim(
        "gain.over_single.nll",
        0.0,
        MOLCHANOV("distillation: better than a single network"),
        0.0,
        "at least",
        "negative log-likelihood of one network above the student's",
        "nat",
    ),
    Claim(
        "gain.of_ensemble.nll",
        0.0,
        MOLCHANOV("distillation: worse than the ensemble"),
        0.0,
        "at least",
        "negative log-likelihood of the student above the ensemble's",
        "nat",
    ),
    Claim(
        "gain.over_single.accuracy",
        0.0,
        MOLCHANOV("distillation: better than a single network"),
        0.0,
        "at least",
        "accuracy of the student above that of one network",
        "points",
    ),
    Claim(
        "agreement",
        0.5,
        ours("a student that knows the uncertainty must order images as the ensemble does"),
        0.0,
        "at least",
        "correlation of the Dirichlet student's mutual information with the ensemble's",
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    from zeromean import data

    split = "test" if config.evaluate == "test" else "validation"
    train = _rows(data.load(config.data, "rest", data_dir=log.data_dir), config.train_size)
    test = _rows(data.load(config.data, split, data_dir=log.data_dir), None)
    members = [_member(number, train, config, log) for number in range(config.members)]
    students = {
        name: _student(name, members, train, config, log) for name in ("student", "dirichlet")
    }
    sources = {**{name: [each.model] for name, each in students.items()}, "ensemble": members}
    results = {
        name: log.once(f"measure {name}", partial(_measured, source, test))
        for name, source in sources.items()
    }
    alone = [
        log.once(f"measure member {number}", partial(_measured, [member], test))
        for number, member in enumerate(members)
    ]
    results["single"] = {key: sum(row[key] for row in alone) / len(alone) for key in alone[0]}
    for name, row in results.items():
        log.metrics(network=name, **row)
    agreement = log.once("agreement", partial(_agreement, students["dirichlet"], members, test))
    return {
        **results,
        **agreement,
        "gain": {
            "over_single": _difference(results["single"], results["student"]),
            "of_ensemble": _difference(results["student"], results["ensemble"]),
        },
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [
        {label: record["metrics"][name] for name, label in LABELS.items()} for record in records
    ]
    return [
        bars("Negative log-likelihood", "network", {"nll": "NLL"}, runs, y_label="nat"),
        bars("Calibration error", "network", {"ece": "ECE"}, runs, y_label="share"),
        bars("Accuracy", "network", {"accuracy": "accuracy"}, runs, y_label="%"),
    ]


def _network(config: Config, pixels: int, classes: int) -> nn.Module:
    from zeromean.models import mlp

    return mlp((pixels, *config.hidden, classes), nn.Linear)


def _member(number: int, train: ImageSet, config: Config, log: RunLog) -> nn.Module:
    seed = SEEDS_APART * (config.seed + 1) + number
    settings = asdict(config)
    for name in ("members", "num_samples", "input_noise", "evaluate", "seed"):
        del settings[name]  # What does not make it another network.
    return shared_networks.train(
        f"member {number}",
        {"experiment": "distillation", **settings},
        partial(_network, config, train.images[0].numel(), train.num_classes),
        train,
        _training(config, seed),
        log,
    ).model


def _student(
    name: str, members: list[nn.Module], train: ImageSet, config: Config, log: RunLog
) -> Distilled:
    from zeromean.training import distill

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        student = _network(config, train.images[0].numel(), train.num_classes)
    log.say(f"{name}: {config.epochs} epochs")
    result = distill(
        student,
        members,
        train,
        _training(config, config.seed),
        folder=log.folder / name,
        learn="uncertainty" if name == "dirichlet" else "predictions",
        num_samples=config.num_samples,
        input_noise=config.input_noise,
        accelerator="cpu",
        progress=log.progress,
    )
    log.note_origin(f"network {name}", was_there=result.fit.resumed_from > 0)
    for row in result.fit.history:
        log.metrics(network=name, **row)
    result.model.eval()
    return result


def _training(config: Config, seed: int) -> TrainingConfig:
    from zeromean.training import TrainingConfig

    return TrainingConfig(
        epochs=config.epochs, batch_size=config.batch_size, lr=config.lr, seed=seed
    )


def _rows(images: ImageSet, size: int | None) -> ImageSet:
    from zeromean.data import ImageSet

    return ImageSet(images.images[:size].flatten(1), images.labels[:size], images.num_classes)


def _measured(source: list[nn.Module], test: ImageSet) -> dict[str, float]:
    start = time.process_time()
    proba = _probabilities(source, test.images)
    seconds = time.process_time() - start
    return {
        "accuracy": small_networks.accuracy(proba, test.labels),
        "nll": uncertainty.negative_log_likelihood(proba, test.labels),
        "ece": uncertainty.calibration_error(proba, test.labels),
        "brier": uncertainty.brier_score(proba, test.labels),
        "passes": len(source),
        "milliseconds": 1000 * seconds / (len(test.labels) / 1000),
    }


def _probabilities(source: list[nn.Module], images: Tensor) -> Tensor:
    batches = images.split(evaluation.EVALUATION_BATCH)
    return torch.cat([zm.predict_proba(source, batch, 1) for batch in batches])


def _agreement(student: Distilled, members: list[nn.Module], test: ImageSet) -> dict[str, float]:
    """How alike student and ensemble order the images by how much networks disagree."""
    found = student.predictive_uncertainty(test.images).mutual_information
    wanted = zm.predictive_uncertainty(members, test.images, 1).mutual_information
    return {
        "agreement": torch.corrcoef(torch.stack([found, wanted]))[0, 1].item(),
        "information_of_student": found.mean().item(),
        "information_of_ensemble": wanted.mean().item(),
    }


def _difference(worse: Mapping[str, float], better: Mapping[str, float]) -> dict[str, float]:
    """What the second gains: less NLL, more accuracy."""
    return {
        "nll": worse["nll"] - better["nll"],
        "accuracy": better["accuracy"] - worse["accuracy"],
    }
