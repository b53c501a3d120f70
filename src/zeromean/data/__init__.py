"""Data sets in their official files, checked by content, whole in memory; and their mini-batches.

`load("mnist")` looks in the data folder, downloads what is missing where there is a network, and
where there is none says which file to put where.
"""

from zeromean.data.augmentation import ShiftAndAlternate, crop_and_flip
from zeromean.data.batches import Batches
from zeromean.data.built_in import toy_points
from zeromean.data.image_set import ImageSet
from zeromean.data.loading import (
    NAMES,
    FileStatus,
    data_folder,
    download,
    how_to_provide,
    load,
    verify,
)

__all__ = [
    "NAMES",
    "Batches",
    "FileStatus",
    "ImageSet",
    "ShiftAndAlternate",
    "crop_and_flip",
    "data_folder",
    "download",
    "how_to_provide",
    "load",
    "toy_points",
    "verify",
]
