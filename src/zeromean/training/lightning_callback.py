"""The KL term for LightningModules of one's own, as a callback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from zeromean.arguments import require_integer
from zeromean.prediction.classification import predict_proba
from zeromean.prediction.regression import predict_moments
from zeromean.training.layer_monitor import layer_metrics
from zeromean.training.likelihoods import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from zeromean.training.objective import elbo_loss, kl_divergence
from zeromean.training.ranks import seed_ranks


class ElboCallback(pl.Callback):
    """Adds beta · KL / num_data to the loss of any LightningModule, and validates by many draws.

    `training_step` goes on returning the mean data term, as a tensor or under "loss". The KL joins
    it wherever the step is called: in every part of an accumulated batch, which Lightning averages,
    and in every closure of an optimizer such as LBFGS. With manual optimization there is no loss
    that is returned; call `zm.elbo_loss` in the step, as an error says.

    It logs `kl` and `beta` by step, `kl/LAYER` and `log_alpha/LAYER` by epoch, and with
    `num_samples`, of the outputs of the module's `forward` on validation batches, `mc_accuracy` and
    `mc_nll` of the averaged probabilities; for a regression `mc_mse` of the averaged outputs and
    `mc_nll` of a normal distribution with their moments. Ranks draw noise of their own.

    Args:
        num_data: Examples in the whole training set.
        beta: Weight of the KL, or a function of the optimizer's steps, such as `zm.linear_warmup`.
        num_samples: Draws in validation; 0 for none.
        likelihood: Of a regression: `zm.GaussianLikelihood`, …. Default: classification.
        unpack: Gives inputs and targets of a validation batch. Default: a pair of them, or a
            mapping of inputs with the targets under "labels".
        seed: Of the noise in validation, which leaves the noise of training alone.
    """

    def __init__(
        self,
        *,
        num_data: int,
        beta: float | Callable[[int], float] = 1.0,
        num_samples: int = 20,
        likelihood: GaussianLikelihood | HeteroscedasticGaussianLikelihood | None = None,
        unpack: Callable[[Any], tuple[Any, Tensor]] | None = None,
        seed: int = 0,
    ):
        self.num_data = require_integer("num_data", num_data, at_least=1)
        self.num_samples = require_integer("num_samples", num_samples, at_least=0)
        self.beta, self.likelihood, self.seed = beta, likelihood, seed
        self.unpack = unpack or _inputs_and_targets

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "ElboCallback adds the KL to the loss that training_step returns, and with manual "
                "optimization there is none; call zm.elbo_loss before manual_backward instead."
            )
        step = pl_module.training_step

        @functools.wraps(step)
        def with_kl(*args: Any, **kwargs: Any) -> Any:
            output = step(*args, **kwargs)
            if output is None:  # Lightning skips the step.
                return None
            kl = kl_divergence(pl_module)
            beta = self.beta(trainer.global_step) if callable(self.beta) else self.beta
            pl_module.log_dict({"kl": kl.detach(), "beta": beta})
            loss = output["loss"] if isinstance(output, Mapping) else output
            loss = elbo_loss(loss, kl, num_data=self.num_data, beta=beta)
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss

        # The strategies look it up in the module, where DistributedDataParallel wraps it too.
        pl_module.training_step = with_kl

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        vars(pl_module).pop("training_step", None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        vars(pl_module).pop("training_step", None)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            seed_ranks()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # All ranks have the same; Lightning warns where it is not told to average.
        pl_module.log_dict(layer_metrics(pl_module), sync_dist=True)

    def on_validation_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self.num_samples:
            return
        inputs, targets = self.unpack(batch)
        draws: dict[str, Any] = {"num_samples": self.num_samples, "seed": self.seed + batch_idx}
        if self.likelihood is None:
            probabilities = predict_proba(pl_module, inputs, **draws).flatten(0, -2)
            log_probabilities = probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
            hits = probabilities.argmax(-1) == targets.flatten()
            measured = {"mc_accuracy": hits.float().mean()}
            measured["mc_nll"] = F.nll_loss(log_probabilities, targets.flatten())
        else:
            mean, noise, spread = predict_moments(
                pl_module, inputs, likelihood=self.likelihood, **draws
            )
            measured = {"mc_mse": F.mse_loss(mean, targets)}
            measured["mc_nll"] = F.gaussian_nll_loss(mean, targets, noise + spread, full=True)
        pl_module.log_dict(measured, on_epoch=True, batch_size=len(targets), sync_dist=True)


def _inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, Mapping):
        return {name: x for name, x in batch.items() if name != "labels"}, batch["labels"]
    inputs, targets = batch
    return inputs, targets
