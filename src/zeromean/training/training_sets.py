"""Data that cannot be trained on or chosen by, refused before anything is started."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from zeromean.data.image_set import ImageSet
from zeromean.training.data_sources import as_image_set, is_module, require_data
from zeromean.training.likelihoods import Likelihood, require_class_targets


def require_sets(likelihood: Likelihood | None, **sets: Any) -> None:
    """Refuse data that are none, are empty, or have targets of another kind."""
    for name, data in sets.items():
        if (name != "train" and data is None) or is_module(data):
            continue
        require_data(name, data)
        tensors = as_image_set(data)
        if tensors is None:
            continue
        if len(tensors) == 0:
            if name == "train":
                raise ValueError("The training set is empty.")
            raise ValueError(f"The {name} set is empty; leave {name}= out, or give it examples.")
        if likelihood is not None:
            continue
        if isinstance(data, ImageSet):
            _require_classes(data)
        else:
            require_class_targets(tensors.labels)


def refuse_training_data(train: Any, validation: Any) -> None:
    """Refuse validation data that the model is trained on: on these it looks too sure."""
    if _is_same(train, validation):
        raise ValueError(
            "validation must be data that the model was not trained on, got the training data "
            "themselves; hold some examples out."
        )
    ours, theirs = as_image_set(train), as_image_set(validation)
    if ours is None or theirs is None or ours.images.shape[1:] != theirs.images.shape[1:]:
        return
    seen = torch.isin(_fingerprints(theirs.images), _fingerprints(ours.images))
    count = int(seen.sum())
    # Real sets repeat some of their examples.
    if 2 * count > len(seen):
        raise ValueError(
            "validation must be data that the model was not trained on, but the training data "
            f"hold {count} of its {len(seen)} examples; hold some out of both."
        )


def _require_classes(data: ImageSet) -> None:
    labels = data.labels
    if labels.dim() != 1 or labels.is_floating_point():
        raise ValueError(
            "Without a likelihood labels must be classes, one integer for each image, got "
            f"{labels.dtype} of shape {tuple(labels.shape)}; for a regression pass "
            "likelihood=zm.GaussianLikelihood()."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= data.num_classes:
        raise ValueError(
            f"Labels must be from 0 to {data.num_classes - 1}, as num_classes says, got {low} to "
            f"{high}."
        )


def _is_same(train: Any, validation: Any) -> bool:
    if train is validation:
        return True
    one, other = (
        data.dataset if isinstance(data, DataLoader) else data for data in (train, validation)
    )
    if one is other:
        return True
    if isinstance(one, Subset) and isinstance(other, Subset):
        return one.dataset is other.dataset and not set(one.indices).isdisjoint(other.indices)
    if isinstance(one, TensorDataset) and isinstance(other, TensorDataset):
        return one.tensors[0] is other.tensors[0]
    return False


def _fingerprints(inputs: Tensor) -> Tensor:
    """A number for each row that other rows do not have."""
    rows = inputs.detach().flatten(1) if inputs.dim() > 1 else inputs.detach().unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64)
    # In one order of summation for all of them: equal rows must give equal numbers.
    sums = [(part.cpu().double() * weights).sum(1) for part in rows.split(1000)]
    return torch.cat(sums)
