"""Section 3.3: Gaussian, Bernoulli and uniform variance layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import PAPER, ours
from zeromean.experiments.runs.figure import bars
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.variance_networks import lenet

TITLE = "Section 3.3: Gaussian, Bernoulli and uniform noise"
SOURCE = "Neklyudov et al. (2019), section 3.3"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS = ("paper: section 3.3",)
VERSION = 2  # Trained on 55,000 images, the others being the validation set.
# Bernoulli and uniform noise know no local reparameterization. Flipout gives every example noise of
# its own all the same, exactly distributed, as both are symmetric.
NETWORKS = {
    "Gaussian": lenet.Network(prior="log-uniform"),
    "Bernoulli": lenet.Network(noise="rademacher", sampler="flipout"),
    "uniform": lenet.Network(noise="uniform", sampler="flipout"),
    "Gaussian, shared": lenet.Network(prior="log-uniform", sampler="weight"),
    "Bernoulli, shared": lenet.Network(noise="rademacher", sampler="weight"),
    "uniform, shared": lenet.Network(noise="uniform", sampler="weight"),
}
NOTES = (
    "The paper gives Gaussian noise to each example and Bernoulli or uniform noise to a whole "
    "mini-batch, as it knew no other way. Like for like are the rows “shared”, with one draw "
    "of the weights for each mini-batch; they are {Bernoulli, shared.accuracy_averaged} "
    "(Bernoulli) and {uniform, shared.accuracy_averaged} (uniform), next to {Gaussian, "
    "shared.accuracy_averaged} with Gaussian noise that is shared too. Flipout gives each "
    "example noise of its own, exactly distributed as both are symmetric, which the paper did "
    "not have: {Bernoulli.accuracy_averaged} and {uniform.accuracy_averaged}. All have "
    "{setting epochs} passes.",
)


@dataclass(frozen=True, kw_only=True)
class Config(lenet.Settings):
    """Networks that differ by the noise of dense1, and by whether a batch shares its noise."""

    epochs: int = 16
    """Passes over the training set; the paper has 200."""


QUICK = Config(**lenet.QUICK)
SMOKE = Config(**lenet.SMOKE)
CLAIMS = [
    Claim(f"{name}.accuracy_averaged", value, author, 0.15, "at least", f"{name}: averaged", "%")
    for name, value, author in (
        ("Gaussian", 99.3, PAPER("section 3.3")),
        # As in the paper, which had no way to give each example Bernoulli noise of its own.
        ("Bernoulli, shared", 98.7, PAPER("section 3.3")),
        ("uniform, shared", 98.7, PAPER("section 3.3")),
        ("Bernoulli", 98.7, ours("the paper's number, with flipout")),
        ("uniform", 98.7, ours("the paper's number, with flipout")),
    )
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    return lenet.compare(NETWORKS, config, log)


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    labels = {"accuracy_1": "one sample", "accuracy_averaged": "averaged"}
    # Errors, as all accuracies are near 100%.
    errors = [
        {name: {key: 100 - row[key] for key in labels} for name, row in record["metrics"].items()}
        for record in records
    ]
    title = "Test error by the noise of the variance layer"
    return [bars(title, "noise", labels, errors, y_label="error, %")]
