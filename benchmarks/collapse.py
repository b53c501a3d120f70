"""How often the prior wins: small networks trained from scratch, with and without warm-up.

python benchmarks/collapse.py    writes results/collapse.json

Ten small problems, of which five are regression. A network has collapsed if its error on new rows
is no better than 0.9 of that of the best constant: RMSE, or the share of wrong classes. "No KL" is
the control: what does not learn there is not the prior's doing.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "src"))

import environment  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from sklearn import datasets  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import zeromean as zm  # noqa: E402

STEPS, BATCH, LR, LOG_ALPHA_LR, HIDDEN = 400, 100, 1e-2, 3e-2, 50
AS_BAD_AS_A_CONSTANT = 0.9
# Posterior and prior, and the initial noise of each: the default comes first.
NETWORKS: dict[str, tuple[Callable, zm.Prior, tuple[dict[str, float], ...]]] = {
    "Additive, Normal(learn=True)": (
        zm.Additive,
        zm.Normal(learn=True),
        ({"log_variance": -10.0}, {"log_alpha": -8.0}, {"log_alpha": -4.0}),
    ),
    "Additive, LogUniform": (
        zm.Additive,
        zm.LogUniform(),
        ({"log_variance": -10.0}, {"log_alpha": -8.0}, {"log_alpha": -4.0}),
    ),
    "Multiplicative, LogUniform": (
        zm.Multiplicative,
        zm.LogUniform(),
        ({"log_alpha": -5.0}, {"log_alpha": -8.0}),
    ),
}
BETAS: dict[str, Callable[[int], float]] = {
    "no warm-up": lambda step: 1.0,
    "warm-up": zm.linear_warmup(STEPS // 2),
    "no KL": lambda step: 0.0,
}


@dataclass(frozen=True)
class Problem:
    """Standardised inputs and targets: numbers, or classes if integers."""

    x: Tensor
    y: Tensor
    new_x: Tensor
    new_y: Tensor

    @property
    def num_outputs(self) -> int:
        return 1 if self.y.is_floating_point() else int(self.y.max()) + 1


def problems() -> dict[str, Problem]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, generator=generator)
    noise = torch.randn(400, generator=generator)
    made = {
        "sine": (x[:, :1], torch.sin(3 * x[:, 0]) + 0.1 * noise),
        "linear": (x, x[:, :3].sum(1) + 0.5 * noise),
        "product": (x[:, :4], x[:, 0] * x[:, 1] + 0.3 * noise),
        "friedman": _tensors(datasets.make_friedman1(400, noise=1.0, random_state=0)),
        "diabetes": _tensors(datasets.load_diabetes(return_X_y=True)),
        "xor": (x[:, :2], (x[:, 0] * x[:, 1] > 0).long()),
        "moons": _tensors(datasets.make_moons(400, noise=0.2, random_state=0)),
        "iris": _tensors(datasets.load_iris(return_X_y=True)),
        "wine": _tensors(datasets.load_wine(return_X_y=True)),
        "breast cancer": _tensors(datasets.load_breast_cancer(return_X_y=True)),
    }
    return {name: _split(*rows) for name, rows in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=PROJECT / "results" / "collapse.json")
    output = parser.parse_args().output
    rows = []
    for network, (posterior, prior, starts) in NETWORKS.items():
        for number, start in enumerate(starts):
            for warmup, beta in BETAS.items():
                if warmup == "no KL" and number > 0:
                    continue  # Without the KL, the noise only shrinks.
                layer = partial(zm.Linear, posterior=partial(posterior, **start), prior=prior)
                errors = {n: relative_error(p, layer, beta) for n, p in problems().items()}
                collapsed = sum(error > AS_BAD_AS_A_CONSTANT for error in errors.values())
                ((name, value),) = start.items()
                what = {"network": network, "start": f"{name}={value:g}", "default": number == 0}
                rows.append({**what, "warmup": warmup, "collapsed": collapsed, "errors": errors})
                print(network, start, warmup, f"{collapsed} of {len(errors)}", flush=True)
    settings = {"steps": STEPS, "batch": BATCH, "lr": LR, "log_alpha_lr": LOG_ALPHA_LR}
    record = environment.describe("torch", "scikit-learn") | {
        "command": "python benchmarks/collapse.py",
        "settings": settings | {"hidden": HIDDEN, "collapsed_above": AS_BAD_AS_A_CONSTANT},
        "rows": rows,
    }
    environment.write(output, record)


def relative_error(problem: Problem, layer: Callable, beta: Callable[[int], float]) -> float:
    """Error of a network, trained from scratch, as a part of the best constant's."""
    torch.manual_seed(0)
    hidden = layer(problem.x.shape[1], HIDDEN), nn.ReLU(), layer(HIDDEN, HIDDEN), nn.ReLU()
    model = nn.Sequential(*hidden, layer(HIDDEN, problem.num_outputs))
    likelihood = zm.GaussianLikelihood(noise_variance=0.1)
    both = nn.ModuleList([model, likelihood])
    groups = zm.parameter_groups(both, lr=LR, log_alpha_lr=LOG_ALPHA_LR)
    optimizer = torch.optim.Adam(groups)
    regression = problem.y.is_floating_point()
    for step in range(STEPS):
        batch = torch.randint(len(problem.x), (BATCH,))
        outputs, targets = model(problem.x[batch]), problem.y[batch]
        if regression:
            nll = likelihood.nll(outputs, targets[:, None])
        else:
            nll = F.cross_entropy(outputs, targets)
        kl = zm.kl_divergence(model)
        loss = zm.elbo_loss(nll, kl, num_data=len(problem.x), beta=beta(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if regression:
        mean = zm.predict_moments(model, problem.new_x, 50, likelihood=likelihood, seed=0).mean
        error = (mean[:, 0] - problem.new_y).square().mean().sqrt()
        constant = (problem.y.mean() - problem.new_y).square().mean().sqrt()
    else:
        found = zm.predict_proba(model, problem.new_x, 50, seed=0).argmax(-1)
        error = (found != problem.new_y).float().mean()
        constant = (problem.y.mode().values != problem.new_y).float().mean()
    return round((error / constant).item(), 3)


def _tensors(rows: tuple) -> tuple[Tensor, Tensor]:
    x, y = (torch.as_tensor(part) for part in rows)
    return x.float(), y.float() if y.is_floating_point() else y.long()


def _split(x: Tensor, y: Tensor) -> Problem:
    """Two thirds to train on, and standardised."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[order], y[order]
    count = 2 * len(x) // 3
    x = (x - x[:count].mean(0)) / x[:count].std(0)
    if y.is_floating_point():
        y = (y - y[:count].mean()) / y[:count].std()
    return Problem(x[:count], y[:count], x[count:], y[count:])


if __name__ == "__main__":
    main()
