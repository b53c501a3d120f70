"""A few hundred of the random cases of `tools/fuzz.py`, which runs 100,000."""

import importlib.util
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fuzz.py"
# Of each part so many that the whole takes seconds: a record costs as much as fifty layers.
CASES = {
    "estimators": 40,
    "command-line": 15,
    "records": 5,
    "models": 60,
    "networks": 60,
    "layers": 250,
}


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fuzz_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.modules[spec.name] = module  # Dataclasses look themselves up there.
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules[spec.name]


@pytest.mark.parametrize("name", CASES)
def test_random_cases_are_checked_or_refused_with_a_sentence(tool, name, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROMEAN_DATA", str(tmp_path))
    part = next(part for part in tool.PARTS if part.name == name)
    counts = tool.run(part, range(CASES[name]), 1, tmp_path)
    assert not counts.failures, "\n".join(text for _, text in counts.failures)
    assert sum(counts.outcomes.values()) == CASES[name]
    assert counts.outcomes["checked"], "nothing was answered"


def test_every_part_is_among_them(tool):
    assert {part.name for part in tool.PARTS} == CASES.keys()


def test_failures_say_what_reproduces_them(tool, capsys, monkeypatch):
    def prepare(folder):
        def case(generator):
            raise KeyError("raw")

        return case

    part = tool.Part("layers", "layers", prepare, 1)
    monkeypatch.setattr(tool, "PARTS", (part,))
    assert tool.main(["--cases", "1", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "python tools/fuzz.py --seed 7 --only layers:0" in said
    assert "KeyError: 'raw'" in said
