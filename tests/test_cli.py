"""The command line: what it prints, and with which exit code."""

import subprocess
import sys

import pytest

import zeromean as zm
from zeromean import cli, demo


@pytest.fixture
def no_training(monkeypatch):
    """Fail where a command gets as far as training."""

    def run_demo(*args, **kwargs):
        pytest.fail("the demo started training")

    monkeypatch.setattr(demo, "run_demo", run_demo)


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zeromean {zm.__version__}\n"


def test_python_m_zeromean_is_the_same_command_line():
    command = [sys.executable, "-m", "zeromean", "--version"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout == f"zeromean {zm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--help"], list(cli.COMMANDS)), (["demo", "--help"], ["--output", "--seed"])],
)
def test_help_names_what_there_is(arguments, expected, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in expected)


@pytest.mark.parametrize(
    "arguments", [[], ["dance"], ["demo", "--sed", "1"], ["demo", "--seed", "x"]]
)
def test_wrong_arguments_exit_with_2(arguments, capsys, no_training):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda output, *, seed: calls.append((output, seed)))
    folder = tmp_path / "new" / "folder"
    assert cli.main(["demo", "--output", str(folder), "--seed", "7"]) == 0
    assert calls == [(folder, 7)]
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_folder_that_cannot_be_created_is_refused_before_training(capsys, tmp_path, no_training):
    (tmp_path / "file").write_text("in the way")
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        assert cli.main(["demo", "--output", str(output)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"zeromean: cannot write into {output}: ")
        assert error.count("\n") == 1


def test_folder_that_cannot_be_written_is_refused_before_training(
    capsys, monkeypatch, tmp_path, no_training
):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(cli.tempfile, "TemporaryFile", refuse)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert "Permission denied; choose another --output." in capsys.readouterr().err


def test_full_disk_is_one_sentence(capsys, monkeypatch, tmp_path):
    def run_demo(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_seed_out_of_range_is_refused(seed, capsys, tmp_path, no_training):
    assert cli.main(["demo", "--output", str(tmp_path), "--seed", seed]) == 2
    assert f"--seed must lie between 0 and 2³² − 1, got {seed}." in capsys.readouterr().err


def test_ctrl_c_exits_with_130_and_no_traceback(capsys, monkeypatch, tmp_path):
    def run_demo(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert cli.main(["demo", "--output", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "zeromean: interrupted.\n"


def test_missing_extra_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "tyro" else name)
    assert cli.main(["demo"]) == 2
    expected = "zeromean: the command line needs tyro; run: pip install 'zeromean[cli]'\n"
    assert capsys.readouterr().err == expected


def test_importing_the_command_line_leaves_the_heavy_extras_alone():
    code = "import sys, zeromean.cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, *cli.REQUIREMENTS, "zeromean.demo"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
