"""Figure 7: what its attacks aim at, and what its curves and claims are made of."""

import pytest
import torch

from zeromean.experiments.variance_networks import attacks, fig7


def test_targets_are_all_the_other_classes_by_seed():
    labels = torch.arange(10).repeat(200)
    targets = attacks.other_classes(labels, 10, seed=0)
    assert not (targets == labels).any()
    offsets = ((targets - labels) % 10).bincount(minlength=10)[1:]
    assert offsets.min() > 150  # 222 of each in the mean, with a deviation of 14.
    assert torch.equal(targets, attacks.other_classes(labels, 10, seed=0))
    assert not torch.equal(targets, attacks.other_classes(labels, 10, seed=1))


def test_groups_differ_in_noise_and_number(monkeypatch, tmp_path):
    seen = {}

    def attack(name, networks, noisy, test, settings, log, *, seed):
        seen[name] = (len(networks), noisy)
        number = list(fig7.GROUPS).index(name)
        accuracy = {"accuracy": {"8": 10.0}}
        return {
            "fast_sign": {"success": [0.0, 10.0 * number]},
            "eot_pgd": accuracy,
            "autoattack": {"suspicious": int(name == "dropout")},
        }

    monkeypatch.setattr(fig7.attacks, "attack", attack)
    monkeypatch.setattr(fig7.cifar, "images", lambda config, split, log: None)
    trained = fig7.cifar.Trained(torch.nn.Identity(), [], None, None)
    monkeypatch.setattr(fig7.cifar, "train", lambda name, network, config, log: trained)
    metrics = fig7.run(fig7.Config(seed=2), None)
    assert seen == {
        "deterministic": (1, False),
        "dropout": (1, True),
        "deep_ensemble": (5, False),
        "variance": (1, True),
        "variance_ensemble": (5, True),
    }
    assert metrics["gain"]["variance_over_dropout"] == pytest.approx(-10)
    assert metrics["suspicious"] == 1
    drawn = fig7.figures([{"metrics": metrics}, {"metrics": metrics}])
    assert [trace["name"] for trace in drawn[0]["traces"]] == list(fig7.LABELS.values())
    with pytest.raises(ValueError, match="attacked must be at least 1"):
        fig7.Config(attacked=0)
