"""The KL term for `transformers.Trainer`, as a mixin."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeromean.arguments import require_integer
from zeromean.files.model import save
from zeromean.training.objective import elbo_loss, kl_divergence
from zeromean.training.ranks import seed_ranks

# The trainer's methods are there at run time alone: nothing of it is imported.
_Trainer: Any = object if not TYPE_CHECKING else Any


class ElboTrainerMixin(_Trainer):
    """Adds beta · KL / num_data to the loss of a `transformers.Trainer`, and evaluates by draws.

        class ElboTrainer(ElboTrainerMixin, Trainer): ...

    The KL counts once in an optimizer's step, however its batch is accumulated. Evaluation averages
    over draws: what `compute_metrics` and `predict` get as logits are the logarithms of averaged
    probabilities (of a regression, averaged outputs), and the loss is the draws' average, without
    the KL. Logs have `kl` and `beta`. Weight decay leaves log-variances and log α alone.
    Checkpoints hold the posteriors, in files that `zm.load` reads and training resumes from.

    Args:
        num_data: Examples in the whole training set. Default: the length of `train_dataset`.
        beta: Weight of the KL, or a function of the optimizer's steps, such as `zm.linear_warmup`.
        num_samples: Draws in evaluation and prediction.
    """

    def __init__(
        self,
        *args: Any,
        num_data: int | None = None,
        beta: float | Callable[[int], float] = 1.0,
        num_samples: int = 20,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.num_samples = require_integer("num_samples", num_samples, at_least=1)
        if num_data is None and self.train_dataset is not None:
            if not hasattr(self.train_dataset, "__len__"):
                raise ValueError("train_dataset has no length; say num_data=, its examples.")
            num_data = len(self.train_dataset)
        self.num_data: Any = num_data
        self.beta, self._kl = beta, math.nan
        self._ranks_seeded = False
        classifies = type(self.model).__name__.endswith("ForSequenceClassification")
        if classifies and getattr(self, "loss_is_scaled_for_ga", None) is None:
            # Their loss is a mean over a part of the batch, which the trainer takes for a share of
            # the mean over all parts (transformers 5.23), as they accept what would make it one.
            self.loss_is_scaled_for_ga = False

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if model.training and not self._ranks_seeded:
            self._ranks_seeded = True
            if self.args.world_size > 1:  # All ranks have the seed of the arguments.
                seed_ranks(self.args.seed)
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if model.training:
            kl = kl_divergence(model)
            self._kl = kl.detach()
            # As in the trainer's training_step: what it does not divide by the steps, we do.
            whole = getattr(self, "loss_is_scaled_for_ga", None)
            if whole is None:
                by_items = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                whole = by_items or self.compute_loss_func is not None
            if whole:
                kl = kl / self.current_gradient_accumulation_steps
            loss = elbo_loss(loss, kl, num_data=self.num_data, beta=self._beta())
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, *args: Any, **options: Any) -> tuple[Any, Any, Any]:
        draws = [super().prediction_step(*args, **options)]
        for _ in range(self.num_samples - 1):
            draws.append(super().prediction_step(*args, **options))
        losses, logits, labels = zip(*draws, strict=True)
        loss = None if losses[0] is None else torch.stack(losses).mean()
        if isinstance(logits[0], tuple):  # Hidden states and others come behind the logits.
            return loss, (self._average([each[0] for each in logits]), *logits[-1][1:]), labels[0]
        return loss, None if logits[0] is None else self._average(logits), labels[0]

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if "loss" in logs:
            logs = {**logs, "kl": float(self._kl), "beta": self._beta()}
        super().log(logs, *args, **options)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        names = super().get_decay_parameter_names(model)
        return [n for n in names if not n.rpartition(".")[2].startswith("log_")]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        model, name = self.accelerator.unwrap_model(self.model), "save_pretrained"
        refusal = vars(model).get(name)
        if refusal is None:
            return super()._save(output_dir, state_dict)

        def save_posteriors(folder: str, **_: Any) -> None:
            save(model, Path(folder) / "model.safetensors")
            model.config.save_pretrained(folder)

        setattr(model, name, save_posteriors)
        try:
            return super()._save(output_dir, state_dict)
        finally:
            setattr(model, name, refusal)

    def _beta(self) -> float:
        return self.beta(self.state.global_step) if callable(self.beta) else self.beta

    def _average(self, logits: Any) -> Tensor:
        drawn = torch.stack(list(logits))
        if getattr(self.model.config, "problem_type", None) == "regression":
            return drawn.mean(0)
        return drawn.float().log_softmax(-1).logsumexp(0) - math.log(len(drawn))
