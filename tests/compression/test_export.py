"""Compressed models as files: safetensors without pickle, and ONNX in onnxruntime."""

import json
import math
import struct
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from test_compress import ADDITIVE, Residual, images, zero_out
from torch import nn
from torch.nn.utils import prune as torch_prune

import zeromean as zm
from zeromean import export
from zeromean.compression.export import bit_packing, sparse_coding, tensor_codes
from zeromean.compression.modules.batch_last import BatchLast
from zeromean.layers.dropout.unit_noise import UnitScale
from zeromean.models.lenet import lenet5, lenet5_caffe, lenet_300_100

HEADER = "zeromean.compressed"


def variance_network():
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.ReLU(),
        zm.Linear(8, 10, posterior=partial(zm.ZeroMean, noise=zm.uniform), sampler=zm.weight),
        nn.BatchNorm1d(10),
        nn.ReLU(),
        zm.Linear(10, 3, bias=False),
    ).eval()
    zm.prune_(model, by="variance", sparsity=0.6)
    return model


@pytest.mark.parametrize("density", [0.0, 0.001, 0.02, 0.3, 1.0])
def test_sparse_code_gives_the_tensor_back(density):
    tensor = torch.randn(50, 40, 3) * (torch.rand(50, 40, 3) < density)
    values, steps = sparse_coding.encode(tensor)
    assert torch.equal(sparse_coding.decode(values, steps, tensor.shape), tensor)
    # A byte for every value, and one for each whole 255 places that are skipped.
    assert len(values) <= len(steps) <= len(values) + tensor.numel() // 255
    edge = torch.zeros(1, 1024)
    edge[0, [0, 255, 511, 767, 1023]] = 1.0
    assert torch.equal(sparse_coding.decode(*sparse_coding.encode(edge), edge.shape), edge)


@pytest.mark.parametrize(
    "network",
    [
        lambda: zero_out(lenet5(), 0.95),
        lambda: zero_out(lenet5(activation=nn.GELU, batchnorm=False), 0.3),
        lambda: zero_out(nn.Sequential(nn.Conv1d(1, 4, 3), nn.LayerNorm(26), nn.Flatten()), 0.5),
        lambda: zero_out(nn.Sequential(nn.Flatten(), nn.Linear(784, 9, bias=False)), 0.5),
        lambda: zero_out(Residual(), 0.9),
    ],
)
def test_loaded_model_predicts_the_same(network, tmp_path):
    model = network()
    compressed = zm.compress(model)
    x = images(12)[0]
    x = (
        x[:, :, 0]
        if isinstance(model[0] if isinstance(model, nn.Sequential) else 0, nn.Conv1d)
        else x
    )
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    assert type(loaded) is type(compressed) or "GraphModule" in type(loaded).__name__
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    outputs, expected = loaded(x), compressed(x)
    if isinstance(expected, dict):
        outputs, expected = outputs["logits"], expected["logits"]
    assert torch.equal(outputs, expected)


def test_recurrent_layers_survive(tmp_path):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(28, 6, batch_first=True, bidirectional=True)
            self.dense = nn.Linear(12, 3)

        def forward(self, x):
            states, _ = self.gru(x.squeeze(1))
            return self.dense(states[:, -1])

    compressed = zm.compress(zero_out(Last(), 0.5))
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    (x,) = images(3)
    assert torch.equal(loaded(x), compressed(x))
    export.save_onnx(compressed, tmp_path / "m.onnx", x)
    output = in_onnxruntime(tmp_path / "m.onnx")(x)
    torch.testing.assert_close(output, compressed(x), rtol=1e-5, atol=1e-5)


def test_variance_layers_and_multipliers_survive(tmp_path):
    compressed = zm.compress(variance_network())
    compressed.append(UnitScale(torch.tensor([1.0, 2.0, 3.0])))
    export.save_compressed(compressed, tmp_path / "m.safetensors")
    loaded = export.load_compressed(tmp_path / "m.safetensors")
    outputs = []
    for model in (compressed, loaded):
        torch.manual_seed(1)
        outputs.append(model(torch.ones(4, 6)))
    assert torch.equal(*outputs)


def test_file_of_a_sparse_network_is_small_and_its_size_is_reported(tmp_path):
    model = lenet_300_100(**dict.fromkeys(("dense1", "dense2", "dense3"), ADDITIVE["dense"]))
    for name, sparsity in (("dense1", 0.989), ("dense2", 0.972), ("dense3", 0.62)):
        zm.prune_(model, sparsity=sparsity, where=lambda n, _, name=name: n == name)
    path = tmp_path / "m.safetensors"
    saved = export.save_compressed(zm.compress(model), path, original=model)
    assert saved.size == path.stat().st_size
    assert saved.original_size == 4 * (784 * 300 + 300 * 100 + 100 * 10 + 300 + 100 + 10)
    assert saved.ratio > 40
    assert str(saved).endswith(f"{saved.size:,} bytes, {saved.ratio:.1f}× smaller than 1,066,440")
    assert str(export.save_compressed(zm.compress(model), path)).endswith(f"{saved.size:,} bytes")
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    json.loads(content[8 : 8 + length])


def test_what_a_file_cannot_describe_is_refused(tmp_path):
    class Own(nn.Module):
        def forward(self, x):
            return x.sort(-1).values

    path = tmp_path / "m.safetensors"
    with pytest.raises(ValueError, match="A file cannot describe Own: it holds"):
        export.save_compressed(nn.Sequential(nn.ReLU(), Own()), path)
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(ValueError, match="A file cannot describe the hooks of ReLU; remove them"):
        export.save_compressed(nn.Sequential(hooked), path)
    network = torch.fx.symbolic_trace(Own())
    with pytest.raises(ValueError, match="A file cannot describe sort, which the forward"):
        export.save_compressed(network, path)
    with pytest.raises(ValueError, match="a stochastic layer here has means; compress the model"):
        export.save_compressed(ADDITIVE["dense"](3, 2), path)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        export.save_compressed(nn.ReLU(), tmp_path / "none" / "m.safetensors")
    assert not path.exists()


def rewrite(path, change):
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[HEADER])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, RUF100
    change(header, tensors)
    save_file(tensors, path, metadata={HEADER: json.dumps(header)})


@pytest.mark.parametrize(
    "change",
    [
        lambda header, _: header.pop("model"),
        lambda header, _: header["model"].update(kind="os.system"),
        lambda header, _: header["model"]["modules"]["dense1"].update(kind="Linear2"),
        lambda header, _: header["model"]["modules"]["dense1"]["arguments"].update(in_features=3),
        lambda header, _: header["sparse"].update({"dense1.weight": [2, 2]}),
        lambda _, tensors: tensors.pop("dense1.bias"),
        lambda _, tensors: tensors.update(
            {"dense1.weight.steps": tensors["dense1.weight.steps"][1:].clone()}
        ),
    ],
)
def test_damaged_files_get_a_sentence(change, tmp_path):
    path = tmp_path / "m.safetensors"
    model = lenet_300_100(dense1=ADDITIVE["dense"])
    zm.prune_(model, sparsity=0.99)
    export.save_compressed(zm.compress(model), path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=r"has a damaged header \(.*\); save it again"):
        export.load_compressed(path)


@pytest.mark.parametrize(
    ("op", "place", "value"),
    [
        ("placeholder", 2, "x=print('run')"),
        ("placeholder", 2, "lambda"),
        ("call_module", 2, "dense'), print('run"),
        ("call_method", 4, {"dict": [["dim=print('run'), other", 1]]}),
        ("call_method", 0, "get_attr"),
    ],
)
def test_code_in_a_file_is_refused(op, place, value, tmp_path, capsys):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 3)

        def forward(self, x):
            return self.dense(x).softmax(dim=-1)

    def change(header, _):
        nodes = header["model"]["nodes"]
        (node,) = [node for node in nodes if node[0] == op]
        if op == "call_module":
            header["model"]["modules"][value] = {"kind": "ReLU", "arguments": {}}
        node[place] = value

    path = tmp_path / "m.safetensors"
    export.save_compressed(torch.fx.symbolic_trace(Network()), path)
    export.load_compressed(path)(torch.ones(2, 4))
    rewrite(path, change)
    with pytest.raises(ValueError, match="has a damaged header"):
        export.load_compressed(path)(torch.ones(2, 4))
    assert capsys.readouterr().out == ""


def test_files_are_loaded_for_inference_mode(tmp_path):
    path = tmp_path / "m.safetensors"
    compressed = zm.compress(zero_out(lenet5_caffe(), 0.97))
    export.save_compressed(compressed, path)
    (x,) = images(9)
    with torch.inference_mode():
        assert torch.equal(export.load_compressed(path)(x), compressed(x))


def test_other_files_and_newer_formats_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(nn.Linear(2, 2), path)
    with pytest.raises(ValueError, match=r"not one that export\.save_compressed wrote"):
        export.load_compressed(path)
    export.save_compressed(nn.Sequential(nn.ReLU()), path)
    rewrite(path, lambda header, tensors: (header.update(format_version=4), tensors.clear()))
    with pytest.raises(ValueError, match="has format version 4, this zeromean reads up to 3"):
        export.load_compressed(path)


def multiples(shape, largest, density, by=None):
    """Whole multiples of a step, or of one for each row or column."""
    numbers = torch.randint(-largest, largest + 1, shape).float() * (torch.rand(shape) < density)
    steps = torch.rand(1) + 0.1
    if by is not None:
        steps = (torch.rand(shape[by]) + 0.1).view(
            [-1 if d == by else 1 for d in range(len(shape))]
        )
    return numbers * steps


@pytest.mark.parametrize("shape", [(30, 50), (6, 5, 3, 3), (1, 7)])
@pytest.mark.parametrize("largest", [1, 3, 7, 100, 2000])
@pytest.mark.parametrize("by", [None, 0, 1])
@pytest.mark.parametrize("density", [0.0, 0.05, 1.0])
def test_weights_on_a_grid_come_back_from_few_bits(shape, largest, by, density):
    torch.manual_seed(largest)
    tensor = multiples(shape, largest, density, by)
    code = tensor_codes.encode(tensor)
    if tensor.numel() > 1000 and largest <= 100:
        bits = math.log2(2 * largest + 1) + 1
        table = 4 * (1 if by is None else shape[by])
        assert code.nbytes < tensor.numel() * min(bits, density * (bits + 8)) / 8 + table + 40
    if tensor_codes.BITS in code.parts:
        back = tensor_codes.decode_bits(code.parts[tensor_codes.BITS], tensor.shape)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types_come_back_as_they_were(dtype):
    tensor = multiples((40, 30), 7, 0.5).to(dtype)
    code = tensor_codes.encode(tensor)
    back = tensor_codes.decode_bits(code.parts[tensor_codes.BITS], tensor.shape)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_few_values_come_back_from_a_list():
    values = torch.tensor([0.0, 0.1, -0.37, 1.5, 9.0])
    tensor = values[torch.randint(5, (40, 30))]
    code = tensor_codes.encode(tensor)
    assert code.nbytes < 40 * 30 * 3 / 8 + 60
    back = tensor_codes.decode_bits(code.parts[tensor_codes.BITS], tensor.shape)
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e30])
def test_weights_that_were_never_rounded_are_kept_to_the_last_bit(scale):
    tensor = torch.randn(20, 30) * scale
    assert list(tensor_codes.encode(tensor).parts) == [""]
    tensor *= torch.rand(20, 30) < 0.1
    code = tensor_codes.encode(tensor)
    assert code.nbytes <= 5 * int(tensor.count_nonzero()) + 5
    tensor[0, 0] = math.nan
    assert tensor_codes.BITS not in tensor_codes.encode(tensor).parts


@pytest.mark.parametrize("numbers", [[], [0], [5], [0] * 20, [1, 0, 1], [2**40, 3], range(300)])
def test_whole_numbers_come_back_from_their_bits(numbers):
    array = np.array(list(numbers), dtype=np.int64)
    code = bit_packing.pack(array)
    assert len(code) == bit_packing.size(array)
    back, rest = bit_packing.unpack(code + b"rest")
    assert np.array_equal(back, array)
    assert rest == b"rest"


def test_damaged_bits_are_refused_and_ask_for_little_memory():
    tensor = multiples((40, 30), 7, 0.2, by=0)
    bits = tensor_codes.encode(tensor).parts[tensor_codes.BITS]
    with pytest.raises(ValueError, match="got"):
        tensor_codes.decode_bits(bits, torch.Size([100_000, 100_000]))
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bits.clone()
        for _ in range(generator.integers(1, 4)):
            damaged[generator.integers(len(bits))] = int(generator.integers(256))
        damaged = damaged[: generator.integers(1, len(bits) + 1)]
        try:
            back = tensor_codes.decode_bits(damaged, tensor.shape)
        except ValueError:
            continue
        assert back.shape == tensor.shape


def test_files_of_version_0_1_0_load(tmp_path):
    """As that version wrote them: sparse weights by values and steps, and no word on bits."""
    weight = torch.randn(4, 6) * (torch.rand(4, 6) < 0.3)
    values, steps = sparse_coding.encode(weight)
    tensors = {"0.weight.values": values, "0.weight.steps": steps, "0.bias": torch.randn(4)}
    header = {
        "format_version": 1,
        "model": {
            "kind": "Sequential",
            "modules": {
                "0": {"kind": "Linear", "arguments": {"in_features": 6, "out_features": 4}},
                "1": {"kind": "ReLU", "arguments": {}},
            },
        },
        "sparse": {"0.weight": [4, 6]},
    }
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={HEADER: json.dumps(header)})
    x = torch.randn(3, 6)
    expected = torch.nn.functional.linear(x, weight, tensors["0.bias"]).relu()
    torch.testing.assert_close(export.load_compressed(path)(x), expected)


def test_only_files_with_bits_need_the_newer_format(tmp_path):
    path = tmp_path / "m.safetensors"
    versions = []
    for weight in (torch.randn(20, 30), multiples((20, 30), 3, 0.5)):
        layer = nn.Linear(30, 20)
        layer.weight.data.copy_(weight)
        saved = export.save_compressed(nn.Sequential(layer), path)
        assert saved.size == export.compressed_size(nn.Sequential(layer))
        with safe_open(path, framework="pt") as file:
            versions.append(json.loads(file.metadata()[HEADER])["format_version"])
        assert torch.equal(export.load_compressed(path)[0].weight, weight)
    assert versions == [1, 2]


def in_onnxruntime(path):
    """The model of a file, as a function."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    return lambda x: torch.from_numpy(session.run(None, {argument.name: x.numpy()})[0])


@pytest.mark.parametrize("network", [lenet5_caffe, Residual])
def test_onnxruntime_predicts_what_torch_predicts(network, tmp_path):
    model = zero_out(network(), 0.95)
    compressed = zm.compress(model)
    saved = export.save_onnx(compressed, tmp_path / "m.onnx", *images(2), original=model)
    assert saved.size == (tmp_path / "m.onnx").stat().st_size
    assert saved.ratio > 1
    predict = in_onnxruntime(saved.path)
    for x in images(1, 9):
        expected = model(x)
        expected = expected["logits"] if isinstance(expected, dict) else expected
        torch.testing.assert_close(predict(x), expected.detach(), rtol=1e-4, atol=1e-5)


def test_onnxruntime_draws_from_variance_layers_anew(tmp_path):
    onnxruntime.set_seed(0)  # Its own generator, whatever torch's seed is.
    compressed = zm.compress(variance_network())
    saved = export.save_onnx(compressed, tmp_path / "m.onnx", torch.randn(2, 6))
    draw = in_onnxruntime(saved.path)
    x = torch.randn(2, 6)
    # The uniform layer draws its weights once a run: one object of every run.
    theirs = torch.cat([draw(x)[:1] for _ in range(2000)])
    ours = zm.sample_outputs(compressed, x[:1], 2000, seed=0).squeeze(1)
    for moment in (1, 2):
        samples = [draws.double() ** moment for draws in (theirs, ours)]
        error = sum(s.var(0) / len(s) for s in samples).sqrt()
        assert ((samples[0].mean(0) - samples[1].mean(0)).abs() < 5 * error).all()
    assert len(theirs.unique(dim=0)) == 2000


def test_what_onnx_cannot_hold_gets_a_sentence(tmp_path, monkeypatch):
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match=r"ONNX cannot hold this model \(.+\); compress it first"):
        export.save_onnx(Branching(), tmp_path / "m.onnx", torch.ones(2, 3))
    frozen = torch.randn(5)
    layer = zm.Linear(3, 5, sampler=lambda op, x, posterior, bias: op(x, posterior.scale) + frozen)
    with pytest.raises(ValueError, match="would freeze the noise of a stochastic layer"):
        export.save_onnx(layer, tmp_path / "m.onnx", torch.ones(2, 3))
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        export.save_onnx(nn.ReLU(), tmp_path / "none" / "m.onnx", torch.ones(2, 3))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[export\]'"):
        export.save_onnx(nn.ReLU(), tmp_path / "m.onnx", torch.ones(2, 3))
    assert list(tmp_path.iterdir()) == []


def test_an_onnx_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    export.save_onnx(nn.ReLU(), path, torch.ones(2, 3))
    before = path.read_bytes()

    def fail(proto, file):
        Path(file).write_bytes(b"half of")
        raise OSError("No space left on device")

    monkeypatch.setattr(onnx, "save_model", fail)
    with pytest.raises(OSError, match="No space left"):
        export.save_onnx(nn.Tanh(), path, torch.ones(2, 3))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_onnx_of_a_network_with_masks_of_torch_prune(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(3, 4))
    torch_prune.l1_unstructured(model[0], "weight", 0.5)
    x = torch.randn(5, 3)
    export.save_onnx(model, tmp_path / "m.onnx", x)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(x).detach())


def test_chain_keeps_its_class(tmp_path):
    model = zero_out(
        nn.Sequential(nn.Linear(200, 190), nn.ReLU(), nn.Linear(190, 60)), 0.97, dead=0
    )
    export.save_compressed(zm.compress(model), tmp_path / "m.safetensors")
    assert isinstance(export.load_compressed(tmp_path / "m.safetensors"), BatchLast)
