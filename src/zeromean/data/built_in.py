"""The sets that need no files: scikit-learn's digits and the toy problem of Figure 1."""

from __future__ import annotations

import torch
from torch import Tensor

from zeromean.arguments import require_integer, shown
from zeromean.data.image_set import ImageSet
from zeromean.extras import how_to_install

TOY_CENTRES = ((3.0, 3.0), (3.0, 10.0), (10.0, 3.0), (10.0, 10.0))


def toy_points(
    num_per_class: int = 500, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Points `(n, 2)` around the four centres of Figure 1, with unit covariance; their classes."""
    num_per_class = require_integer("num_per_class", num_per_class, at_least=1)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {shown(generator)}; use "
            "torch.Generator().manual_seed(0)."
        )
    labels = torch.arange(len(TOY_CENTRES)).repeat_interleave(num_per_class)
    noise = torch.randn(len(labels), 2, generator=generator)
    return torch.tensor(TOY_CENTRES)[labels] + noise, labels


def load_toy(split: str) -> ImageSet:
    """500 points a class, always the same ones; `images` is `(N, 2)` and not scaled."""
    seed = {"train": 0, "test": 1}[split]
    return ImageSet(*toy_points(generator=torch.Generator().manual_seed(seed)), num_classes=4)


def load_digits(split: str) -> ImageSet:
    """1,797 images of 8 × 8, a third of them for testing, always the same ones."""
    try:
        from sklearn import datasets, model_selection
    except ImportError as error:
        raise ImportError(
            how_to_install("The digits come with scikit-learn", "experiments")
        ) from error
    pixels, classes = datasets.load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(classes, dtype=torch.int64)
    train, test = model_selection.train_test_split(
        range(len(labels)), test_size=1 / 3, stratify=classes, random_state=0
    )
    chosen = torch.tensor(train if split == "train" else test)
    return ImageSet(images, labels, num_classes=10).subset(chosen)


BUILT_IN = {"digits": load_digits, "toy": load_toy}
