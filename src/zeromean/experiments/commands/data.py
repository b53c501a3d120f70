"""`zeromean data`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zeromean.commands.messages import nearest, refuse


@dataclass(frozen=True, kw_only=True)
class Data:
    """Fetch a data set, or explain how to provide it, and check its files."""

    name: str
    """mnist, fashion-mnist, notmnist, cifar10, cifar100, digits or toy."""
    data_dir: Path | None = None
    """Folder of the data sets; default: $ZEROMEAN_DATA, else the cache folder of this system."""

    def run(self) -> int:
        from zeromean import data

        if self.name not in data.NAMES:
            return refuse(f"there is no data set {self.name!r}; {nearest(self.name, data.NAMES)}")
        sentence = ""
        try:
            data.download(self.name, self.data_dir)
        except (ValueError, OSError) as error:
            sentence = str(error)
        files = data.verify(self.name, self.data_dir)
        for file in files:
            print(f"{file.path}: {file.state}")
        if not files:
            print(f"{self.name} is built in.")
        damaged = [file for file in files if file.state != "ok"]
        if sentence or not damaged:
            return refuse(sentence) if sentence else 0
        return refuse(f"{damaged[0].path} is {damaged[0].state}; remove it, and try again.")
