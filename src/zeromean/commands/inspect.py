"""`zeromean inspect`: what is in a file of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeromean.commands.messages import refuse, require_writable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zeromean.files.contents import RandomWeight


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show what is in a file of a network: layers, posteriors, sparsity, log α, KL, checksum."""

    file: Path
    """A file of zm.save or export.save_compressed."""
    model: str | None = None
    """package.module:function that builds the architecture; for a file of zm.save it adds the
    layers without noise, and the KL of an Embedding."""
    pictures: Path | None = None
    """Folder for histograms by layer (PNG) of log α, signal-to-noise and scales."""

    def run(self) -> int:
        from zeromean.commands.networks import kind_of
        from zeromean.compression.summary import summarize

        if self.pictures is not None:
            try:
                require_writable(self.pictures)
            except OSError as error:
                reason = error.strerror or error
                return refuse(f"cannot write into {self.pictures}: {reason}; choose another.")
        kind = kind_of(self.file)
        weights, tensors, ties, network = _contents(self.file, self.model, kind)
        print(_about(self.file, kind))
        summary = summarize(weights, network)
        sections = [
            _network(network),
            str(summary).splitlines(),
            _notes(weights),
            _tensors(tensors),
            _ties(weights, ties),
        ]
        print("\n\n".join(["", *("\n".join(lines) for lines in sections if lines)]).strip("\n"))
        if self.pictures is not None:
            for path in summary.draw(self.pictures):
                print(f"wrote {path}")
        return 0


def _contents(
    path: Path, factory: str | None, kind: str
) -> tuple[dict[str, RandomWeight], dict[str, Tensor], dict[str, str], nn.Module | None]:
    """What is random, all other tensors, what is tied, and the network if it is known."""
    from zeromean.commands.networks import load_network
    from zeromean.compression.export.blueprint import stored_tensors
    from zeromean.compression.random_weights import weights_in
    from zeromean.distributions.posteriors.posterior import Posterior
    from zeromean.files.contents import read_contents

    if kind == "saved":
        contents = read_contents(path)
        if factory is None:
            return contents.weights, contents.tensors, contents.aliases, None
        network = load_network(path, factory)
        return weights_in(network), contents.tensors, contents.aliases, network
    network = load_network(path, factory)
    weights = weights_in(network)
    tensors = {
        f"{owner}.{name}".lstrip("."): tensor
        for owner, module in network.named_modules()
        if not isinstance(module, Posterior)
        for name, tensor in stored_tensors(module).items()
        if not (owner in weights and name == "weight")
    }
    return weights, tensors, {}, network


def _about(path: Path, kind: str) -> str:
    import json

    from zeromean.compression.export import compressed
    from zeromean.files import model as saved
    from zeromean.files.safetensors import CHECKSUM, read_metadata

    metadata = read_metadata(path)
    header = saved.HEADER if kind == "saved" else compressed.HEADER
    version = json.loads(metadata[header])["format_version"]
    writer = "zm.save" if kind == "saved" else "export.save_compressed"
    checksum = metadata.get(CHECKSUM)
    sound = "no checksum" if checksum is None else f"checksum {checksum} (it fits)"
    return f"{path}: {path.stat().st_size:,} bytes of {writer}, format version {version}, {sound}"


def _network(network: nn.Module | None) -> list[str]:
    if network is None:
        return []
    from zeromean.distributions.posteriors.posterior import Posterior
    from zeromean.layers.stochastic_module import StochasticModule
    from zeromean.text_table import text_table

    inside = [m for m in network.modules() if isinstance(m, (Posterior, StochasticModule))]
    rows = [
        (name or "the network", type(module).__name__, module.extra_repr())
        for name, module in network.named_modules()
        if module not in inside and not any(True for _ in module.children())
    ]
    return ["Layers without noise", *text_table(rows, left=(0, 1, 2))] if rows else []


def _notes(weights: Mapping[str, RandomWeight]) -> list[str]:
    """What a file does not say."""
    lines = []
    if any(not weight.knows_layout for weight in weights.values()):
        lines.append("the KL of an Embedding needs --model: the file does not say what is padding")
    unknown = sorted({w.described for w in weights.values() if w.posterior is None})
    if unknown:
        lines.append(f"not known here: {', '.join(unknown)}; --model imports what registers it")
    return lines


def _tensors(tensors: Mapping[str, Tensor]) -> list[str]:
    from zeromean.text_table import text_table

    rows = [("name", "type", "shape", "numbers", "zeros")]
    for name, tensor in tensors.items():
        zeros = 1 - int(tensor.count_nonzero()) / tensor.numel() if tensor.numel() else 0.0
        kind = str(tensor.dtype).removeprefix("torch.")
        rows.append((name, kind, _shape(tensor.shape), f"{tensor.numel():,}", f"{zeros:.2%}"))
    return ["Other tensors", *text_table(rows, left=(0, 1, 2))] if len(rows) > 1 else []


def _ties(weights: Mapping[str, RandomWeight], aliases: Mapping[str, str]) -> list[str]:
    layers = {name: weight.tied_to for name, weight in weights.items() if weight.tied_to}
    ties = [f"{name} has the weight of {other}" for name, other in layers.items()]
    # Parts of the posteriors that have been named already.
    others = {n: o for n, o in aliases.items() if not any(n.startswith(f"{t}.") for t in layers)}
    ties += [f"{name} is {other}" for name, other in others.items()]
    return ["Ties", *ties] if ties else []


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one"
