"""The settings of a training run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from zeromean.arguments import require_choice, require_numbers, shown
from zeromean.training.objective import linear_warmup

Decay = Literal["linear", "constant", "one-cycle"]
OptimizerName = Literal["adam", "sgd"]
Precision = Literal["float32", "bfloat16", "float16"]
MonitorMode = Literal["min", "max"]
Objective = Literal["samples", "moments"]
_WORDS: dict[str, Any] = {
    "decay": Decay,
    "optimizer": OptimizerName,
    "precision": Precision,
    "monitor_mode": MonitorMode,
    "objective": Objective,
}


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that decides how a model is trained, apart from the model and the data."""

    epochs: int
    """Passes over the training set."""
    batch_size: int = 200
    """Examples in a mini-batch, over all processes; a DataLoader has batches of its own."""
    lr: float = 1e-3
    """Learning rate at the first step, or at the peak of "one-cycle"."""
    log_alpha_lr: float | None = None
    """The same for log α and log-variances, which are Adam's in any case; by default `lr`. With
    "sgd", whose rates are of another size, it must be given where there are any."""
    log_alpha_beta2: float | None = None
    """Adam's β₂ for the same; see `zm.parameter_groups`. By default 0.999, as for everything."""
    weight_decay: float = 0.0
    """L2 penalty on deterministic weights and posterior means."""
    scale_lr: float | None = None
    """Adam's learning rate for the scales of variance layers; by default `lr`."""
    scale_decay: float = 0.0
    """Decoupled weight decay of the scales of variance layers; see `zm.parameter_groups`."""
    kl_warmup_epochs: int = 0
    """Epochs over which the weight of the KL term rises linearly from 0 to `beta`."""
    beta: float = 1.0
    """Weight of the KL term after the warm-up."""
    clip_log_alpha: tuple[float, float] | None = None
    """Bounds into which log α is projected after every step."""
    adam_eps: float | None = None
    """Adam's epsilon; by default 1e-8 over the size of the training set.

    The loss is divided by that size, so late gradients would drown in 1e-8.
    """
    prune_after_epochs: int | None = None
    """Epochs after which weights with log α > 3 are pruned at the start of every epoch, for good.
    Steps of Adam shake the α of superfluous weights about; so those that were beyond the threshold
    once stay there.
    """
    clip_gradient: float | None = None
    """Norm to which longer gradients are cut; recurrent networks need it."""
    average_epochs: float | None = None
    """Time constant, in epochs, of a moving average of the weights, which is what is evaluated and
    what the run ends with. The noise of Adam's steps hides how small the means of superfluous
    weights are; averaged out, many more of them can be pruned. By default the last weights.
    """
    decay: Decay = "linear"
    """What the learning rates do over the run: "linear" (to 0), "constant", or "one-cycle" (up
    from 0 to a peak and down to 0 again, both linearly)."""
    peak_at: float = 0.25
    """Part of the run after which the rates of "one-cycle" peak."""
    optimizer: OptimizerName = "adam"
    """"adam", or "sgd": Nesterov momentum for weights, means and biases. What has no scale of its
    own, log α, log-variances and the scales of variance layers, is Adam's then too."""
    momentum: float = 0.9
    """Of "sgd"."""
    label_smoothing: float = 0.0
    """Part of every label's probability that goes to all classes alike, in the loss. What is
    trained is then no bound of the evidence; `nll` and `elbo` of the metrics are without it."""
    precision: Precision = "float32"
    """"bfloat16" and "float16" compute forward and backward passes in it where torch's autocast
    does; weights, the KL term, the loss and the optimizer stay in float32, and so do evaluations.
    "float16" scales the loss, and leaves out steps whose gradients overflow all the same."""
    objective: Objective = "samples"
    """"samples" draws the noise once a step. "moments" takes the expected data term instead, by
    means and variances (docs, Moments): its gradient has no variance. In float32, for networks
    without BatchNorm in training mode."""
    accumulate: int = 1
    """Mini-batches whose gradients are averaged for a step of the optimizer. Rates, the warm-up and
    the average of the weights count steps."""
    monitor: str | None = None
    """A number of `metrics.jsonl` by which an epoch is judged, such as "validation_nll": the run
    ends with the weights of the best epoch."""
    patience: int | None = None
    """Epochs in a row without a better one after which the run stops. By default it does not."""
    monitor_mode: MonitorMode | None = None
    """Whether the smallest ("min") or the largest ("max") number is best; by default as its name
    says: accuracies and the ELBO are to be large, the loss, nll, KL and RMSE small."""
    seed: int = 0
    """Seed of the batches' order and of all noise."""

    def __post_init__(self):
        # numpy's numbers would make checkpoints that only pickle can read.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (np.generic, np.ndarray)):
                value = value.tolist()
            if isinstance(value, (tuple, list)):
                require_numbers(**{f"{field.name}[{i}]": bound for i, bound in enumerate(value)})
                value = tuple(float(bound) for bound in value)
            elif field.name == "clip_log_alpha" and value is not None:
                raise TypeError(f"clip_log_alpha must be (low, high), got {shown(value)}.")
            elif field.name == "monitor":
                if value is not None and not (isinstance(value, str) and value):
                    raise TypeError(f"monitor must be the name of a metric, got {shown(value)}.")
            elif field.name not in _WORDS and (value is not None or field.default is not None):
                require_numbers(**{field.name: value})
            object.__setattr__(self, field.name, value)
        for name in ("epochs", "batch_size", "seed", "accumulate", "patience"):
            value = getattr(self, name)
            if value is None:
                continue
            if not float(value).is_integer():
                raise ValueError(f"{name} must be a whole number, got {value}.")
            if name != "seed" and value < 1:
                raise ValueError(f"{name} must be at least 1, got {int(value)}.")
            object.__setattr__(self, name, int(value))
        for name in ("kl_warmup_epochs", "prune_after_epochs", "seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must not be negative, got {value}.")
        for name in (
            "lr",
            "log_alpha_lr",
            "scale_lr",
            "adam_eps",
            "average_epochs",
            "clip_gradient",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value}.")
        for name in ("momentum", "label_smoothing", "peak_at"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}.")
        for name in ("weight_decay", "scale_decay", "beta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        bounds = self.clip_log_alpha
        if bounds is not None and not (len(bounds) == 2 and bounds[0] <= bounds[1]):
            raise ValueError(f"clip_log_alpha must be (low, high), got {bounds}.")
        if self.log_alpha_beta2 is not None and not 0 <= self.log_alpha_beta2 < 1:
            raise ValueError(f"log_alpha_beta2 must be in [0, 1), got {self.log_alpha_beta2}.")
        for name, choices in _WORDS.items():
            if name != "monitor_mode" or self.monitor_mode is not None:
                require_choice(name, getattr(self, name), get_args(choices))
        if self.objective == "moments" and self.precision != "float32":
            raise ValueError(
                f"objective='moments' computes in float32, got precision={self.precision!r}."
            )
        if self.monitor is None and (self.patience is not None or self.monitor_mode is not None):
            raise ValueError(
                "patience and monitor_mode are about a metric; say which: "
                "monitor='validation_nll', with validation= in fit."
            )
        if self.monitor is not None:
            # Found out before training, and not after its first epoch.
            object.__setattr__(self, "monitor_mode", self.monitor_mode or mode_of(self.monitor))

    def described(self) -> dict[str, Any]:
        """Fields by name; what came later only where it is set, so that older files stay good."""
        later = ("log_alpha_beta2", "scale_lr", "scale_decay", "peak_at", "optimizer", "momentum")
        later = (*later, "label_smoothing", "precision", "accumulate", "monitor", "patience")
        later = (*later, "monitor_mode", "objective")
        unset = {field.name: field.default for field in fields(self) if field.name in later}
        return {k: v for k, v in asdict(self).items() if k not in unset or v != unset[k]}

    def lr_factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rates are multiplied with at a step, counted from 0."""
        if self.decay == "constant":
            return 1.0
        done = min(1.0, step / (self.epochs * steps_per_epoch))
        if self.decay == "linear":
            return 1 - done
        # The middle of a step: the first and the last one are not lost at a rate of zero.
        done = min(1.0, (step + 0.5) / (self.epochs * steps_per_epoch))
        return done / self.peak_at if done < self.peak_at else (1 - done) / (1 - self.peak_at)

    def kl_weight(self, step: int, steps_per_epoch: int) -> float:
        """The weight of the KL term at a step, counted from 0."""
        if self.kl_warmup_epochs == 0:
            return self.beta
        return linear_warmup(self.kl_warmup_epochs * steps_per_epoch, end=self.beta)(step)


def mode_of(metric: str) -> MonitorMode:
    """Whether a metric is to be small or large, by its name."""
    modes: dict[str, MonitorMode] = {"accuracy": "max", "elbo": "max", "data_term": "max"}
    modes |= {"nll": "min", "loss": "min", "rmse": "min", "kl": "min", "error": "min"}
    for ending, mode in modes.items():
        if metric == ending or metric.endswith(f"_{ending}"):
            return mode
    raise ValueError(
        f"Whether a small or a large {metric} is good does not follow from its name; say "
        "monitor_mode='min' or 'max'."
    )
