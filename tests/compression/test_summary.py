"""`zm.summary` says what the parts of the model say of themselves."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import cli


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = zm.Linear(8, 6, posterior=partial(zm.Additive, log_variance=-4.0))
        self.units = zm.LogNormalDropout(6)
        self.shared = zm.Linear(6, 6, posterior=partial(zm.Multiplicative, log_alpha=4.0))
        self.rate = zm.GaussianDropout(6)
        self.variance = zm.Linear(6, 6)
        self.gru = zm.GRU(6, 4)
        self.full = zm.Linear(4, 2, posterior=zm.FullCovariance)
        self.last = nn.Linear(2, 2)


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        made.own.weight.log_variance.uniform_(-12, 4)
        made.own.weight.mask = torch.rand(6, 8) > 0.3
        made.units.log_scale.uniform_(-3, 3)
        made.gru.weight_hh_l0.log_variance.uniform_(-12, 4)
    return made


def test_it_counts_what_prune_takes(model):
    told = {each.name: each.prunable for each in zm.summary(model)}
    pruned = zm.prune_(copy.deepcopy(model)).pruned
    assert {name: count for name, count in told.items() if count is not None} == pruned
    assert {name for name, count in told.items() if count is None} == {
        "shared",
        "variance",
        "full",
        "rate",
    }
    assert pruned["own"] > 0 < pruned["units"]


def test_kl_is_that_of_the_model(model):
    told = zm.summary(model)
    assert told.kl == pytest.approx(float(zm.kl_divergence(model).detach()), rel=1e-5)
    assert told["own"].kl == pytest.approx(float(model.own.kl().detach()), rel=1e-6)
    assert told["rate"].kl == pytest.approx(float(model.rate.kl().detach()), rel=1e-6)


def test_weights_that_are_nothing_but_variance(model):
    told = zm.summary(model)
    log_alpha = model.own.weight.log_alpha_per_weight()[model.own.weight.mask]
    assert told["own"].variance_only == pytest.approx(float((log_alpha > 3).double().mean()))
    assert told["shared"].variance_only == 1.0
    assert told["variance"].variance_only == 1.0
    assert told["full"].variance_only == 0.0


def test_tied_weights_count_once():
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    made[1].weight = made[0].weight
    zm.make_stochastic_(made)
    told = zm.summary(made)
    assert told["1"].tied_to == "0"
    assert told["1"].kl is None is told["1"].prunable
    assert told.kl == pytest.approx(float(zm.kl_divergence(made).detach()), rel=1e-5)


def test_its_tables_are_those_of_inspect(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    zm.save(model, "m.safetensors")
    monkeypatch.setattr("zeromean.commands.networks.build_network", lambda factory: Model())
    assert cli.main(["inspect", "m.safetensors", "--model", "any:thing"]) == 0
    told = str(zm.summary(model))
    assert told in capsys.readouterr().out
    for part in ("FullCovariance", "GRU", "LogNormalDropout", "variance only", "prune_ takes"):
        assert part in told


def test_pictures(model, tmp_path):
    paths = zm.summary(model).draw(tmp_path / "new")
    assert [path.name for path in paths] == ["log_alpha.png", "snr.png", "scale.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_broken_network_is_told_all_the_same(model):
    with torch.no_grad():
        model.own.weight.mean[0] = math.nan
        model.units.location[0] = math.nan
    told = zm.summary(model)
    assert told["own"].prunable is None is told["units"].prunable
    assert np.isnan(told["own"].numbers.log_alpha).any()
    assert "nan" in str(told)


def test_what_is_not_random_and_what_is_not_a_model():
    told = zm.summary(nn.Linear(2, 2))
    assert str(told) == "No random weights."
    assert told.kl == 0
    with pytest.raises(KeyError):
        told["0"]
    with pytest.raises(TypeError, match="model must be a torch module"):
        zm.summary("m.safetensors")
