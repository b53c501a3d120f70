"""What each sampler costs in accuracy: networks trained with `local`, predicted with all samplers.

python benchmarks/samplers.py    writes results/samplers.json

scikit-learn's digits; one network with a convolutional variance layer, one with a dense one. Each
number is a mean over seeds of training.
"""

import argparse
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import environment  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import zeromean as zm  # noqa: E402

SAMPLERS = {"local": zm.local, "auto": zm.auto, "weight": zm.weight, "flipout": zm.flipout}
SEEDS, EPOCHS, BATCH, LR, NUM_SAMPLES = 3, 25, 100, 3e-3, 50
NUM_TRAINING = 1200


def convolutional() -> nn.Module:
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    second = zm.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 10))


def dense() -> nn.Module:
    first = nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU()
    second = zm.Linear(100, 100), nn.BatchNorm1d(100), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Linear(100, 10))


NETWORKS = {"convolution": convolutional, "dense": dense}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PROJECT / "results" / "samplers.json")
    output = parser.parse_args().output
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for network, build in NETWORKS.items():
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            model = train(build(), x[:NUM_TRAINING], y[:NUM_TRAINING])
            for name, sampler in SAMPLERS.items():
                scores = evaluate(model, x[NUM_TRAINING:], y[NUM_TRAINING:], sampler)
                found.setdefault((network, name), []).append(scores)
    rows = []
    for (network, sampler), scores in found.items():
        accuracies, nlls = zip(*scores, strict=True)
        what = {"network": network, "sampler": sampler}
        rows.append({**what, "accuracy": sum(accuracies) / SEEDS, "nll": sum(nlls) / SEEDS})
        print(rows[-1], flush=True)
    settings = {"seeds": SEEDS, "epochs": EPOCHS, "batch": BATCH, "lr": LR, "samples": NUM_SAMPLES}
    record = environment.describe("torch", "scikit-learn") | {
        "command": "python benchmarks/samplers.py",
        "settings": settings,
        "rows": rows,
    }
    environment.write(output, record)


def train(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=LR))
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            loss = F.cross_entropy(model(x[batch]), y[batch])  # Variance layers have no KL.
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def evaluate(model: nn.Module, x: Tensor, y: Tensor, sampler: zm.samplers.Sampler):
    """Accuracy in per cent, and negative log-likelihood in nats."""
    probabilities = zm.predict_proba(model, x, NUM_SAMPLES, sampler=sampler, seed=0)
    accuracy = 100 * (probabilities.argmax(-1) == y).float().mean().item()
    return accuracy, F.nll_loss(probabilities.clamp_min(1e-9).log(), y).item()


if __name__ == "__main__":
    main()
