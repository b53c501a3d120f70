"""One α for all layers, through everything that a model goes through."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm

BY_LAYER = partial(zm.Multiplicative, share="layer", log_alpha=-2.0)


def plain():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = plain()
    zm.make_stochastic_(made, posterior=BY_LAYER)
    for place, value in ((0, -1.0), (2, -2.0), (4, -3.0)):
        nn.init.constant_(made[place].weight.log_alpha, value)
    zm.share_log_alpha_(made)
    return made


def is_shared(model):
    return len({id(model[place].weight.log_alpha) for place in (0, 2, 4)}) == 1


def test_all_layers_have_one_and_its_kl_counts_every_weight(model):
    assert is_shared(model)
    assert model[0].weight.log_alpha.item() == pytest.approx(-2.0)
    weights = 24 + 36 + 18
    expected = weights * zm.functional.log_uniform_kl(torch.tensor(math.exp(2.0)))
    torch.testing.assert_close(zm.kl_divergence(model).detach(), expected)
    groups = zm.parameter_groups(model, lr=1e-2)
    assert [len(g["params"]) for g in groups if g["name"] == "log_alpha"] == [1]


def test_it_learns_as_one(model):
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=1e-2))
    zm.require_optimized(model, optimizer)
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    for _ in range(3):
        optimizer.zero_grad()
        nll = F.cross_entropy(model(x), y)
        zm.elbo_loss(nll, zm.kl_divergence(model), num_data=20).backward()
        optimizer.step()
    assert is_shared(model)
    assert model[4].weight.log_alpha != -2.0


def test_it_stays_one(model, tmp_path):
    zm.save(model, tmp_path / "m.safetensors")
    ways = (
        zm.load(tmp_path / "m.safetensors", plain()),
        zm.load(tmp_path / "m.safetensors", model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model).double(),
    )
    for other in ways:
        assert is_shared(other)
        assert other[2].weight.log_alpha.item() == pytest.approx(-2.0)
    zm.clip_log_alpha_(model, high=-4.0)
    assert model[4].weight.log_alpha == -4.0
    assert is_shared(model)


def test_some_layers_and_what_cannot_share():
    model = plain()
    zm.make_stochastic_(model, posterior=BY_LAYER)
    zm.share_log_alpha_(model, where=lambda name, layer: name != "4")
    assert model[0].weight.log_alpha is model[2].weight.log_alpha
    assert model[0].weight.log_alpha is not model[4].weight.log_alpha
    with pytest.raises(ValueError, match="at least two layers with an α by layer, got 1"):
        zm.share_log_alpha_(model, where=lambda name, layer: name == "4")
    mixed = nn.Sequential(zm.Linear(2, 2, posterior=BY_LAYER), zm.Linear(2, 2))
    with pytest.raises(ValueError, match="1 has no α of the layer to share: its posterior is Zero"):
        zm.share_log_alpha_(mixed, where=lambda name, layer: True)
    several = nn.Sequential(
        zm.Linear(2, 2, posterior=BY_LAYER),
        zm.Linear(2, 2, posterior=BY_LAYER, dtype=torch.float64),
    )
    with pytest.raises(ValueError, match="0, 1 have α of several types"):
        zm.share_log_alpha_(several)
