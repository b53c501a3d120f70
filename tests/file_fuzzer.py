"""Damaged files of models: what is refused gets a ValueError, what is not is sound and small.

`python tests/file_fuzzer.py 10000` makes so many damages; the tests make a few hundred.
"""

import copy
import json
import math
import random
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeromean as zm
from old_networks import FOLDER, Branches, SavedNetwork, plain_network
from zeromean import export
from zeromean.files.safetensors import write_safetensors

MOST_BYTES = 2**28 + 2**20
NUMBERS = (0, 1, -1, 2, 255, 2**16, 2**31, 2**40, 2**63, 10**30, 0.5, 1e308, math.nan, -math.inf)
VALUES = (*NUMBERS, None, True, "", "x", "weight", "../x", "lambda", "\x00", [], {}, [[]], "Linear")


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self.bytes = max(self.bytes, each.nbytes)
        return result


def make_files(folder):
    """Sound files by name, with what loads them; those of 0.1.0 have no checksum."""
    torch.manual_seed(0)
    load_saved = partial(zm.load, model=SavedNetwork())
    saved = SavedNetwork()
    zm.make_stochastic_(saved, posterior=zm.Additive, where=lambda name, _: name != "last")
    zm.make_stochastic_(saved, posterior=zm.ZeroMean, prior=None, where=lambda n, _: n == "last")
    zm.save(saved, folder / "saved.safetensors")
    chain, branches = plain_network(), Branches()
    with torch.no_grad():
        for layer in (*chain, branches.first, branches.last):
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.weight *= torch.rand_like(layer.weight) < 0.1
    variance = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), zm.Linear(4, 3, sampler=zm.weight))
    zm.prune_(variance, by="variance", sparsity=0.5)
    models = {"chain": chain, "branches": branches, "variance": variance}
    files = {folder / "saved.safetensors": load_saved, FOLDER / "saved.safetensors": load_saved}
    for name, model in models.items():
        path = folder / f"{name}.safetensors"
        export.save_compressed(zm.compress(model.eval()), path)
        files[path] = export.load_compressed
    for name in ("compressed", "graph"):
        files[FOLDER / f"{name}.safetensors"] = export.load_compressed
    return files


def damage(source, target, generator):
    """Write a damaged copy and say how."""
    kinds = (flip_bits, cut_and_paste, _change_entries, _change_header, _change_header)
    kind = generator.choice((*kinds, _change_tensors))
    kind(source, target, generator)
    return kind.__name__.strip("_")


def flip_bits(source, target, generator):
    content = bytearray(source.read_bytes())
    for _ in range(generator.choice((1, 1, 1, 2, 8))):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    target.write_bytes(content)


def cut_and_paste(source, target, generator):
    content = source.read_bytes()
    start = generator.randrange(len(content))
    end = min(len(content), start + generator.choice((1, 2, 8, 100, len(content))))
    piece = content[start:end]
    new = generator.choice((b"", piece * 2, piece[::-1], generator.randbytes(len(piece))))
    target.write_bytes(content[:start] + new + content[end:])


def _change_entries(source, target, generator):
    """What safetensors itself says of its tensors: types, shapes, places."""
    content = source.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    entries = json.loads(content[8 : 8 + length])
    metadata = entries.pop("__metadata__")
    entries = {**mutated(entries, generator), "__metadata__": metadata}
    text = json.dumps(entries).encode()
    target.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _change_header(source, target, generator):
    _rewrite(source, target, generator, lambda header: mutated(header, generator), lambda t: None)


def _change_tensors(source, target, generator):
    def change(tensors):
        name, other = generator.choice(list(tensors)), generator.choice(list(tensors))
        tensor = tensors[name]
        new = generator.choice(
            (
                lambda: tensor[:0] if tensor.dim() else tensor,
                lambda: tensor.flatten()[1:],
                lambda: tensor.unsqueeze(0),
                lambda: tensor.double(),
                lambda: tensor.to(torch.int8),
                lambda: tensors[other],
                lambda: torch.zeros(generator.choice((10**9, 2**40)), 0),
                lambda: torch.full_like(tensor, generator.choice((0, 1, 255 % 127, 100))),
            )
        )()
        del tensors[name]
        if generator.random() < 0.8:
            place = name if generator.random() < 0.8 else generator.choice(("x", "a.b", name * 2))
            tensors[place] = new.clone().contiguous()

    _rewrite(source, target, generator, lambda header: header, change)


def _rewrite(source, target, generator, change_header, change_tensors):
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, RUF100
    (key,) = metadata.keys() - {"checksum"}
    text = json.dumps(change_header(json.loads(metadata[key])))
    if generator.random() < 0.02:
        nested = generator.choice(("[", '{"a":'))
        text = text.replace("null", nested * generator.choice((500, 100_000)), 1)
    elif generator.random() < 0.02:
        text = text.replace(" 1", " " + "9" * 5000, 1)
    change_tensors(tensors)
    # With a checksum that fits: nothing but the contents can show that they are wrong.
    write = write_safetensors if generator.random() < 0.5 else _write_without_checksum
    write(target, tensors, {key: text})


def _write_without_checksum(path, tensors, metadata):
    save_file(tensors, path, metadata=metadata)


def mutated(tree, generator):
    """A copy with one to three places changed, removed, nested or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(generator.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return tree
        holder, key = generator.choice(places)
        value = holder[key]
        other_holder, other_key = generator.choice(places)
        change = generator.randrange(6)
        if change == 0:
            del holder[key]
        elif change == 1:
            holder[key] = copy.deepcopy(other_holder[other_key])
        elif change == 2:
            holder[key] = [value] if generator.random() < 0.5 else {"a": value}
        elif change == 3 and isinstance(value, (int, float)):
            holder[key] = generator.choice((value + 1, value - 1, -value, value * 10**9))
        elif change == 4 and isinstance(holder, dict):
            holder[generator.choice(("x", "eval", "_modules", "graph", key * 2))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(generator.choice(VALUES))
    return tree


def _places(tree):
    if isinstance(tree, (dict, list)):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


def fuzz(count, seed, folder):
    """How often each damage ended how; an AssertionError where it should not have."""
    generator = random.Random(seed)
    files = make_files(folder)
    sound = {path: load(path).state_dict() for path, load in files.items()}
    outcomes = Counter()
    target = folder / "damaged.safetensors"
    for number in range(count):
        source = generator.choice(list(files))
        kind = damage(source, target, generator)
        largest, started, model = LargestTensor(), time.process_time(), None
        try:
            with largest, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about settings that nobody chose
                model = files[source](target)
        except ValueError as error:
            if str(target) not in str(error) or len(str(error)) > 4000:
                raise AssertionError(f"{number}, {kind} of {source}: {error!r}") from error
        except BaseException as error:
            keep = folder / f"failed-{number}.safetensors"
            target.rename(keep)
            raise AssertionError(f"{number}, {kind} of {source} as {keep}: {error!r}") from error
        seconds = time.process_time() - started
        assert largest.bytes <= MOST_BYTES, f"{number}, {kind} of {source}: {largest.bytes:,} bytes"
        assert seconds < 60, f"{number}, {kind} of {source}: {seconds:.0f} s"
        accepted = model is not None
        if accepted and kind in ("flip_bits", "cut_and_paste", "change_entries"):
            # A checksum that is there sees everything that makes a difference.
            same = _same(model.state_dict(), sound[source])
            assert same or source.parent == FOLDER, f"{number}, {kind} of {source} went unseen"
        outcomes[kind, "loaded" if accepted else "refused"] += 1
    return outcomes


def _same(state, expected):
    return state.keys() == expected.keys() and all(
        torch.equal(state[k], expected[k]) for k in state
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for outcome, times in sorted(fuzz(int(sys.argv[1]), 0, Path(name)).items()):
            print(*outcome, times)
