"""The demo at a size that takes seconds: its numbers, its pictures, and that a seed repeats it."""

import json
import sys
from typing import cast

import pytest
import torch
from rich.console import Console

import zeromean as zm
from zeromean.data.built_in import TOY_CENTRES
from zeromean.experiments.demo import DemoResult, Sizes, digits, pictures, run_demo, toy
from zeromean.models.toy import toy_network

TINY = Sizes(digits_epochs=3, toy_epochs=3, toy_points=50, toy_networks=1, draws=2, num_samples=5)


def run_tiny(folder, seed=0) -> DemoResult:
    return run_demo(folder, seed=seed, sizes=TINY, console=Console(quiet=True))


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> DemoResult:
    return run_tiny(tmp_path_factory.mktemp("demo"))


def test_pictures_are_png_files_with_something_in_them(result):
    assert [path.name for path in result.pictures] == ["accuracy.png", "uncertainty.png", "toy.png"]
    for path in result.pictures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        assert len(content) > 20_000
    written = {path.name for path in result.pictures[0].parent.iterdir()}
    assert written == {"accuracy.png", "uncertainty.png", "toy.png", "demo.json"}  # nothing else


def test_record_has_the_numbers_of_every_network(result):
    record = json.loads(result.record.read_text(encoding="utf-8"))
    assert list(record["accuracy"]["rows"]) == list(record["separation"]["rows"])
    for kind, by_images in result.uncertainties.items():
        (_, familiar), *foreign = by_images.items()
        for name, uncertainty in foreign:
            auroc = digits.separation(familiar.predictive_entropy, uncertainty.predictive_entropy)
            assert record["separation"]["rows"][kind][name] == f"{auroc:.3f}"


def test_mean_propagation_of_the_variance_network_is_at_chance(result):
    assert list(result.accuracies) == list(digits.KINDS)
    variance = result.accuracies["variance"]
    assert variance.mean < 12
    assert variance.twenty_samples.min() > 80
    assert result.accuracies["deterministic"].mean > 80
    assert result.accuracies["dropout"].mean > 80


def test_deterministic_network_does_not_depend_on_how_it_is_evaluated(result):
    deterministic = result.accuracies["deterministic"]
    everything = torch.cat(
        [
            deterministic.one_sample,
            deterministic.twenty_samples,
            deterministic.by_num_samples.ravel(),
        ]
    )
    torch.testing.assert_close(everything, torch.full_like(everything, deterministic.mean))


def test_same_seed_gives_the_same_numbers_and_leaves_the_generator_alone(result, tmp_path):
    state = torch.random.get_rng_state()
    again = run_tiny(tmp_path)
    assert torch.equal(state, torch.random.get_rng_state())
    for kind, expected in result.accuracies.items():
        for left, right in zip(expected, again.accuracies[kind], strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert torch.equal(result.encodings[0].activations, again.encodings[0].activations)


def test_table_and_paths_are_printed(tmp_path, capsys):
    sizes = Sizes(
        digits_epochs=1, toy_epochs=1, toy_points=50, toy_networks=1, draws=2, num_samples=2
    )
    result = run_demo(tmp_path, sizes=sizes)
    printed = capsys.readouterr().out
    assert all(kind in printed for kind in digits.KINDS)
    assert all(str(path) in printed for path in result.pictures)


def test_digits_are_split_by_class_and_scaled():
    data = digits.load()
    assert len(data.train_images) + len(data.test_images) == 1797
    assert data.test_images.amin() == 0
    assert data.test_images.amax() == 1
    share = (
        data.test_labels.bincount() / torch.cat([data.train_labels, data.test_labels]).bincount()
    )
    torch.testing.assert_close(share, torch.full((10,), 1 / 3), rtol=0, atol=0.005)


def test_networks_differ_in_one_layer():
    kinds = {kind: digits.build_network(kind) for kind in digits.KINDS}
    sizes = {sum(p.numel() for p in model.parameters()) for model in kinds.values()}
    assert len(sizes) == 1
    assert list(zm.stochastic_layers(kinds["variance"])) == ["9"]
    assert not zm.stochastic_layers(kinds["dropout"])


def test_separation_of_disjoint_and_of_equal_uncertainties():
    low, high = torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.4])
    assert digits.separation(low, high) == 1
    assert digits.separation(low, low) == 0.5


def test_spread_of_the_variance_neurons_is_that_of_the_layer():
    torch.manual_seed(0)
    model = toy_network()
    points = torch.tensor(TOY_CENTRES)
    encoding = toy.encode(model, points, torch.arange(4))
    *deterministic, layer = model[0].children()
    hidden = torch.nn.Sequential(*deterministic)(points)
    _, variance = cast(zm.Linear, layer).weight.moments()
    exact = (hidden.square() @ variance.T).sqrt()
    # A standard deviation estimated from n samples has a relative error of 1/√(2n).
    torch.testing.assert_close(encoding.std, exact, rtol=4 / (2 * 50) ** 0.5, atol=0)


def test_picture_that_fails_leaves_the_old_one_and_no_temporary_file(tmp_path):
    class Broken(pictures.Figure):
        def savefig(self, fname, **kwargs):
            fname.write_bytes(b"half a pict")
            raise OSError(28, "No space left on device")

    path = tmp_path / "toy.png"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        pictures.save(Broken(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["toy.png"]
    assert path.read_bytes() == b"old"


def test_pyplot_stays_unimported(processes):
    code = "import sys, zeromean.experiments.demo; print('matplotlib.pyplot' in sys.modules)"
    assert processes.run([sys.executable, "-c", code]).stdout == "False\n"
