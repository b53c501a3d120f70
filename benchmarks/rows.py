"""Every row of the tables, with the bounds it must reach and the aim.

Rows of one group are measured one after the other in one process, so they lie side by side.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import networks
import torch
from measurements import (
    LENET,
    Case,
    Reading,
    Settings,
    exact_kl,
    import_time,
    memory_kept_for_backward,
    peak_memory,
    prediction,
    training,
    training_with_plain_malloc,
)
from roster import PEERS

MAIN_PEERS = ["cplxmodule VD", "torchbnn"]
TWENTY_SAMPLES = partial(prediction, num_samples=20)
CHANNELS_LAST = Case(networks.lenet5_caffe, memory_format=torch.channels_last)


@dataclass(frozen=True)
class Row:
    """One line: `must` and `aim` are upper bounds; rows with `quick=False` wait for a full run."""

    group: str
    name: str
    measure: Callable[[Settings], Reading]
    must: float | None = None
    aim: float | None = None
    quick: bool = True
    unit: str = "ratio"


def all_rows() -> list[Row]:
    return [row for rows in _GROUPS for row in rows()]


def _training() -> Iterator[Row]:
    row = partial(Row, "Training step, LeNet-5-Caffe, batch 128, in deterministic steps")
    yield from _each(row, training, LENET, _OURS_IN_TRAINING)
    # Both ways to use posteriors train alike; they differ in prediction.
    yield from _each(row, training, LENET, _untargeted(PEERS, without="posteriors, vmap"))
    yield from _each(row, training, LENET, [(name, 1.16, 1.1) for name in _DRAWING_WEIGHTS])
    group = "Training step, LeNet-5-Caffe, batch 128, with malloc as the system brings it"
    for name, must, aim in [("zeromean, additive", 1.95, 1.8), ("torchbnn", None, None)]:
        yield Row(group, name, partial(training_with_plain_malloc, name), must, aim, quick=False)


def _memory() -> Iterator[Row]:
    group = "Memory kept for backward by a forward pass, LeNet-5-Caffe, batch 128, MiB"
    for name, must, aim in [
        ("deterministic", None, None),
        ("zeromean, zero-mean", 24, 20),
        ("zeromean, layer-wise alpha", 24, 20),
        ("zeromean, additive", 24, 20),
        *_untargeted(PEERS, without="posteriors, vmap"),
    ]:
        measure = partial(memory_kept_for_backward, name, whole_step=False)
        yield Row(group, name, measure, must, aim, unit="MiB")
    group = "Memory kept for backward by the whole loss with its KL, MiB"
    for name in ["zeromean, layer-wise alpha", "zeromean, additive", *MAIN_PEERS]:
        measure = partial(memory_kept_for_backward, name, whole_step=True)
        yield Row(group, name, measure, unit="MiB")


def _peak_memory() -> Iterator[Row]:
    group = "Rise of resident memory at its highest, LeNet-5-Caffe, batch 128, MiB"
    names = ["deterministic", "zeromean, zero-mean", "zeromean, additive", *MAIN_PEERS]
    for name in names:
        measure = partial(peak_memory, name, LENET, num_samples=None)
        yield Row(group, f"{name}: training", measure, unit="MiB", quick=False)
    names = ["deterministic", "zeromean, additive", *MAIN_PEERS, "posteriors, vmap"]
    for name in names:
        measure = partial(peak_memory, name, LENET, num_samples=20)
        label = f"{name}: 20 samples"
        yield Row(group, label, measure, unit="MiB", quick=False)


def _single_stochastic_layer() -> Iterator[Row]:
    group = "20 samples, one stochastic layer, LeNet-5-Caffe, batch 128, in single passes"
    for name, must, aim in [
        ("zeromean, only dense1 stochastic", 1.45, 1.25),
        ("zeromean, only the last layer stochastic", 1.15, 1.05),
    ]:
        yield Row(
            group, name, partial(prediction, name, LENET, num_samples=20, floor_passes=1), must, aim
        )


def _moments() -> Iterator[Row]:
    dense1, additive = "zeromean, only dense1 stochastic, moments", "zeromean, additive, moments"
    for case, targets in [
        (LENET, [(dense1, 1.25, 1.1), (additive, 4, 3)]),
        (Case(networks.lenet5_caffe, 1), [(dense1, None, None), (additive, 8, 5)]),
    ]:
        group = f"Moments for samples, LeNet-5-Caffe, batch {case.batch_size}, in single passes"
        measure = partial(prediction, num_samples=1)
        yield from _each(partial(Row, group), measure, case, targets)


def _prediction() -> Iterator[Row]:
    row = partial(Row, "20 samples, LeNet-5-Caffe, batch 128, in 20 deterministic passes")
    ours = [
        ("zeromean, additive", 1.65, 1.3),
        ("zeromean, additive, sampler=weight", 1.07, 0.95),
        ('zeromean, additive, sampler="auto"', None, None),
        ("zeromean, zero-mean", None, None),
    ]
    yield from _each(row, TWENTY_SAMPLES, LENET, ours + _untargeted(PEERS))

    row = partial(Row, "20 samples, LeNet-5-Caffe, batch 1, in 20 deterministic passes")
    ours = [("zeromean, additive", 1.0, 0.7), *_OTHER_SAMPLERS]
    yield from _each(row, TWENTY_SAMPLES, Case(networks.lenet5_caffe, 1), ours + _untargeted(PEERS))

    row = partial(
        Row, "20 samples, LeNet-5-Caffe, batch 1024, in 20 deterministic passes", quick=False
    )
    ours = [("zeromean, additive", None, None), *_OTHER_SAMPLERS]
    case = Case(networks.lenet5_caffe, 1024)
    yield from _each(row, TWENTY_SAMPLES, case, ours + _untargeted(MAIN_PEERS))


def _other_networks() -> Iterator[Row]:
    by_weights = [(name, 1.05, 1.0) for name in _DRAWING_WEIGHTS]
    for title, network, num_samples, quick, targets in [
        ("MLP 784-1000-1000-10", networks.mlp, 20, True, [("zeromean, additive", 2.4, 2.1)]),
        (
            "narrow VGG",
            networks.narrow_vgg,
            5,
            False,
            [("zeromean, additive", None, None), *by_weights],
        ),
    ]:
        case = Case(network)
        row = partial(
            Row, f"Training step, {title}, batch 128, in deterministic steps", quick=quick
        )
        names = ["zeromean, zero-mean", "zeromean, layer-wise alpha"]
        yield from _each(row, training, case, _untargeted(names))
        yield from _each(row, training, case, targets)
        yield from _each(row, training, case, _untargeted(MAIN_PEERS))

        row = partial(
            Row,
            f"{num_samples} samples, {title}, batch 128, in {num_samples} deterministic passes",
            quick=quick,
        )
        names = ["zeromean, additive", *(name for name, *_ in _OTHER_SAMPLERS), *MAIN_PEERS]
        yield from _each(
            row, partial(prediction, num_samples=num_samples), case, _untargeted(names)
        )


def _number_of_samples() -> Iterator[Row]:
    case = Case(networks.lenet5_caffe, 16)
    for name in ["zeromean, additive", "zeromean, only dense1 stochastic"]:
        group = f"Cost against samples, LeNet-5-Caffe, batch 16, {name}, per sample"
        for num_samples in [1, 10, 100, 1000]:
            measure = partial(prediction, name, case, num_samples=num_samples)
            yield Row(group, f"samples: {num_samples}", measure, quick=num_samples <= 100)


def _depth() -> Iterator[Row]:
    for depth in [1, 2, 4, 8, 16]:
        case = Case(networks.deep_mlp(depth))
        group = "Cost against depth, MLP with hidden layers of 200, batch 128"
        name = "zeromean, zero-mean"
        label = f"{depth} hidden, {name}: training"
        yield Row(group, label, partial(training, name, case), quick=depth in (1, 16))
        name = "zeromean, additive"
        label = f"{depth} hidden, {name}: 20 samples"
        must, aim = (1.8, 1.4) if depth == 16 else (None, None)
        measure = partial(TWENTY_SAMPLES, name, case)
        yield Row(group, label, measure, must, aim, quick=depth in (1, 16))


def _channels_last() -> Iterator[Row]:
    group = "Gain of channels_last alone: deterministic, against the same net in NCHW"
    measure = partial(training, "deterministic", CHANNELS_LAST, floor_case=LENET)
    yield Row(group, "training step", measure)
    measure = partial(prediction, "deterministic", CHANNELS_LAST, floor_case=LENET, num_samples=5)
    yield Row(group, "forward pass", measure)
    row = partial(Row, "Training step, all in channels_last, LeNet-5-Caffe, batch 128", quick=False)
    bounds = {"zeromean, zero-mean": (1.3, 1.2), "zeromean, additive": (2.2, 2.0)}
    ours = [(name, *bounds.get(name, (None, None))) for name, *_ in _OURS_IN_TRAINING]
    yield from _each(row, training, CHANNELS_LAST, ours + _untargeted(MAIN_PEERS))
    row = partial(Row, "20 samples, all in channels_last, LeNet-5-Caffe, batch 128", quick=False)
    ours = [("zeromean, additive", None, None), *_OTHER_SAMPLERS]
    yield from _each(row, TWENTY_SAMPLES, CHANNELS_LAST, ours + _untargeted(MAIN_PEERS))


def _small_things() -> Iterator[Row]:
    name = "zeromean.functional.kl.log_uniform_kl_sum"
    for num_weights, must, aim in [(431_000, 1.2, 1.0), (1_800_000, 0.5, 0.3)]:
        group = f"Exact KL against the sigmoid approximation, {num_weights:,} weights, value and "
        yield Row(group + "gradient", name, partial(exact_kl, num_weights), must, aim)
    group = "CPU seconds of an import"
    yield Row(group, "import zeromean, after torch", import_time, 0.15, 0.05, unit="s")


_OURS_IN_TRAINING = [
    ("zeromean, zero-mean", 1.30, 1.15),
    ("zeromean, zero-mean, 95% of scales 1e-21", 1.30, 1.15),
    ("zeromean, layer-wise alpha", 1.85, 1.6),
    ("zeromean, additive", 2.05, 1.8),
]
_DRAWING_WEIGHTS = [
    "zeromean, additive, weights drawn",
    "zeromean, additive, weights drawn, normal prior",
]
_OTHER_SAMPLERS = [
    ("zeromean, additive, sampler=weight", None, None),
    ('zeromean, additive, sampler="auto"', None, None),
]
_GROUPS = [
    _training,
    _memory,
    _single_stochastic_layer,
    _moments,
    _prediction,
    _small_things,
    _channels_last,
    _other_networks,
    _number_of_samples,
    _depth,
    _peak_memory,
]


def _each(row, measure, case, targets) -> Iterator[Row]:
    for name, must, aim in targets:
        yield row(name, partial(measure, name, case), must, aim)


def _untargeted(names, without: str = "") -> list[tuple[str, None, None]]:
    return [(name, None, None) for name in names if name != without]
