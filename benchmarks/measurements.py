"""One function for each thing a row can report; each returns a `Reading`."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import networks
import roster
import torch
from harness import Ratio, cpu_ratio, mebibytes_kept_for_backward, peak_mebibytes
from networks import Network
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    """How much time a row may take: pairs at most, and CPU seconds to aim for."""

    repeats: int
    budget: float


@dataclass(frozen=True)
class Reading:
    value: float
    lower: float
    upper: float
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A network, a batch size, and the layout of both subject and floor."""

    network: Network
    batch_size: int = 128
    memory_format: torch.memory_format = torch.contiguous_format

    def model(self, build: Callable[[Network], Any]) -> Any:
        model = build(self.network)
        return model.to(memory_format=self.memory_format) if self._converts else model

    def batch(self) -> tuple[Tensor, Tensor]:
        x, y = networks.random_batch(self.network, self.batch_size)
        return (x.to(memory_format=self.memory_format) if self._converts else x), y

    @property
    def _converts(self) -> bool:
        return self.memory_format is not torch.contiguous_format


LENET = Case(networks.lenet5_caffe)


def training(
    name: str, case: Case, settings: Settings, *, floor_case: Case | None = None
) -> Reading:
    """One training step, optimizer included, in deterministic steps."""
    return _paired(
        _training_step(name, case), _training_step("deterministic", floor_case or case), settings
    )


def training_with_plain_malloc(name: str, settings: Settings) -> Reading:
    """`training` on LeNet-5-Caffe in a process whose allocator is as the system brings it."""
    roster.subject(name)  # report a missing package from here, not from the child
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import json, torch, measurements as m\n"
        "torch.set_num_threads(1); torch.manual_seed(0)\n"
        f"reading = m.training({name!r}, m.LENET, m.{settings!r})\n"
        "print(json.dumps(m.asdict(reading)))"
    )
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    output = subprocess.check_output([sys.executable, "-c", code], text=True, env=plain)
    return Reading(**json.loads(output))


def prediction(
    name: str,
    case: Case,
    settings: Settings,
    *,
    num_samples: int,
    floor_passes: int | None = None,
    floor_case: Case | None = None,
) -> Reading:
    """`num_samples` samples, in `floor_passes` deterministic passes (as many, by default)."""
    floor_passes = floor_passes or num_samples
    # A pass is a pass: timing a few and multiplying saves minutes where batches are large.
    timed = min(floor_passes, 20 if case.batch_size <= 128 else 4)
    return _paired(
        _prediction(name, num_samples, case),
        _prediction("deterministic", timed, floor_case or case),
        settings,
        floor_calls=floor_passes / timed,
    )


def memory_kept_for_backward(name: str, settings: Settings, *, whole_step: bool) -> Reading:
    """Mebibytes that autograd saves in a forward pass, or with the loss and its KL as well."""
    x, y = LENET.batch()
    subject = roster.subject(name)
    model = subject.build(LENET.network)
    if not isinstance(model, nn.Module):
        raise NotImplementedError("its own transforms do the differentiation: not counted")
    step = subject.trainer(model)
    step(x, y)
    forward = partial(step, x, y) if whole_step else partial(model, x)
    total, without_parameters = mebibytes_kept_for_backward(forward, model)
    return Reading(total, total, total, {"without_parameters": without_parameters})


def peak_memory(name: str, case: Case, settings: Settings, *, num_samples: int | None) -> Reading:
    """Peak mebibytes of five training steps, or of one prediction, in a process of its own."""
    roster.subject(name)  # report a missing package from here, not from the child
    peak = peak_mebibytes(_peak_work, name, num_samples, case.network, case.batch_size)
    return Reading(peak, peak, peak)


def exact_kl(num_weights: int, settings: Settings) -> Reading:
    """Exact log-uniform KL against the sigmoid approximation, value and gradient."""
    roster.subject("zeromean, additive")  # is it there?
    from zeromean.functional.kl import log_uniform_kl_approx, log_uniform_kl_sum

    mean = torch.randn(num_weights).mul_(0.05).requires_grad_()
    log_variance = torch.randn(num_weights).sub_(8.0).requires_grad_()

    def approximate() -> None:
        log_alpha = log_variance - 2 * mean.abs().log()
        torch.autograd.grad(log_uniform_kl_approx(log_alpha).sum(), (mean, log_variance))

    def exact() -> None:
        torch.autograd.grad(log_uniform_kl_sum(mean, log_variance), (mean, log_variance))

    return _paired(exact, approximate, settings)


def import_time(settings: Settings) -> Reading:
    """CPU seconds of `import zeromean` after `import torch`, each in a fresh interpreter."""
    roster.subject("zeromean, additive")  # is it there?
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import time, torch; start = time.process_time()\n"
        "import zeromean; print(time.process_time() - start)"
    )
    # The interpreter is this one; -c keeps the list above as its only search path.
    seconds = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True))
        for _ in range(max(3, settings.repeats // 2))
    ]
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return Reading(median, lower, upper)


def _training_step(name: str, case: Case) -> Callable[[], Any]:
    subject = roster.subject(name)
    step = subject.trainer(case.model(subject.build))
    return partial(step, *case.batch())


def _prediction(name: str, num_samples: int, case: Case) -> Callable[[], Any]:
    subject = roster.subject(name)
    x, _ = case.batch()
    return partial(subject.predict, case.model(subject.build), x, num_samples)


def _peak_work(
    name: str, num_samples: int | None, network: Network, batch_size: int
) -> Callable[[], Any]:
    case = Case(network, batch_size)
    if num_samples is not None:
        return _prediction(name, num_samples, case)
    step = _training_step(name, case)
    return lambda: [step() for _ in range(5)]


def _paired(
    subject: Callable[[], Any], floor: Callable[[], Any], settings: Settings, floor_calls: float = 1
) -> Reading:
    ratio: Ratio = cpu_ratio(
        subject, floor, repeats=settings.repeats, budget=settings.budget, floor_calls=floor_calls
    )
    detail = asdict(ratio)
    return Reading(detail.pop("median"), detail.pop("lower"), detail.pop("upper"), detail)
