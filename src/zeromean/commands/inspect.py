"""`zeromean inspect`: what is in a file of a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zeromean.commands.messages import refuse, require_writable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zeromean.commands.random_weights import Measured
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
        from zeromean.commands.random_weights import measure

        if self.pictures is not None:
            try:
                require_writable(self.pictures)
            except OSError as error:
                reason = error.strerror or error
                return refuse(f"cannot write into {self.pictures}: {reason}; choose another.")
        kind = kind_of(self.file)
        weights, tensors, ties, network = _contents(self.file, self.model, kind)
        print(_about(self.file, kind))
        measured = {
            name: measure(weight.posterior)
            for name, weight in weights.items()
            if weight.posterior is not None and weight.tied_to is None
        }
        sections = [
            _network(network),
            _random_weights(weights, measured),
            _noise(measured),
            _scales(measured),
            _tensors(tensors),
            _ties(weights, ties),
        ]
        print("\n\n".join(["", *("\n".join(lines) for lines in sections if lines)]).strip("\n"))
        if self.pictures is not None:
            for path in _draw(self.pictures, measured):
                print(f"wrote {path}")
        return 0


def _contents(
    path: Path, factory: str | None, kind: str
) -> tuple[dict[str, RandomWeight], dict[str, Tensor], dict[str, str], nn.Module | None]:
    """What is random, all other tensors, what is tied, and the network if it is known."""
    from zeromean.commands.networks import load_network
    from zeromean.commands.random_weights import weights_in
    from zeromean.compression.export.blueprint import stored_tensors
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


def _random_weights(
    weights: Mapping[str, RandomWeight], measured: Mapping[str, Measured]
) -> list[str]:
    from zeromean.commands.random_weights import kl_of
    from zeromean.text_table import text_table

    if not weights:
        return ["No random weights."]
    rows = [
        ("name", "layer", "posterior", "prior", "sampler", "shape", "parameters", "sparsity", "KL")
    ]
    total = 0.0
    for name, weight in weights.items():
        numbers = measured.get(name)
        kl = None if weight.tied_to is not None else kl_of(weight)
        total += kl or 0.0
        rows.append(
            (
                name,
                weight.layer,
                weight.described,
                "–" if weight.prior is None else str(weight.prior),
                weight.sampler or "–",
                "–" if numbers is None else _shape(numbers.shape),
                "–" if numbers is None else f"{numbers.parameters:,}",
                "–" if numbers is None else f"{numbers.sparsity:.2%}",
                "–" if kl is None else f"{kl:,.1f}",
            )
        )
    parameters = sum(each.parameters for each in measured.values())
    count = sum(_count(each.shape) for each in measured.values())
    kept = sum(each.kept for each in measured.values())
    lines = ["Random weights (KL in nats)", *text_table(rows, left=range(6))]
    if count:
        lines.append(
            f"together: {count:,} weights, {kept:,} kept ({1 - kept / count:.2%} pruned), "
            f"{parameters:,} parameters, KL {total:,.1f}"
        )
    if any(not weight.knows_layout for weight in weights.values()):
        lines.append("the KL of an Embedding needs --model: the file does not say what is padding")
    unknown = sorted({w.described for w in weights.values() if w.posterior is None})
    if unknown:
        lines.append(f"not known here: {', '.join(unknown)}; --model imports what registers it")
    return lines


def _noise(measured: Mapping[str, Measured]) -> list[str]:
    from zeromean.commands.histograms import in_text
    from zeromean.text_table import text_table

    headings = ("name", "mean", "5%", "median", "95%", "of all", "−12 … 12", "median SNR")
    rows: list[tuple[str, ...]] = [headings]
    for name, numbers in measured.items():
        if numbers.log_alpha is None or not len(numbers.log_alpha):
            continue
        quantiles = _quantiles(numbers.log_alpha)
        rows.append(
            (
                name,
                f"{numbers.log_alpha.mean():.2f}",
                *(f"{each:.2f}" for each in quantiles),
                f"{numbers.effective_log_alpha:.2f}",
                f"[{in_text(numbers.log_alpha, -12, 12)}]",
                f"{10 ** _quantiles(numbers.log10_snr)[1]:.3g}",
            )
        )
    title = "log α = log(variance / mean²) of the kept weights: above 3 the noise drowns the mean"
    return [title, *text_table(rows)] if len(rows) > 1 else []


def _scales(measured: Mapping[str, Measured]) -> list[str]:
    from zeromean.commands.histograms import in_text
    from zeromean.text_table import text_table

    rows: list[tuple[str, ...]] = [("name", "5%", "median", "95%", "log₁₀, −8 … 2")]
    for name, numbers in measured.items():
        if numbers.log_alpha is None and len(numbers.log10_scale):
            cells = (f"{10**each:.3g}" for each in _quantiles(numbers.log10_scale))
            rows.append((name, *cells, f"[{in_text(numbers.log10_scale, -8, 2)}]"))
    title = "Scales of the weights with mean zero, whose α is infinite"
    return [title, *text_table(rows)] if len(rows) > 1 else []


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


def _draw(folder: Path, measured: Mapping[str, Measured]) -> list[Path]:
    """Draw what there is to draw, and return what was written."""
    from zeromean.commands.histograms import draw

    log_alphas = {n: m.log_alpha for n, m in measured.items() if m.log_alpha is not None}
    snrs = {n: m.log10_snr for n, m in measured.items() if m.log10_snr is not None}
    scales = {n: m.log10_scale for n, m in measured.items() if m.log_alpha is None}
    pictures = {
        "log_alpha": (log_alphas, "log α", {"log α = 3, beyond which prune_ prunes": 3.0}),
        "snr": (snrs, "log₁₀ |mean| / σ", {"as much signal as noise": 0.0}),
        "scale": (scales, "log₁₀ σ, mean zero", {}),
    }
    written = []
    for name, (by_layer, label, marked) in pictures.items():
        by_layer = {layer: values for layer, values in by_layer.items() if len(values)}
        if by_layer:
            path = folder / f"{name}.png"
            draw(path, by_layer, label, marked)
            written.append(path)
    return written


def _quantiles(values: object) -> list[float]:
    import numpy as np

    return [float(each) for each in np.quantile(np.asarray(values), [0.05, 0.5, 0.95])]


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one"


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
