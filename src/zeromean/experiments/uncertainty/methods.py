"""Six ways to the uncertainty of LeNet-5 on MNIST, trained once for all experiments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zeromean.experiments.networks import evaluation, shared_networks
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.uncertainty.last_layer_laplace import last_layer_laplace
from zeromean.experiments.variance_networks import lenet
from zeromean.prediction.sources import Source

if TYPE_CHECKING:
    from zeromean.data import ImageSet

NETWORKS = {
    "deterministic": lenet.Network(layers=()),
    "dropout": lenet.Network(layers=(), dropout=0.5),
    "mean_field": lenet.Network(
        layers=("conv1", "conv2", "dense1", "dense2"), posterior="additive", prior="normal"
    ),
    "variance": lenet.Network(prior="log-uniform"),
}
LABELS = {
    "deterministic": "deterministic",
    "dropout": "MC dropout",
    "ensemble": "deep ensemble",
    "mean_field": "mean field",
    "variance": "variance layer",
    "laplace": "last-layer Laplace",
}
# Members of one run's ensemble have seeds that no other run's have.
SEEDS_APART = 1000


@dataclass(frozen=True, kw_only=True)
class Settings(lenet.Settings):
    """LeNet-5 with BatchNorm; the same passes for every network, an ensemble has several."""

    epochs: int = 30
    """Passes over the training set, of every network."""
    num_samples: int = 50
    """Samples in a prediction, where there is noise; draws of the Laplace approximation."""
    members: int = 5
    """Networks in the ensemble."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.members < 2:
            raise ValueError(f"members must be at least 2, got {self.members}.")


QUICK: dict[str, Any] = {**lenet.QUICK, "num_samples": 20, "members": 3}
SMOKE: dict[str, Any] = {**lenet.SMOKE, "members": 2}


class Method(NamedTuple):
    """How one of them predicts."""

    source: Source
    num_samples: int
    """Of each of its networks."""
    prepare: Callable[[Tensor], Tensor] | None = None
    """What images become before they reach the networks."""

    def samples(self, data: ImageSet, *, seed: int = 0) -> Tensor:
        """Probabilities by every sample, `(num_samples, images, classes)`."""
        if self.prepare is not None:
            parts = [self.prepare(batch) for batch in data.images.split(1000)]
            data = dataclasses.replace(data, images=torch.cat(parts))
        # The source may be an ensemble, of which the evaluation knows nothing.
        source: Any = self.source
        return evaluation.sampled_probabilities(source, data, self.num_samples, seed=seed)


def methods(config: Settings, log: RunLog) -> Iterator[tuple[str, Method]]:
    """Train or load them, one after the other."""
    for name, network in NETWORKS.items():
        # Dropping all means 200 times an epoch would take longer than the training.
        watch = _accuracy if name == "mean_field" else evaluation.look
        trained = lenet.train(name, network, config, log, watch=watch)
        noisy = name != "deterministic"
        yield name, Method(trained.model.eval(), config.num_samples if noisy else 1)
        if name == "deterministic":
            yield "ensemble", Method(_members(trained.model, config, log), 1)
            yield "laplace", _laplace(trained, config, log)


def validation_images(config: Settings, log: RunLog) -> ImageSet:
    """What temperatures and the Laplace approximation's prior are fitted on."""
    return shared_networks.grey_images(config.data, "validation", 5000, log)


def _accuracy(few: ImageSet, epoch: int, model: nn.Module) -> dict[str, Any]:
    return {"accuracy_ensemble": evaluation.accuracy(model, few, 10, seed=epoch)}


def _members(first: nn.Module, config: Settings, log: RunLog) -> list[nn.Module]:
    others = [
        lenet.train(
            f"member {number}",
            NETWORKS["deterministic"],
            dataclasses.replace(config, seed=config.seed + SEEDS_APART * number),
            log,
        ).model.eval()
        for number in range(1, config.members)
    ]
    return [first, *others]


def _laplace(trained: lenet.Trained, config: Settings, log: RunLog) -> Method:
    *body, head = trained.model.eval().children()
    assert isinstance(head, nn.Linear)
    features = nn.Sequential(*body)

    @torch.no_grad()
    def prepare(images: Tensor) -> Tensor:
        return features(images)

    def all_of(data: ImageSet) -> Tensor:
        return torch.cat([prepare(batch) for batch in data.images.split(1000)])

    held_out = validation_images(config, log)
    found = last_layer_laplace(
        head,
        all_of(trained.train),
        (all_of(held_out), held_out.labels),
        num_draws=config.num_samples,
        seed=config.seed,
    )
    log.say(f"last-layer Laplace: prior precision {found.precision:.3g}")
    return Method(found.networks, 1, prepare)
