"""Damaged files of models and checkpoints: refused by name, or as they were."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from file_fuzzer import (
    FOLDER,
    MOST_BYTES,
    LargestTensor,
    cut_and_paste,
    damage,
    flip_bits,
    make_files,
)
from fuzzing.outcomes import CHECKED, REFUSED, refused, require
from zeromean.training.checkpoint import load_tensors, save_tensors

MOST_SECONDS = 60.0
# Damages that a checksum sees. What is written anew gets one that fits.
SEEN = ("flip_bits", "cut_and_paste", "change_entries")


def prepare(folder: Path) -> Callable[[random.Random], str]:
    models = make_files(folder)
    checkpoint = folder / "checkpoint.ckpt"
    save_tensors(checkpoint, {"format_version": 1, "epoch": 3, "weight": torch.randn(4, 5)})
    sound = {path: load(path).state_dict() for path, load in models.items()}
    sound[checkpoint] = load_tensors(checkpoint)
    return partial(case, folder / "damaged.safetensors", models, checkpoint, sound)


def case(
    target: Path,
    models: dict[Path, Callable[[Path], Any]],
    checkpoint: Path,
    sound: dict[Path, dict[str, Any]],
    generator: random.Random,
) -> str:
    source = generator.choice([*models, checkpoint])
    if source == checkpoint:
        kind = "flip_bits"
        generator.choice((flip_bits, cut_and_paste))(source, target, generator)
    else:
        kind = damage(source, target, generator)
    started = time.process_time()
    with LargestTensor() as largest:
        try:
            if source == checkpoint:
                state = load_tensors(target)
            else:
                state = models[source](target).state_dict()
        except ValueError as error:
            state = None
            outcome = refused(error, names=str(target))
    seconds = time.process_time() - started
    require(largest.bytes <= MOST_BYTES, f"{largest.bytes:,} bytes for {target.stat().st_size:,}")
    require(seconds < MOST_SECONDS, f"it took {seconds:.0f} s")
    if state is None:
        return outcome if outcome == REFUSED else CHECKED
    # Files of 0.1.0 have no checksum.
    if kind in SEEN and source.parent != FOLDER:
        require(_same(state, sound[source]), f"{kind} of {source.name} went unseen")
    return CHECKED


def _same(state: dict[str, Any], expected: dict[str, Any]) -> bool:
    return state.keys() == expected.keys() and all(
        torch.equal(torch.as_tensor(state[key]), torch.as_tensor(expected[key])) for key in state
    )
