"""Pictures of sparse networks: what was pruned, at what cost, and what the weights look like."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.runs.figure import figure, image, over_seeds, trace

# Of the patch of a dense layer that is drawn, both ways.
PATCH = 100
# The same of a frame: there are many of them.
SMALL_PATCH = 40


def figures(
    records: Sequence[Mapping[str, Any]], quoted: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Of all seeds, with the results that others reported."""
    metrics = [record["metrics"] for record in records]
    first = metrics[0]
    epochs = list(range(1, len(first["by_epoch"]["error"]) + 1))

    def curve(name: str, values: Callable[[Any], Sequence[float]]) -> dict[str, Any]:
        return over_seeds(name, epochs, [values(m) for m in metrics])

    factors = [row["compression"] for row in first["magnitude"]]
    by_magnitude = [[row["error"] for row in m["magnitude"]] for m in metrics]
    return [
        figure(
            "Compression by epoch",
            "epoch",
            "weights over weights left",
            [curve("sparse variational dropout", lambda m: m["by_epoch"]["compression"])],
            y_log=True,
        ),
        figure(
            "Sparsity by epoch",
            "epoch",
            "weights that are gone, %",
            [
                curve(layer, lambda m, layer=layer: m["sparsity_by_epoch"][layer])
                for layer in first["sparsity_by_epoch"]
            ],
        ),
        figure(
            "Test error against compression",
            "weights over weights left",
            "error, %",
            [
                over_seeds("magnitude pruning, retrained", factors, by_magnitude),
                _by_threshold(metrics),
                trace(
                    "sparse variational dropout, log α > 3, each seed",
                    [m["sparse"]["compression"] for m in metrics],
                    [m["sparse"]["error"] for m in metrics],
                    kind="scatter",
                ),
                trace("not sparse", [1], [first["dense"]["error"]], kind="scatter"),
                *(
                    trace(f"quoted: {name}", [factor], [error], kind="scatter")
                    for name, (error, factor) in quoted.items()
                ),
            ],
            x_log=True,
            # A network that is pruned too far would press all the others to the bottom.
            y_log=True,
        ),
        *quantization_figures(metrics),
        *(
            image(f"{title}, {name} network", x_label, y_label, rows)
            for name, pictures in first["pictures"].items()
            for title, x_label, y_label, rows in pictures
        ),
        *frame_figures(first["frames"]),
    ]


def _by_threshold(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The curve of a network that is pruned further and further, without more training."""
    rows = [m["by_threshold"] for m in metrics]
    factors = [
        statistics.fmean(row["compression"] for row in same) for same in zip(*rows, strict=True)
    ]
    errors = [[row["error"] for row in of_seed] for of_seed in rows]
    return over_seeds("sparse variational dropout, by the threshold of log α", factors, errors)


def frame_figures(frames: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The lecture's film as two pictures: epochs from left to right, up to six of them."""
    if not frames:
        return []
    every = -(-len(frames) // 6)
    epochs = [*list(frames)[:-1:every], list(frames)[-1]]
    filters = [_cells(torch.tensor(frames[e][0][3])) for e in epochs]
    patches = [torch.tensor(frames[e][1][3])[:SMALL_PATCH, :SMALL_PATCH] for e in epochs]
    label = "after epochs " + ", ".join(epochs)
    return [
        image("Filters of the first layer by epoch", label, "", _side_by_side(filters)),
        image("A patch of the largest dense layer by epoch", label, "", _side_by_side(patches)),
    ]


def _cells(tiles: Tensor) -> Tensor:
    """The first four of twenty filters, in two rows of ten, below each other."""
    height, width = tiles.shape[0] // 2, tiles.shape[1] // 10
    return torch.cat([tiles[:height, k * width : (k + 1) * width] for k in range(4)])


def _side_by_side(pictures: Sequence[Tensor]) -> list[list[int]]:
    """With a column between two that is as strong as the strongest pixel."""
    height = pictures[0].shape[0]
    line = torch.full((height, 1), 100)
    parts = [part for picture in pictures for part in (line, picture)]
    return torch.cat(parts[1:], dim=1).tolist()


def quantization_figures(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Error and size of the rounded networks, `quantized` of each seed."""
    variants = [(per, t) for per, rows in metrics[0]["quantized"].items() for t in rows]
    names = [f"per {per}, {tolerance}" for per, tolerance in variants]
    return [
        figure(
            f"Rounded by the posterior: {label}",
            "bit widths",
            label,
            [
                over_seeds(
                    label,
                    names,
                    [[m["quantized"][per][t][key] for per, t in variants] for m in metrics],
                    kind="bar",
                )
            ],
        )
        for key, label in (("error", "test error, %"), ("compression", "times smaller than float"))
    ]


def sentence_about(quoted: Mapping[str, tuple[float, float]]) -> str:
    """What others reported, in a sentence: the error and the compression of each method."""
    rows = [f"{name} {error:g}% at {factor:g}×" for name, (error, factor) in quoted.items()]
    return (
        f"Quoted from the lecture: {', '.join(rows)}. Magnitude pruning in the pictures is ours: "
        "torch.nn.utils.prune, and training after each step."
    )


@torch.no_grad()
def weight_images(model: nn.Module) -> list[tuple[str, str, str, list[list[int]]]]:
    """The filters of the first layer, and a patch of the largest dense one, as `image` has them."""
    weights: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, zm.StochasticLayer):
            mean, _ = module.weight.moments()
            assert mean is not None
            weights[name] = mean
        elif isinstance(module, nn.Conv2d | nn.Linear):
            weights[name] = module.weight
    first = next(iter(weights.values()))
    name, dense = max(
        ((n, w) for n, w in weights.items() if w.dim() == 2), key=lambda item: item[1].numel()
    )
    middle = dense.shape[1] // 2  # the border of the images says nothing
    patch = dense[:PATCH, middle - PATCH // 2 : middle + PATCH // 2]
    tiles = (first if first.dim() == 4 else first[:20].unflatten(1, (1, 28, 28)))[:20, 0]
    return [
        ("Filters of the first layer", "ten a row", "", _per_cent(_tiled(tiles, 10))),
        (f"A patch of {name}", "input", "neuron", _per_cent(patch)),
    ]


def _tiled(tiles: Tensor, columns: int) -> Tensor:
    """Pictures `(count, height, width)` side by side, with a gap of one pixel."""
    padded = nn.functional.pad(tiles, (0, 1, 0, 1))
    return padded.unflatten(0, (-1, columns)).permute(0, 2, 1, 3).flatten(2).flatten(0, 1)


def _per_cent(values: Tensor) -> list[list[int]]:
    """In per cent of the largest: two digits are enough to look at, and keep records small."""
    largest = values.abs().max().clamp_min(torch.finfo(values.dtype).tiny)
    return (100 * values / largest).round().int().tolist()
