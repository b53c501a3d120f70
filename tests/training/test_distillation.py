"""Students that learn what samples say together, against the closed forms of what they should."""

import math

import pytest
import torch
from test_training import At, assert_same_state, interrupt
from torch import nn
from torch.distributions import Categorical, Dirichlet
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm
from zeromean.ensembles import SWAG, Ensemble
from zeromean.functional import dirichlet_entropies, dirichlet_nll
from zeromean.training import (
    CategoricalLikelihood,
    DirichletLikelihood,
    SplitVarianceLikelihood,
    TotalVarianceLikelihood,
    TrainingConfig,
    distill,
    fit,
)

pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
CONFIG = TrainingConfig(epochs=3, batch_size=20, lr=0.02)


def plain(seed=0, outputs=3, inputs=4, hidden=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def noisy(seed=0, outputs=3):
    torch.manual_seed(seed)
    layer = zm.Linear(4, 8, posterior=lambda *a, **o: zm.Additive(*a, log_variance=-1.0, **o))
    return nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, outputs))


def table(rows=3, outputs=3):
    """A student that can say anything of each example: what it ends with is the optimum."""
    return nn.Linear(rows, outputs, bias=False)


class Fixed(nn.Module):
    """A network that says the same as ever of each of a few examples."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs)

    def forward(self, x):
        return x @ self.outputs


ROWS = torch.eye(3)
# Few epochs of many steps.
MANY = ROWS.repeat(300, 1)
LONG = TrainingConfig(epochs=6, batch_size=9, lr=0.1)


# --- Dirichlet in closed form


def test_dirichlet_nll_is_that_of_torch():
    torch.manual_seed(0)
    z = torch.randn(5, 4).requires_grad_()
    p = torch.rand(7, 5, 4).add(0.1).log_softmax(-1)
    expected = -Dirichlet(z.exp()).log_prob(p.exp()).mean(0)
    torch.testing.assert_close(dirichlet_nll(z, p.mean(0)), expected, rtol=1e-4, atol=1e-4)
    moved = dirichlet_nll(z.mT, p.mean(0).mT, dim=0)
    torch.testing.assert_close(moved, dirichlet_nll(z, p.mean(0)))
    assert torch.autograd.gradcheck(
        lambda a: dirichlet_nll(a, p.mean(0).double()), z.detach().double().requires_grad_()
    )


def test_dirichlet_entropies_are_those_of_samples():
    torch.manual_seed(0)
    z = torch.tensor([[0.0, 0.0, 0.0], [2.0, -1.0, 0.5], [-3.0, -3.0, 1.0], [4.0, 4.0, 4.0]])
    expected, information = dirichlet_entropies(z)
    samples = Dirichlet(z.exp()).sample((200_000,))
    entropies = Categorical(samples).entropy()
    error = entropies.std(0) / 200_000**0.5
    assert ((entropies.mean(0) - expected).abs() < 4.5 * error).all()
    total = Categorical(logits=z).entropy()
    torch.testing.assert_close(expected + information, total)
    assert information[0] > information[3] > 0
    # Where concentrations are large the information is (classes − 1) / 2α₀, to first order.
    sure = torch.full((1, 10), 20.0)
    wanted = torch.tensor([9 / (2 * 10 * math.exp(20.0))])
    torch.testing.assert_close(dirichlet_entropies(sure)[1], wanted, rtol=1e-3, atol=0)


def test_information_of_a_dirichlet_lies_within_its_entropy():
    z = torch.linspace(-30, 30, 41).unsqueeze(-1) * torch.tensor([1.0, 0.5, -0.2])
    expected, information = dirichlet_entropies(z)
    assert expected.isfinite().all()
    assert (expected >= -1e-9).all()
    assert (information >= 0).all()
    assert (expected + information <= math.log(3) + 1e-6).all()


# --- what the optimum is


def test_student_of_classes_ends_with_the_averaged_probabilities(tmp_path):
    torch.manual_seed(0)
    teacher = [Fixed(2 * torch.randn(3, 3)) for _ in range(3)]
    result = distill(table(), teacher, MANY, LONG, folder=tmp_path, num_samples=3)
    averaged = zm.predict_proba(teacher, ROWS, 1)
    torch.testing.assert_close(zm.predict_proba(result.model, ROWS, 1), averaged, atol=1e-3, rtol=0)
    # What is left is the entropy of the average.
    entropy = Categorical(averaged).entropy().mean().item()
    assert result.fit.history[-1]["nll"] == pytest.approx(entropy, abs=1e-4)


def fitted(likelihood, samples):
    """Outputs for each example that a likelihood finds best, of samples `(examples, k, 3)`."""
    outputs = torch.zeros(len(samples), 3, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.1)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1500)
    for _ in range(1500):
        optimizer.zero_grad()
        likelihood.nll(outputs, samples).backward()
        optimizer.step()
        decay.step()
    return outputs.detach()


def test_likeliest_dirichlet_is_the_one_that_was_drawn_from():
    torch.manual_seed(0)
    truth = torch.tensor([[5.0, 2.0, 1.0], [0.8, 0.6, 3.0], [20.0, 20.0, 20.0]])
    samples = Dirichlet(truth).sample((2000,)).log()
    likelihood = DirichletLikelihood("likelihood", smoothing=0.0)
    found = fitted(likelihood, samples.movedim(0, 1))
    assert (found.exp() / truth - 1).abs().max() < 4.5 * (1 / 2000) ** 0.5
    entropies = Categorical(logits=samples).entropy()
    error = entropies.std(0) / 2000**0.5
    expected = likelihood.predictive_uncertainty(found).expected_entropy
    assert ((expected - entropies.mean(0)).abs() < 4.5 * error).all()


def test_matched_entropies_are_those_of_any_samples():
    torch.manual_seed(0)
    samples = 3 * torch.randn(4, 5, 3)
    samples[3, :] = samples[3, 0]
    likelihood = DirichletLikelihood()
    outputs = fitted(likelihood, samples)
    average = samples.softmax(-1).mean(1)
    torch.testing.assert_close(likelihood.probabilities(outputs), average, atol=3e-3, rtol=0)
    found = likelihood.predictive_uncertainty(outputs)
    expected = Categorical(logits=samples).entropy().mean(1)
    torch.testing.assert_close(found.expected_entropy, expected, atol=5e-3, rtol=0)
    torch.testing.assert_close(
        found.predictive_entropy, Categorical(average).entropy(), atol=1e-2, rtol=0
    )
    assert found.mutual_information[3] < 1e-3


def gaussians():
    torch.manual_seed(0)
    means = torch.randn(4, 3, 2)
    noises = 0.5 * torch.randn(4, 3, 2)
    return [Fixed(torch.cat([m, s], -1)) for m, s in zip(means, noises, strict=True)]


@pytest.mark.parametrize("learn", ["predictions", "uncertainty"])
def test_student_of_a_regression_ends_with_the_moments(learn, tmp_path):
    teacher, likelihood = gaussians(), zm.HeteroscedasticGaussianLikelihood()
    expected = zm.predict_moments(teacher, ROWS, 1, likelihood=likelihood)
    student = table(outputs=4 if learn == "predictions" else 6)
    result = distill(
        student, teacher, MANY, LONG, folder=tmp_path, likelihood=likelihood, learn=learn
    )
    found = result.predict_moments(ROWS)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.variance, expected.variance, atol=5e-3, rtol=0)
    if learn == "uncertainty":
        torch.testing.assert_close(found.aleatoric, expected.aleatoric, atol=5e-3, rtol=0)
        uncertainty = result.predictive_uncertainty(ROWS)
        normal = torch.distributions.Normal
        total = normal(0.0, found.variance.sqrt()).entropy().sum(-1)
        of_noise = normal(0.0, found.aleatoric.sqrt()).entropy().sum(-1)
        torch.testing.assert_close(uncertainty.predictive_entropy, total)
        torch.testing.assert_close(uncertainty.expected_entropy, of_noise)
        torch.testing.assert_close(uncertainty.mutual_information, total - of_noise)


def test_student_of_constant_noise_learns_its_variance(tmp_path):
    teacher = [Fixed(torch.tensor([[1.0], [2.0], [3.0]])), Fixed(torch.zeros(3, 1))]
    noise = zm.GaussianLikelihood(noise_variance=0.25)
    result = distill(
        table(outputs=3),
        teacher,
        MANY,
        LONG,
        folder=tmp_path,
        likelihood=noise,
        learn="uncertainty",
    )
    found = result.predict_moments(ROWS)
    torch.testing.assert_close(found.aleatoric, torch.full((3, 1), 0.25), atol=1e-3, rtol=0)
    wanted = torch.tensor([[0.25], [1.0], [2.25]])
    torch.testing.assert_close(found.epistemic, wanted, atol=5e-3, rtol=0)
    assert noise.log_noise_variance.item() == pytest.approx(math.log(0.25))  # Not trained.


def test_likelihoods_take_labels_as_others_do():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    expected = nn.functional.cross_entropy(logits, labels)
    for likelihood in (CategoricalLikelihood(), DirichletLikelihood()):
        torch.testing.assert_close(likelihood.nll(logits, labels), expected)
        torch.testing.assert_close(likelihood.probabilities(logits), logits.softmax(1))
    outputs, targets = torch.randn(5, 6), torch.randn(5, 2)
    mean, log_variance = SplitVarianceLikelihood().mean_and_log_variance(outputs)
    density = torch.distributions.Normal(mean, (log_variance / 2).exp()).log_prob(targets)
    nll = SplitVarianceLikelihood().nll(outputs, targets)
    torch.testing.assert_close(nll, -density.sum(-1).mean())
    whole = TotalVarianceLikelihood().nll(outputs[:, :4], targets)
    same = zm.HeteroscedasticGaussianLikelihood().nll(outputs[:, :4], targets)
    torch.testing.assert_close(whole, same)


def test_smoothing_is_a_mixture_with_all_classes():
    torch.manual_seed(0)
    outputs, samples = torch.randn(4, 3), 30 * torch.randn(4, 5, 3)
    likelihood = DirichletLikelihood("likelihood", smoothing=0.01)
    p = 0.99 * samples.softmax(-1) + 0.01 / 3
    expected = -Dirichlet(outputs.exp()).log_prob(p.movedim(1, 0)).mean()
    torch.testing.assert_close(likelihood.nll(outputs, samples), expected, rtol=1e-4, atol=1e-4)


def test_classes_may_lie_before_pixels(tmp_path):
    torch.manual_seed(0)
    images = torch.randn(12, 2, 4, 4)
    teacher = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Dropout(0.3))
    student = nn.Conv2d(2, 3, 3, padding=1)
    result = distill(student, teacher, images, CONFIG, folder=tmp_path, learn="uncertainty")
    assert result.predictive_uncertainty(images).mutual_information.shape == (12, 4, 4)


# --- every source, on all that `fit` does

TEACHERS = {
    "noise": noisy,
    "dropout": lambda: nn.Sequential(plain(1), nn.Dropout(0.5)),
    "list": lambda: [plain(1), noisy(2)],
    "ensemble": lambda: Ensemble([plain(seed) for seed in range(5)]),
    "states": lambda: zm.States(plain(), [plain(seed).state_dict() for seed in range(6)]),
}


@pytest.mark.parametrize("learn", ["predictions", "uncertainty"])
@pytest.mark.parametrize("kind", TEACHERS)
def test_any_source_teaches(kind, learn, tmp_path):
    result = distill(plain(9), TEACHERS[kind](), X, CONFIG, folder=tmp_path, learn=learn)
    history = result.fit.history
    assert history[-1]["nll"] < history[0]["nll"]
    assert zm.predict_proba(result.model, X, 1).shape == (60, 3)


def test_draws_of_an_average_of_weights_teach(tmp_path):
    model = plain()
    swag = SWAG(model)
    for seed in range(3):
        model.load_state_dict(plain(seed).state_dict())
        swag.update()
    result = distill(plain(9), swag.draws(5), X, CONFIG, folder=tmp_path)
    assert result.fit.history[-1]["nll"] < result.fit.history[0]["nll"]


@pytest.mark.parametrize("kind", TEACHERS)
def test_interrupted_distillation_ends_bit_for_bit_the_same(kind, tmp_path):
    options = {"learn": "uncertainty", "input_noise": 0.1}
    whole = distill(plain(9), TEACHERS[kind](), X, CONFIG, folder=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        distill(
            plain(9),
            TEACHERS[kind](),
            X,
            CONFIG,
            folder=tmp_path / "cut",
            callbacks=[At(2, 2, interrupt)],
            **options,
        )
    cut = distill(plain(9), TEACHERS[kind](), X, CONFIG, folder=tmp_path / "cut", **options)
    assert cut.fit.resumed_from == 1
    assert_same_state(cut.model, whole.model)
    assert cut.fit.history == whole.fit.history
    assert whole.fit.inexact == ()


def test_another_teacher_is_another_run(tmp_path):
    distill(plain(9), [plain(1), plain(2)], X, CONFIG, folder=tmp_path)
    with pytest.raises(ValueError, match="on_batch"):
        distill(plain(9), [plain(1), plain(3)], X, CONFIG, folder=tmp_path)
    with pytest.raises(ValueError, match="on_batch"):
        distill(plain(9), [plain(1), plain(2)], X, CONFIG, folder=tmp_path, num_samples=1)


def test_labels_are_for_evaluation_alone(tmp_path):
    teacher = TEACHERS["ensemble"]()
    labels = DataLoader(TensorDataset(X, Y), batch_size=20)
    wrong = DataLoader(TensorDataset(X, 2 - Y), batch_size=20)
    runs = [
        distill(plain(9), teacher, data, CONFIG, folder=tmp_path / name, validation=(X, Y))
        for name, data in (("right", labels), ("wrong", wrong))
    ]
    assert_same_state(runs[0].model, runs[1].model)
    row = runs[0].fit.history[-1]
    probabilities = zm.predict_proba(runs[0].model, X, 1)
    accuracy = 100 * (probabilities.argmax(-1) == Y).double().mean().item()
    assert row["validation_accuracy"] == pytest.approx(accuracy)
    nll = nn.functional.nll_loss(probabilities.log(), Y).item()
    assert row["validation_nll"] == pytest.approx(nll, rel=1e-5)


def test_validation_of_a_regression_has_its_error(tmp_path):
    noise = zm.HeteroscedasticGaussianLikelihood()
    result = distill(
        plain(9, 3),
        [plain(1, 2), plain(2, 2)],
        X,
        CONFIG,
        folder=tmp_path,
        likelihood=noise,
        learn="uncertainty",
        validation=(X, X[:, :1]),
    )
    found = result.predict_moments(X)
    rmse = (found.mean - X[:, :1]).square().mean().sqrt().item()
    assert result.fit.history[-1]["validation_rmse"] == pytest.approx(rmse, rel=1e-5)


def test_the_teacher_is_left_as_it_is(tmp_path):
    teacher = nn.Sequential(noisy(), nn.BatchNorm1d(3))
    teacher.train()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    needs = [parameter.requires_grad for parameter in teacher.parameters()]
    distill(plain(9), teacher, X, CONFIG, folder=tmp_path)
    assert teacher.training
    assert [parameter.requires_grad for parameter in teacher.parameters()] == needs
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_random_student_has_its_kl(tmp_path):
    result = distill(noisy(9), [plain(1), plain(2)], X, CONFIG, folder=tmp_path)
    assert result.fit.history[-1]["kl"] > 0


def test_noise_reaches_teacher_and_student_alike(tmp_path):
    seen = {"student": [], "teacher": []}

    class Watched(nn.Module):
        def __init__(self, name, seed):
            super().__init__()
            self.name, self.network = name, plain(seed)

        def forward(self, x):
            if not torch._C._functorch.is_batchedtensor(x):
                seen[self.name].append(x.detach().clone())
            return self.network(x)

    config = TrainingConfig(epochs=1, batch_size=60)
    teacher = [Watched("teacher", 1)]
    distill(
        Watched("student", 9), teacher, X, config, folder=tmp_path, num_samples=1, input_noise=0.5
    )
    both = seen["student"][0], seen["teacher"][-1]
    assert torch.equal(*both)
    distance = (both[0][:, None] - X).square().sum(-1).amin(1)
    assert 0.1 < distance.mean() < 4 * 0.25


# --- what is refused


def test_what_cannot_be_distilled_is_refused(tmp_path):
    def run(student=None, teacher=None, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        student = plain(9) if student is None else student
        return distill(
            student, noisy() if teacher is None else teacher, X, CONFIG, folder=folder, **options
        )

    with pytest.raises(ValueError, match=r"as much for an example.*returns \(3,\); got \(5,\)"):
        run(plain(9, 5))
    with pytest.raises(ValueError, match=r"as much for an example"):
        run(plain(9, 5), learn="uncertainty")
    noise = zm.HeteroscedasticGaussianLikelihood()
    with pytest.raises(ValueError, match="even last dimension"):
        run(plain(9, 3), noisy(0, 4), likelihood=noise)
    with pytest.raises(ValueError, match="three numbers for each output"):
        run(plain(9, 4), noisy(0, 4), likelihood=noise, learn="uncertainty")
    with pytest.raises(ValueError, match=r"as much.*returns \(4,\); got \(2,\)"):
        run(plain(9, 2), noisy(0, 4), likelihood=noise)
    with pytest.raises(TypeError, match="student must be a torch module"):
        run(plain)
    with pytest.raises(TypeError, match="model must be a torch module"):
        run(teacher=3)
    with pytest.raises(TypeError, match=r"generator gives its networks once.*zm\.States"):
        run(teacher=(plain(seed) for seed in range(3)))
    with pytest.raises(ValueError, match="at least one network"):
        run(teacher=[])
    with pytest.raises(ValueError, match="learn must be one of predictions, uncertainty"):
        run(learn="everything")
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        run(num_samples=0)
    with pytest.raises(ValueError, match="input_noise must be at least 0"):
        run(input_noise=-1.0)
    with pytest.raises(TypeError, match="mean_and_log_variance"):
        run(likelihood=nn.MSELoss())
    with pytest.raises(ValueError, match=r"samples of the teacher are the same.*predictions"):
        run(teacher=plain(1), learn="uncertainty")
    with pytest.raises(ValueError, match="returns probabilities"):
        run(teacher=nn.Sequential(noisy(), nn.Softmax(-1)))
    with pytest.raises(ValueError, match="a row for each of 20 examples"):
        run(teacher=nn.Sequential(noisy(), nn.Flatten(0)))
    student = plain(9)
    for teacher in (student, [plain(1), student], Ensemble([plain(1), student])):
        with pytest.raises(ValueError, match="part of the teacher"):
            run(student, teacher)
    with pytest.raises(ValueError, match="learned the averaged prediction"):
        run().predictive_uncertainty(X)
    with pytest.raises(ValueError, match=r"predicts classes.*predict_proba"):
        run().predict_moments(X)
    with pytest.raises(ValueError, match="SplitVarianceLikelihood is not for classes"):
        run(learn=SplitVarianceLikelihood())
    with pytest.raises(ValueError, match="DirichletLikelihood is not for a regression"):
        run(learn=DirichletLikelihood(), likelihood=noise)
    with pytest.raises(ValueError, match="match must be one of entropies, likelihood"):
        DirichletLikelihood("moments")
    with pytest.raises(ValueError, match=r"smoothing must be in \[0, 1\)"):
        DirichletLikelihood(smoothing=1.0)


def test_on_batch_gives_what_is_trained_on(tmp_path):
    def other_labels(inputs, targets):
        return inputs, (targets + 1) % 3

    config = TrainingConfig(epochs=60, batch_size=60, lr=0.05)
    result = fit(plain(), (X, Y), config, folder=tmp_path / "a", on_batch=other_labels)
    found = zm.predict_proba(result.model, X, 1).argmax(-1)
    assert (found == (Y + 1) % 3).double().mean() > 0.9
    with pytest.raises(TypeError, match="on_batch must be a function"):
        fit(plain(), (X, Y), config, folder=tmp_path / "b", on_batch=nn.Identity())
    with pytest.raises(TypeError, match=r"must be \(inputs, targets\)"):
        fit(plain(), (X, Y), config, folder=tmp_path / "c", on_batch=lambda x, y: x)
