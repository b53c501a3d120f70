"""What attacks on random networks and predictions of ensembles cost, in passes of one network.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \
        .venv/bin/python benchmarks/robustness.py            # writes results/robustness_speed.json
    … benchmarks/robustness.py --quick                       # fewer repeats; writes nothing

Gradients over 20 draws against a gradient of the deterministic network of the same shape, and
ensembles of five against one member. The last rows are why members are predicted one by one: the
same five networks under `torch.func.vmap`, against a loop over them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import environment
import torch
import torch.nn.functional as F
from harness import cpu_ratio
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import zeromean as zm
from zeromean.ensembles import Ensemble
from zeromean.models.dense import mlp
from zeromean.models.lenet import lenet5
from zeromean.models.vgg import vgg_like
from zeromean.robustness import MeanClassifier

RECORD = Path(__file__).parents[1] / "results" / "robustness_speed.json"
NUM_SAMPLES = 20
MOST_FOR_LATE_NOISE = 2.0
MOST_FOR_FIVE = 5.2


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of attacks and of ensembles.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no record")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    repeats, budget = (5, 4.0) if arguments.quick else (25, 60.0)
    rows = []
    for name, subject, floor, most in cases():
        ratio = cpu_ratio(subject, floor, repeats=repeats, budget=budget)
        verdict = "ok" if most is None or ratio.median <= most else "NO"
        bound = "" if most is None else f"at most {most:g}: {verdict}"
        print(f"{name:66} {ratio.median:6.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})  {bound}")
        rows.append({"name": name, "at_most": most, **asdict(ratio)})
    if not arguments.quick:
        packages = environment.describe("zeromean", "torch")
        environment.write(RECORD, {**packages, "num_samples": NUM_SAMPLES, "rows": rows})
        print(f"written: {RECORD}")


Case = tuple[str, Callable[[], Any], Callable[[], Any], float | None]


def cases() -> list[Case]:
    return [
        *gradients("LeNet-5, the last layer stochastic", lenet5(dense2=zm.Linear), True),
        *gradients("LeNet-5, dense1 stochastic", lenet5(dense1=zm.Linear), False),
        *predictions("LeNet-5", lenet5, torch.rand(128, 1, 28, 28)),
        *predictions("VGG of width 0.25", partial(vgg_like, width=0.25), torch.rand(32, 3, 32, 32)),
        *predictions("MLP 784-300-100", mlp_of_digits, torch.rand(128, 784)),
        *stacked("MLP 784-300-100, 128 examples", mlp_of_digits, torch.rand(128, 784)),
        *stacked("MLP 784-300-100, 1 example", mlp_of_digits, torch.rand(1, 784)),
        *stacked("MLP 2-20-20, 128 examples", toy, torch.rand(128, 2)),
        *stacked("LeNet-5, 128 examples", lenet5, torch.rand(128, 1, 28, 28)),
    ]


def mlp_of_digits() -> nn.Module:
    return mlp([784, 300, 100, 10])


def toy() -> nn.Module:
    return mlp([2, 20, 20, 2])


def gradients(name: str, model: nn.Module, is_bounded: bool) -> list[Case]:
    """The gradient of the log mean probability, and that of a cross-entropy."""
    images, labels = torch.rand(64, 1, 28, 28), torch.randint(10, (64,))
    plain, adapter = lenet5().eval(), MeanClassifier(model, NUM_SAMPLES)

    def gradient(classifier: nn.Module) -> Tensor:
        x = images.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(classifier(x), labels), x)[0]

    most = MOST_FOR_LATE_NOISE if is_bounded else None
    title = f"gradient over {NUM_SAMPLES} draws, {name}, in deterministic ones"
    return [(title, lambda: gradient(adapter), lambda: gradient(plain), most)]


def predictions(name: str, build: Callable[[], nn.Module], x: Tensor) -> list[Case]:
    """predict_proba of five members, and of one."""
    ensemble = Ensemble([build().eval() for _ in range(5)])
    title = f"prediction by five, {name}, {len(x)} examples, in single ones"
    single = partial(zm.predict_proba, ensemble[0], x, 1)
    return [(title, partial(zm.predict_proba, ensemble, x, 1), single, MOST_FOR_FIVE)]


@torch.no_grad()
def stacked(name: str, build: Callable[[], nn.Module], x: Tensor) -> list[Case]:
    """Five networks under vmap, their weights stacked beforehand, and the same ones in a loop."""
    members = [build().eval() for _ in range(5)]
    weights = stack_module_state(members)
    together = vmap(lambda *state: functional_call(members[0], state, (x,)))
    assert torch.allclose(together(*weights), torch.stack([m(x) for m in members]), atol=1e-4)

    def looped() -> Tensor:
        with torch.no_grad():
            return torch.stack([member(x) for member in members])

    def at_once() -> Tensor:
        with torch.no_grad():
            return together(*weights)

    return [(f"five under vmap, {name}, in loops over five", at_once, looped, None)]


if __name__ == "__main__":
    main()
