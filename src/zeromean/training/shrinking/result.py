"""What came out of shrinking a network: all networks on the way, and the one that is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from zeromean.text_table import text_table


@dataclass(frozen=True)
class ShrunkNetwork:
    """One network on the way, and what is measured of it.

    Attributes:
        name: "original", or what was done.
        score: Accuracy on the validation data in per cent; with a likelihood, minus their NLL.
        weights: How many are not zero.
        file_size: Bytes of its file. Of the original that is what its parameters and buffers take.
        milliseconds: CPU time of a prediction on one thread, by runtime and examples in the batch:
            "torch 1", "onnxruntime 64".
        onnx_size: Bytes of its ONNX file, None without onnxruntime.
        model: The network.
        folder: Of its files, in that of the run.
        bits: Of its weights, None where they are as they were trained.
    """

    name: str
    score: float
    weights: int
    file_size: int
    milliseconds: dict[str, float]
    onnx_size: int | None = None
    model: nn.Module = field(repr=False, default_factory=nn.Identity)
    folder: str = ""
    bits: int | None = None


@dataclass(frozen=True)
class Shrunk:
    """What `shrink` found; `print` shows it as a table.

    Attributes:
        networks: The original, and all networks on the way from it to the smallest.
        chosen: The number of the one that is taken.
        reached: Whether that is what was asked for.
        key: The time that counts, of `ShrunkNetwork.milliseconds`.
        likelihood: Whether scores are of a likelihood, and not accuracies.
        folder: Where `chosen.safetensors` and `chosen.onnx` are; None where nothing is kept.
        notes: What was known before anything was trained.
    """

    networks: tuple[ShrunkNetwork, ...]
    chosen: int
    reached: bool
    key: str
    likelihood: bool = False
    folder: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        """The network that is taken: plain layers, for prediction."""
        return self.best.model

    @property
    def original(self) -> ShrunkNetwork:
        return self.networks[0]

    @property
    def best(self) -> ShrunkNetwork:
        """The network that is taken, and its measurements."""
        return self.networks[self.chosen]

    @property
    def speedup(self) -> float:
        """How many times faster it is, by the time that counts."""
        return self.original.milliseconds[self.key] / self.best.milliseconds[self.key]

    @property
    def compression(self) -> float:
        """How many times smaller its file is."""
        return self.original.file_size / self.best.file_size

    def __str__(self) -> str:
        times = list(self.original.milliseconds)
        score = "−NLL" if self.likelihood else "accuracy"
        rows = [("", "network", score, "weights", "bytes", *(f"ms {time}" for time in times))]
        for number, network in enumerate(self.networks):
            row = (
                "→" if number == self.chosen else "",
                network.name,
                f"{network.score:.4g}" if self.likelihood else f"{network.score:.2f}",
                f"{network.weights:,}",
                f"{network.file_size:,}",
            )
            rows.append((*row, *(f"{network.milliseconds[time]:.3g}" for time in times)))
        taken = (
            f"{self.best.name}: {self.speedup:.1f}× faster ({self.key}), a file "
            f"{self.compression:.1f}× smaller"
        )
        missed = [] if self.reached else ["This is not what was asked for, but what comes nearest."]
        return "\n".join([*text_table(rows, left=(0, 1)), taken, *missed, *self.notes])

    def save_picture(self, path: Path | str) -> None:
        """Draw score against time and against the size of the file, into a PNG (extra `cli`)."""
        from zeromean.training.shrinking.picture import draw

        draw(self, Path(path))
