"""What `fit` refuses to train and to evaluate on, before anything is started."""

from __future__ import annotations

from typing import Any

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
