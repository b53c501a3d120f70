"""An ensemble as a folder of safetensors, one file a member, that is whole or not there.

`ensemble.json` names the files of the members and their checksums. It is written last, and
atomically: until then the folder holds what it held before, whatever happens. The names of the
files are those of their contents, so that a new ensemble never writes over the files of an old one.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from torch import nn

from zeromean.arguments import require_model, shown
from zeromean.files.atomic import whole_file
from zeromean.files.lock import locked
from zeromean.files.model import load, save
from zeromean.prediction.ensemble import Ensemble

FORMAT_VERSION = 1
INDEX = "ensemble.json"
_PATTERN = "member-*.safetensors"


def save_ensemble(ensemble: Ensemble, folder: str | os.PathLike[str]) -> None:
    """Write every member, as `zm.save` does, into a folder, all of them or none.

    An ensemble that was in the folder is replaced when the new one is complete.

    Args:
        folder: Made where it is not there; other files in it are left alone.
    """
    if not isinstance(ensemble, Ensemble):
        raise TypeError(
            f"save_ensemble needs an Ensemble, got {shown(ensemble)}; build one: "
            "Ensemble([first, second])."
        )
    ensemble = Ensemble(ensemble)  # Members may have been pruned, or put in, since it was built.
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; an ensemble is saved as a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, ".ensemble.lock"):
        members = []
        try:
            for index, member in enumerate(ensemble):
                written = folder / f"member-{index:03d}-new.safetensors"
                save(member, written)
                checksum = _checksum(written)
                path = folder / f"member-{index:03d}-{checksum}.safetensors"
                os.replace(written, path)
                members.append({"file": path.name, "crc32": checksum})
            document = {"format_version": FORMAT_VERSION, "members": members}
            with whole_file(folder / INDEX) as temporary:
                temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        finally:
            _remove_others(folder)


def load_ensemble(folder: str | os.PathLike[str], model: nn.Module) -> Ensemble:
    """The ensemble that `save_ensemble` wrote; every member is a copy of the model, filled.

    Args:
        model: The architecture of the members, plain or stochastic, as `zm.load` takes it.
    """
    require_model(model)
    folder = Path(folder)
    names = _members_in(folder)
    for index, (name, checksum) in enumerate(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"Member {index} of the ensemble in {folder} is missing: there is no {name}; copy "
                "the folder again from where it is whole, or save the ensemble again."
            )
        if _checksum(folder / name) != checksum:
            raise ValueError(
                f"Member {index} of the ensemble in {folder} is damaged: {name} has changed since "
                "it was written; copy the folder again from where it is sound, or save the "
                "ensemble again."
            )
    return Ensemble([load(folder / name, model) for name, _ in names])


def _members_in(folder: Path) -> list[tuple[str, str]]:
    """Names and checksums of the files of the members."""
    index = folder / INDEX
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} holds no complete ensemble: there is no {INDEX}; zeromean.ensembles."
            "save_ensemble writes one."
        )
    try:
        document: Any = json.loads(index.read_text(encoding="utf-8"))
        version = document["format_version"]
        if not isinstance(version, int):
            raise TypeError(f"format_version is {version!r}")
        newer = version > FORMAT_VERSION
        members = [] if newer else [(m["file"], m["crc32"]) for m in document["members"]]
        if not newer and not members:
            raise ValueError("no members")
        for name, _ in members:
            if name != Path(name).name:  # Nothing outside of the folder is read.
                raise ValueError(f"{name!r} is not the name of a file")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}); save the ensemble again.") from error
    if newer:
        raise ValueError(
            f"{index} has format version {version}, this zeromean reads up to {FORMAT_VERSION}; "
            "upgrade zeromean."
        )
    return members


def _remove_others(folder: Path) -> None:
    """Remove the files of members that the index does not name."""
    if not (folder / INDEX).exists():
        named = set()
    else:
        try:
            named = {name for name, _ in _members_in(folder)}
        except ValueError:
            return  # Nobody knows whose they are.
    for path in folder.glob(_PATTERN):
        if path.name not in named:
            path.unlink()


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            value = zlib.crc32(block, value)
    return f"{value:08x}"
