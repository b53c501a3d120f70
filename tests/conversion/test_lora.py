"""Adapters: predictions before and after, the KL, the rank, merging next to products."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.layers.lora import LoraLinear, lora_layers

NOISY = partial(zm.Additive, log_variance=-4.0)


def network():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def trained(rank=4, **options):
    """Adapters with means of their own."""
    model = network()
    zm.add_lora_(model, rank, **{"posterior": NOISY, **options})
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.up.weight.mean, std=0.3)
    return model


def test_predictions_stay_and_only_adapters_learn():
    model = network()
    plain = copy.deepcopy(model)
    x = torch.randn(50, 6)
    report = zm.add_lora_(model, rank=2)
    assert report.converted == ["0", "2"]
    assert report.keeps_predictions
    assert all(0.01 < noise < 0.04 for noise in report.noise.values())
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), plain(x))
    drawn = zm.sample_outputs(model, x, 20)
    assert 0 < (drawn - plain(x)).square().mean() < 0.05**2 * plain(x).square().mean()
    learning = {n for n, p in model.named_parameters() if p.requires_grad}
    assert learning == {
        f"{i}.{part}.weight.{name}"
        for i in (0, 2)
        for part in ("down", "up")
        for name in ("mean", "log_variance")
    }
    assert model[0].down.weight.shape == (2, 6)
    F.mse_loss(model(x), torch.randn(50, 3)).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n in learning)


def test_output_is_the_base_and_the_scaled_product():
    model = trained(rank=4, alpha=8)
    layer, x = model[0], torch.randn(5, 6)
    product = 2 * layer.up.weight.mean @ layer.down.weight.mean
    expected = F.linear(x, layer.base.weight + product, layer.base.bias)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(layer(x), expected)


def test_kl_is_that_of_the_adapters():
    model = trained(prior=zm.Normal(scale=0.5))
    layers = [m for m in model.modules() if isinstance(m, zm.Linear)]
    assert len(layers) == 4
    torch.testing.assert_close(zm.kl_divergence(model), sum(m.kl() for m in layers))


def test_merged_is_a_plain_network_with_the_outputs_of_means():
    model, x = trained(alpha=2.0), torch.randn(5, 6)
    with zm.sampling(model, zm.mean):
        expected = model(x)
    merged = zm.to_deterministic(model)
    assert [type(m) for m in merged] == [nn.Linear, nn.ReLU, nn.Linear]
    assert merged.state_dict().keys() == network().state_dict().keys()
    assert merged[0].weight.requires_grad
    torch.testing.assert_close(merged(x), expected)
    assert isinstance(model[0], LoraLinear)
    first, second = (zm.to_deterministic(model, weights="sample")(x) for _ in range(2))
    assert not torch.equal(first, second)


def test_alpha_of_a_component_is_that_of_drawn_products():
    model = trained(rank=3)
    layer = model[0]
    signal, total = layer.component_moments()
    count = 4000
    with torch.no_grad():
        down = torch.stack([layer.down.weight.sample() for _ in range(count)])
        up = torch.stack([layer.up.weight.sample() for _ in range(count)])
        squares = up.square().sum(1) * down.square().sum(2)  # (count, rank)
    error = squares.std(0) / count**0.5
    assert ((squares.mean(0) - total).abs() < 5 * error).all()
    mean = torch.einsum("or,ri->roi", layer.up.weight.mean, layer.down.weight.mean)
    torch.testing.assert_close(signal, mean.square().sum((1, 2)).double(), rtol=1e-5, atol=0)


def test_pruning_keeps_the_components_with_signal():
    model, x = trained(rank=4), torch.randn(5, 6)
    for layer in lora_layers(model).values():
        layer.up.weight.mean.data[:, 1:3] *= 1e-3
    kept = copy.deepcopy(model)
    assert zm.prune_lora_(model, threshold=3.0) == {"0": 2, "2": 2}
    for layer in lora_layers(kept).values():
        layer.up.weight.mean.data[:, 1:3] = 0
    with zm.sampling(model, zm.mean), zm.sampling(kept, zm.mean):
        torch.testing.assert_close(model(x), kept(x), rtol=0, atol=5e-3)
        torch.testing.assert_close(zm.to_deterministic(model)(x), model(x))
    assert zm.prune_lora_(model, rank=3) == {"0": 2, "2": 2}  # What is gone stays so.
    assert zm.prune_lora_(model, rank=1) == {"0": 1, "2": 1}
    assert zm.prune_lora_(model, rank=0) == {"0": 0, "2": 0}
    assert zm.kl_divergence(model) == 0
    torch.testing.assert_close(model(x), model[2].base(F.relu(model[0].base(x))), rtol=0, atol=0)


@pytest.mark.slow
def test_one_component_is_enough_for_a_change_of_rank_one():
    plain = nn.Sequential(nn.Linear(8, 8, bias=False))
    change = 0.5 * torch.outer(torch.randn(8), torch.randn(8))
    x = torch.randn(400, 8)
    y = x @ (plain[0].weight.detach() + change).T + 0.1 * torch.randn(400, 8)
    model = copy.deepcopy(plain)
    zm.add_lora_(model, rank=4, prior=zm.ARD())
    optimizer = torch.optim.Adam(zm.parameter_groups(model, lr=1e-2, log_alpha_lr=5e-2))
    beta = zm.linear_warmup(steps=300)
    for step in range(600):
        nll = 50 * (model(x) - y).square().sum(1).mean()
        loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=400, beta=beta(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    before = zm.to_deterministic(model)[0].weight
    full = copy.deepcopy(model)
    assert zm.prune_lora_(full, threshold=100.0) == {"0": 4}
    torch.testing.assert_close(zm.to_deterministic(full)[0].weight, before)
    assert zm.prune_lora_(model, rank=1) == {"0": 1}
    learned = zm.to_deterministic(model)[0].weight - plain[0].weight
    assert (learned - change).norm() < 0.1 * change.norm()


def test_files_bring_adapters_back(tmp_path):
    model = trained()
    zm.prune_lora_(model, rank=2)
    zm.save(model, tmp_path / "model.safetensors")
    fresh = network()
    zm.add_lora_(fresh, 4)
    loaded = zm.load(tmp_path / "model.safetensors", fresh)
    x = torch.randn(5, 6)
    expected = zm.sample_outputs(model, x, 3, seed=1)
    torch.testing.assert_close(zm.sample_outputs(loaded, x, 3, seed=1), expected, rtol=0, atol=0)
    assert loaded[0].rank == 2


def test_compress_merges_too():
    model, x = trained(rank=2), torch.randn(5, 6)
    zm.prune_lora_(model, rank=1)
    small = zm.compress(model, x)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(small(x), model(x))
    assert not lora_layers(small)


def test_attention_and_unselected_layers_are_left():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 2)
    ).eval()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 8)
    report = zm.add_lora_(model, 2, where=lambda name, module: name != "1")
    assert report.converted == ["0.linear1", "0.linear2"]
    assert "reads its weight directly" in report.left["0.self_attn.out_proj"]
    assert report.left["1"] == "not selected"
    assert not model[1].weight.requires_grad
    with torch.no_grad(), zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), plain(x))
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))


def test_weights_that_are_kept_transposed():
    pytransformers = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(pytransformers.Conv1D(5, 3))
    x = torch.randn(4, 3)
    expected = model(x)
    assert zm.add_lora_(model, 2).converted == ["0"]
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x), expected)
        nn.init.normal_(model[0].up.weight.mean)
        expected = model(x)
    merged = zm.to_deterministic(model)
    assert type(merged[0]) is pytransformers.Conv1D
    torch.testing.assert_close(merged(x), expected)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="rank must be at least 1"):
        zm.add_lora_(network(), 0)
    with pytest.raises(ValueError, match="alpha must be a positive number"):
        zm.add_lora_(network(), alpha=0)
    with pytest.raises(ValueError, match=r"posterior with means of both signs.*zm\.Additive"):
        zm.add_lora_(network(), posterior=zm.ZeroMean)
    with pytest.raises(ValueError, match=r"No layer was selected .*0: not selected.*where="):
        zm.add_lora_(network(), where=lambda name, module: False)
    with pytest.raises(ValueError, match=r"wrap it in nn\.Sequential"):
        zm.add_lora_(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="stochastic already"):
        zm.add_lora_(trained())
    with pytest.raises(ValueError, match=r"no adapters.*zm\.add_lora_"):
        zm.prune_lora_(network())
    with pytest.raises(ValueError, match="a threshold or a rank"):
        zm.prune_lora_(trained(), threshold=1.0, rank=2)
