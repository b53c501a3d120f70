"""Tasks one after the other, learned by several methods in the same way and as long."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
from zeromean.experiments.networks import small_networks
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog
from zeromean.models import MultiHead
from zeromean.training import coreset
from zeromean.training.checkpoint import load_tensors, save_tensors

if TYPE_CHECKING:
    from zeromean.data import ImageSet

VCL = "VCL"
METHODS = (VCL, "online Laplace", "EWC", "fine-tuning")
WITH_CORESET = "VCL with coreset"
CORESET_ALONE = "coreset alone"

Quoted = tuple[float, str]
"""A least accuracy, and what the paper has."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Networks, training and what is kept; the same passes for all methods."""

    num_tasks: int
    """Tasks."""
    hidden: tuple[int, ...]
    """Units of the hidden layers; no biases, which would have no prior."""
    epochs: int = 20
    """Passes over every task."""
    batch_size: int = 256
    """Images in a mini-batch."""
    lr: float = 1e-3
    """Adam's learning rate of deterministic networks; it falls linearly to zero in every task."""
    vcl_lr: float = 3e-3
    """The same of the means of VCL."""
    log_variance_lr: float = 1e-2
    """The same of its log-variances."""
    log_variance: float = -10.0
    """Log-variance of its weights at the start of the first task."""
    prior_scale: float = 0.1
    """Standard deviation of its prior in the first task."""
    coreset_size: int
    """Images that are kept of a task."""
    coreset_steps: int = 100
    """Steps over all that was kept, on a copy, before it predicts."""
    ewc: float = 30.0
    """Factor of the penalty of EWC."""
    laplace: float = 1.0
    """Factor of the penalty of online Laplace."""
    train_size: int | None = None
    """Images to train on; None for all."""
    num_samples: int = 10
    """Samples of a prediction of VCL."""
    evaluate: str = "test"
    """Images that accuracies are of; all choices were made on "validation"."""
    data: str = "mnist"
    """Data set."""
    seed: int = 0
    """Seed of the tasks, the networks, the batches, the noise and what is kept."""


@dataclass(frozen=True)
class Task:
    """Rows of pixels, and their labels; made when asked for, as ten copies would take memory."""

    train: Callable[[], tuple[Tensor, Tensor]]
    evaluate: Callable[[], tuple[Tensor, Tensor]]


def claims(mean_over: str, vcl: Quoted, with_coreset: Quoted, *, gained: float) -> list[Claim]:
    """What Nguyen et al. (2018) have after the last task, and that it is memory that makes it so.

    Args:
        mean_over: Whose mean an accuracy is.
        vcl: The least accuracy that counts, and theirs.
        with_coreset: The same where some images of every task are kept.
        gained: Points by which VCL must be above a network without a memory.
    """
    quoted = {VCL: vcl, WITH_CORESET: with_coreset}
    return [
        *(
            Claim(
                f"accuracy.{method}",
                least,
                ours(f"Nguyen et al. (2018) have {theirs} passes"),
                0.0,
                "at least",
                f"mean over {mean_over}: {method}",
                "%",
            )
            for method, (least, theirs) in quoted.items()
        ),
        Claim(
            "gained_over_fine_tuning",
            gained,
            ours("the control: without a memory the first tasks are forgotten"),
            0.0,
            "at least",
            "VCL above fine-tuning",
            "points",
        ),
    ]


def image_sets(config: Settings, log: RunLog) -> tuple[ImageSet, ImageSet]:
    """The images that tasks are made of: to train on, and those that accuracies are of."""
    from zeromean import data

    split = "test" if config.evaluate == "test" else "validation"
    train, evaluate = (
        data.load(config.data, part, data_dir=log.data_dir) for part in ("rest", split)
    )
    return train, evaluate


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


def run_method(
    method: str, build: Build, tasks: Sequence[Task], config: Settings, log: RunLog
) -> dict[str, list[list[float]]]:
    """Accuracies after every task: one row a task, with one column for each that has been learned.

    Every task is a stage of the run, at the end of which all that was learned lies in a file.
    """
    folder = log.folder / "learned"
    folder.mkdir(parents=True, exist_ok=True)
    current: dict[str, Any] = {"learner": None, "done": 0}
    rows: dict[str, list[list[float]]] = {}

    def learn(number: int) -> dict[str, list[float]]:
        if current["done"] != number:
            # Initial values that are overwritten must not shift what is drawn next.
            with torch.random.fork_rng(devices=[]):
                current["learner"] = Learner(method, build, config)
                current["learner"].load(folder / f"{method} {number - 1}", number)
        elif current["learner"] is None:
            current["learner"] = Learner(method, build, config)
        learner: Learner = current["learner"]
        learner.learn(number, tasks[number])
        current["done"] = number + 1
        results = {method: learner.accuracies(learner.model, tasks[: number + 1])}
        if method == VCL:
            results[WITH_CORESET] = learner.accuracies(learner.refined(), tasks[: number + 1])
            if number + 1 == len(tasks):
                fresh = Learner("fine-tuning", build, config)
                for other in range(1, len(tasks)):
                    add_head_(fresh.model, fresh.build, other)
                # As much as the coresets have seen of VCL's training, and more.
                train_on_coresets(fresh.model, learner.kept, config)
                results[CORESET_ALONE] = fresh.accuracies(fresh.model, tasks)
        learner.save(folder / f"{method} {number}")
        return results

    for number in range(len(tasks)):
        results = log.once(f"{method}, task {number + 1}", partial(learn, number))
        for name, row in results.items():
            rows.setdefault(name, []).append(row)
            log.metrics(method=name, task=number + 1, accuracy=row)
    return rows


def compare(build: Build, tasks: Sequence[Task], config: Settings, log: RunLog) -> dict[str, Any]:
    """All methods on the same tasks."""
    rows: dict[str, list[list[float]]] = {}
    for method in METHODS:
        rows |= run_method(method, build, tasks, config, log)
    accuracy = {name: _mean(by_task[-1]) for name, by_task in rows.items()}
    return {
        "accuracy": accuracy,
        "gained_over_fine_tuning": accuracy[VCL] - accuracy["fine-tuning"],
        "gained_over_coreset": accuracy[WITH_CORESET] - accuracy[CORESET_ALONE],
        "first_task": {name: by_task[-1][0] for name, by_task in rows.items()},
        "last_task": {name: by_task[-1][-1] for name, by_task in rows.items()},
        "by_task": {name: [_mean(row) for row in by_task] for name, by_task in rows.items()},
    }


def figures(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    metrics = [record["metrics"] for record in records]
    curves = [name for name, row in metrics[0]["by_task"].items() if len(row) > 1]
    tasks = list(range(1, len(metrics[0]["by_task"][VCL]) + 1))
    traces = [over_seeds(name, tasks, [m["by_task"][name] for m in metrics]) for name in curves]
    labels = {"first_task": "first task", "accuracy": "all tasks", "last_task": "last task"}
    rows = [{n: {k: m[k][n] for k in labels} for n in m["accuracy"]} for m in metrics]
    return [
        figure("Accuracy over all tasks so far", "tasks learned", "accuracy, %", traces),
        bars("Accuracy after the last task", "method", labels, rows),
    ]


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


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row)
