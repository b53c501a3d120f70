"""Every path runs on small files in the official formats; real data are read where they are."""

import dataclasses
import functools
import gzip
import hashlib
import http.server
import os
import struct
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from zeromean import data
from zeromean.data import transfer
from zeromean.data.catalogue import CATALOGUE, Download, FileSet, cifar_files, idx_split

TRAIN, TEST = 40, 20
MIRROR = ("https://example.invalid/",)


def idx_images(pixels):
    return struct.pack(">4I", 2051, len(pixels), 28, 28) + pixels.tobytes()


def idx_labels(labels):
    return struct.pack(">2I", 2049, len(labels)) + labels.tobytes()


def sha256(contents):
    return hashlib.sha256(contents).hexdigest()


@dataclasses.dataclass
class Small:
    """A data folder with small sets in the official formats, and what was written into it."""

    folder: Path
    arrays: dict

    def rewrite(self, path, contents):
        packed = gzip.compress(contents) if path.endswith(".gz") else contents
        (self.folder / path).write_bytes(packed)

    def contents(self, path):
        raw = (self.folder / path).read_bytes()
        return gzip.decompress(raw) if path.endswith(".gz") else raw

    def exchange(self, first, second):
        a, b = (self.folder / path for path in (first, second))
        here = a.read_bytes()
        a.write_bytes(b.read_bytes())
        b.write_bytes(here)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The catalogue describes small sets that lie in a folder, and the network is not there."""
    random = np.random.default_rng(0)
    folder = Small(tmp_path / "data", {})
    monkeypatch.delenv("ZEROMEAN_DATA", raising=False)

    def idx_set(name, sizes, per_class=False, known=True):
        splits = {}
        (folder.folder / name).mkdir(parents=True)
        for split, prefix in {"train": "train", "test": "t10k"}.items():
            if split not in sizes:
                continue
            count = sizes[split]
            pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            labels = random.permutation(np.arange(count, dtype=np.uint8) % 10)
            contents = idx_images(pixels), idx_labels(labels)
            files = idx_split(
                name,
                prefix,
                count,
                md5=("0" * 32, "0" * 32),
                sha256=(sha256(contents[0]), sha256(contents[1])) if known else (None, None),
                mirrors=MIRROR,
                per_class=count // 10 if per_class else None,
            )
            for file, raw in zip(files, contents, strict=True):
                folder.rewrite(file.path, raw)
            splits[split] = files
            folder.arrays[name, split] = pixels[:, None], labels
        monkeypatch.setitem(CATALOGUE, name, FileSet(10, (1, 28, 28), splits))

    def cifar_set(name, inside, label_bytes, num_classes, batches):
        archive = Download(f"{name}.tar.gz", "0" * 32, MIRROR)
        splits = {}
        (folder.folder / inside).mkdir(parents=True)
        for split, names in batches.items():
            digests, parts = {}, []
            for file_name in names:
                labels = random.integers(0, num_classes, (TEST, label_bytes), dtype=np.uint8)
                pixels = random.integers(0, 256, (TEST, 3, 32, 32), dtype=np.uint8)
                raw = np.concatenate([labels, pixels.reshape(TEST, -1)], 1).tobytes()
                folder.rewrite(f"{inside}/{file_name}", raw)
                digests[file_name] = sha256(raw)
                parts.append((pixels, labels[:, -1]))
            splits[split] = cifar_files(
                archive,
                inside,
                digests,
                count=TEST,
                num_classes=num_classes,
                label_bytes=label_bytes,
            )
            folder.arrays[name, split] = tuple(map(np.concatenate, zip(*parts, strict=True)))
        monkeypatch.setitem(CATALOGUE, name, FileSet(num_classes, (3, 32, 32), splits))

    idx_set("mnist", {"train": TRAIN, "test": TEST})
    idx_set("fashion-mnist", {"train": TRAIN, "test": TEST}, per_class=True, known=False)
    idx_set("notmnist", {"test": TEST}, per_class=True)
    batches = {"train": ["data_batch_1.bin", "data_batch_2.bin"], "test": ["test_batch.bin"]}
    cifar_set("cifar10", "cifar-10-batches-bin", 1, 10, batches)
    batches = {"train": ["train.bin"], "test": ["test.bin"]}
    cifar_set("cifar100", "cifar-100-binary", 2, 100, batches)

    def no_network(source, target):
        raise ConnectionError(f"no connection to {source.urls[0]}")

    monkeypatch.setattr(transfer, "download_file", no_network)
    return folder


CASES = [(n, s) for n in CATALOGUE for s in ("train", "test") if (n, s) != ("notmnist", "train")]


@pytest.mark.parametrize(("name", "split"), CASES)
def test_official_formats_are_read_exactly(small, name, split):
    loaded = data.load(name, split, data_dir=small.folder)
    pixels, labels = small.arrays[name, split]
    assert loaded.images.dtype == torch.float32
    assert loaded.labels.dtype == torch.int64
    torch.testing.assert_close(
        loaded.images, torch.tensor(pixels, dtype=torch.float32) / 255, rtol=0, atol=0
    )
    assert loaded.labels.tolist() == labels.tolist()
    assert loaded.num_classes == (100 if name == "cifar100" else 10)
    assert len(loaded) == len(labels)


def test_verify_says_ok_for_every_sound_file(small):
    for name in CATALOGUE:
        statuses = data.verify(name, small.folder)
        assert [status.state for status in statuses] == ["ok"] * len(CATALOGUE[name].files)
        assert all(status.path.is_relative_to(small.folder) for status in statuses)


def test_verify_and_download_have_nothing_to_do_for_built_in_sets():
    for name in ("digits", "toy"):
        assert data.verify(name) == data.download(name) == []
        assert data.how_to_provide(name) == ""


# Damage ------------------------------------------------------------------------------------------


def damaged(small, name, split, path, reason):
    """The file is refused by load, named by verify, and left alone by both."""
    before = (small.folder / path).read_bytes()
    with pytest.raises(ValueError, match=reason) as caught:
        data.load(name, split, data_dir=small.folder)
    assert str(small.folder / path) in str(caught.value)
    states = {status.path: status.state for status in data.verify(name, small.folder)}
    assert states[small.folder / path].startswith("damaged: ")
    assert (small.folder / path).read_bytes() == before


IMAGES, LABELS = "mnist/train-images-idx3-ubyte.gz", "mnist/train-labels-idx1-ubyte.gz"
BATCH = "cifar-10-batches-bin/data_batch_2.bin"


@pytest.mark.parametrize("path", [IMAGES, LABELS])
@pytest.mark.parametrize("keep", [0, 5, 20, -1, -9])
def test_gzip_file_cut_anywhere_is_refused(small, path, keep):
    packed = (small.folder / path).read_bytes()
    (small.folder / path).write_bytes(packed[:keep])
    damaged(small, "mnist", "train", path, "cut short|not a sound gzip")


@pytest.mark.parametrize("path", [IMAGES, LABELS, BATCH])
@pytest.mark.parametrize("keep", [0, 3, 6, 13, -1])
def test_contents_cut_anywhere_are_refused(small, path, keep):
    small.rewrite(path, small.contents(path)[:keep])
    name = "cifar10" if path == BATCH else "mnist"
    damaged(small, name, "train", path, "cut short")


@pytest.mark.parametrize("path", [IMAGES, LABELS, BATCH])
def test_trailing_bytes_are_refused(small, path):
    small.rewrite(path, small.contents(path) + b"\0")
    damaged(small, "cifar10" if path == BATCH else "mnist", "train", path, "longer than")


@pytest.mark.parametrize("path", [IMAGES, LABELS, BATCH])
def test_one_changed_byte_is_refused(small, path):
    contents = bytearray(small.contents(path))
    contents[-1] ^= 1  # labels 0 to 9 stay below 10
    small.rewrite(path, bytes(contents))
    name = "cifar10" if path == BATCH else "mnist"
    damaged(small, name, "train", path, "not the official ones")


def test_flipped_bit_of_a_compressed_file_is_refused(small):
    packed = bytearray((small.folder / IMAGES).read_bytes())
    packed[len(packed) // 2] ^= 0xFF
    (small.folder / IMAGES).write_bytes(packed)
    damaged(small, "mnist", "train", IMAGES, "gzip|not the official|cut short|longer")


def test_file_that_is_no_gzip_or_no_idx_is_refused(small):
    (small.folder / IMAGES).write_bytes(b"<html>404 not found</html>")
    damaged(small, "mnist", "train", IMAGES, "not a sound gzip file")
    small.rewrite(IMAGES, b"<html>404 not found</html>" * 10)
    damaged(small, "mnist", "train", IMAGES, "does not begin like an IDX file of images")


def test_images_of_another_size_are_refused(small):
    small.rewrite(IMAGES, struct.pack(">4I", 2051, TRAIN, 32, 32) + b"\0" * TRAIN * 32 * 32)
    damaged(small, "mnist", "train", IMAGES, "32 × 32 where 28 × 28 belong")


def test_images_and_labels_exchanged_are_refused(small):
    small.exchange(IMAGES, LABELS)
    damaged(small, "mnist", "train", IMAGES, "holds labels where images belong")


def test_training_and_test_files_exchanged_are_refused(small):
    small.exchange(IMAGES, "mnist/t10k-images-idx3-ubyte.gz")
    damaged(small, "mnist", "train", IMAGES, "20 images where 40 belong.*exchanged")


@pytest.mark.parametrize("other", ["data_batch_1.bin", "test_batch.bin"])
def test_cifar_batches_exchanged_are_refused_by_name(small, other):
    small.exchange(BATCH, f"cifar-10-batches-bin/{other}")
    # Both are refused; loading meets the first one in the order of the set.
    first, contents = (BATCH, other) if other == "test_batch.bin" else (CIFAR_FILES[0], BATCH)
    damaged(small, "cifar10", "train", first, f"holds the contents of .*{Path(contents).name}")
    states = [status.state for status in data.verify("cifar10", small.folder)]
    assert sum("holds the contents of" in state for state in states) == 2


def test_mnist_in_place_of_fashion_mnist_is_refused_without_a_hash(small):
    path = "fashion-mnist/train-images-idx3-ubyte.gz"
    small.rewrite(path, small.contents(IMAGES))
    damaged(small, "fashion-mnist", "train", path, f"holds the contents of {IMAGES}")


def test_labels_are_checked_without_a_hash(small):
    path = "fashion-mnist/train-labels-idx1-ubyte.gz"
    labels = small.arrays["fashion-mnist", "train"][1].copy()
    labels[0] = 10
    small.rewrite(path, idx_labels(labels))
    damaged(small, "fashion-mnist", "train", path, "label 10 where only 10 exist")
    labels[0] = labels[1]
    small.rewrite(path, idx_labels(np.sort(labels)))
    damaged(small, "fashion-mnist", "train", path, "a class where 4 belong")


def test_folder_in_place_of_a_file_is_refused(small):
    (small.folder / BATCH).unlink()
    (small.folder / BATCH).mkdir()
    with pytest.raises(ValueError, match="cannot be read"):
        data.load("cifar10", data_dir=small.folder)


# Missing files -----------------------------------------------------------------------------------


def test_without_a_network_the_error_says_which_file_to_put_where(small):
    (small.folder / IMAGES).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        data.load("mnist", data_dir=small.folder)
    message = str(caught.value)
    url = "https://example.invalid/train-images-idx3-ubyte.gz"
    assert f"{url} -> {small.folder / IMAGES}\n" in message
    assert str(small.folder / LABELS) not in message  # it is there
    assert "no connection to" in message
    assert "ZEROMEAN_DATA" in message
    assert message.endswith(data.how_to_provide("mnist", small.folder))
    assert [status.state for status in data.verify("mnist", small.folder)].count("missing") == 1
    assert len(data.load("mnist", "test", data_dir=small.folder)) == TEST  # the rest still loads


def test_missing_member_of_an_archive_is_explained(small):
    (small.folder / BATCH).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        data.download("cifar10", small.folder)
    arrow = f"https://example.invalid/cifar10.tar.gz -> {small.folder / 'cifar10.tar.gz'}\n"
    assert arrow in str(caught.value)
    assert f"(or unpacked: {small.folder / BATCH})" in str(caught.value)


def make_archive(small, path, names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(small.folder / name, name)


CIFAR_FILES = [
    f"cifar-10-batches-bin/{name}.bin" for name in ("data_batch_1", "data_batch_2", "test_batch")
]


def test_archive_in_the_folder_is_unpacked_checked_and_kept(small):
    archive = small.folder / "cifar10.tar.gz"
    make_archive(small, archive, CIFAR_FILES)
    for name in CIFAR_FILES:
        (small.folder / name).unlink()
    loaded = data.load("cifar10", data_dir=small.folder)
    assert loaded.labels.tolist() == small.arrays["cifar10", "train"][1].tolist()
    assert archive.exists()
    assert [status.state for status in data.download("cifar10", small.folder)] == ["ok"] * 3


def test_downloaded_archive_is_deleted_after_unpacking(small, tmp_path, monkeypatch):
    make_archive(small, tmp_path / "kept.tar.gz", CIFAR_FILES)
    for name in CIFAR_FILES:
        (small.folder / name).unlink()

    def download_file(source, target):
        target.write_bytes((tmp_path / "kept.tar.gz").read_bytes())

    monkeypatch.setattr(transfer, "download_file", download_file)
    assert [status.state for status in data.download("cifar10", small.folder)] == ["ok"] * 3
    assert not (small.folder / "cifar10.tar.gz").exists()
    assert {path.name for path in (small.folder / "cifar-10-batches-bin").iterdir()} == {
        Path(name).name for name in CIFAR_FILES
    }


@pytest.mark.parametrize("harm", ["cut", "member missing", "member damaged", "no archive"])
def test_damaged_archive_is_refused_and_leaves_nothing(small, harm):
    archive = small.folder / "cifar10.tar.gz"
    if harm == "member damaged":
        small.rewrite(BATCH, small.contents(BATCH)[:-1] + b"\xff")
    make_archive(small, archive, CIFAR_FILES[:1] if harm == "member missing" else CIFAR_FILES)
    (small.folder / BATCH).unlink()
    if harm == "cut":
        archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    if harm == "no archive":
        archive.write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"cifar10\.tar\.gz is damaged") as caught:
        data.load("cifar10", data_dir=small.folder)
    assert str(small.folder / BATCH) in str(caught.value)
    assert not (small.folder / BATCH).exists()
    assert not list(small.folder.rglob(".*"))


@pytest.mark.parametrize("kind", ["large", "sparse", "link"])
def test_member_of_another_size_is_refused_before_it_is_written(small, kind, monkeypatch):
    archive = small.folder / "cifar10.tar.gz"
    original = small.contents(BATCH)
    small.rewrite(BATCH, original + bytes(2**20))
    with tarfile.open(archive, "w:gz") as members:
        member = tarfile.TarInfo(BATCH)
        if kind == "link":
            members.add(small.folder / BATCH, "other")
            member.type, member.linkname = tarfile.SYMTYPE, "other"
        elif kind == "large":
            member.size = len(original) + 2**20
        else:  # of a terabyte, of which none is there
            member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1"}
            member.pax_headers |= {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40)}
        content = (small.folder / BATCH).open("rb")
        members.addfile(member, content if kind == "large" else None)
        content.close()
    (small.folder / BATCH).unlink()
    written = []
    monkeypatch.setattr(transfer, "whole_file", lambda path: written.append(path))
    reason = "is not a file" if kind == "link" else rf"bytes where {len(original):,} belong"
    with pytest.raises(ValueError, match=rf"cifar10\.tar\.gz is damaged: .*{reason}"):
        data.load("cifar10", data_dir=small.folder)
    assert written == []


# Downloads ---------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder served over HTTP, and the paths that were asked for."""
    served, asked = tmp_path / "served", []
    served.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

    handler = functools.partial(Handler, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(transfer, "RETRIES", 0)  # pooch sleeps between two attempts
        yield served, f"http://127.0.0.1:{running.server_port}/", asked
        running.shutdown()
        thread.join()


def test_download_comes_from_the_first_mirror_that_has_the_file(server, tmp_path):
    served, address, asked = server
    (served / "good").mkdir()
    (served / "wrong").mkdir()
    (served / "good" / "file").write_bytes(b"contents")
    (served / "wrong" / "file").write_bytes(b"other contents")
    md5 = hashlib.md5(b"contents").hexdigest()
    mirrors = (f"{address}absent/", f"{address}wrong/", f"{address}good/")
    target = tmp_path / "new" / "file"
    transfer.download_file(Download("set/file", md5, mirrors), target)
    assert target.read_bytes() == b"contents"
    assert [path.split("/")[1] for path in asked] == ["absent", "absent", "wrong", "good"]


def test_failed_download_names_every_mirror_and_leaves_no_file(server, tmp_path):
    served, address, _ = server
    (served / "file").write_bytes(b"other contents")
    mirrors = (f"{address}absent/", address, "http://127.0.0.1:9/")
    with pytest.raises(ConnectionError) as caught:
        transfer.download_file(Download("file", "0" * 32, mirrors), tmp_path / "new" / "file")
    message = str(caught.value)
    assert "404" in message
    assert "MD5 hash" in message
    assert "no connection to http://127.0.0.1:9/file" in message
    assert not list((tmp_path / "new").iterdir())


def test_download_retries(server, tmp_path, monkeypatch):
    _, address, asked = server
    monkeypatch.setattr(transfer, "RETRIES", 1)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(ConnectionError):
        transfer.download_file(Download("file", "0" * 32, (address,)), tmp_path / "file")
    assert asked.count("/file") >= 2


def test_missing_pooch_is_explained_with_the_extra(small, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("ZEROMEAN_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(FileNotFoundError, match=r"pip install '\.\[experiments\]'"):
        data.load("mnist", data_dir=small.folder / "empty")
    with pytest.raises(ImportError, match=r"ZEROMEAN_DATA.*pip install '\.\[experiments\]'"):
        data.data_folder()


def test_missing_scikit_learn_is_explained_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[experiments\]'"):
        data.load("digits")


# Names and folders -------------------------------------------------------------------------------


def test_data_folder_prefers_the_argument_then_the_variable_then_the_cache(monkeypatch):
    monkeypatch.setenv("ZEROMEAN_DATA", "/elsewhere")
    assert data.data_folder("/here") == Path("/here")
    assert data.data_folder("~/here") == Path.home() / "here"
    assert data.data_folder() == Path("/elsewhere")
    monkeypatch.setenv("ZEROMEAN_DATA", "")
    assert "zeromean" in data.data_folder().parts


def test_variable_is_where_load_looks(small, monkeypatch):
    monkeypatch.setenv("ZEROMEAN_DATA", str(small.folder))
    assert len(data.load("mnist")) == TRAIN


def test_unknown_names_and_splits_are_refused():
    for call in (data.load, data.verify, data.download, data.how_to_provide):
        with pytest.raises(ValueError, match="no data set 'imagenet'; there are mnist, "):
            call("imagenet")
    with pytest.raises(ValueError, match="split must be"):
        data.load("digits", "dev")
    with pytest.raises(ValueError, match="notmnist has no train split, only test"):
        data.load("notmnist")


@pytest.mark.parametrize("name", ["digits", "toy"])
def test_validation_set_and_the_rest_are_the_training_set(name):
    train, validation, rest = (data.load(name, split) for split in ("train", "validation", "rest"))
    assert len(validation) == len(train) // 10
    assert torch.equal(torch.cat([rest.images, validation.images]), train.images)
    assert torch.equal(torch.cat([rest.labels, validation.labels]), train.labels)


def test_names_are_the_catalogue_and_the_built_in_sets():
    assert data.NAMES == (*CATALOGUE, "digits", "toy")


# Built-in sets -----------------------------------------------------------------------------------


def test_digits_have_a_fixed_split_without_overlap():
    train, test = data.load("digits"), data.load("digits", "test")
    assert train.images.shape == (1198, 1, 8, 8)
    assert test.images.shape == (599, 1, 8, 8)
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert train.num_classes == 10
    torch.testing.assert_close(train.images, data.load("digits").images, rtol=0, atol=0)
    every = torch.cat([train.images, test.images]).flatten(1)
    assert len(every.unique(dim=0)) == 1797


def test_toy_points_lie_around_their_centres():
    points, labels = data.toy_points(2000, torch.Generator().manual_seed(0))
    assert labels.bincount().tolist() == [2000] * 4
    centres = torch.tensor([(3.0, 3.0), (3.0, 10.0), (10.0, 3.0), (10.0, 10.0)])
    error = torch.stack([points[labels == c].mean(0) for c in range(4)]) - centres
    assert error.abs().max() < 4 / 2000**0.5  # standard errors
    assert (points - centres[labels]).var().item() == pytest.approx(1, abs=4 * (2 / 16000) ** 0.5)
    with pytest.raises(ValueError, match="num_per_class must be at least 1"):
        data.toy_points(0)


def test_toy_set_is_always_the_same_and_its_splits_differ():
    state = torch.get_rng_state()
    train, test = data.load("toy"), data.load("toy", "test")
    assert train.images.shape == test.images.shape == (2000, 2)
    assert train.num_classes == 4
    assert torch.equal(train.images, data.load("toy").images)
    assert not torch.equal(train.images, test.images)
    assert torch.equal(torch.get_rng_state(), state)


def numbered(count):
    """A set whose images and labels carry their own number."""
    labels = torch.arange(count)
    return data.ImageSet(labels.float().view(-1, 1, 1, 1).expand(-1, 1, 4, 4), labels, count)


def test_subset_keeps_order_and_number_of_classes():
    chosen = numbered(10).subset([7, 2, 7])
    assert chosen.labels.tolist() == [7, 2, 7]
    assert chosen.images[:, 0, 0, 0].tolist() == [7, 2, 7]
    assert chosen.num_classes == 10
    assert len(numbered(10).subset(torch.tensor([], dtype=torch.int64))) == 0
    assert numbered(10).subset(range(3)).labels.tolist() == [0, 1, 2]


def test_image_set_moves_and_needs_a_label_for_each_image():
    moved = numbered(3).to("meta")
    assert moved.images.is_meta
    assert moved.labels.is_meta
    with pytest.raises(ValueError, match="3 images and 2 labels"):
        data.ImageSet(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64), 2)


# Batches -----------------------------------------------------------------------------------------


def order(batches):
    return torch.cat([labels for _, labels in batches]).tolist()


def test_every_epoch_has_every_image_once_with_its_label():
    batches = data.Batches(numbered(23), 5, seed=0)
    assert len(batches) == len(list(batches)) == 5
    for images, labels in batches:
        assert torch.equal(images[:, 0, 0, 0], labels.float())
    assert sorted(order(batches)) == list(range(23))


def test_order_is_a_function_of_seed_and_epoch_alone():
    def epoch(seed, number):
        batches = data.Batches(numbered(50), 7, seed=seed)
        batches.set_epoch(number)
        torch.rand(1)  # the global generator does not matter
        return tuple(order(batches))

    assert epoch(3, 4) == epoch(3, 4)
    assert len({epoch(seed, number) for seed in range(4) for number in range(4)}) == 16
    batches = data.Batches(numbered(50), 7, seed=3)
    assert order(batches) == order(batches) == list(epoch(3, 0))


def test_global_generator_is_untouched():
    state = torch.get_rng_state()
    list(data.Batches(numbered(20), 6, seed=0, augment=data.crop_and_flip))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_shuffling_the_order_is_that_of_the_set():
    assert order(data.Batches(numbered(23), 5, seed=0, shuffle=False)) == list(range(23))


@pytest.mark.parametrize(
    ("count", "drop_last", "sizes"),
    [(10, False, [4, 4, 2]), (10, True, [4, 4]), (8, True, [4, 4]), (3, True, []), (0, False, [])],
)
def test_last_batch(count, drop_last, sizes):
    batches = data.Batches(numbered(count), 4, seed=0, drop_last=drop_last)
    assert [len(labels) for _, labels in batches] == sizes
    assert len(batches) == len(sizes)


def test_writing_into_a_batch_leaves_the_set_alone():
    whole = numbered(6)
    for images, labels in data.Batches(whole, 6, seed=0, shuffle=False):
        images.fill_(-1)
        labels.fill_(-1)
    assert whole.labels.tolist() == list(range(6))
    assert (whole.images >= 0).all()


def test_augmentation_depends_on_seed_epoch_and_batch():
    images = torch.rand(1, 1, 8, 8).expand(64, -1, -1, -1)
    same = data.ImageSet(images, torch.zeros(64, dtype=torch.int64), 1)
    batches = data.Batches(same, 16, seed=0, shuffle=False, augment=data.crop_and_flip)
    first = [images for images, _ in batches]
    again = [images for images, _ in batches]
    batches.set_epoch(1)
    later = [images for images, _ in batches]
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, later))
    assert not torch.equal(first[0], first[1])


def test_bad_batch_arguments_are_refused():
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        data.Batches(numbered(3), 0, seed=0)
    with pytest.raises(ValueError, match="seed must not be negative"):
        data.Batches(numbered(3), 1, seed=-1)
    with pytest.raises(ValueError, match="epoch must not be negative"):
        data.Batches(numbered(3), 1, seed=0).set_epoch(-1)


# Augmentation ------------------------------------------------------------------------------------


def windows(image, padding):
    """Every crop of a padded image, and its mirror image, by plain slicing."""
    height, width = image.shape[-2:]
    padded = torch.nn.functional.pad(image, (padding,) * 4)
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            window = padded[..., top : top + height, left : left + width]
            yield window
            yield window.flip(-1)


@pytest.mark.parametrize("shape", [(3, 6, 5), (1, 4, 7)])
def test_crop_and_flip_gives_every_window_equally_often(shape):
    image = torch.rand(shape) + 1
    count, padding = 20_000, 1
    augmented = data.crop_and_flip(image.expand(count, *shape), padding)
    assert augmented.shape == (count, *shape)
    candidates = torch.stack(list(windows(image, padding)))
    found, frequency = augmented.unique(dim=0, return_counts=True)
    assert {tuple(x.flatten().tolist()) for x in found} == {
        tuple(x.flatten().tolist()) for x in candidates
    }
    expected = count / len(candidates)
    assert (frequency - expected).abs().max() < 4.5 * expected**0.5


def test_crop_and_flip_keeps_images_apart():
    images = torch.arange(1.0, 101).view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    augmented = data.crop_and_flip(images, 2)
    assert torch.equal(augmented.amax((1, 2, 3)), images[:, 0, 0, 0])
    assert set((augmented / images).unique().tolist()) <= {0.0, 1.0}


def test_crop_and_flip_follows_its_generator():
    images = torch.rand(10, 3, 8, 8)
    draws = [
        data.crop_and_flip(images, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_bad_augmentation_arguments_are_refused():
    with pytest.raises(ValueError, match=r"needs images of shape \(N, C, H, W\), got \(3, 8, 8\)"):
        data.crop_and_flip(torch.rand(3, 8, 8))
    with pytest.raises(ValueError, match="padding must not be negative"):
        data.crop_and_flip(torch.rand(1, 3, 8, 8), -1)


# The real files ----------------------------------------------------------------------------------

BESIDE = Path(__file__).parents[3] / "shared" / "data"
REAL = Path(os.environ.get("ZEROMEAN_DATA") or BESIDE)
FIRST_LABELS = {
    ("mnist", "train"): [5, 0, 4, 1, 9],
    ("mnist", "test"): [7, 2, 1, 0, 4],
    ("fashion-mnist", "train"): [9, 0, 0, 3, 0],
    ("fashion-mnist", "test"): [9, 2, 1, 1, 6],
    ("cifar10", "train"): [6, 9, 9, 4, 1],
    ("cifar10", "test"): [3, 8, 8, 0, 6],
    ("cifar100", "train"): [19, 29, 0, 11, 1],
    ("cifar100", "test"): [49, 33, 72, 51, 71],
}


@pytest.mark.parametrize(("name", "split"), CASES)
def test_real_files_load(name, split):
    files = CATALOGUE[name].splits[split]
    missing = [file.path for file in files if not (REAL / file.path).exists()]
    if missing:
        pytest.skip(f"{missing[0]} is not in {REAL}; set ZEROMEAN_DATA to a folder that has it")
    loaded = data.load(name, split, data_dir=REAL)
    assert len(loaded) == sum(file.count for file in files if file.holds != "images")
    assert loaded.images.shape[1:] == CATALOGUE[name].image_shape
    assert (loaded.images.min(), loaded.images.max()) == (0, 1)
    assert len(loaded.labels.unique()) == loaded.num_classes
    if (name, split) in FIRST_LABELS:
        assert loaded.labels[:5].tolist() == FIRST_LABELS[name, split]


def test_subsets_by_indices_and_by_masks():
    digits = data.load("digits")
    threes = digits.subset(digits.labels == 3)
    assert len(threes) == (digits.labels == 3).sum()
    assert (threes.labels == 3).all()
    assert torch.equal(digits.subset([5, 2, 2]).labels, digits.labels[[5, 2, 2]])
    assert len(digits.subset([])) == 0
    with pytest.raises(ValueError, match="True or False for each of 1198 images"):
        digits.subset(torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"needs indices, got numbers of type torch\.float32"):
        digits.subset(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.bool])
def test_labels_become_int64(dtype):
    labels = data.ImageSet(torch.zeros(2, 3), torch.tensor([0, 1]).to(dtype), 2).labels
    assert torch.equal(labels, torch.tensor([0, 1]))
    assert labels.dtype == torch.int64


def test_a_folder_of_an_unknown_user_is_refused():
    with pytest.raises(ValueError, match="There is no user for the data folder ~nobody-there/x"):
        data.load("mnist", "train", data_dir="~nobody-there/x")
