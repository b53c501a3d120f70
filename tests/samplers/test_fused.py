"""The fused local sampler against the plain one: same noise, same values, same gradients."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeromean as zm
from cases import LAYERS, POSTERIORS, is_normal
from zeromean.samplers import fused, linear_maps, outputs

GAUSSIAN = [name for name in POSTERIORS if is_normal(name)]


def run(layer, x, sampler, noise_seed=7):
    """Output and gradients for one sampler, with the same noise for all."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(noise_seed)
    with zm.sampling(layer, sampler):
        output = layer(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    return [output.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "Embedding"])
@pytest.mark.parametrize("posterior", GAUSSIAN)
@pytest.mark.parametrize("bias", [True, False])
def test_fused_layer_is_the_plain_one(layer, posterior, bias):
    make, inputs = LAYERS[layer]
    model = make(posterior=POSTERIORS[posterior], bias=bias, dtype=torch.float64)
    x = inputs().double()
    assert fused.can_fuse(model.linear_map(), x)
    expected = run(model, x, outputs.plain_local)
    for ours, reference in zip(run(model, x, zm.local), expected, strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("posterior", GAUSSIAN)
def test_fused_linear_takes_any_leading_dimensions(posterior):
    model = zm.Linear(6, 4, posterior=POSTERIORS[posterior], dtype=torch.float64)
    for shape in ((6,), (2, 3, 6), (0, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        expected = run(model, x, outputs.plain_local)
        for ours, reference in zip(run(model, x, zm.local), expected, strict=True):
            torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [(1, 5), (20, 50), (16, 32)])
def test_memory_formats_change_nothing_but_the_speed(memory_format, channels, monkeypatch):
    # Noise is drawn in the order of memory, so give both samplers noise that has no order.
    monkeypatch.setattr(outputs, "normal", lambda like: torch.full_like(like, 0.7))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self: self.fill_(0.7))
    monkeypatch.setattr(linear_maps, "_WORTH_COPYING", 0)
    model = zm.Conv2d(*channels, 3, posterior=zm.Additive, dtype=torch.float64)
    model = model.to(memory_format=memory_format)
    x = torch.randn(2, channels[0], 6, 7, dtype=torch.float64).to(memory_format=memory_format)
    expected = run(model, x, outputs.plain_local)
    results = run(model, x, zm.local)
    for ours, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, reference)
    assert results[0].is_contiguous(memory_format=memory_format)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected[0])


@pytest.mark.parametrize("chunk", [16, 48, 1024])
def test_chunks_of_any_size_draw_the_same_noise(chunk, monkeypatch):
    model = zm.Linear(8, 48, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = run(model, x, zm.local)[0]
    monkeypatch.setattr(fused, "_CHUNK", chunk)
    torch.testing.assert_close(run(model, x, zm.local)[0], expected)


def test_without_variance_there_is_no_noise_and_no_gradient():
    for sampler in (zm.local, outputs.plain_local):
        model = zm.Linear(3, 2, bias=False)
        with torch.no_grad():
            model.weight.scale[0] = 1e-21
        x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
        output, grad_x, grad_scale = run(model, x, sampler)
        assert (output[1] == 0).all()
        assert output[0, 0] == 0
        assert output[0, 1] != 0
        assert (grad_x[1] == 0).all()
        assert (grad_scale[0] == 0).all()
        assert grad_scale.isfinite().all()


@pytest.mark.parametrize("posterior", GAUSSIAN)
def test_double_backward_is_that_of_the_plain_version(posterior):
    make, inputs = LAYERS["Conv2d"]
    model = make(posterior=POSTERIORS[posterior], dtype=torch.float64)
    x = inputs().double().requires_grad_()

    def second_derivatives(sampler):
        torch.manual_seed(3)
        with zm.sampling(model, sampler):
            output = model(x)
        parameters = [x, *model.parameters()]
        gradients = torch.autograd.grad(output.pow(3).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), parameters)

    for ours, reference in zip(
        second_derivatives(zm.local), second_derivatives(outputs.plain_local), strict=True
    ):
        torch.testing.assert_close(ours, reference)


def test_backward_twice_through_one_graph():
    model, x = zm.Linear(4, 3), torch.randn(2, 4)
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    first = model.weight.scale.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.weight.scale.grad, 2 * first)


def test_output_may_be_changed_in_place():
    model = nn.Sequential(zm.Conv2d(1, 2, 3), nn.ReLU(inplace=True))
    model(torch.randn(2, 1, 5, 5)).sum().backward()
    assert model[0].weight.scale.grad.isfinite().all()


def test_frozen_parameters_and_inputs_get_no_gradient():
    model = zm.Linear(4, 3, posterior=zm.Additive)
    model.weight.mean.requires_grad_(False)
    model(torch.randn(2, 4)).sum().backward()
    assert model.weight.mean.grad is None
    assert model.weight.log_variance.grad is not None


def test_fused_is_not_used_where_it_would_be_in_the_way():
    op, x = zm.Linear(4, 3).linear_map(), torch.randn(2, 4)
    assert fused.can_fuse(op, x)
    assert not fused.can_fuse(zm.Embedding(3, 2).linear_map(), torch.tensor([1]))
    with torch.no_grad():
        assert not fused.can_fuse(op, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fused.can_fuse(op, x)
    torch.func.vmap(lambda row: row if not fused.can_fuse(op, row) else 1 / 0)(x)


def test_training_keeps_little_more_than_a_deterministic_layer():
    saved = {}

    def count(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model, x = zm.Conv2d(3, 8, 3), torch.randn(4, 3, 16, 16)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        output = model(x)
    own = x.nbytes + model.weight.scale.nbytes
    assert sum(saved.values()) <= own + output.nbytes


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 0],  # one token of a sequence
        lambda x: x[..., ::2][:, 0, :3].repeat_interleave(2, -1)[..., :6],
        lambda x: x[:1].expand(4, 3, 6),
        lambda x: x.flatten().unfold(0, 6, 1)[:7],
        lambda x: x.transpose(0, 1),
    ],
)
@pytest.mark.parametrize("posterior", ["ZeroMean", "Additive"])
def test_inputs_may_be_views_of_any_kind(view, posterior):
    model = zm.Linear(6, 4, posterior=POSTERIORS[posterior], dtype=torch.float64)
    base = torch.randn(4, 3, 6, dtype=torch.float64)
    results = []
    for sampler in (zm.local, outputs.plain_local):
        leaf = base.clone().requires_grad_()
        model.zero_grad()
        torch.manual_seed(5)
        with zm.sampling(model, sampler):
            output = model(view(leaf))
        output.square().sum().backward()
        results.append([output.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("posterior", ["ZeroMean", "Multiplicative-layer", "Additive"])
def test_weight_and_input_may_have_different_memory_formats(posterior, monkeypatch):
    monkeypatch.setattr(outputs, "normal", lambda like: torch.full_like(like, 0.7))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda self: self.fill_(0.7))
    for channels in (1, 3, 20):
        model = zm.Conv2d(channels, 4, 3, posterior=POSTERIORS[posterior], dtype=torch.float64)
        model = model.to(memory_format=torch.channels_last)
        grey = torch.rand(5, 1, 8, 9, dtype=torch.float64)
        for x in (grey.repeat(1, channels, 1, 1), grey.expand(5, channels, 8, 9)):
            results = []
            for sampler in (zm.local, outputs.plain_local):
                model.zero_grad()
                with zm.sampling(model, sampler):
                    output = model(x)
                output.square().sum().backward()
                results.append([output.detach(), *(p.grad for p in model.parameters())])
            for ours, reference in zip(*results, strict=True):
                torch.testing.assert_close(ours, reference)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit, from inside forward_ad
def test_forward_mode_derivatives():
    model = zm.Linear(4, 3, dtype=torch.float64)
    x, direction = torch.randn(2, 5, 4, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        torch.manual_seed(1)
        tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    step = 1e-6
    torch.manual_seed(1)
    ahead = model(x + step * direction)
    torch.manual_seed(1)
    behind = model(x - step * direction)
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-8)


GEOMETRIES = {
    "Linear": (lambda: zm.Linear(30, 20), (7, 30)),
    "Linear with a short last chunk": (lambda: zm.Linear(4, 65541), (1, 4)),
    "Linear with two chunks": (lambda: zm.Linear(10, 300, posterior=zm.Additive), (300, 10)),
    "Conv2d in a better format": (lambda: zm.Conv2d(20, 50, 5), (32, 20, 12, 12)),
    "Conv2d": (lambda: zm.Conv2d(3, 8, 3, posterior=zm.Additive), (4, 3, 9, 9)),
    "ConvTranspose2d": (lambda: zm.ConvTranspose2d(20, 50, 3), (32, 20, 8, 8)),
    "Conv1d": (lambda: zm.Conv1d(3, 5, 3), (4, 3, 20)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_seed_gives_the_same_noise_without_gradients(name):
    build, shape = GEOMETRIES[name]
    layer, x = build(), torch.randn(shape)
    outputs = []
    for enabled in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(enabled):
            outputs.append(layer(x).detach())
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_under_checkpointing_are_those_of_the_output(name):
    build, shape = GEOMETRIES[name]
    layer = build()
    x = torch.randn(shape, requires_grad=True)
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=True)):
        layer.zero_grad()
        torch.manual_seed(1)
        run(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_a_padding_row_has_no_noise_with_gradients_either():
    embedding = zm.Embedding(6, 4, padding_idx=2, posterior=zm.Additive)
    head = zm.Linear(4, 6, bias=False, posterior=zm.Additive)
    head.weight = embedding.weight
    outputs = head(torch.ones(50, 4))
    assert outputs[:, 2].detach().unique().numel() == 1
    assert outputs[:, 3].detach().unique().numel() == 50


def test_layers_run_on_the_meta_device():
    layer = zm.Linear(3, 2, device="meta")
    assert layer(torch.empty(4, 3, device="meta")).shape == (4, 2)


@pytest.mark.parametrize("kind", [zm.Conv2d, zm.Conv3d])
def test_weights_and_inputs_in_other_formats_draw_the_same_without_gradients(kind):
    dims = 2 if kind is zm.Conv2d else 3
    layer = kind(1, 6, 3, posterior=partial(zm.Additive, log_variance=0.0))
    layer = layer.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    x = torch.randn(2, 1, *[6] * dims)
    torch.manual_seed(1)
    expected = layer(x)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)
