"""Files that appear under their name only when they are complete.

What is being written lies in a hidden folder next to the file, with a lock that its writer holds
for as long as it lives. So whoever writes the same file next can tell what a killed writer has
left behind, and removes it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NO_ROOM = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, getattr(errno, "EOPNOTSUPP", errno.ENOSYS)}
_ENDING = ".part"


@contextmanager
def whole_file(
    path: str | os.PathLike[str], *, keep_as: str | os.PathLike[str] | None = None
) -> Iterator[Path]:
    """Another path to write to, which becomes `path` at the end of the block, on disk as well.

    After an exception nothing is left of it, and what stood under the name before still does.
    Links are followed and stay links; devices and pipes stay what they are, and get the content
    when it is complete. A file keeps its permissions.

    Args:
        keep_as: A name for what stood under `path` before.

    Raises:
        OSError: It cannot be written there; the sentence names the file.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path} is a folder; give the name of a file")
        if path.exists() and not path.is_file():
            with _through(path) as temporary:
                yield temporary
            return
        target = Path(os.path.realpath(path))
        if not target.parent.is_dir():
            raise FileNotFoundError(f"There is no folder {target.parent}; create it first.")
        _remove_abandoned(target)
        with _own_folder(target) as folder:
            temporary = folder / target.name  # Some writers look at the ending.
            temporary.touch()
            mode = (target if target.exists() else temporary).stat().st_mode
            yield temporary
            _flush(temporary)
            temporary.chmod(stat.S_IMODE(mode))  # Some writers let only the owner read.
            if keep_as is not None and target.exists():
                os.replace(target, keep_as)
            os.replace(temporary, target)
            if os.name == "posix":
                with suppress(OSError):  # Not every file system has it for folders.
                    _flush(target.parent)
    except OSError as error:
        if error.errno is None or error.errno not in _NO_ROOM:
            raise
        raise OSError(
            error.errno,
            f"There is no room for {path} ({os.strerror(error.errno)}); make room and try again. "
            "What was there before is unchanged",
        ) from error


@contextmanager
def _through(path: Path) -> Iterator[Path]:
    """A path to write to, the content of which then goes into something that is no file."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder, path.name)
        temporary.touch()
        yield temporary
        with temporary.open("rb") as content, path.open("wb") as target:
            shutil.copyfileobj(content, target)


@contextmanager
def _own_folder(target: Path) -> Iterator[Path]:
    """A hidden folder next to a file, locked while the block runs, and gone afterwards."""
    from filelock import FileLock, Timeout

    while True:
        try:
            folder = Path(tempfile.mkdtemp(_ENDING, _beginning(target), target.parent))
        except OSError as error:
            code = error.errno or errno.EIO
            raise OSError(code, f"{target} cannot be written: {os.strerror(code)}") from error
        lock = FileLock(folder / "lock")
        try:
            lock.acquire(timeout=0)
        except (Timeout, FileNotFoundError, FileExistsError):
            continue  # Somebody took it for abandoned before it had its lock.
        except NotImplementedError:
            pass  # Without locks nothing is ever taken for abandoned.
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        if (folder / "lock").exists():  # and nobody has removed it under the lock
            break
        lock.release()
    try:
        yield folder
    finally:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """Remove what writers of this file left who have been killed: their locks are free."""
    beginning = _beginning(target)
    with suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(beginning) and entry.name.endswith(_ENDING):
                _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError, NotImplementedError):
        return
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        lock.release()


def _beginning(target: Path) -> str:
    """How the names of the hidden folders of a file begin, however long its own name is."""
    return f".{target.name[:40]}.{zlib.crc32(os.fsencode(target.name)):08x}-"


def _flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
