"""A network that learns one task after the other, by any of the methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromean as zm
from zeromean.experiments.bayesian.memories import (
    ElasticWeights,
    Memory,
    Nothing,
    OnlineLaplace,
    YesterdaysPosterior,
)
from zeromean.experiments.bayesian.tasks import Settings, Task
from zeromean.experiments.networks import small_networks
from zeromean.models import MultiHead
from zeromean.training import coreset
from zeromean.training.checkpoint import load_tensors, save_tensors

VCL = "VCL"

Build = Callable[[Callable[..., nn.Module]], nn.Module]
"""A network for the first task, from a factory of its layers."""


class Learner:
    """A network that learns one task after the other."""

    def __init__(self, method: str, build: Build, config: Settings):
        self.method, self.config = method, config
        random = method == VCL
        layer = partial(
            zm.Linear, bias=False, prior=zm.Normal(config.prior_scale), posterior=_posterior(config)
        )
        self.build = partial(build, layer if random else partial(nn.Linear, bias=False))
        self.samples = config.num_samples if random else 1
        self.memory = _memory(method, config)
        self.model = self.build()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def learn(self, number: int, task: Task) -> None:
        """Learn a task and put it into memory; without the images of the coreset, for VCL."""
        inputs, labels = task.train()
        add_head_(self.model, self.build, number)
        if self.method == VCL:
            chosen = coreset(inputs, self.config.coreset_size, seed=self.config.seed)
            self.kept.append((inputs[chosen], labels[chosen]))
            rest = torch.ones(len(inputs), dtype=torch.bool)
            rest[chosen] = False
            inputs, labels = inputs[rest], labels[rest]
        _train(self.model, self.memory, inputs, labels, self.config)
        self.memory.keep(self.model, inputs)

    def refined(self) -> nn.Module:
        """A copy that has learned what was kept, to predict with and not to learn on with."""
        model = copy.deepcopy(self.model)
        train_on_coresets(model, self.kept, self.config)
        return model

    def accuracies(self, model: nn.Module, tasks: Sequence[Task]) -> list[float]:
        """Per cent of images of each task."""
        return [accuracy(model, number, task, self.samples) for number, task in enumerate(tasks)]

    def save(self, path: Any) -> None:
        state = {"model": self.model.state_dict(), "memory": self.memory.state, "kept": self.kept}
        save_tensors(path, state)

    def load(self, path: Any, num_tasks: int) -> None:
        state = load_tensors(path)
        self.model = self.build()
        for number in range(1, num_tasks):
            add_head_(self.model, self.build, number)
        self.memory.prepare(self.model)
        self.model.load_state_dict(state["model"])
        self.memory.state = state["memory"]
        self.kept = state["kept"]


def add_head_(model: nn.Module, build: Callable[[], Any], number: int) -> None:
    """Give a network with several heads the one of a task, drawn as in a new network."""
    if isinstance(model, MultiHead) and number == len(model.heads):
        model.add_head(build().heads[0])
    choose_(model, number)


def choose_(model: nn.Module, number: int) -> None:
    """Let the head of a task answer, where there are several."""
    if isinstance(model, MultiHead):
        model.task = number


def accuracy(model: nn.Module, number: int, task: Task, num_samples: int) -> float:
    choose_(model, number)
    inputs, labels = task.evaluate()
    proba = [zm.predict_proba(model, x, num_samples, seed=0) for x in inputs.split(1000)]
    return small_networks.accuracy(torch.cat(proba), labels)


def train_on_coresets(
    model: nn.Module, kept: Sequence[tuple[Tensor, Tensor]], config: Settings
) -> None:
    """Full-batch steps over what was kept of all tasks; the KL is that to the posterior before."""
    groups = zm.parameter_groups(model, lr=config.vcl_lr, log_alpha_lr=config.log_variance_lr)
    num_data = sum(len(labels) for _, labels in kept)
    optimizer = torch.optim.Adam(groups, eps=1e-8 / num_data)
    for _ in range(config.coreset_steps):
        nll = torch.zeros(())
        for number, (inputs, labels) in enumerate(kept):
            choose_(model, number)
            nll = nll + F.cross_entropy(model(inputs), labels, reduction="sum")
        loss = zm.elbo_loss(nll / num_data, zm.kl_divergence(model), num_data=num_data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _train(
    model: nn.Module, memory: Memory, inputs: Tensor, labels: Tensor, config: Settings
) -> None:
    random = bool(zm.stochastic_layers(model))
    lr = config.vcl_lr if random else config.lr
    groups = zm.parameter_groups(model, lr=lr, log_alpha_lr=config.log_variance_lr)
    optimizer = torch.optim.Adam(groups, eps=1e-8 / len(inputs))
    batches = -(-len(inputs) // config.batch_size)
    steps = config.epochs * batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(config.epochs):
        for batch in torch.randperm(len(inputs)).chunk(batches):
            nll = F.cross_entropy(model(inputs[batch]), labels[batch])
            loss = nll + memory.penalty(model) / len(inputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def _posterior(config: Settings) -> Any:
    return partial(zm.Additive, log_variance=config.log_variance)


def _memory(method: str, config: Settings) -> Memory:
    if method == VCL:
        return YesterdaysPosterior()
    if method == "EWC":
        return ElasticWeights(config.ewc)
    if method == "online Laplace":
        return OnlineLaplace(config.laplace)
    return Nothing()
