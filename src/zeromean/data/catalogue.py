"""The official files of every data set: their sources, their places and what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Download:
    """A file on the network: the data file itself, or a tar archive with it inside."""

    path: str  # where it is saved, from the data folder on
    md5: str  # of the official file as it is transferred
    mirrors: tuple[str, ...]  # its addresses, without the file's name

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(mirror + self.path.rpartition("/")[2] for mirror in self.mirrors)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file and everything by which its contents are checked."""

    path: str  # from the data folder on
    holds: Literal["images", "labels", "records"]  # IDX images, IDX labels, CIFAR records
    count: int
    num_classes: int
    # Of the contents: compressed files are unpacked first, since they can be packed differently.
    sha256: str | None
    source: Download
    label_bytes: int = 1  # a CIFAR record's; the last one is the class
    per_class: int | None = None  # examples a class, where all have the same number

    @property
    def in_archive(self) -> bool:
        return self.source.path != self.path


@dataclass(frozen=True)
class FileSet:
    """The files of a data set, by split."""

    num_classes: int
    image_shape: tuple[int, int, int]
    splits: Mapping[str, tuple[DataFile, ...]]

    @property
    def files(self) -> tuple[DataFile, ...]:
        return tuple(file for files in self.splits.values() for file in files)


def idx_split(
    folder: str,
    prefix: str,
    count: int,
    *,
    md5: tuple[str, str],
    sha256: tuple[str | None, str | None],
    mirrors: tuple[str, ...],
    per_class: int | None = None,
) -> tuple[DataFile, DataFile]:
    """The images and the labels of a split in MNIST's format; hashes in that order."""
    paths = (f"{folder}/{prefix}-images-idx3-ubyte.gz", f"{folder}/{prefix}-labels-idx1-ubyte.gz")
    images, labels = (Download(*found, mirrors) for found in zip(paths, md5, strict=True))
    return (
        DataFile(
            path=paths[0],
            holds="images",
            count=count,
            num_classes=10,
            sha256=sha256[0],
            source=images,
        ),
        DataFile(
            path=paths[1],
            holds="labels",
            count=count,
            num_classes=10,
            sha256=sha256[1],
            source=labels,
            per_class=per_class,
        ),
    )


def cifar_files(
    source: Download,
    folder: str,
    sha256: Mapping[str, str],
    *,
    count: int,
    num_classes: int,
    label_bytes: int,
) -> tuple[DataFile, ...]:
    """The files of a split in CIFAR's binary format, from file names and hashes."""
    return tuple(
        DataFile(
            path=f"{folder}/{name}",
            holds="records",
            count=count,
            num_classes=num_classes,
            sha256=digest,
            source=source,
            label_bytes=label_bytes,
        )
        for name, digest in sha256.items()
    )


_MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_FASHION = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
_NOTMNIST = ("https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/",)
_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
_CIFAR10 = Download("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", _TORONTO)
_CIFAR100 = Download("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", _TORONTO)

CATALOGUE: dict[str, FileSet] = {
    "mnist": FileSet(
        10,
        (1, 28, 28),
        {
            "train": idx_split(
                "mnist",
                "train",
                60_000,
                md5=("f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432"),
                sha256=(
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                ),
                mirrors=_MNIST,
            ),
            "test": idx_split(
                "mnist",
                "t10k",
                10_000,
                md5=("9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c"),
                sha256=(
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                mirrors=_MNIST,
            ),
        },
    ),
    "fashion-mnist": FileSet(
        10,
        (1, 28, 28),
        {
            "train": idx_split(
                "fashion-mnist",
                "train",
                60_000,
                md5=("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe"),
                # The images could not be had where this table was made: the md5 of a download
                # and their form must do.
                sha256=(None, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
                mirrors=_FASHION,
                per_class=6_000,
            ),
            "test": idx_split(
                "fashion-mnist",
                "t10k",
                10_000,
                md5=("bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310"),
                sha256=(
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
                mirrors=_FASHION,
                per_class=1_000,
            ),
        },
    ),
    "notmnist": FileSet(
        10,
        (1, 28, 28),
        {
            "test": idx_split(
                "notmnist",
                "t10k",
                10_000,
                md5=("2c87c839a4ef9b238846600eec8c35b7", "7ea9118cbafd0f6e3ee2ad771d782a01"),
                sha256=(
                    "8e7f38ae95cc8f48e0986175ffc9137e5007ebcf3d8fdf6656c904eb9dab198b",
                    "5f8e6012f2ce730700d8d05fca098bc47f71d25b890e4bec7ac5ebfd614a4001",
                ),
                mirrors=_NOTMNIST,
                per_class=1_000,
            ),
        },
    ),
    "cifar10": FileSet(
        10,
        (3, 32, 32),
        {
            "train": cifar_files(
                _CIFAR10,
                "cifar-10-batches-bin",
                {
                    "data_batch_1.bin": (
                        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"
                    ),
                    "data_batch_2.bin": (
                        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"
                    ),
                    "data_batch_3.bin": (
                        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"
                    ),
                    "data_batch_4.bin": (
                        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"
                    ),
                    "data_batch_5.bin": (
                        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"
                    ),
                },
                count=10_000,
                num_classes=10,
                label_bytes=1,
            ),
            "test": cifar_files(
                _CIFAR10,
                "cifar-10-batches-bin",
                {
                    "test_batch.bin": (
                        "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
                    )
                },
                count=10_000,
                num_classes=10,
                label_bytes=1,
            ),
        },
    ),
    "cifar100": FileSet(
        100,
        (3, 32, 32),
        {
            "train": cifar_files(
                _CIFAR100,
                "cifar-100-binary",
                {"train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29"},
                count=50_000,
                num_classes=100,
                label_bytes=2,
            ),
            "test": cifar_files(
                _CIFAR100,
                "cifar-100-binary",
                {"test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a"},
                count=10_000,
                num_classes=100,
                label_bytes=2,
            ),
        },
    ),
}
"""What can be loaded, by name."""
