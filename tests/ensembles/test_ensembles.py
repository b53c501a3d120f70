"""Ensembles: one object for predictions, trained in processes, kept as one folder."""

import copy
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.ensembles import (
    SWA,
    SWAG,
    CosineCycles,
    Ensemble,
    Snapshots,
    deep_ensemble,
    fit_ensemble,
    fit_snapshots,
    load_ensemble,
    save_ensemble,
)

X = torch.linspace(-1, 1, 24).reshape(8, 3)


def plain():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


def variance():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), zm.Linear(5, 4))


def trained(seed):
    return plain()


def test_an_ensemble_predicts_as_the_average_of_its_members():
    members = [plain() for _ in range(3)]
    expected = torch.stack([m(X).softmax(-1) for m in members]).mean(0)
    assert torch.allclose(zm.predict_proba(Ensemble(members), X), expected)
    uncertainty = zm.predictive_uncertainty(Ensemble(members), X)
    entropy = -(expected * expected.log()).sum(-1)
    assert torch.allclose(uncertainty.predictive_entropy, entropy, atol=1e-6)
    moments = zm.predict_moments(Ensemble(members), X)
    outputs = torch.stack([m(X) for m in members])
    assert torch.allclose(moments.epistemic, outputs.var(0, unbiased=False), atol=1e-6)


def test_members_draw_noise_of_their_own_in_chunks_by_seed():
    ensemble = Ensemble([variance(), variance()])
    options = {"num_samples": 7, "seed": 3, "sampler": zm.weight, "batch_size": 3}
    samples = zm.sample_outputs(ensemble, X, **options)
    assert samples.shape == (14, 8, 4)
    assert torch.equal(samples, zm.sample_outputs(ensemble, X, **options))
    assert torch.equal(samples, zm.sample_outputs(list(ensemble), X, **options))
    # The same weights twice would be the same network twice if both had the same noise.
    twins = Ensemble([ensemble[0], copy.deepcopy(ensemble[0])])
    first, second = zm.sample_outputs(twins, X, **options).chunk(2)
    assert not torch.allclose(first, second)
    mean = zm.predict_proba(ensemble, X, 7, seed=3, sampler=zm.weight, batch_size=3)
    assert torch.allclose(mean, samples.softmax(-1).mean(0), atol=1e-6)


def test_what_is_no_ensemble_is_refused():
    with pytest.raises(TypeError, match=r"list of modules.*put it in a list"):
        Ensemble(plain())
    with pytest.raises(ValueError, match="at least one member"):
        Ensemble([])
    with pytest.raises(TypeError, match="member 1 must be a torch module"):
        Ensemble([plain(), plain])
    member = plain()
    with pytest.raises(ValueError, match="The same module"):
        Ensemble([member, member])
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6))
    with pytest.raises(ValueError, match=r"2\.weight .*\(6, 5\) in member 1 and .*4, 5"):
        Ensemble([plain(), other])
    with pytest.raises(ValueError, match="is missing in member 1"):
        Ensemble([plain(), nn.Sequential(nn.Linear(3, 5))])
    with pytest.raises(ValueError, match=r"Network 1 returns outputs of shape.*must agree"):
        zm.predict_proba([plain(), other], X)


@pytest.mark.parametrize("build", [plain, variance])
def test_a_folder_brings_back_every_member(build, tmp_path):
    ensemble = Ensemble([build() for _ in range(3)])
    save_ensemble(ensemble, tmp_path / "e")
    loaded = load_ensemble(tmp_path / "e", plain())
    assert len(loaded) == 3
    for before, after in zip(ensemble, loaded, strict=True):
        for name, value in before.state_dict().items():
            assert torch.equal(value, after.state_dict()[name])
    options = {"num_samples": 3, "seed": 0}
    assert torch.equal(
        zm.sample_outputs(ensemble, X, **options), zm.sample_outputs(loaded, X, **options)
    )


def test_a_new_ensemble_replaces_the_old_one_and_leaves_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save_ensemble(Ensemble([plain() for _ in range(3)]), tmp_path)
    new = Ensemble([plain() for _ in range(2)])
    save_ensemble(new, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"
    loaded = load_ensemble(tmp_path, plain())
    assert torch.equal(loaded[1][0].weight, new[1][0].weight)


def test_a_save_that_fails_leaves_the_old_ensemble(tmp_path, monkeypatch):
    old = Ensemble([plain() for _ in range(2)])
    save_ensemble(old, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    saved = zm.save
    calls = []

    def fails_at_the_second(member, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("no room")
        saved(member, path)

    monkeypatch.setattr("zeromean.ensembles.folder.save", fails_at_the_second)
    with pytest.raises(OSError, match="no room"):
        save_ensemble(Ensemble([plain() for _ in range(2)]), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert torch.equal(load_ensemble(tmp_path, plain())[1][0].weight, old[1][0].weight)


def test_damaged_and_missing_members_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no complete ensemble"):
        load_ensemble(tmp_path, plain())
    save_ensemble(Ensemble([plain() for _ in range(3)]), tmp_path)
    paths = sorted(tmp_path.glob("member-001-*"))
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"Member 1 .*damaged: {paths[0].name}"):
        load_ensemble(tmp_path, plain())
    paths[0].unlink()
    with pytest.raises(FileNotFoundError, match=f"Member 1 .*missing.*{paths[0].name}"):
        load_ensemble(tmp_path, plain())
    index = tmp_path / "ensemble.json"
    document = json.loads(index.read_text())
    index.write_text(json.dumps({**document, "format_version": 99}))
    with pytest.raises(ValueError, match=r"format version 99.*upgrade"):
        load_ensemble(tmp_path, plain())
    document["members"][0]["file"] = "../elsewhere.safetensors"
    for text in (json.dumps(document), "{", "[]", '{"format_version": 1, "members": []}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"ensemble\.json is damaged"):
            load_ensemble(tmp_path, plain())


def test_saving_asks_for_an_ensemble_of_one_architecture(tmp_path):
    with pytest.raises(TypeError, match="needs an Ensemble"):
        save_ensemble([plain()], tmp_path)
    ensemble = Ensemble([plain(), plain()])
    ensemble[1] = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="one architecture"):
        save_ensemble(ensemble, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        save_ensemble(Ensemble([plain()]), tmp_path / "file")


def test_a_deep_ensemble_trains_what_is_missing(tmp_path):
    called = []

    def train(seed):
        called.append(seed)
        if seed == 2 and called.count(2) == 1:
            raise RuntimeError("the disk is on fire")
        return plain()

    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"seed 2 .*disk is on fire\. .*run it again"):
        deep_ensemble(train, build=plain, folder=tmp_path, seeds=3)
    assert torch.equal(torch.get_rng_state(), state)
    ensemble = deep_ensemble(train, build=plain, folder=tmp_path, seeds=4)
    assert called == [0, 1, 2, 2, 3]
    assert len(ensemble) == 4
    torch.manual_seed(3)
    assert torch.equal(ensemble[3][0].weight, plain()[0].weight)  # Seeded by its seed.
    with pytest.raises(ValueError, match="a seed of its own"):
        deep_ensemble(train, build=plain, folder=tmp_path, seeds=[1, 1])
    with pytest.raises(ValueError, match="at least one seed"):
        deep_ensemble(train, build=plain, folder=tmp_path, seeds=[])
    with pytest.raises(TypeError, match="train must be a function"):
        deep_ensemble(plain(), build=plain, folder=tmp_path)
    with pytest.raises(TypeError, match=r"top of a module.*processes=1"):
        deep_ensemble(lambda seed: plain(), build=plain, folder=tmp_path / "new", processes=2)
    with pytest.raises(RuntimeError, match="what train returns must be a torch module"):
        deep_ensemble(lambda seed: None, build=plain, folder=tmp_path / "none", seeds=1)


DEEP = """
import os
from torch import nn
from zeromean.ensembles import deep_ensemble

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

def train(seed):
    print("trained", seed, "in the parent" if str(os.getpid()) == os.environ["PARENT"] else "")
    if seed == 1 and not os.path.exists("second"):
        open("second", "w").close()
        os._exit(1)
    return build()

if __name__ == "__main__":
    os.environ["PARENT"] = str(os.getpid())
    try:
        deep_ensemble(train, build=build, folder="deep", seeds=2, processes=2)
    except RuntimeError as error:
        print("said", error)
    print("done", len(deep_ensemble(train, build=build, folder="deep", seeds=2)))
"""
FITTED = """
import torch
from torch import nn
from zeromean.data import ImageSet
from zeromean.ensembles import fit_ensemble
from zeromean.training import TrainingConfig

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))

if __name__ == "__main__":
    images = torch.rand(16, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    data = ImageSet(images, torch.arange(16) % 3, 3)
    config = TrainingConfig(epochs=1, batch_size=8)
    fitted = fit_ensemble(build, data, config, folder="fitted", seeds=2, processes=2)
    alone = fit_ensemble(build, data, config, folder="alone", seeds=2)
    for a, b in zip(fitted, alone, strict=True):
        assert torch.equal(a[1].weight, b[1].weight)
    assert not torch.equal(fitted[0][1].weight, fitted[1][1].weight)
    print("done", len(fitted))
"""


@pytest.mark.slow
def test_members_train_in_processes_and_go_on_after_a_crash(processes, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DEEP)
    printed = processes.run([sys.executable, script], cwd=tmp_path).stdout
    assert "ended from outside" in printed
    assert "done 2" in printed
    assert printed.count("in the parent") <= 2  # In the second call, which has one process.


@pytest.mark.slow
def test_fit_in_processes_gives_the_same_members(processes, tmp_path):
    pytest.importorskip("lightning")
    script = tmp_path / "train.py"
    script.write_text(FITTED)
    assert "done 2" in processes.run([sys.executable, script], cwd=tmp_path).stdout


def test_snapshots_of_fit_go_on_from_each_other(tmp_path):
    pytest.importorskip("lightning")
    from zeromean.data import ImageSet
    from zeromean.training import TrainingConfig

    data = ImageSet(torch.rand(20, 1, 2, 2), torch.arange(20) % 3, 3)
    config = TrainingConfig(epochs=1, batch_size=10, lr=1e-2)

    def run(folder, cycles):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        return fit_snapshots(model, data, config, folder=folder, num_cycles=cycles, progress=False)

    whole = run(tmp_path / "a", 3)
    run(tmp_path / "b", 1)
    resumed = run(tmp_path / "b", 3)
    for first, second in zip(whole, resumed, strict=True):
        assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(whole[0][1].weight, whole[2][1].weight)
    deep = fit_ensemble(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
        data,
        config,
        folder=tmp_path / "deep",
        seeds=[4, 9],
        progress=False,
    )
    assert len(deep) == 2
    with pytest.raises(TypeError, match="must be a TrainingConfig"):
        fit_ensemble(plain, data, {}, folder=tmp_path / "x")


def test_snapshots_are_a_source_of_networks():
    model = plain()
    snapshots = Snapshots(model)
    with pytest.raises(ValueError, match="no snapshots yet"):
        zm.predict_proba(snapshots, X)
    outputs = []
    for _ in range(3):
        with torch.no_grad():
            model[0].weight.add_(0.1)
        snapshots.take()
        outputs.append(model(X).softmax(-1))
    expected = torch.stack(outputs).mean(0)
    assert torch.allclose(zm.predict_proba(snapshots, X), expected)
    assert torch.allclose(zm.predict_proba(snapshots.ensemble(), X), expected)


def test_cosine_cycles_start_again():
    cycles = CosineCycles(10, 3)
    factors = [cycles(step) for step in range(11)]
    starts = [step for step in range(10) if factors[step] == 1]
    ends = [step for step in range(10) if cycles.ends_cycle(step)]
    assert starts == [0, 3, 6]
    assert ends == [2, 5, 9]
    assert all(0 <= factor <= 1 for factor in factors)
    assert factors[8] == pytest.approx((math.cos(math.pi * 2 / 4) + 1) / 2)
    with pytest.raises(ValueError, match="at least as many steps"):
        CosineCycles(2, 3)


def test_swa_is_the_mean_of_the_weights_and_swag_their_variance():
    model = plain()
    swa, swag = SWA(model), SWAG(model)
    passed = []
    for _ in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        swa.update()
        swag.update()
        passed.append(model[0].weight.detach().clone())
    stacked = torch.stack(passed)
    assert torch.allclose(swa.network()[0].weight, stacked.mean(0), atol=1e-6)
    assert torch.allclose(swag.variances()["0.weight"], stacked.var(0, unbiased=False), atol=1e-5)
    other = SWAG(model)
    other.load_state_dict(copy.deepcopy(swag.state_dict()))
    assert torch.equal(other.variances()["0.weight"], swag.variances()["0.weight"])
    draws = swag.draws(400, seed=1)
    weights = torch.stack([network[0].weight.detach().clone() for network in draws])
    std = stacked.std(0, unbiased=False)
    assert ((weights.mean(0) - stacked.mean(0)).abs() < 4.5 * std / 20).all()
    assert ((weights.std(0) / std - 1).abs() < 4.5 / math.sqrt(800)).all()
    first, again = (zm.predict_proba(swag.draws(5, seed=1), X) for _ in range(2))
    assert torch.equal(first, again)
    still = zm.predict_proba(swag.draws(2, scale=0.0), X)
    assert torch.allclose(still, swa.network()(X).softmax(-1), atol=1e-6)


def test_averages_of_networks_with_batchnorm_get_statistics_of_their_own():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    data = torch.randn(64, 3)
    swag = SWAG(model)
    with pytest.raises(ValueError, match="needs one update"):
        swag.network()
    swag.update()
    with pytest.raises(ValueError, match="two updates"):
        swag.variances()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    swag.update()
    with pytest.raises(ValueError, match=r"BatchNorm.*batches="):
        swag.network()
    with pytest.raises(ValueError, match=r"BatchNorm.*batches="):
        swag.draws(3)
    network = swag.network(data)
    hidden = network[0](data)
    assert torch.allclose(network[1].running_mean, hidden.mean(0), atol=1e-5)
    for drawn in swag.draws(2, batches=data):
        assert torch.allclose(drawn[1].running_mean, drawn[0](data).mean(0), atol=1e-5)
    with pytest.raises(ValueError, match="scale must be at least 0"):
        swag.draws(3, scale=-1.0, batches=data)


def test_variance_networks_make_an_ensemble_that_beats_its_members():
    torch.manual_seed(1)
    x = torch.randn(150, 3)
    y = (x[:, 0] * x[:, 1] > 0).long()

    def fitted():
        model = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), zm.Linear(30, 30), nn.ReLU())
        model.append(nn.Linear(30, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(150):
            loss = zm.elbo_loss(F.cross_entropy(model(x), y), zm.kl_divergence(model), num_data=150)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model

    members = [fitted() for _ in range(3)]
    new = torch.randn(500, 3)
    labels = (new[:, 0] * new[:, 1] > 0).long()

    def nll(source):
        return F.nll_loss(zm.predict_proba(source, new, 50, seed=0).log(), labels)

    # By Jensen's inequality: the log of an average is not below the average of the logs.
    assert nll(Ensemble(members)) < torch.stack([nll(member) for member in members]).mean()
