"""Getting missing files into the data folder: by download, or out of an archive that is there."""

from __future__ import annotations

import os
import shutil
import tarfile
import zlib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeromean.data.catalogue import DataFile, Download
from zeromean.data.files import contents_size, read_checked
from zeromean.extras import how_to_install
from zeromean.files.atomic import whole_file

RETRIES = 2
TIMEOUT_SECONDS = (10, 60)  # to connect, and between two pieces


def provide(files: Iterable[DataFile], folder: Path) -> None:
    """Bring those of the files that are missing.

    Whatever lies in the folder already stays as it is. An archive that somebody put there is
    unpacked and kept, one that is downloaded is unpacked and deleted.

    Raises:
        OSError, ImportError: Where nothing can be downloaded.
        ValueError: Where an archive is damaged.
    """
    missing: dict[Download, list[DataFile]] = {}
    for file in absent(files, folder):
        missing.setdefault(file.source, []).append(file)
    for source, wanted in missing.items():
        target = folder / source.path
        provided = os.path.exists(target)
        if not provided:
            download_file(source, target)
        archived = [file for file in wanted if file.in_archive]
        if archived:
            _unpack(archived, target, folder)
            if not provided:
                target.unlink(missing_ok=True)


def absent(files: Iterable[DataFile], folder: Path) -> list[DataFile]:
    """Those of the files that are not there, or lie where one may not look."""
    return [file for file in files if not os.path.exists(folder / file.path)]


def download_file(source: Download, target: Path) -> None:
    """Download with retries and a progress bar from the first mirror that has the right file."""
    try:
        import pooch
        import requests  # pooch brings it
    except ImportError as error:
        raise ImportError(how_to_install("downloading needs pooch", "experiments")) from error
    reasons = []
    for url in source.urls:
        fetcher = pooch.create(
            path=target.parent,
            base_url="",
            registry={target.name: f"md5:{source.md5}"},
            urls={target.name: url},
            retry_if_failed=RETRIES,
        )
        # Any: pooch's own downloader does not fit the type that it declares for one.
        downloader: Any = pooch.HTTPDownloader(
            progressbar=find_spec("tqdm") is not None, timeout=TIMEOUT_SECONDS, chunk_size=1 << 16
        )
        try:
            fetcher.fetch(target.name, downloader=downloader)
            return
        except (requests.ConnectionError, requests.Timeout):
            reasons.append(f"no connection to {url}")
        except (OSError, ValueError) as error:  # not there, no room for it, or not the right file
            reasons.append(f"{url}: {error}")
    raise ConnectionError("; ".join(reasons))


def _unpack(files: list[DataFile], archive: Path, folder: Path) -> None:
    """Write members of a tar archive to their places, each once its contents are checked."""
    try:
        with tarfile.open(archive) as members:
            for file in files:
                _unpack_member(file, members, folder)
    except (tarfile.TarError, EOFError, zlib.error, KeyError, ValueError) as error:
        reason = str(error).strip("'\"")
        raise ValueError(
            f"{archive} is damaged: {reason}; delete it, or put the official file in its place."
        ) from error


def _unpack_member(file: DataFile, members: tarfile.TarFile, folder: Path) -> None:
    found = members.getmember(file.path)
    member = members.extractfile(found) if found.isfile() else None
    if member is None:
        raise ValueError(f"{file.path} in it is not a file")
    # Before it is written: a small archive can hold a file that fills the disk.
    size = contents_size(file)
    if found.size > size:
        raise ValueError(f"{file.path} in it has {found.size:,} bytes where {size:,} belong")
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as temporary:
        with temporary.open("wb") as part:
            shutil.copyfileobj(member, part)
        read_checked(file, temporary)
