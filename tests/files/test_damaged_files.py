"""Files of models that were damaged, on the way or on purpose, end in a ValueError."""

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import zeromean as zm
from file_fuzzer import FOLDER, LargestTensor, fuzz
from zeromean import export
from zeromean.compression.export import sparse_coding


def rewrite(source, target, change):
    """Change the header and the tensors of a file, and leave out its checksum."""
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, RUF100
    (key,) = metadata.keys() - {"checksum"}
    header = json.loads(metadata[key])
    text = change(header, tensors) or json.dumps(header)
    save_file(tensors, target, metadata={key: text})


@pytest.mark.parametrize("seed", range(3))
def test_damages_at_random_are_refused_or_harmless(seed, tmp_path):
    outcomes = fuzz(60, seed, tmp_path)
    assert sum(outcomes.values()) == 60


@pytest.mark.parametrize("kind", ["saved", "compressed"])
def test_every_flipped_bit_is_seen(kind, tmp_path):
    path = tmp_path / "m.safetensors"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    if kind == "saved":
        zm.make_stochastic_(model, posterior=zm.Additive)
        zm.save(model, path)
    else:
        export.save_compressed(model, path)
    content = path.read_bytes()
    generator = random.Random(0)
    for place in generator.sample(range(len(content)), 150):
        changed = bytearray(content)
        changed[place] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"m\.safetensors"):
            zm.load(path, model) if kind == "saved" else export.load_compressed(path)


def test_a_changed_number_is_seen_by_its_checksum(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(nn.Linear(4, 5), path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="has changed since it was written: its checksum does not"):
        zm.load(path, nn.Linear(4, 5))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn]
)
def test_checksums_are_made_of_every_type(dtype, tmp_path):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            for name, shape in (("many", (2, 3)), ("one", ()), ("none", (0, 2))):
                self.register_buffer(name, torch.ones(shape).to(dtype))

    zm.save(Holder(), tmp_path / "m.safetensors")
    assert zm.load(tmp_path / "m.safetensors", Holder()).many.dtype == dtype


@pytest.mark.parametrize(
    "change",
    [
        lambda header, _: header["sparse"].update({"4.weight": [30000, 30000]}),
        lambda header, _: header["sparse"].update({"4.weight": [2**40, 2]}),
        lambda header, tensors: tensors.update({"x": torch.zeros(10**9, 0)}),
        lambda header, _: header["sparse"].update({"4.weight": [10**9, 0]}),
    ],
)
def test_small_files_cannot_ask_for_large_tensors(change, tmp_path):
    path = tmp_path / "m.safetensors"
    rewrite(FOLDER / "compressed.safetensors", path, change)
    assert path.stat().st_size < 3000
    with (
        LargestTensor() as largest,
        pytest.raises(ValueError, match=r"damaged header \(.*places in a code of"),
    ):
        export.load_compressed(path)
    assert largest.bytes < 2**20


def test_recurrent_layers_have_as_many_tensors_as_they_say(tmp_path):
    def change(header, _):
        header["model"]["modules"]["gru"]["arguments"]["num_layers"] = 10**9

    rewrite(FOLDER / "graph.safetensors", tmp_path / "m.safetensors", change)
    with pytest.raises(ValueError, match=r"damaged header \(.*4 tensors for 1000000000 layers"):
        export.load_compressed(tmp_path / "m.safetensors")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[]", "3"])
@pytest.mark.parametrize("name", ["saved", "graph"])
def test_headers_that_are_no_headers_are_refused(name, text, tmp_path):
    path = tmp_path / "m.safetensors"
    rewrite(FOLDER / f"{name}.safetensors", path, lambda header, tensors: text)
    with pytest.raises(ValueError, match=r"m\.safetensors has a damaged header") as caught:
        zm.load(path, nn.ReLU()) if name == "saved" else export.load_compressed(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("shape", [(1, 1), (3, 255), (3, 256), (40, 1000), (1, 255)])
@pytest.mark.parametrize("place", [None, 0, -1])
def test_codes_say_how_large_their_tensors_are(shape, place):
    tensor = torch.zeros(shape)
    if place is not None:
        tensor.view(-1)[place] = 2.0
    values, steps = sparse_coding.encode(tensor)
    assert torch.equal(sparse_coding.decode(values, steps, tensor.shape), tensor)
    assert tensor.numel() <= 256 * len(steps) + 254
