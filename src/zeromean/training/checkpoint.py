"""Checkpoints on disk: the last two, each whole or not there, without pickled classes."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from zeromean.files.atomic import whole_file

FORMAT_VERSION = 1

_log = logging.getLogger("zeromean.training")


class CheckpointFolder:
    """Where a run keeps its last two checkpoints and `metrics.jsonl`.

    A checkpoint carries the metrics of all its epochs, so `metrics.jsonl` is only a copy to read:
    after an interruption it is written again from the checkpoint and cannot disagree with it.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.latest = folder / "checkpoint.ckpt"
        self.previous = folder / "checkpoint.previous.ckpt"
        self.metrics = folder / "metrics.jsonl"

    def create(self) -> None:
        """Make the folder, or say why it cannot be one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = "it is a file" if self.folder.is_file() else error.strerror
            raise type(error)(
                error.errno, f"There cannot be a folder {self.folder}: {reason}; choose another"
            ) from error

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint; whatever happens meanwhile, the last one stays readable."""
        try:
            save_tensors(
                self.latest, {"format_version": FORMAT_VERSION, **state}, keep_as=self.previous
            )
        except OSError as error:
            kept = next((p for p in (self.latest, self.previous) if p.exists()), None)
            raise OSError(
                error.errno,
                f"Epoch {state['epoch']} could not be saved ({_reason(error)}); "
                + (f"{kept.name} is intact, run again to resume" if kept else "nothing is saved"),
                str(self.latest),
            ) from error

    def append_metrics(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(_line(row))

    def write_metrics(self, history: list[dict[str, Any]]) -> None:
        content = "".join(map(_line, history)).encode()
        if not self.metrics.exists() or self.metrics.read_bytes() != content:
            with whole_file(self.metrics) as temporary:
                temporary.write_bytes(content)

    def load(self) -> dict[str, Any] | None:
        """The newest whole checkpoint, None where there is no run.

        Where the last one is damaged and the one before is not, it is set aside and the log says
        so; where there is none to go back to, that is an error and nothing is touched.
        """
        damage: Exception | None = None
        for path in (self.latest, self.previous):
            if not path.exists():
                continue
            try:
                state = _read(path)
            except DamagedError as error:
                damage = damage or error
                continue
            if damage is not None:
                _log.warning("%s Going back to epoch %d, in %s.", damage, state["epoch"], path.name)
                os.replace(self.latest, self.folder / "checkpoint.damaged.ckpt")
            if path is self.previous:
                # Else the next save would push the only good one out.
                os.replace(path, self.latest)
            return state
        if damage is not None:
            raise ValueError(
                f"{damage} There is no sound one before it; delete the folder to train again."
            ) from damage
        if self.metrics.exists():
            raise ValueError(
                f"{self.folder} has a metrics.jsonl but no checkpoint, so it is not a run that can "
                "be resumed; choose another folder, or delete it."
            )
        return None


def require_same_run(found: dict[str, Any], wanted: dict[str, Any], folder: Path) -> None:
    """Refuse to resume a run of another configuration, model or data set."""
    found, wanted = _flat(found), _flat(wanted)
    differences = [
        f"{name} is {_short(found.get(name))} there and {_short(wanted.get(name))} here"
        for name in {**wanted, **found}
        if found.get(name) != wanted.get(name)
    ]
    if differences:
        raise ValueError(
            f"{folder} holds a run of another configuration: {'; '.join(differences)}. "
            "Choose another folder, or delete it."
        )


def save_tensors(path: Path, state: dict[str, Any], *, keep_as: Path | None = None) -> None:
    """Write tensors and plain values, all or nothing, for `load_tensors`."""
    content = io.BytesIO()
    torch.save(state, content)
    with whole_file(path, keep_as=keep_as) as temporary:
        temporary.write_bytes(content.getbuffer())


def load_tensors(path: Path) -> dict[str, Any]:
    """What `save_tensors` wrote; a DamagedError where the file is not as it was."""
    content = io.BytesIO(path.read_bytes())
    try:
        with zipfile.ZipFile(content) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums.
        content.seek(0)
        state = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a dozen kinds here, depending on where it is cut.
        raise DamagedError(f"{path} is cut short or damaged.") from error
    if damaged is not None or not isinstance(state, dict):
        raise DamagedError(f"{path} is cut short or damaged.")
    return state


class DamagedError(ValueError):
    """A file that cannot be read, or has changed since it was written."""


def _read(path: Path) -> dict[str, Any]:
    state = load_tensors(path)
    version = state.get("format_version")
    if version is None:
        raise DamagedError(f"{path} is cut short or damaged.")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}, but this zeromean reads version "
            f"{FORMAT_VERSION}; resume it with the zeromean that wrote it."
        )
    return state


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else "another one"
