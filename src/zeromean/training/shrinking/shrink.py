"""A trained network made smaller and faster where it runs, in one call."""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zeromean.arguments import require_flag, require_integer, require_model, require_numbers, shown
from zeromean.compression.plan import Plan, composed
from zeromean.compression.sparse_runtimes import sparse_runtimes
from zeromean.compression.speed import require_onnxruntime
from zeromean.conversion.to_deterministic import to_deterministic
from zeromean.files.atomic import whole_file
from zeromean.training.config import TrainingConfig
from zeromean.training.data_sources import Data, evaluation_batches
from zeromean.training.likelihoods import Likelihood, as_likelihood
from zeromean.training.mini_batches import first_rows, split_batch
from zeromean.training.shrinking.measuring import NETWORK, ONNX, Measurements
from zeromean.training.shrinking.result import Shrunk, ShrunkNetwork
from zeromean.training.shrinking.steps import (
    Work,
    drown_units,
    price_of,
    tune_,
    with_sparse_weights,
)
from zeromean.training.shrinking.target import Target, TargetMissedWarning, speedup
from zeromean.training.trainer import require_lightning
from zeromean.training.training_sets import refuse_training_data, require_sets

if TYPE_CHECKING:
    from zeromean.data.batches import Augmentation, EpochAugmentation

# By how many points more than allowed a network may be worse, and training may go on from it: some
# of that comes back.
_MARGIN = 0.5
# By how much the price of what is left of the network rises from step to step.
_DEARER = 1.6


def shrink(
    model: nn.Module,
    train: Data,
    validation: Data,
    *,
    target: Target | None = None,
    config: TrainingConfig | None = None,
    steps: int = 8,
    pressure: float = 4.0,
    sparse_weights: bool = False,
    folder: Path | str | None = None,
    likelihood: Likelihood | Callable[[Tensor, Tensor], Tensor] | None = None,
    augment: Augmentation | EpochAugmentation | None = None,
    progress: bool = True,
) -> Shrunk:
    """Make a trained network smaller and faster: a plain one, with fewer neurons and filters.

    Every step gives units noise (`zm.add_unit_noise_`), trains with a KL term that makes the
    network cost nats, drops the units that have drowned, trains what is left, and measures it: on
    the validation data, and where it is to run. The next step goes on from there, at a higher
    price, or where that was too much, from the network before, at a lower one. Of all these
    networks, also with weights that are rounded to few bits and, where that is faster, with large
    products in int8, the one that comes nearest to the target is taken. The model that is given
    stays as it is.

    Args:
        model: A trained network. Stochastic layers count by their means.
        train: Data as for `fit`.
        validation: Other data of the same kind, by which networks are chosen. What you report needs
            a third set.
        target: What is asked for. Default: as small as it gets at no loss.
        config: How a step trains, with noise and then as long again without. The KL weight and its
            warm-up are those of `shrink`. Default: 5 epochs of Adam.
        steps: Steps at most. It ends earlier when the target is reached, or out of reach.
        pressure: Nats per example that the network costs in the first step.
        sparse_weights: After every step, make single weights sparse too: smaller files, but no
            faster where they are multiplied densely, as `zm.sparse_runtimes` says beforehand.
        folder: Folder of this run only; called again it goes on there, also with another target.
            Default: nothing is kept.
        likelihood: As for `fit`. Default: targets are classes.
        augment: As for `fit`.
        progress: Show progress bars and a line for every step, where the output is a terminal.

    Returns:
        All networks on the way with their measurements, and which one is taken.
    """
    require_lightning()
    require_model(model)
    target = Target() if target is None else target
    if not isinstance(target, Target):
        raise TypeError(f"target must be a zeromean.training.Target, got {shown(target)}.")
    config = TrainingConfig(epochs=5, batch_size=128) if config is None else config
    if not isinstance(config, TrainingConfig):
        raise TypeError(f"config must be a TrainingConfig, got {shown(config)}.")
    steps = require_integer("steps", steps, at_least=1)
    require_numbers(pressure=pressure)
    if not 0 < pressure < math.inf:
        raise ValueError(f"pressure must be a positive number of nats, got {pressure}.")
    require_flag("sparse_weights", sparse_weights)
    likelihood = as_likelihood(likelihood)
    require_sets(likelihood, train=train, validation=validation)
    refuse_training_data(train, validation)
    if target.runtime == "onnxruntime":
        require_onnxruntime()
    example = _example(validation)
    plain = to_deterministic(model).eval().cpu()  # Where it is measured; `fit` trains where it can.
    with tempfile.TemporaryDirectory() as temporary:
        work = Work(
            train=train,
            validation=validation,
            likelihood=likelihood,
            config=config,
            folder=Path(temporary if folder is None else folder),
            example=example,
            augment=augment,
            progress=progress,
        )
        notes = (str(sparse_runtimes(plain)),) if sparse_weights else ()
        if progress and sys.stdout.isatty():
            print(*notes, sep="\n")
        price = price_of(work, plain)  # Whether there are units to remove, before training.
        measured = Measurements(work, plain, target)
        key = measured.key
        allowed = target.allowed_loss(measured.standard_error())
        networks = _networks(
            work, measured, plain, target, key, allowed, steps, pressure / price, sparse_weights
        )
        chosen = target.choose(networks[0], networks, key, allowed)
        found = networks[chosen]
        reached = chosen > 0 and target.is_met(networks[0], found, key, allowed)
        result = Shrunk(tuple(networks), chosen, reached, key, likelihood is not None, notes=notes)
        if folder is not None:
            result = replace(result, folder=Path(folder))
            measured.export(found)
            _keep(Path(folder), work.folder / found.folder)
    if not reached:
        lost = networks[0].score - found.score
        warnings.warn(
            f"{target} was not reached in {len(networks) - 1} networks; the nearest is "
            f"{found.name}: {result.speedup:.1f}× faster ({key}), {found.file_size:,} bytes, "
            f"{lost:.2f} lost. Allow more loss, more steps or more epochs.",
            TargetMissedWarning,
            stacklevel=2,
        )
    return result


def _networks(
    work: Work,
    measured: Measurements,
    plain: nn.Module,
    target: Target,
    key: str,
    allowed: float,
    steps: int,
    price: float,
    sparse_weights: bool,
) -> list[ShrunkNetwork]:
    """All networks, the original first."""
    before = measured.original
    networks = [before]
    current: tuple[nn.Module, Plan | None] = plain, None
    search = Search(price)
    for step in range(1, steps + 1):
        name = f"step-{step}"
        model, until_now = current
        smaller, decided = drown_units(work, model, search.price * work.num_data(), f"{name}/noise")
        plan = decided if until_now is None else composed(until_now, decided)
        tune_(work, smaller, f"{name}/tuning")
        found = [(name, f"step {step}", smaller)]
        if sparse_weights:
            sparse = with_sparse_weights(work, smaller, f"{name}/sparse/training")
            found.append((f"{name}/sparse", f"step {step}, sparse", sparse))
        lost = []
        for place, title, network in found:
            bound = allowed if target.file_size is None else None
            made = measured.network(place, title, network, plan, bound)
            networks += made
            lost.append(before.score - made[0].score)
            _say(work, made[-1], before, key)
        too_much = min(lost) > allowed + _MARGIN
        search = search.after(too_much=too_much)
        current = current if too_much else (smaller, plan)
        if search.is_over or (target.is_of_size and _is_met(networks, target, key, allowed)):
            break
    return networks


@dataclass(frozen=True)
class Search:
    """For the largest price at which a network still does what it should.

    Attributes:
        price: The price to try next.
        paid: The largest one that was not too much, if any was.
        ceiling: The smallest one that was too much.
    """

    price: float
    paid: float | None = None
    ceiling: float | None = None

    def after(self, *, too_much: bool) -> Search:
        """What to try next: more, or what lies between the last two."""
        if too_much and self.paid is None:
            return Search(self.price / _DEARER**2, None, self.price)
        if too_much:
            assert self.paid is not None
            return Search(math.sqrt(self.paid * self.price), self.paid, self.price)
        if self.ceiling is None:
            return Search(_DEARER * self.price, self.price, None)
        return Search(math.sqrt(self.price * self.ceiling), self.price, self.ceiling)

    @property
    def is_over(self) -> bool:
        """Whether the next one would hardly be another."""
        return self.ceiling is not None and self.ceiling < 1.1 * self.price


def _is_met(networks: list[ShrunkNetwork], target: Target, key: str, allowed: float) -> bool:
    return any(target.is_met(networks[0], network, key, allowed) for network in networks[1:])


def _say(work: Work, network: ShrunkNetwork, before: ShrunkNetwork, key: str) -> None:
    if work.progress and sys.stdout.isatty():
        print(
            f"{network.name}: {network.score:.2f} (was {before.score:.2f}), {network.file_size:,} "
            f"bytes, {speedup(before, network, key):.1f}× faster ({key})"
        )


def _example(validation: Data) -> Any:
    for batch in evaluation_batches(validation):
        return first_rows(split_batch(batch)[0], 64)
    raise ValueError("The validation data gave no batch.")


def _keep(folder: Path, chosen: Path) -> None:
    """Copies of the chosen network's files where they are easily found."""
    for source, name in ((NETWORK, "chosen.safetensors"), (ONNX, "chosen.onnx")):
        if (chosen / source).exists():
            with whole_file(folder / name) as temporary:
                shutil.copyfile(chosen / source, temporary)
