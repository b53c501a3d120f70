"""Settings of experiments on CIFAR: data, training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromean.training.config import Precision

ARCHITECTURES = ("vgg", "airbench")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Data, training and evaluation."""

    epochs: int = 30
    """Passes over the training set. The paper has 550, by Adam."""
    lr: float = 0.1
    """Rate of SGD at its peak."""
    peak_at: float = 0.25
    """Part of the training after which all rates peak; then they fall to zero."""
    weight_decay: float = 5e-4
    """L2 penalty on deterministic weights and on means."""
    label_smoothing: float = 0.1
    """Part of every label that goes to all classes alike."""
    log_alpha_lr: float = 0.03
    """Adam's rate for log α and log-variances at its peak."""
    log_alpha_beta2: float = 0.95
    """Adam's β₂ for the same, with which log α rises in fewer passes."""
    dropout: float = 1.0
    """Factor of the network's drop rates; 0 for none."""
    shift: int = 4
    """Pixels by which training images are shifted at most."""
    batch_size: int = 128
    """Images in a mini-batch."""
    width: float = 1.0
    """Width of the network, in parts of the paper's."""
    architecture: str = "vgg"
    """vgg, the paper's VGG-like network, or airbench, a small one for quick sizes."""
    precision: str = "auto"
    """float32, bfloat16, or auto: bfloat16 where the CPU computes in it. Which one it was is in the
    record (bits), and networks of the two are kept apart."""
    data: str = "cifar10"
    """Data set: cifar10, cifar100, or digits (enlarged and coloured)."""
    train_size: int = 45_000
    """Training images that are used, the first ones. The last 5,000 of the 50,000 are the
    validation set, on which settings are chosen."""
    look_size: int = 1000
    """Validation images on which a network is watched while it trains."""
    test_size: int = 10_000
    """Test images."""
    num_samples: int = 20
    """Samples in an averaged prediction."""
    seed: int = 0
    """Seed of the initialization, the batches and the noise."""

    def __post_init__(self) -> None:
        # Here, not where it is used: that may be hours later.
        for name in ("epochs", "batch_size", "train_size", "look_size", "test_size", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name, known in (("architecture", ARCHITECTURES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )
        if not 0 <= self.dropout < 2:
            raise ValueError(
                f"dropout multiplies rates of up to 0.5: it must be in [0, 2), got {self.dropout}."
            )


# Arguments of the sizes that are not full.
QUICK: dict[str, Any] = {
    "epochs": 6,
    "train_size": 5000,
    "test_size": 1000,
    "look_size": 500,
    "batch_size": 64,
    "log_alpha_lr": 0.1,
    "architecture": "airbench",
    "width": 0.25,
}
SMOKE: dict[str, Any] = {
    "epochs": 2,
    "train_size": 96,
    "test_size": 50,
    "look_size": 50,
    "batch_size": 32,
    "width": 0.05,
    "data": "digits",
    "num_samples": 3,
}


def precision_of(settings: Settings) -> Precision:
    """What "auto" is on this CPU."""
    from zeromean.training.precision import computes_in_bfloat16, require_precision

    chosen: Any = settings.precision
    if chosen == "auto":
        chosen = "bfloat16" if computes_in_bfloat16() else "float32"
    require_precision(chosen)
    return chosen


def bits(settings: Settings) -> int:
    """Bits of the numbers that networks were computed in, for the record."""
    return {"float32": 32, "bfloat16": 16}[precision_of(settings)]
