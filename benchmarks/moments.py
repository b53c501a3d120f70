"""Cost against accuracy of predictions: moments, and samples by each sampler.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 \
        .venv/bin/python benchmarks/moments.py    # writes results/moments.json and its picture
    … benchmarks/moments.py --quick      # fewer images and samples; writes nothing
    … benchmarks/moments.py --picture    # docs/images/moments.png again, from the record

Networks are trained on 30,000 images of MNIST for one pass. The truth is the average of many
samples, drawn as the networks were trained; what is compared is its KL divergence to each
prediction, and the CPU time of the prediction in passes of the deterministic network of the same
shape. `--networks` measures some again; the others stay in the record.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import environment  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from harness import cpu_ratio  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import zeromean as zm  # noqa: E402
from zeromean.data import load  # noqa: E402
from zeromean.models import lenet5, lenet5_caffe, lenet_300_100  # noqa: E402

RECORD = PROJECT / "results" / "moments.json"
PICTURE = PROJECT / "docs" / "images" / "moments.png"
ADDITIVE = {"posterior": partial(zm.Additive, log_variance=-7.0), "prior": zm.Normal(scale=0.1)}
SAMPLERS = {"local": (1, 20, 100), "weight": (20,), "flipout": (20,)}


@dataclass(frozen=True)
class Network:
    """A random network, and the deterministic one that its cost is counted in."""

    build: Callable[[], nn.Module]
    plain: Callable[[], nn.Module]


def all_additive(network: Callable[..., nn.Module], **layers: Any) -> Callable[[], nn.Module]:
    return lambda: network(**{name: partial(kind, **ADDITIVE) for name, kind in layers.items()})


CONVOLUTIONAL = {"conv1": zm.Conv2d, "conv2": zm.Conv2d, "dense1": zm.Linear, "dense2": zm.Linear}
DENSE = {"dense1": zm.Linear, "dense2": zm.Linear, "dense3": zm.Linear}
NETWORKS = {
    "LeNet-5, dense1 a variance layer": Network(partial(lenet5, dense1=zm.Linear), lenet5),
    "LeNet-5-Caffe, all additive": Network(
        all_additive(lenet5_caffe, **CONVOLUTIONAL), lenet5_caffe
    ),
    "MLP 784-300-100-10, all additive": Network(
        all_additive(lenet_300_100, **DENSE), lenet_300_100
    ),
    "LeNet-5, dropout 0.5": Network(partial(lenet5, dropout=0.5), lenet5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few images and samples, no record")
    parser.add_argument("--networks", nargs="+", help="words of names of networks")
    parser.add_argument("--picture", action="store_true", help="draw the record again")
    options = parser.parse_args()
    if options.picture:
        draw(json.loads(RECORD.read_text())["networks"])
        return
    quick, words = options.quick, options.networks or [""]
    torch.set_num_threads(1)
    train, test = load("mnist", "train"), load("mnist", "test")
    images = 2_000 if quick else 30_000
    tested, samples = (50, 200) if quick else (64, 2_000)
    repeats, budget = (3, 1.0) if quick else (9, 2.0)
    for name, network in NETWORKS.items():
        if not any(word in name for word in words):
            continue
        torch.manual_seed(0)
        model = trained(network.build(), train.images[:images], train.labels[:images])
        x = test.images[:tested]
        truth = zm.predict_proba(model, x, samples, seed=1)
        cost = partial(in_passes, network.plain(), test.images[:128], repeats, budget)
        rows = []
        for way, predict in ways(model):
            rows.append({"way": way, **off_by(truth, predict(x)), **cost(predict)})
            print(name, rows[-1], flush=True)
        found = zm.propagate_moments(model, x, compare_with_samples=samples, seed=2).comparison
        assert found is not None
        error = {"mean": found.mean_error, "noise": found.mean_noise, "std": found.variance_error}
        print(name, error, flush=True)
        if not quick:
            settings = {"images": images, "tested": tested, "samples": samples}
            keep(name, {"settings": settings, "rows": rows, "error": error})


def keep(name: str, found: dict[str, Any]) -> None:
    """Put a network into the record, which has the others already or not yet."""
    networks = json.loads(RECORD.read_text())["networks"] if RECORD.exists() else {}
    networks[name] = {"date": datetime.date.today().isoformat(), **found}
    record = environment.describe("zeromean", "torch")
    record["command"] = "python benchmarks/moments.py"
    in_order = {known: networks[known] for known in NETWORKS if known in networks}
    environment.write(RECORD, record | {"networks": in_order})
    print(f"written: {RECORD}")
    draw(in_order)


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> nn.Module:
    """One pass with the ELBO."""
    groups = zm.parameter_groups(model, lr=1e-3, log_alpha_lr=1e-2)
    optimizer = torch.optim.Adam(groups)
    model.train()
    for batch in torch.randperm(len(images)).split(100):
        nll = F.cross_entropy(model(images[batch]), labels[batch])
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def ways(model: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """The predictions that are compared."""
    yield "moments", lambda x: zm.predict_proba(model, x, method="moments")
    yield "mean propagation", lambda x: means_alone(model, x)
    random = bool(zm.stochastic_layers(model))
    for name, numbers in (SAMPLERS if random else {"dropout": (1, 20, 100)}).items():
        sampler = getattr(zm, name) if random else None
        for number in numbers:
            draw = partial(by_samples, model, num_samples=number, sampler=sampler)
            yield f"{number} samples, {name}", draw


def by_samples(model: nn.Module, x: Tensor, *, num_samples: int, sampler: Any) -> Tensor:
    return zm.predict_proba(model, x, num_samples, sampler=sampler)


@torch.no_grad()
def means_alone(model: nn.Module, x: Tensor) -> Tensor:
    with zm.sampling(model, zm.mean):
        return model(x).softmax(-1)


def off_by(truth: Tensor, found: Tensor) -> dict[str, float]:
    """KL(truth ‖ found) in nats, the mean over images, and the largest change of a probability."""
    kl = (torch.xlogy(truth, truth) - truth * found.clamp_min(1e-12).log()).sum(-1)
    return {"kl": float(kl.mean()), "largest_change": float((truth - found).abs().max())}


def in_passes(
    plain: nn.Module, x: Tensor, repeats: int, budget: float, predict: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    plain.eval()

    @torch.no_grad()
    def floor() -> Tensor:
        return plain(x).softmax(-1)

    ratio = cpu_ratio(lambda: predict(x), floor, repeats=repeats, budget=budget)
    return {"passes": ratio.median, "lower": ratio.lower, "upper": ratio.upper}


def draw(networks: dict[str, dict[str, Any]]) -> None:
    """KL against passes, a panel a network: samples on a line, moments and means by themselves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 1 if len(networks) == 1 else 2
    lines = -(-len(networks) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.4 * lines), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for panel in panels.flat[len(networks) :]:
        panel.remove()
    for panel, (name, found) in zip(panels.flat, networks.items(), strict=False):
        rows = {row["way"]: row for row in found["rows"]}
        trained_by = "local" if "1 samples, local" in rows else "dropout"
        line = [rows[f"{number} samples, {trained_by}"] for number in (1, 20, 100)]
        panel.loglog([r["passes"] for r in line], [r["kl"] for r in line], "o-", color="0.45")
        for number, row in zip((1, 20, 100), line, strict=True):
            said = f"{number} sample" + "s" * (number > 1)
            panel.annotate(said, (row["passes"], row["kl"]), (6, 5), textcoords="offset points")
        for way, colour, marker in (("moments", "C0", "*"), ("mean propagation", "C3", "X")):
            place = rows[way]["passes"], rows[way]["kl"]
            panel.loglog(*place, marker, color=colour, markersize=12)
            panel.annotate(way, place, (9, -4), textcoords="offset points", color=colour)
        panel.set_title(name, fontsize=10)
        panel.set_xlim(0.6, 400)
        panel.set_xlabel("CPU time, in passes of the deterministic network")
        panel.grid(which="major", alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("KL to the truth, nats")
    figure.savefig(PICTURE, dpi=110)
    print(f"written: {PICTURE}")


if __name__ == "__main__":
    main()
