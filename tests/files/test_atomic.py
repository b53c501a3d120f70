"""Files are whole or not there, whoever writes them and whatever happens meanwhile."""

import errno
import os
import signal
import stat
import sys
import threading
from pathlib import Path

import pytest
from torch import nn

import zeromean as zm
from zeromean import export
from zeromean.files.atomic import whole_file

needs_posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")


def write(path, text="new", **options):
    with whole_file(path, **options) as temporary:
        temporary.write_text(text)


def killed_while_writing(processes, path):
    """Another process that dies in mid-file, as from `kill -9` or a lack of memory."""
    code = (
        "import os, runpy, signal, sys\n"
        "whole_file = runpy.run_path(sys.argv[1])['whole_file']\n"  # without torch
        "with whole_file(sys.argv[2]) as temporary:\n"
        "    temporary.write_bytes(bytes(1 << 16))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    source = sys.modules[whole_file.__module__].__file__
    processes.run([sys.executable, "-c", code, source, path], code=-signal.SIGKILL)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_old_content_can_be_kept_under_another_name(tmp_path):
    path, kept = tmp_path / "a", tmp_path / "b"
    write(path, "first", keep_as=kept)
    assert names(tmp_path) == ["a"]
    write(path, "second", keep_as=kept)
    assert (path.read_text(), kept.read_text()) == ("second", "first")
    assert names(tmp_path) == ["a", "b"]


@needs_posix
def test_what_a_killed_writer_leaves_is_removed_by_the_next_of_the_same_file(processes, tmp_path):
    path, other = tmp_path / "m.safetensors", tmp_path / "m.safetensors2"
    write(path, "old")
    killed_while_writing(processes, path)
    killed_while_writing(processes, other)
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 3
    write(path)
    left = [name for name in names(tmp_path) if name != path.name]
    assert len(left) == 1
    assert left[0].startswith(".m.safetensors2.")
    assert path.read_text() == "new"


@needs_posix
def test_a_killed_save_of_a_model_leaves_nothing_after_the_next(processes, tmp_path):
    path = tmp_path / "m.safetensors"
    # safetensors has a temporary file of its own, which is the one that is left.
    code = (
        "import os, signal, sys, safetensors.torch, torch, zeromean as zm\n"
        "save_file = safetensors.torch.save_file\n"
        "def killed(*arguments, **options):\n"
        "    save_file(*arguments, **options)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "safetensors.torch.save_file = killed\n"
        "zm.save(torch.nn.Linear(99, 99), sys.argv[1])\n"
    )
    processes.run([sys.executable, "-c", code, path], code=-signal.SIGKILL)
    assert len(names(tmp_path)) == 1
    zm.save(nn.Linear(2, 2), path)
    assert names(tmp_path) == [path.name]


def test_what_a_living_writer_has_is_left_alone(tmp_path):
    path = tmp_path / "a"
    with whole_file(path) as temporary:
        temporary.write_text("slow")
        thread = threading.Thread(target=write, args=(path, "quick"))
        thread.start()
        thread.join()
        assert path.read_text() == "quick"
        assert temporary.read_text() == "slow"
    assert path.read_text() == "slow"
    assert names(tmp_path) == ["a"]


@needs_posix
def test_links_stay_links(tmp_path):
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to(Path("folder", "target"))
    for text in ("made", "replaced"):
        write(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert names(tmp_path) == ["folder", "link"]
    assert names(tmp_path / "folder") == ["target"]


@needs_posix
def test_pipes_get_the_content_and_stay_pipes(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = []
    reader = threading.Thread(target=lambda: content.append(pipe.read_bytes()), daemon=True)
    reader.start()
    zm.save(nn.Linear(2, 2), pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    reader.join(60)
    (tmp_path / "m.safetensors").write_bytes(content[0])
    zm.load(tmp_path / "m.safetensors", nn.Linear(2, 2))


def device(folder, minor):
    """A node of its own for a device of Linux: no mistake may cost the machine its /dev/null."""
    path = folder / "device"
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, minor))
        path.open("wb").close()
    except (AttributeError, OSError) as error:
        pytest.skip(f"devices cannot be made here ({error})")
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="needs the device numbers of Linux")
def test_devices_stay_devices(tmp_path):
    null = device(tmp_path, 3)
    write(null)
    assert null.is_char_device()
    assert names(tmp_path) == [null.name]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the device numbers of Linux")
def test_a_full_device_gets_a_sentence(tmp_path):
    full = device(tmp_path, 7)
    with pytest.raises(OSError, match=r"There is no room for .*device") as caught:
        zm.save(nn.Linear(2, 2), full)
    assert caught.value.errno == errno.ENOSPC
    assert full.is_char_device()


@needs_posix
@pytest.mark.parametrize("save", [zm.save, export.save_compressed])
def test_a_disk_without_room_gets_a_sentence_and_keeps_the_old_file(save, tmp_path):
    import resource

    path = tmp_path / "m.safetensors"
    save(nn.Linear(2, 2), path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = nn.Linear(600, 600)  # 1.4 MB
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(OSError, match=r"There is no room for .*m\.safetensors.*unchanged"):
            save(model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert names(tmp_path) == [path.name]


@needs_posix
def test_a_file_keeps_its_permissions(tmp_path):
    path = tmp_path / "a"
    path.touch()
    path.chmod(0o640)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; give the name of a file"):
        write(tmp_path)
    assert names(tmp_path) == []


def test_long_names_are_written(tmp_path):
    path = tmp_path / ("a" * 250)
    write(path)
    assert path.read_text() == "new"


@needs_posix
@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match=r"a cannot be written: Permission denied"):
            write(tmp_path / "a")
    finally:
        tmp_path.chmod(0o700)


def test_nothing_is_left_of_an_interrupted_block(tmp_path):
    def interrupted():
        with whole_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    write(tmp_path / "a", "old")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "old"
