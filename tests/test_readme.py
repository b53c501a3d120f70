"""The README says what is true: its examples run, and its numbers are those of the records."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import zeromean as zm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_first_example_runs_as_printed(capsys):
    namespace = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), namespace)
    assert namespace["probabilities"].shape == (1000, 2)
    correct = namespace["probabilities"].argmax(-1) == namespace["y"]
    assert correct.float().mean() > 0.9
    assert "accuracy" in capsys.readouterr().out


def test_a_trained_network_keeps_its_predictions_and_learns_its_noise():
    torch.manual_seed(0)
    namespace = {}
    exec(compile(BLOCKS[0] + BLOCKS[2], "README.md", "exec"), namespace)
    proba = zm.predict_proba(namespace["plain"], namespace["x"], 20, seed=0)
    assert (proba.argmax(-1) == namespace["y"]).float().mean() > 0.9
    sure, unsure, _ = namespace["uncertainty"].predictive_entropy
    assert sure < 0.1 < unsure


def test_one_call_makes_the_network_smaller(capsys):
    torch.manual_seed(0)
    namespace = {}
    exec(compile(BLOCKS[0] + BLOCKS[1], "README.md", "exec"), namespace)
    shrunk, small, dense = (namespace[name] for name in ("shrunk", "small", "dense"))
    assert shrunk.reached
    count = sum(p.numel() for p in small.parameters())
    assert count < 0.7 * sum(p.numel() for p in dense.parameters())
    assert shrunk.best.name in capsys.readouterr().out


def test_layers_of_the_fourth_example_can_be_built():
    exec(compile(f"import zeromean as zm\n{BLOCKS[3]}", "README.md", "exec"), {})


@pytest.mark.parametrize("table", ["accuracy", "separation"])
def test_tables_of_the_demo_are_the_recorded_ones(table):
    record = json.loads((ROOT / "results" / "demo.json").read_text(encoding="utf-8"))
    for network, row in record[table]["rows"].items():
        assert f"| {' | '.join([network, *row.values()])} |" in README


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^make (\w+)|`make (\w+)`", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= {"".join(groups) for groups in targets}
    for target in map("".join, targets):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_speed_tables_are_the_recorded_ones(processes):
    processes.run([sys.executable, ROOT / "benchmarks" / "publish.py", "--check"])
