"""Attacks: closed forms on linear networks, peers on trained ones, and what they refuse."""

import warnings

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.ensembles import Ensemble
from zeromean.robustness import autoattack, eot_pgd, iterative_fast_sign, judge, random_noise
from zeromean.robustness.progress import progress_bar

EPSILON = 0.08


def linear(weight, bias=0.0):
    model = nn.Linear(len(weight), 2)
    with torch.no_grad():
        model.weight.copy_(torch.stack([torch.zeros(len(weight)), torch.tensor(weight)]))
        model.bias.copy_(torch.tensor([0.0, bias]))
    return model


def test_on_a_linear_network_every_pixel_goes_all_the_way():
    model = linear([2.0, -1.0, 0.0])
    x = torch.tensor([[0.5, 0.5, 0.5], [0.05, 0.98, 0.2]])
    labels = torch.tensor([1, 1])
    made = eot_pgd(model, x, labels, epsilon=0.1, num_steps=5, random_start=False)
    assert torch.allclose(made.images, torch.tensor([[0.4, 0.6, 0.5], [0.0, 1.0, 0.2]]))
    aimed = eot_pgd(
        model, x, 1 - labels, targets=labels, epsilon=0.1, num_steps=5, random_start=False
    )
    assert torch.allclose(aimed.images, torch.tensor([[0.6, 0.4, 0.5], [0.15, 0.88, 0.2]]))


def test_success_of_the_iterated_fast_sign_is_that_of_a_linear_network():
    # The logit of class 1 is x − 0.5: from x the target is reached after (0.5 − x) / step steps.
    model = linear([1.0], bias=-0.5)
    x = torch.tensor([[0.495], [0.47], [0.42], [0.1]])
    labels, targets = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)
    made = iterative_fast_sign(model, x, labels, targets, num_steps=9, step=0.01, batch_size=3)
    expected = [sum(0.5 - x.squeeze(1) < 0.01 * step) / 4 for step in range(10)]
    assert torch.equal(made.success_by_step, torch.stack(expected).double())
    assert torch.allclose(made.images, x + 0.09)
    near = iterative_fast_sign(
        model, x, labels, targets, num_steps=9, step=0.01, epsilon=0.02
    ).images
    assert torch.allclose(near, x + 0.02)


def test_foolboxs_pgd_comes_to_the_same_images(plain, digits):
    images, labels = (part[1400:1600] for part in digits)
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed: pip install foolbox")
    steps, step = 20, EPSILON / 8
    attack = foolbox.attacks.LinfPGD(abs_stepsize=step, steps=steps, random_start=False)
    theirs = foolbox.PyTorchModel(plain, bounds=(0, 1), device="cpu")
    _, found, fooled = attack(theirs, images, labels, epsilons=EPSILON)
    ours = eot_pgd(
        plain, images, labels, epsilon=EPSILON, num_steps=steps, step=step, random_start=False
    )
    survived = judge(plain, images, labels, ours).correct["PGD"]
    assert (survived == ~fooled).double().mean() >= 0.98
    assert ((ours.images - found).abs().amax((1, 2, 3)) < 1e-5).double().mean() >= 0.98
    assert 0.1 < fooled.double().mean() < 0.95


def test_pyautoattacks_apgd_agrees(plain, digits):
    images, labels = (part[1400:1600] for part in digits)
    pytest.importorskip("pyautoattack")
    from pyautoattack.autopgd_base import APGDAttack

    attack = APGDAttack(plain, n_iter=100, eps=EPSILON, device="cpu")
    attack.init_hyperparam(images)
    # From the images themselves: without a random start.
    _, still_correct, _, _ = attack.attack_single_run(images, labels, x_init=images)
    still_correct = still_correct & (plain(images).argmax(-1) == labels)
    ours = eot_pgd(plain, images, labels, epsilon=EPSILON, num_steps=60, random_start=False)
    (apgd,) = autoattack(plain, images, labels, epsilon=EPSILON, attacks=["apgd-ce"])
    judged = judge(plain, images, labels, [ours, apgd])
    assert (judged.correct["PGD"] == still_correct).double().mean() >= 0.98
    assert (judged.correct["apgd-ce"] == still_correct).double().mean() >= 0.98


@pytest.mark.parametrize("name", ["apgd-dlr", "apgd-t", "fab", "fab-t", "square"])
def test_every_attack_of_autoattack_stays_within_its_bound(plain, images, labels, name):
    pytest.importorskip("pyautoattack")
    few, y = images[:12], labels[:12]
    state = torch.get_rng_state()
    options = {"epsilon": 0.15, "attacks": name, "num_steps": 20, "num_queries": 300}
    (made,) = autoattack(plain, few, y, **options, batch_size=5)
    assert made.attack == name
    assert made.images.shape == few.shape
    assert torch.equal(torch.get_rng_state(), state)
    assert judge(plain, few, y, made, epsilon=0.15).success(name) > 0.3
    (flat,) = autoattack(nn.Sequential(*plain[1:]), few.flatten(1), y, **options, batch_size=5)
    if name != "square":  # Rows have no squares.
        assert torch.allclose(flat.images, made.images.flatten(1), atol=1e-6)


def test_attacks_take_every_kind_of_classifier(plain, variance, dropout, images, labels):
    few, y = images[:10], labels[:10]
    sources = {
        "variance": variance,
        "dropout": dropout,
        "ensemble": Ensemble([plain]),
        "several": [plain, variance],
        "states": zm.States(plain, [plain.state_dict()] * 2),
    }
    for name, source in sources.items():
        options = {"epsilon": 0.15, "num_steps": 8}
        made, again = (eot_pgd(source, few, y, **options, batch_size=4) for _ in range(2))
        assert torch.equal(made.images, again.images), name
        assert made.num_samples == (20 if name in ("variance", "dropout", "several") else 1)
        judged = judge(source, few, y, made, num_samples=30)
        assert judged.robust_accuracy < judged.clean_accuracy, name


def test_batches_and_the_global_generator_change_nothing(plain, images, labels):
    options = {"epsilon": EPSILON, "num_steps": 5, "random_start": False}
    state = torch.get_rng_state()
    whole = eot_pgd(plain, images, labels, **options).images
    assert torch.allclose(whole, eot_pgd(plain, images, labels, **options, batch_size=7).images)
    assert torch.equal(torch.get_rng_state(), state)
    started = eot_pgd(plain, images, labels, **(options | {"random_start": True}))
    assert not torch.allclose(started.images, whole)
    margin = eot_pgd(plain, images, labels, **options, loss="margin")
    assert judge(plain, images, labels, margin).robust_accuracy < 0.9


def test_without_noise_an_average_over_draws_says_so(plain, images, labels):
    options = {"epsilon": EPSILON, "num_steps": 3, "random_start": False}
    with pytest.warns(UserWarning, match="draws no noise.*20 draws are all alike"):
        made = eot_pgd(plain, images, labels, num_samples=20, **options)
    assert made.attack == "PGD"
    assert torch.equal(made.images, eot_pgd(plain, images, labels, **options).images)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eot_pgd(plain, images, labels, num_samples=1, **options)


def test_what_cannot_be_attacked_is_refused(plain, images, labels):
    other = (labels + 1) % 10
    once = torch.cat([labels[:1], other[1:]])
    three = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    cases = [
        (ValueError, r"must lie in \[0, 1\].*normalization", {"images": images * 255}),
        (ValueError, r"must lie in \[0, 1\]", {"images": images - 0.5}),
        (ValueError, "must not be negative, got -0.1", {"epsilon": -0.1}),
        (
            ValueError,
            r"targets must differ.*1 of 50",
            {"targets": once},
        ),
        (ValueError, "targets must be from 0 to 9", {"targets": other + 10}),
        (ValueError, "labels must be from 0 to 9", {"labels": labels + 10}),
        (ValueError, "one class for each of 50 images", {"labels": labels[:3]}),
        (TypeError, "labels must be a tensor of classes", {"labels": labels.float()}),
        (ValueError, "at least one image", {"images": images[:0]}),
        (TypeError, "needs a tensor, got a numpy", {"images": images.numpy()}),
        (ValueError, "step, in pixels", {"step": 0.0}),
        (ValueError, "loss must be one of", {"loss": "hinge"}),
        (TypeError, "must be a torch module", {"model": None}),
        (
            ValueError,
            "must agree",
            {"model": [plain, three]},
        ),
    ]
    for kind, message, changed in cases:
        arguments = {"model": plain, "images": images, "labels": labels, "epsilon": 0.1} | changed
        with pytest.raises(kind, match=message):
            eot_pgd(**arguments)
    with pytest.raises(ValueError, match="targets must differ"):
        iterative_fast_sign(plain, images, labels, labels)
    with pytest.raises(ValueError, match="must not be negative"):
        random_noise(images, -1.0)
    with pytest.raises(ValueError, match=r"attacks must be .*got 'pgd'"):
        autoattack(plain, images, labels, epsilon=0.1, attacks=["pgd"])
    with pytest.raises(ValueError, match="keep must be"):
        autoattack(plain, images, labels, epsilon=0.1, keep="best")


def test_losses_that_need_more_classes_say_so():
    pytest.importorskip("pyautoattack")
    x, y = torch.rand(4, 3), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="apgd-dlr needs at least 3 classes, got 2"):
        autoattack(nn.Linear(3, 2), x, y, epsilon=0.1)


def test_where_pyautoattack_is_missing_the_extra_is_named(plain, images, labels, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyautoattack", None)
    with pytest.raises(ImportError, match=r"'\.\[attacks\]'"):
        autoattack(plain, images, labels, epsilon=0.1)


def test_a_progress_bar_is_drawn_on_terminals_only(monkeypatch, capsys):
    with progress_bar("attack", 2, True) as advance:
        advance()
    assert capsys.readouterr().out == ""
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("attack", 2, True) as advance:
        advance()
        advance()
    assert "attack" in capsys.readouterr().out
