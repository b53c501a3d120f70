"""What an experiment writes while it runs: metrics, arrays, finished stages."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from zeromean.experiments.runs.cpu_time import CpuTime
from zeromean.experiments.runs.json_files import plain, replace_text, to_json, write_json

Result = TypeVar("Result")


class RunLog:
    """The folder of one run, and what else an experiment has to know about where it runs.

    Args:
        folder: Folder of this run and of no other.
        seed: Seed of the run, from which the stages get theirs.
        data_dir: Where the data sets are; None leaves it to `zeromean.data`.
        models: Folder of trained networks that experiments share; default: inside `folder`.
        progress: Whether to print what is going on.

    Attributes:
        reused: Whether something was there already, from this run or from another experiment.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        data_dir: Path | None = None,
        models: Path | None = None,
        progress: bool = True,
    ):
        self.folder = folder
        self.seed = seed
        self.data_dir = data_dir
        self.models = models or folder / "models"
        self.progress = progress
        self.reused = False
        self._cpu = CpuTime(folder / "cpu_time.json")
        self._networks: dict[str, float] = {}
        self._asked_for: set[str] = set()
        self._said = 0
        path = folder / "metrics.jsonl"
        # What is damaged differs from what is said again, and is replaced.
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._lines = text.splitlines(keepends=True)

    def metrics(self, **values: Any) -> None:
        """Append a line to metrics.jsonl.

        A resumed run says again what it has said; its lines replace the earlier ones one by one,
        so that at no time less stands there than before.
        """
        path = self.folder / "metrics.jsonl"
        line = to_json(values) + "\n"
        said_before = self._lines[self._said : self._said + 1]
        self._said += 1
        if said_before == [line]:
            return
        if said_before:
            self._lines[self._said - 1] = line
            replace_text(path, "".join(self._lines))
        else:
            self._lines.append(line)
            with path.open("a", encoding="utf-8") as file:
                file.write(line)

    def say(self, text: str) -> None:
        """Tell the user what is going on."""
        if self.progress:
            # A line in one piece: print writes its end apart, and other processes between the two.
            sys.stderr.write(f"[{self.folder.parent.parent.name} seed {self.seed}] {text}\n")

    def once(self, stage: str, compute: Callable[[], Result]) -> Result:
        """Compute a stage, or read its result where an interrupted run has left it.

        torch's generator is seeded by the run's seed and the stage's name, so that a resumed run
        ends with the same numbers. The result must be plain: numbers, strings, lists, dicts.
        """
        path = self.folder / "stages" / f"{stage}.json"
        try:
            found = json.loads(path.read_bytes()) if path.exists() else None
        except ValueError:
            self.say(f"{path} is damaged; computing it again")
            found = None
        self.note_origin(f"stage {stage}", was_there=found is not None)
        if found is not None:
            return found
        self.say(stage)
        self.seed_everything(stage)
        result = plain(compute())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
        self._cpu.save()
        return result

    def note_origin(self, name: str, *, was_there: bool) -> None:
        """Say, when a part of the work is first asked for, whether it was done before this run."""
        self.reused |= was_there and name not in self._asked_for
        self._asked_for.add(name)

    def note_network(self, name: str, cpu: CpuTime) -> None:
        """Count the training of a network once, whoever did it, and not as this run's own work."""
        self._networks.setdefault(name, cpu.seconds)
        self._cpu.leave_out(cpu.seconds_here)

    @property
    def cpu_seconds(self) -> float:
        """CPU time of everything that led to this run's numbers, shared networks included."""
        return self._cpu.seconds + sum(self._networks.values())

    def seed_everything(self, stage: str) -> None:
        """Seed torch by the run's seed and a name."""
        import torch

        digest = hashlib.sha256(f"{self.seed} {stage}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:4], "big"))
