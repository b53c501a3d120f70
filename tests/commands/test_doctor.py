"""`zeromean doctor` works where little does, and says what to install."""

import os
import re
import shlex
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import zeromean as zm
from zeromean import cli
from zeromean.commands import doctor
from zeromean.training import precision

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROMEAN_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(b"")
    return tmp_path


def test_versions_devices_and_data_are_shown(capsys, data):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in (zm.__version__, torch.__version__, np.__version__, "CUDA", "MPS", "threads"):
        assert word in printed
    assert f"{data} (from ZEROMEAN_DATA)" in printed
    assert re.search(r"mnist +1 of 4 files; `zeromean data mnist` says which", printed)
    assert re.search(r"cifar10 +missing; `zeromean data cifar10` fetches it", printed)
    assert cli.main(["doctor", "--data-dir", "elsewhere"]) == 0
    assert "elsewhere (from --data-dir)" in capsys.readouterr().out


@pytest.mark.parametrize(("fast", "said"), [(True, "fast"), (False, "use float32")])
def test_speed_of_bfloat16_is_told(fast, said, capsys, monkeypatch, data):
    monkeypatch.setattr(precision, "computes_in_bfloat16", lambda: fast)
    assert cli.main(["doctor"]) == 0
    assert re.search(f"bfloat16 is .*{said}", capsys.readouterr().out)


def test_what_an_extra_lacks_comes_with_the_command(capsys, monkeypatch, data):
    there = {"safetensors": "0.3.9", "rich": "13.0", "tyro": "0.10"}
    monkeypatch.setattr(doctor, "_version", there.get)
    assert cli.main(["doctor"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.split()}
    assert lines["io"].endswith("missing safetensors>=0.4; pip install 'safetensors>=0.4'")
    assert "missing matplotlib>=3.8, scikit-learn>=1.6; pip install" in lines["cli"]
    assert "'safetensors>=0.4'" in lines["export"]  # Of the extra that it contains.


def test_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(declared) - {"dev", "docs"}
    # As the metadata of a wheel have them.
    lines = [
        f"{requirement}; extra == '{extra}'"
        for extra, requirements in declared.items()
        for requirement in requirements
    ]
    found = doctor._requirements([*project["dependencies"], *lines], "experiments")
    assert found["safetensors"] == ">=0.4"
    assert found["plotly"] == ">=6"
    assert "torch" not in found
    assert doctor._requirements(lines, "dask")["dask"] == ">=2024.8"


@pytest.mark.parametrize(
    ("version", "wanted", "enough"),
    [
        (None, "", False),
        ("1.0", "", True),
        ("0.10", ">=0.9", True),
        ("0.9", ">=0.10", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("6", ">=6", True),
        ("unknown", ">=1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(version, wanted, enough):
    assert doctor._is_at_least(version, wanted) is enough


def test_it_runs_without_any_extra(processes, data):
    """Nothing outside of torch and numpy can be imported."""
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['tyro', 'rich', 'matplotlib', 'sklearn', "
        "'safetensors', 'pooch', 'lightning']))\n"
        "from zeromean.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    printed = processes.run([sys.executable, "-c", script], env=os.environ).stdout
    assert torch.__version__ in printed


def test_without_a_data_folder_it_says_how_to_name_one(capsys, monkeypatch):
    monkeypatch.delenv("ZEROMEAN_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert cli.main(["doctor"]) == 0
    assert "the environment variable ZEROMEAN_DATA" in capsys.readouterr().out


def test_a_torch_that_does_not_work_ends_with_1(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "torch     does not work: ModuleNotFoundError" in printed
    assert "extras" in printed


def test_a_package_that_is_not_installed_is_told(capsys, monkeypatch, data):
    def requires(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    assert cli.main(["doctor"]) == 0
    assert "zeromean itself is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "code"), [("--help", 0), ("--dance", 2)])
def test_options_are_its_own(option, code, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["doctor", option])
    assert exit_.value.code == code
    printed = capsys.readouterr()
    assert "--data-dir" in printed.out + printed.err


def test_commands_to_install_can_be_pasted():
    for name, text in doctor._extras():
        if "pip install" in text:
            assert name
            assert shlex.split(text.partition("; ")[2])[:2] == ["pip", "install"]
