"""`zeromean predict`: the numbers of the functions in Python, in files that are whole."""

import csv
import multiprocessing
import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean import cli, export
from zeromean.prediction import parallel

ROWS = 25


@pytest.fixture
def network():
    return nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), zm.Linear(8, 8, prior=None), nn.ReLU(), nn.Linear(8, 3)
    )


@pytest.fixture
def inputs():
    return torch.randn(ROWS, 4)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch, network, inputs):
    """A compressed file, one of zm.save with the module that builds it, and data of each kind."""
    monkeypatch.chdir(tmp_path)
    export.save_compressed(network, "c.safetensors")
    zm.save(network, "s.safetensors")
    np.savez("x.npz", x=inputs.numpy())
    np.save("x.npy", inputs.numpy())
    table = [["a", "b", "c", "d"], *inputs.tolist()]
    with open("x.csv", "w", newline="") as file:
        csv.writer(file).writerows(table)
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n"
        "    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)\n"
        "    return nn.Sequential(*layers)\n\n\n"
        "def nothing():\n    return 3\n\n\n"
        "def fails():\n    raise KeyError('weights')\n\n\n"
        "def with_arguments(width):\n    return width\n"
    )
    yield
    sys.modules.pop("own_network", None)


def predict(*arguments):
    return cli.main(["predict", *map(str, arguments)])


def refused(capsys, *arguments):
    """The one sentence with which a prediction is refused."""
    assert predict(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("zeromean: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["c.safetensors", "x.npz"],
        ["c.safetensors", "x.npz", "--key", "x"],
        ["c.safetensors", "x.npy"],
        ["c.safetensors", "x.csv"],
        ["s.safetensors", "x.npy", "--model", "own_network:build"],
    ],
)
def test_numbers_are_those_of_predict_proba(arguments, network, inputs):
    assert predict(*arguments, "--out", "o.npz", "--seed", 3, "--num-samples", 7) == 0
    found = np.load("o.npz")
    proba = zm.predict_proba(network, inputs, 7, seed=3)
    uncertainty = zm.predictive_uncertainty(network, inputs, 7, seed=3)
    np.testing.assert_allclose(found["probabilities"], proba, rtol=1e-5)
    np.testing.assert_array_equal(found["predicted_class"], proba.argmax(-1))
    np.testing.assert_allclose(found["predictive_entropy"], uncertainty.predictive_entropy, 1e-5)
    np.testing.assert_allclose(found["mutual_information"], uncertainty.mutual_information, 1e-3)


def test_batches_have_seeds_of_their_own(network, inputs):
    options = ["--batch-size", 10, "--seed", 5, "--quiet"]
    assert predict("c.safetensors", "x.npy", "--out", "o.npz", *options) == 0
    batches = [
        zm.predict_proba(network, batch, 20, seed=5 + number)
        for number, batch in enumerate(inputs.split(10))
    ]
    np.testing.assert_allclose(np.load("o.npz")["probabilities"], torch.cat(batches), rtol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="needs forks")
def test_processes_share_batches_and_give_the_same_file(monkeypatch, capsys):
    """Forks start at once; tests run with one thread, so that they are safe."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(parallel, "start_context", lambda: context)
    written = []
    for devices in (1, 2, 3):
        options = ["--model", "own_network:build", "--batch-size", 10, "--devices", devices]
        assert predict("s.safetensors", "x.npy", "--out", "o.npz", "--quiet", *options) == 0
        with np.load("o.npz") as file:
            written.append({name: file[name].tobytes() for name in file})
    assert written[0] == written[1] == written[2]
    capsys.readouterr()
    said = refused(capsys, "c.safetensors", "x.npy", "--devices", 0)
    assert "--devices must be at least 1, got 0" in said


def test_csv_has_a_row_for_each_example(capsys):
    assert predict("c.safetensors", "x.csv", "--out", "o.csv", "--seed", 1) == 0
    printed = capsys.readouterr().out
    assert f"{ROWS} rows, 20 samples" in printed
    assert "wrote o.csv" in printed
    assert predict("c.safetensors", "x.csv", "--out", "o.npz", "--seed", 1) == 0
    with open("o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    arrays = np.load("o.npz")
    assert len(rows) == ROWS
    assert [int(row["row"]) for row in rows] == list(range(ROWS))
    for index in range(3):
        column = np.array([row[f"probability_{index}"] for row in rows], dtype=np.float32)
        np.testing.assert_array_equal(column, arrays["probabilities"][:, index])
    classes = [int(row["predicted_class"]) for row in rows]
    np.testing.assert_array_equal(classes, arrays["predicted_class"])


def test_the_most_uncertain_rows_are_shown(capsys):
    assert predict("c.safetensors", "x.npz", "--out", "o.npz", "--top", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("row "))
    shown = [int(line.split()[0]) for line in lines[start + 1 : start + 4]]
    assert shown == list(np.argsort(-np.load("o.npz")["predictive_entropy"])[:3])


def test_regression_gives_mean_and_both_standard_deviations(network, inputs):
    options = ["--regression", "--noise-variance", 0.25, "--seed", 2, "--out", "o.npz"]
    assert predict("c.safetensors", "x.npz", *options) == 0
    found, moments = np.load("o.npz"), zm.predict_moments(network, inputs, 20, seed=2)
    np.testing.assert_allclose(found["mean"], moments.mean, rtol=1e-5)
    np.testing.assert_allclose(found["epistemic_std"], moments.epistemic.sqrt(), rtol=1e-4)
    np.testing.assert_allclose(found["aleatoric_std"], 0.5, rtol=1e-6)


def test_heteroscedastic_regression_reads_half_of_the_outputs(inputs):
    twofold = nn.Sequential(zm.Linear(4, 6, prior=None))
    export.save_compressed(twofold, "h.safetensors")
    options = ["--regression", "--heteroscedastic", "--out", "o.csv", "--seed", 4]
    assert predict("h.safetensors", "x.npz", *options) == 0
    likelihood = zm.HeteroscedasticGaussianLikelihood()
    moments = zm.predict_moments(twofold, inputs, 20, seed=4, likelihood=likelihood)
    with open("o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"mean_2", "aleatoric_std_2", "epistemic_std_2"} <= set(rows[0])
    found = [float(row["aleatoric_std_1"]) for row in rows]
    np.testing.assert_allclose(found, moments.aleatoric[:, 1].sqrt(), rtol=1e-4)


def test_a_sigmoid_says_yes_or_no(inputs):
    one = nn.Sequential(zm.Linear(4, 1, prior=None))
    export.save_compressed(one, "one.safetensors")
    assert predict("one.safetensors", "x.npz", "--link", "sigmoid", "--out", "o.csv") == 0
    proba = zm.predict_proba(one, inputs, 20, seed=0, link="sigmoid").squeeze(-1)
    with open("o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(r["probabilities"]) for r in rows], proba, rtol=1e-5)
    assert [r["predicted_class"] for r in rows] == [str(int(p > 0.5)) for p in proba]


def test_indices_stay_indices(capsys):
    tokens = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    export.save_compressed(tokens, "t.safetensors")
    with open("t.csv", "w") as file:
        file.write("1;2\n8;0\n")
    assert predict("t.safetensors", "t.csv", "--out", "o.npz") == 0
    proba = zm.predict_proba(tokens, torch.tensor([[1, 2], [8, 0]]), 20, seed=0)
    np.testing.assert_allclose(np.load("o.npz")["probabilities"], proba, rtol=1e-5)
    capsys.readouterr()
    np.save("t.npy", [[0.5, 1.0]])
    assert "not whole numbers" in refused(capsys, "t.safetensors", "t.npy")
    np.save("t.npy", [[1, 99]])
    assert "cannot take 1 rows of shape (2,)" in refused(capsys, "t.safetensors", "t.npy")


def test_numbers_of_other_machines_are_read(network, inputs):
    for kind in (">f8", "<f2", np.longdouble):
        np.save("other.npy", inputs.numpy().astype(kind))
        assert predict("c.safetensors", "other.npy", "--out", "o.npz") == 0
        proba = zm.predict_proba(network, inputs, 20, seed=0)
        np.testing.assert_allclose(np.load("o.npz")["probabilities"], proba, rtol=0.01)


def test_columns_are_chosen_by_name_or_number(network, inputs):
    with open("wide.csv", "w") as file:
        file.write("label,d,c,b,a\n")
        file.writelines(f"cat,{d},{c},{b},{a}\n" for a, b, c, d in inputs.tolist())
    options = ["--columns", "a", "b", "2", "d", "--out", "o.npz"]
    assert predict("c.safetensors", "wide.csv", *options) == 0
    proba = zm.predict_proba(network, inputs, 20, seed=0)
    np.testing.assert_allclose(np.load("o.npz")["probabilities"], proba, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.safetensors", "x.npz"], "There is no file none.safetensors."),
        (["x.csv", "x.npz"], "x.csv is not a complete safetensors file"),
        (["n.onnx", "x.npz"], "n.onnx is an ONNX file"),
        (["s.safetensors", "x.npz"], "no architecture; name what builds the network: --model"),
        (["c.safetensors", "x.npz", "--model", "a:b"], "describes its network itself; leave"),
        (["s.safetensors", "x.npz", "--model", "own_network"], "package.module:function, such as"),
        (["s.safetensors", "x.npz", "--model", "own_netwrok:build"], "No module named"),
        (["s.safetensors", "x.npz", "--model", "own_network:bild"], "no attribute 'bild'"),
        (["s.safetensors", "x.npz", "--model", "own_network:nothing"], "module, but gave a int"),
        (["s.safetensors", "x.npz", "--model", "own_network:fails"], "KeyError: 'weights'"),
        (["s.safetensors", "x.npz", "--model", "own_network:with_arguments"], "take no arguments"),
        (["s.safetensors", "x.npz", "--model", "zeromean.models:lenet5"], "the model has nothing"),
        (["c.safetensors", "none.npz"], "There is no file none.npz."),
        (["c.safetensors", "x.txt"], "must end in .npz, .npy, .csv"),
        (["c.safetensors", "x.npz", "--key", "y"], "has no array 'y'; it has x"),
        (["c.safetensors", "x.npy", "--key", "y"], "leave it out"),
        (["c.safetensors", "x.npz", "--columns", "a"], "leave it out"),
        (["c.safetensors", "x.csv", "--columns", "a", "e"], "no column 'e'; it has a, b, c, d"),
        (["c.safetensors", "x.csv", "--columns", "a", "b"], "cannot take 25 rows of shape (2,)"),
        (["c.safetensors", "x.npz", "--out", "o.txt"], "--out must end in .npz or .csv"),
        (["c.safetensors", "x.npz", "--out", "none/o.csv"], "a file in a folder that exists"),
        (["c.safetensors", "x.npz", "--out", "x.npz"], "is one of the files that are read"),
        (["c.safetensors", "x.npz", "--num-samples", "0"], "--num-samples must be at least 1"),
        (["c.safetensors", "x.npz", "--batch-size", "-1"], "--batch-size must be at least 1"),
        (["c.safetensors", "x.npz", "--top", "-1"], "--top must not be negative"),
        (["c.safetensors", "x.npz", "--device", "tpu"], "cannot be used here"),
        (["c.safetensors", "x.npz", "--device", "meta"], "none of cpu, cuda"),
        (["c.safetensors", "x.npz", "--heteroscedastic"], "go with --regression"),
        (["c.safetensors", "x.npz", "--regression", "--link", "sigmoid"], "are for classes"),
        (["c.safetensors", "x.npz", "--regression", "--num-samples", "1"], "at least 2, got 1"),
        (["c.safetensors", "x.npz", "--outputs", "probabilities"], "outputs between 0 and 1"),
        (
            ["c.safetensors", "x.npz", "--regression", "--noise-variance", "-1"],
            "noise_variance must be positive",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, said, capsys):
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.full((3, 4), np.nan), "NaN or infinite values in 3 of 3 rows, first in row 0"),
        (np.array([[0, 0, 0, 0], [0, 0, np.inf, 0]]), "in 1 of 2 rows, first in row 1"),
        (np.zeros((3, 5)), "5"),
        (np.zeros((3, 2, 2, 4, 1)), "the network"),
        (np.zeros((0, 4)), "at least one row"),
        (np.array(3.0), "at least one row"),
        (np.array([["a", "b"]]), "not real numbers"),
        (np.zeros((3, 4), dtype=complex), "complex128, not real numbers"),
        (np.zeros(3, dtype="datetime64[s]"), "not real numbers"),
        (np.zeros(3, dtype=[("a", float)]), "not real numbers"),
    ],
)
def test_arrays_that_are_no_inputs_are_refused(array, said, capsys):
    np.savez("bad.npz", array)
    assert said in refused(capsys, "c.safetensors", "bad.npz")


class Trap:
    """What a pickle would run."""

    def __reduce__(self):
        return (open, ("sprung", "w"))


@pytest.mark.parametrize("ending", ["npy", "npz"])
def test_nothing_is_unpickled(ending, capsys, tmp_path):
    array = np.array([Trap()], dtype=object)
    (np.save if ending == "npy" else np.savez)(f"trap.{ending}", array, allow_pickle=True)
    (tmp_path / "sprung").unlink(missing_ok=True)
    assert "could run code" in refused(capsys, "c.safetensors", f"trap.{ending}")
    with open(f"plain.{ending}", "wb") as file:
        pickle.dump(Trap(), file)
    assert "it does not begin like one" in refused(capsys, "c.safetensors", f"plain.{ending}")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "c.safetensors"])
@pytest.mark.parametrize("part", [0, 3, 0.5, 0.9])
def test_files_that_are_cut_short_are_refused(name, part, capsys, tmp_path):
    content = (tmp_path / name).read_bytes()
    length = part if isinstance(part, int) else int(part * len(content))
    (tmp_path / name).write_bytes(content[:length])
    files = [name, "x.csv"] if name == "c.safetensors" else ["c.safetensors", name]
    assert name in refused(capsys, *files)


def test_several_arrays_need_a_key(capsys, inputs):
    np.savez("two.npz", x=inputs.numpy(), y=np.zeros(3))
    assert "two.npz has several arrays or none (it has x, y)" in refused(
        capsys, "c.safetensors", "two.npz"
    )
    assert predict("c.safetensors", "two.npz", "--key", "x") == 0
    capsys.readouterr()
    with zipfile.ZipFile("empty.npz", "w"):
        pass
    assert "it is empty" in refused(capsys, "c.safetensors", "empty.npz")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "at least one row"),
        ("a,b,c,d\n", "at least one row"),
        ("a,b,c,d\n1,2,3\n", "its header has 4 cells, its rows 3"),
        ("1,2,3,4\n1,,3,4\n", "not a table of numbers: could not convert string ''"),
        ("1,2,3,4\n1,2,x,4\n", "could not convert string 'x'"),
        ("1,2,3,nan\n", "NaN or infinite"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
    ],
)
def test_tables_that_are_not_of_numbers_are_refused(text, said, capsys, tmp_path):
    (tmp_path / "bad.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refused(capsys, "c.safetensors", "bad.csv")


def test_a_csv_has_no_place_for_outputs_with_positions(capsys, tmp_path):
    positions = nn.Sequential(zm.Linear(2, 3, prior=None))
    export.save_compressed(positions, "p.safetensors")
    np.save("p.npy", np.random.default_rng(0).normal(size=(5, 6, 2)))
    said = refused(capsys, "p.safetensors", "p.npy", "--out", "o.csv")
    assert "a name that ends in .npz" in said
    assert not (tmp_path / "o.csv").exists()
    assert predict("p.safetensors", "p.npy", "--out", "o.npz") == 0
    assert np.load("o.npz")["probabilities"].shape == (5, 6, 3)


def test_a_prediction_that_fails_leaves_what_was_there(capsys, monkeypatch, tmp_path):
    (tmp_path / "o.npz").write_text("before")

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", refuse)
    assert "no room for o.npz" in refused(capsys, "c.safetensors", "x.csv", "--out", "o.npz")
    assert (tmp_path / "o.npz").read_text() == "before"
    assert not list(tmp_path.glob(".o.npz*"))


def test_outputs_like_probabilities_are_told_in_a_sentence(capsys):
    probabilities = nn.Sequential(nn.Linear(4, 30), nn.Hardsigmoid())
    export.save_compressed(probabilities, "h.safetensors")
    assert predict("h.safetensors", "x.npz") == 0
    printed = capsys.readouterr().err
    assert printed.startswith("zeromean: All 750 outputs of the model are between 0 and 1")
    assert printed.count("\n") == 1
