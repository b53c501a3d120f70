"""One training loop for every network of the demo, random or not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

import zeromean as zm


def train(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    lr: float,
    batch_size: int,
    progress: Progress,
    description: str,
) -> None:
    """Minimise the negative ELBO with Adam, its learning rate falling linearly to zero.

    A network without stochastic layers has a KL term of zero: its loss is the cross-entropy.
    """
    num_data = len(inputs)
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=lr))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)
    model.train()
    for _ in progress.track(range(epochs), description=description):
        for batch in torch.randperm(num_data).split(batch_size):
            nll = F.cross_entropy(model(inputs[batch]), labels[batch])
            loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=num_data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
