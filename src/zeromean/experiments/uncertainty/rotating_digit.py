"""A digit that turns: what is predicted, and how surely, when it leaves what was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.data import ImageSet
from zeromean.experiments.networks import shared_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, over_seeds, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.uncertainty import methods
from zeromean.prediction.probabilities import cross_entropy

TITLE = "The rotating digit: probabilities and entropy against the angle"
SOURCE = "Molchanov, lecture: uncertainty estimation; the picture of Gal and Ghahramani (2016)"
NEEDS: tuple[str, ...] = ("mnist",)
COVERS: tuple[str, ...] = ()
SHOWN = ("deterministic", "dropout", "mean_field", "variance")
# A probability at which a person would rely on the prediction.
SURE = 0.9
NOTES = (
    "Means over {setting images} test images of the digit {setting digit}, the same networks as in "
    "`ood_mnist`. Sure and wrong are predictions of another digit with a probability above nine "
    "tenths: "
    "{deterministic.sure_and_wrong:.1%} of all angles and images for the deterministic network, "
    "{dropout.sure_and_wrong:.1%} for dropout, {mean_field.sure_and_wrong:.1%} for mean field, "
    "{variance.sure_and_wrong:.1%} for the variance layer.",
)


@dataclass(frozen=True, kw_only=True)
class Config(methods.Settings):
    """The networks of `ood_mnist`; where these are trained, about 3 minutes."""

    digit: int = 1
    """Which digit turns."""
    images: int = 200
    """Test images of it, the first ones."""
    step: int = 10
    """Degrees between two angles, up to 180."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.digit <= 9:
            raise ValueError(f"digit must be one from 0 to 9, got {self.digit}.")
        if not 1 <= self.step <= 180:
            raise ValueError(f"step must be from 1 to 180 degrees, got {self.step}.")
        if self.images < 1:
            raise ValueError(f"images must be at least 1, got {self.images}.")


QUICK = Config(**methods.QUICK, images=50)
SMOKE = Config(**methods.SMOKE, images=5, step=45)
CLAIMS = [
    Claim(
        "deterministic.sure_and_wrong",
        0.01,
        ours("the lecture calls deterministic networks overconfident, without a number"),
        0.0,
        "at least",
        "deterministic: share of angles and images that it is sure of, and wrong about",
    ),
    *(
        Claim(
            f"saved.{name}",
            0.0,
            ours("averaging over weights should make a network less sure of what it gets wrong"),
            0.0,
            "at least",
            f"{methods.LABELS[name]}: share of sure mistakes below the deterministic network's",
        )
        for name in SHOWN[1:]
    ),
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    test = shared_networks.grey_images(config.data, "test", config.test_size, log)
    chosen = test.images[test.labels == config.digit][: config.images]
    if not len(chosen):
        raise ValueError(f"no test image of the {config.test_size} shows a {config.digit}.")
    angles = list(range(0, 181, config.step))
    results: dict[str, Any] = {"angles": angles}
    for name, method in methods.methods(config, log):
        if name in SHOWN:
            turn = partial(_turned, method, chosen, angles, config.digit)
            results[name] = log.once(f"turn {name}", turn)
    plain = results["deterministic"]["sure_and_wrong"]
    results["saved"] = {name: plain - results[name]["sure_and_wrong"] for name in SHOWN[1:]}
    return results


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [record["metrics"] for record in records]
    angles = runs[0]["angles"]
    curves = [
        figure(
            title,
            "angle, degrees",
            label,
            [
                over_seeds(methods.LABELS[name], angles, [run[name][key] for run in runs])
                for name in SHOWN
            ],
        )
        for key, title, label in (
            ("entropy", "Predictive entropy of the turning digit", "nat"),
            ("right", "Probability of the digit that it is", "probability"),
            ("wrong_above", "Sure of another digit", "share of the images"),
        )
    ]
    first = [
        figure(
            f"One image by angle: {methods.LABELS[name]}",
            "angle, degrees",
            "probability",
            [
                trace(f"digit {digit}", angles, column)
                for digit, column in enumerate(zip(*runs[0][name]["first"], strict=True))
                if max(column) > 0.1
            ],
        )
        for name in SHOWN
    ]
    return curves + first


def _turned(
    method: methods.Method, images: Tensor, angles: Sequence[int], digit: int
) -> dict[str, Any]:
    rows: dict[str, Any] = {"entropy": [], "right": [], "wrong_above": [], "first": []}
    for angle in angles:
        turned = rotated(images, angle)
        labels = torch.full((len(turned),), digit)
        # The same seed, and so the same networks, for all angles.
        proba = method.samples(ImageSet(turned, labels, 10), seed=0).mean(0)
        best = proba.max(-1)
        rows["entropy"].append(cross_entropy(proba, proba, "softmax", -1).mean().item())
        rows["right"].append(proba[:, digit].mean().item())
        wrong = (best.values > SURE) & (best.indices != digit)
        rows["wrong_above"].append(wrong.double().mean().item())
        rows["first"].append(proba[0].tolist())
    rows["sure_and_wrong"] = sum(rows["wrong_above"]) / len(angles)
    return rows


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images turned counter-clockwise around their middle, black where nothing was."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = images.new_tensor([[cos, -sin, 0.0], [sin, cos, 0.0]]).expand(len(images), 2, 3)
    grid = F.affine_grid(turn, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
