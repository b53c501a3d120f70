"""Integer layers: against the plain ones, within the errors of rounding."""

import copy
import os
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import zeromean as zm
from zeromean.compression.int8 import Int8Linear
from zeromean.compression.modules.batch_last import BatchLast


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 300), (300,)])
def test_int8_layer_is_close_to_the_plain_one(bias, shape):
    plain = nn.Linear(300, 40, bias)
    layer = Int8Linear(plain)
    x = torch.randn(shape)
    output, expected = layer(x), plain(x)
    assert output.shape == expected.shape
    # Rounding errors of weights and inputs, each uniform in its step: two standard sums.
    steps = (plain.weight.abs().amax(1) / 127, x.abs().amax(-1, keepdim=True) / 127)
    error = (steps[0].square() * x.square().sum(-1, keepdim=True)).add(
        steps[1].square() * plain.weight.square().sum(1)
    )
    assert ((output - expected).abs() < 5 * (error / 12).sqrt()).all()
    assert layer.weight.dtype == torch.int8


def test_int8_layer_is_exact_for_integers():
    plain = nn.Linear(64, 8)
    with torch.no_grad():
        plain.weight.copy_(torch.randint(-127, 128, (8, 64)))
        plain.weight[:, 0] = 127.0
    x = torch.randint(-127, 128, (5, 64)).float()
    x[:, 0] = -127.0
    torch.testing.assert_close(Int8Linear(plain)(x), plain(x))


@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE"])
def test_int8_layer_is_exact_on_cpus_without_integer_dot_products(instructions, processes):
    """Sums in 16 bits, as these CPUs form them, are too small for what 8 bits can hold."""
    script = """if True:
        import torch
        from zeromean.compression.int8 import Int8Linear

        plain = torch.nn.Linear(64, 8)
        torch.nn.init.constant_(plain.weight, 127.0)
        x = torch.randint(100, 128, (5, 64)).float()
        x[:, 0] = 127.0
        torch.testing.assert_close(Int8Linear(plain)(x), plain(x))
    """
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    processes.run([sys.executable, "-c", script], env=environment)


def test_int8_layer_compiles_without_graph_breaks(fresh_dynamo):
    layer, x = Int8Linear(nn.Linear(64, 8)), torch.randn(5, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_to_int8_converts_large_plain_layers_and_keeps_the_rest():
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3), zm.Linear(3, 3))
    converted = zm.to_int8(model)
    assert [type(m) for m in converted] == [Int8Linear, nn.ReLU, nn.Linear, zm.Linear]
    assert type(model[0]) is nn.Linear
    fresh = copy.deepcopy(converted)
    fresh.load_state_dict(converted.state_dict())
    x = torch.randn(4, 300)
    torch.testing.assert_close(fresh[:3](x), converted[:3](x), rtol=0, atol=0)
    assert "Int8Linear(300, 300, bias=True)" in repr(converted)
    assert isinstance(zm.to_int8(model[0]), Int8Linear)
    with pytest.raises(ValueError, match="no plain linear layer of at least 65536 weights"):
        zm.to_int8(nn.Sequential(zm.Linear(300, 300)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_int8_layer_in_other_precisions(dtype):
    plain = nn.Linear(784, 40).to(dtype)
    x = (torch.rand(5, 784) + 2).to(dtype)
    x[3] = 0.0
    output, expected = Int8Linear(plain)(x), plain(x)
    assert output.dtype == dtype
    assert (output - expected).double().norm() < 0.02 * expected.double().norm()


def test_to_int8_reaches_the_layers_of_a_compressed_chain():
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300)).eval()
    model[0].weight.data *= torch.rand(300, 300) < 0.03
    compressed = zm.compress(model)
    assert isinstance(compressed, BatchLast)
    converted = zm.to_int8(compressed)
    x = torch.rand(4, 300)
    error = (converted(x) - compressed(x)).norm() / compressed(x).norm()
    assert 0 < error < 0.02


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformers_do_not_read_integer_weights_themselves():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    rounded = zm.to_int8(model, min_weights=1000)
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        assert (rounded(x) - model(x)).abs().max() < 0.1
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[0, 3:] = True
        kept = ~padding
        expected = model(x, src_key_padding_mask=padding)
        assert (rounded(x, src_key_padding_mask=padding) - expected)[kept].abs().max() < 0.1


def test_layers_with_hooks_stay_as_they_are():
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    rounded = zm.to_int8(model, min_weights=1)
    rounded(torch.randn(2, 30))
    assert type(rounded[0]) is nn.Linear
    assert isinstance(rounded[1], Int8Linear)
    assert calls == [1]


def test_masks_of_torch_become_zeros():
    model = nn.Sequential(nn.Linear(30, 30))
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    rounded = zm.to_int8(model, min_weights=1)
    assert (rounded[0].weight == 0).float().mean() >= 0.5
    assert list(model[0]._forward_pre_hooks)  # The model is left as it was.


def test_there_is_no_gradient_through_rounding():
    model = zm.to_int8(nn.Sequential(nn.Linear(300, 300)))
    x = torch.randn(4, 300, requires_grad=True)
    assert not model(x).requires_grad
