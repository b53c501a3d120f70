"""Networks for CIFAR shrunk by noise on units, next to structured magnitude pruning."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean import export
from zeromean.experiments.networks import cifar
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import figure, trace
from zeromean.experiments.runs.log import RunLog
from zeromean.experiments.sparse_networks import convolutional, measures, shrunk

TITLE = "Shrunk networks on CIFAR-10: noise on units against structured magnitude pruning"
SOURCE = "ours; Neklyudov et al. (2017), filters by their norms: Li et al. (2017)"
NEEDS: tuple[str, ...] = ("cifar10",)
COVERS: tuple[str, ...] = ()
TIMINGS = ("*.speedup.*",)
NOTES = (
    "A residual network of {setting depth} layers at width {setting resnet_width} and the VGG-like "
    "one at width {setting width}, trained for {setting dense_epochs} passes and shrunk in at most "
    "{setting steps} steps, each of {setting step_epochs} passes with noise and twice as many "
    "without, for a loss of {setting loss} "
    "points on the validation images. Next to every network stands one with as many weights at "
    "most, from the same start and with the same passes in all: in every layer the units with the "
    "smallest weights that read them are gone, as large a part everywhere, filters by fours too. "
    "Both are trained by Adam on shifted and mirrored images.",
)


@dataclass(frozen=True, kw_only=True)
class Config(convolutional.Settings):
    """Two networks, each shrunk and pruned by magnitude; about five hours of one core."""

    networks: tuple[str, ...] = ("resnet", "vgg")
    """Which ones."""
    depth: int = 20
    """Layers with weights of the residual network, 6n + 2."""
    resnet_width: float = 0.5
    """Width of the residual network, in parts of its paper's."""
    width: float = 0.25
    """Width of the VGG-like network, in parts of the paper's."""
    step_epochs: int = 5
    """Passes of a step with noise, and again without."""
    steps: int = 8
    """Steps at most."""
    pressure: float = 4.0
    """Nats per image that the network costs in the first step."""
    loss: float = 0.5
    """Points of validation accuracy that may be lost."""
    shrink_lr: float = 1e-3
    """Adam's rate after the first training."""


QUICK = Config(**convolutional.QUICK, depth=8, step_epochs=3, steps=3)
SMOKE = Config(
    **convolutional.SMOKE,
    networks=("resnet",),
    depth=8,
    resnet_width=0.25,
    step_epochs=1,
    steps=1,
    loss=100.0,
)
CLAIMS = [
    Claim(f"{network}.{metric}", bound, ours(), 0.0, kind, f"{words}: {label}", unit)
    for network, words in (("resnet", "ResNet"), ("vgg", "VGG-like"))
    for metric, bound, kind, label, unit in (
        ("lost", 0.5, "at most", "accuracy lost", "points"),
        ("speedup.onnxruntime_64", 3.0, "at least", "times faster, batches of 64", "×"),
        ("speedup.onnxruntime_1", 3.0, "at least", "times faster, one image", "×"),
        ("file", 6.0, "at least", "file, times smaller", "×"),
        ("gain_over_magnitude", 0.0, "at least", "accuracy above magnitude pruning", "points"),
    )
]


def run(config: Config, log: RunLog) -> dict[str, Any]:
    found: dict[str, Any] = {"bits": cifar.bits(config)}
    identity = {"resnet": [config.depth, config.resnet_width]}
    build = partial(_resnet, config.depth, config.resnet_width)
    for name in config.networks:
        if name == "resnet":
            dense = convolutional.train_dense("resnet", identity, build, config, log)
        else:
            dense = cifar.train(
                "vgg, dense", cifar.DETERMINISTIC, config, log, epochs=config.dense_epochs
            )
        found[name] = _shrunk_and_pruned(name, dense, config, log)
    return found


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    drawn = []
    for name, words in (("resnet", "ResNet"), ("vgg", "VGG-like")):
        found = [r["metrics"][name] for r in records if name in r["metrics"]]
        axes = (
            ("speedup_onnxruntime_64", "times faster in onnxruntime, batches of 64"),
            ("weights", "weights"),
        )
        for axis, label in axes if found else ():
            traces = [
                trace(
                    kind,
                    [value for one in found for value in one[key][axis]],
                    [value for one in found for value in one[key]["error"]],
                    kind="scatter",
                )
                for key, kind in (("curve", "noise on units"), ("magnitude", "magnitude"))
            ]
            drawn.append(figure(words, label, "test error, %", traces, x_log=True))
    return drawn


def _shrunk_and_pruned(
    name: str, dense: cifar.Trained, config: Config, log: RunLog
) -> dict[str, Any]:
    from zeromean.data import ShiftAndAlternate
    from zeromean.training import Target, TargetMissedWarning, TrainingConfig, fit, shrink
    from zeromean.training.shrinking.steps import TUNING

    validation = cifar.images(config, "validation", log)
    training = TrainingConfig(
        epochs=config.step_epochs,
        batch_size=config.batch_size,
        lr=config.shrink_lr,
        precision=cifar.precision_of(config),
        seed=config.seed,
    )
    model = dense.model.to(memory_format=torch.contiguous_format)  # pyright: ignore
    log.say(f"{name}: shrinking in {config.steps} steps at most")
    with shrunk.without(TargetMissedWarning):
        found = shrink(
            model,
            dense.train,
            validation,
            target=Target(loss=config.loss),
            config=training,
            steps=config.steps,
            pressure=config.pressure,
            folder=log.folder / f"shrink {name}",
            augment=ShiftAndAlternate(config.shift, config.seed),
            progress=log.progress,
        )
    results = shrunk.results(found, dense.test)
    exact = [place for place, n in enumerate(found.networks) if n.bits is None][1:]
    rows: dict[str, list[float]] = {"weights": [], "error": [], "speedup_onnxruntime_64": []}
    example = dense.train.images[:64]
    for step, place in enumerate(exact, start=1):
        network = found.networks[place]
        pruned, weights = pruned_to(model, network.weights, example)
        epochs = (1 + TUNING) * step * config.step_epochs
        log.say(f"{name}: magnitude, {weights} weights, {epochs} epochs")
        folder = log.folder / f"magnitude {name} {step}"
        settings = replace(training, epochs=epochs)
        augment = ShiftAndAlternate(config.shift, config.seed)
        fit(pruned, dense.train, settings, folder=folder, augment=augment, progress=log.progress)
        pruned.eval()
        rows["weights"].append(weights)
        rows["error"].append(measures.error(pruned, dense.test))
        export.save_onnx(pruned, folder / "network.onnx", example[:2])
        faster = shrunk.times_faster(
            log.folder / f"shrink {name}" / "original" / "network.onnx",
            folder / "network.onnx",
            example,
        )
        rows["speedup_onnxruntime_64"].append(faster)
    theirs, our = rows["error"], [results["curve"]["error"][place] for place in exact]
    gains = [magnitude - noise for magnitude, noise in zip(theirs, our, strict=True)]
    return {**results, "magnitude": rows, "gain_over_magnitude": sum(gains) / len(gains)}


def pruned_to(model: nn.Module, weights: int, example: Tensor) -> tuple[nn.Module, int]:
    """A network with so many weights at most: the same part of the units is gone everywhere."""
    low, high = 0.0, 1.0
    smallest = pruned_by_magnitude(model, high, example)
    for _ in range(10):
        share = (low + high) / 2
        candidate = pruned_by_magnitude(model, share, example)
        if zm.sparsity(candidate).total.weights <= weights:
            high, smallest = share, candidate
        else:
            low = share
    return smallest, zm.sparsity(smallest).total.weights


@torch.no_grad()
def pruned_by_magnitude(model: nn.Module, share: float, example: Tensor) -> nn.Module:
    """A network without those units of each group whose outgoing weights have the smallest norm."""
    from zeromean.compression.compress import trimmed_with_plan
    from zeromean.layers.dropout.input_noise import input_noises
    from zeromean.training.shrinking.steps import FILTERS

    marked = copy.deepcopy(model)
    zm.add_unit_noise_(marked, example)
    norms: dict[Any, Tensor] = {}
    by_fours: set[Any] = set()
    for name, found in input_noises(marked).items():
        noise, layer = found.noise, marked.get_submodule(name)
        weight: Any = layer.weight
        columns = weight.square().transpose(0, 1).flatten(1).sum(1)
        sums = norms.setdefault(noise, columns.new_zeros(noise.num_features + 1))
        sums.index_add_(0, found.index, columns)
        by_fours |= set() if found.last else {noise}
    for noise, sums in norms.items():
        step = FILTERS if noise in by_fours else 1
        wanted = max(round((1 - share) * noise.num_features / step), 1) * step
        chosen = sums[:-1].topk(min(wanted, noise.num_features)).indices
        noise.log_scale.fill_(-20.0)  # Multipliers of 1.
        noise.keep.fill_(False)
        noise.keep[chosen] = True
    return trimmed_with_plan(marked, example)[0]


def _resnet(
    depth: int, width: float, num_classes: int, conv: Any = nn.Conv2d, linear: Any = nn.Linear
) -> nn.Module:
    from zeromean.models import resnet

    return resnet(depth, width, num_classes, conv=conv, dense=linear)
