"""Methods of learning over time, each on the same tasks in the same way and as long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zeromean.experiments.bayesian.learner import (
    VCL,
    Build,
    Learner,
    add_head_,
    train_on_coresets,
)
from zeromean.experiments.bayesian.tasks import Settings, Task
from zeromean.experiments.runs.claims import Claim
from zeromean.experiments.runs.documents import ours
from zeromean.experiments.runs.figure import bars, figure, over_seeds
from zeromean.experiments.runs.log import RunLog

METHODS = (VCL, "online Laplace", "EWC", "fine-tuning")
WITH_CORESET = "VCL with coreset"
CORESET_ALONE = "coreset alone"

Quoted = tuple[float, str]
"""A least accuracy, and what the paper has."""


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


def _mean(row: Sequence[float]) -> float:
    return sum(row) / len(row)
