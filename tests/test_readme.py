"""The README says what is true: its examples run, and its numbers are those of the records."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def numbers(table):
    """The rows of a table by name: before, with a temperature, trained on, after."""
    rows = re.findall(r"^(\S.*?)((?:\s+-?\d+\.\d+){4})$", table, flags=re.MULTILINE)
    return {name: [float(number) for number in found.split()] for name, found in rows}


def test_first_example_runs_as_printed(capsys):
    pytest.importorskip("lightning.pytorch")
    namespace = {}
    exec(compile(BLOCKS[0], "README.md", "exec"), namespace)
    printed = numbers(capsys.readouterr().out)
    stated = numbers(README[README.index("```text\nlayer") :].split("\n```")[0])
    assert printed.keys() == stated.keys() >= {"RMSE", "NLL", "passes for a prediction"}
    result = namespace["result"]
    # More than a temperature and than the passes are worth, and no error more.
    assert result.after["NLL"] < result.trained_on["NLL"] < result.temperature["NLL"] - 0.3
    assert result.after["RMSE"] < 1.02 * result.before["RMSE"]
    # Other CPUs round otherwise, and training carries that on.
    slack = {"in 90% intervals, %": 3.0, "passes for a prediction": 0.5, "RMSE": 0.01}
    for name, row in printed.items():
        assert row == pytest.approx(stated[name], abs=slack.get(name, 0.1)), name
    inputs, targets = namespace["test"]
    interval = namespace["interval"]
    assert interval.coverage(targets) == pytest.approx(0.9, abs=0.1)
    # The interval is wide where the error is large.
    error = (namespace["model"](inputs) - targets).abs().flatten()
    wide = interval.width.flatten() > interval.width.median()
    assert error[wide].mean() > 1.5 * error[~wide].mean()


def test_variance_layers_learn_what_the_third_example_says(capsys):
    namespace = {}
    exec(compile(BLOCKS[2], "README.md", "exec"), namespace)
    assert namespace["probabilities"].shape == (1000, 2)
    correct = namespace["probabilities"].argmax(-1) == namespace["y"]
    assert correct.float().mean() > 0.9
    assert "accuracy" in capsys.readouterr().out


def test_one_call_makes_the_network_smaller(capsys):
    torch.manual_seed(0)
    namespace = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), namespace)
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
