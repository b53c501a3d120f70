"""A small network that learns CIFAR in few passes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeromean.arguments import shown
from zeromean.models.parts import LayerFactory, _sequential, require_layers, scaled

AIRBENCH_WIDTHS = (64, 256, 256)
# New statistics count 0.4: few passes are not enough for torch's running averages.
MOMENTUM = 0.4
LOGIT_SCALE = 1 / 9
PATCH = 2


class ScaledLogits(nn.Module):
    """Logits times a constant: softmax begins near the uniform distribution."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale

    def extra_repr(self) -> str:
        return f"{self.scale:g}"


def airbench_like(
    width: float = 1.0,
    num_classes: int = 10,
    *,
    conv: LayerFactory = nn.Conv2d,
    dense1: LayerFactory = nn.Linear,
    dropout: float = 0.0,
    **convs: LayerFactory,
) -> nn.Sequential:
    """A network in the manner of Jordan (2024), arXiv 2404.00498: `(N, 3, 32, 32)` to logits.

    A frozen convolution of 2 × 2 pixels, to be whitened by `whiten_`, then three groups of two
    convolutions with BatchNorm and GELU and a dense layer. Convolutions pass on what they get at
    the start, those of layers made by other factories than torch's excepted.

    Args:
        width: Factor of all hidden widths.
        num_classes: Number of logits.
        conv: Factory of the convolutions that have none of their own.
        dense1: Factory of the dense layer.
        dropout: Drop rate before it.
        convs: Factories of single convolutions, by name: `conv1` to `conv6`.
    """
    names = [f"conv{number}" for number in range(1, 2 * len(AIRBENCH_WIDTHS) + 1)]
    require_layers("airbench_like", names, convs, f"its convolutions are conv1 to {names[-1]}")
    whitening = nn.Conv2d(3, 2 * 3 * PATCH**2, PATCH)
    whitening.weight.requires_grad_(False)
    parts: dict[str, nn.Module | None] = {"whitening": whitening, "activation": nn.GELU()}
    channels, number = whitening.out_channels, 0
    for group, out_channels in enumerate(scaled(AIRBENCH_WIDTHS, width), start=1):
        for place in (1, 2):
            number += 1
            factory = convs.get(f"conv{number}", conv)
            layer = factory(channels, out_channels, 3, padding=1, bias=False)
            if isinstance(layer, nn.Conv2d):
                # Where more channels come out than in, the others stay as torch draws them.
                nn.init.dirac_(layer.weight.data[:channels])
            norm = nn.BatchNorm2d(out_channels, momentum=MOMENTUM)
            norm.weight.requires_grad_(False)
            parts[f"conv{number}"] = layer
            if place == 1:
                parts[f"pool{group}"] = nn.MaxPool2d(2)
            parts[f"norm{number}"] = norm
            parts[f"activation{number}"] = nn.GELU()
            channels = out_channels
    parts["pool"] = nn.MaxPool2d(3)
    parts["flatten"] = nn.Flatten()  # One pixel is left.
    parts["dropout"] = nn.Dropout(dropout) if dropout else None
    parts["dense1"] = dense1(channels, num_classes, bias=False)
    parts["scale"] = ScaledLogits(LOGIT_SCALE)
    return _sequential(parts)


@torch.no_grad()
def whiten_(network: nn.Sequential, images: Tensor, *, eps: float = 5e-4) -> nn.Sequential:
    """Let the first convolution of `airbench_like` whiten the patches of such images, in place.

    Half of its filters are the eigenvectors of the patches' covariance over the roots of their
    eigenvalues, the other half their negatives, which GELU needs.

    Args:
        images: `(N, 3, 32, 32)`; a few thousand are enough.
        eps: Added to the eigenvalues.
    """
    whitening = network.get_submodule("whitening")
    assert isinstance(whitening, nn.Conv2d)
    size = whitening.in_channels * PATCH**2
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != 3:
        raise ValueError(f"whiten_ needs images of shape (N, 3, H, W), got {shown(images)}.")
    patches = F.unfold(images, PATCH).transpose(1, 2).reshape(-1, size).double()
    patches = patches - patches.mean(0)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / (values + eps).sqrt()).T.flip(0).view(size, 3, PATCH, PATCH)
    whitening.weight.copy_(torch.cat([filters, -filters]))
    return network
