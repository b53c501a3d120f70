import copy
import json
import os
import stat
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import zeromean as zm

POSTERIORS = [
    zm.ZeroMean,
    zm.Additive,
    *(partial(zm.Multiplicative, share=share) for share in ("layer", "neuron", "weight")),
    partial(zm.ZeroMean, noise=zm.rademacher),
    partial(zm.ZeroMean, noise=zm.uniform),
    partial(zm.Additive, noise=zm.uniform),
]
PRIORS = [
    None,
    zm.LogUniform(),
    zm.LogUniform(kl="approx"),
    zm.LogUniform(kl="sample"),
    zm.StudentT(),
    zm.StudentT(df=3.0, kl="sample"),
    zm.ARD(),
    zm.Normal(0.3),
    zm.Normal(2.0, learn=True),
]
SAMPLERS = [zm.local, zm.weight, zm.moment_matched, zm.flipout, zm.mean]


class TiedTokens(nn.Module):
    def __init__(self, decoder_first=False):
        super().__init__()
        names = ["embedding", "decoder"]
        layers = [nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 6)]
        layers[1].weight = layers[0].weight
        order = (1, 0) if decoder_first else (0, 1)
        for i in order:
            setattr(self, names[i], layers[i])

    def forward(self, tokens):
        return self.decoder(self.embedding(tokens).tanh())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def plain():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular", groups=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(4, 2, 2, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def images():
    return torch.randn(5, 2, 2, 2, generator=torch.Generator().manual_seed(0))


def trained(model):
    """As if trained: every parameter and buffer away from where it starts."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model(images() + 1)
    return model


def stochastic(posterior=zm.Additive, prior="default", sampler="default"):
    model = plain()
    zm.make_stochastic_(model, posterior=posterior, prior=prior, sampler=sampler)
    return trained(model)


def assert_same(loaded, saved, x):
    state = loaded.state_dict()
    assert list(state) == list(saved.state_dict())
    assert all(torch.equal(state[name], value) for name, value in saved.state_dict().items())
    assert str(loaded) == str(saved)
    for mine, other in zip(
        zm.stochastic_layers(loaded).values(), zm.stochastic_layers(saved).values(), strict=True
    ):
        assert (mine.prior, mine.sampler) == (other.prior, other.sampler)
        assert mine.weight.layout == other.weight.layout
    predictions = [zm.predict_proba(m, x, 3, seed=1) for m in (loaded, saved)]
    assert torch.equal(*predictions)
    divergences = []
    for model in (loaded, saved):
        torch.manual_seed(2)
        divergences.append(zm.kl_divergence(model))
    assert torch.equal(*divergences)


def round_trip(model, skeleton, path):
    zm.save(model, path)
    return zm.load(path, skeleton)


# Round trips.


@pytest.mark.parametrize("posterior", POSTERIORS)
def test_every_posterior_and_noise_survives(posterior, tmp_path):
    model = stochastic(posterior)
    assert_same(round_trip(model, plain(), tmp_path / "m.safetensors"), model, images())
    assert_same(zm.load(tmp_path / "m.safetensors", stochastic()), model, images())


@pytest.mark.parametrize("prior", PRIORS, ids=str)
def test_every_prior_survives(prior, tmp_path):
    model = stochastic(prior=prior)
    assert_same(round_trip(model, plain(), tmp_path / "m.safetensors"), model, images())
    assert_same(zm.load(tmp_path / "m.safetensors", stochastic()), model, images())


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: sampler.__name__)
def test_every_sampler_survives(sampler, tmp_path):
    model = stochastic(sampler=sampler)
    skeleton = stochastic(zm.ZeroMean)
    assert_same(round_trip(model, skeleton, tmp_path / "m.safetensors"), model, images())


@pytest.mark.parametrize("decoder_first", [False, True])
@pytest.mark.parametrize("posterior", [zm.ZeroMean, partial(zm.Multiplicative, share="weight")])
@pytest.mark.parametrize("skeleton_is_stochastic", [False, True])
def test_tied_posterior_survives(decoder_first, posterior, skeleton_is_stochastic, tmp_path):
    model, skeleton = TiedTokens(decoder_first), TiedTokens(decoder_first)
    zm.make_stochastic_(model, posterior=posterior, sampler=zm.weight)
    if skeleton_is_stochastic:
        zm.make_stochastic_(skeleton, posterior=zm.Additive)
    loaded = round_trip(model, skeleton, tmp_path / "m.safetensors")
    assert loaded.decoder.weight is loaded.embedding.weight
    assert_same(loaded, model, torch.tensor([[0, 1, 2], [5, 5, 0]]))


def test_tied_plain_weight_is_written_once(tmp_path):
    model = TiedTokens()
    loaded = round_trip(model, TiedTokens(), tmp_path / "m.safetensors")
    assert loaded.decoder.weight is loaded.embedding.weight
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["decoder.bias", "embedding.weight"]
    assert_same(loaded, model, torch.tensor([[0, 1, 2]]))


@pytest.mark.parametrize("skeleton_is_stochastic", [True, False])
def test_recurrent_layers_survive(skeleton_is_stochastic, tmp_path):
    def tied():
        model = nn.ModuleList([nn.LSTM(3, 4), nn.LSTM(3, 4), nn.GRU(4, 2, bidirectional=True)])
        model[1].weight_hh_l0 = model[0].weight_hh_l0
        return model

    posterior = partial(zm.Multiplicative, share="weight")
    path = tmp_path / "m.safetensors"
    model = tied()
    zm.make_stochastic_(model, posterior=posterior, prior=zm.ARD())
    zm.prune_(model, sparsity=0.5)
    zm.save(model, path)
    assert header_of(path)["format_version"] == 3
    skeleton = tied()
    if skeleton_is_stochastic:
        zm.make_stochastic_(skeleton, posterior=zm.Additive)
    loaded = zm.load(path, skeleton)
    assert str(loaded) == str(model)
    assert loaded[0].prior == zm.ARD()
    assert loaded[1].weight_hh_l0 is loaded[0].weight_hh_l0
    x = torch.randn(5, 2, 3)
    with zm.sampling(model, zm.mean), zm.sampling(loaded, zm.mean):
        assert torch.equal(loaded[0](x)[0], model[0](x)[0])
    torch.testing.assert_close(zm.kl_divergence(loaded), zm.kl_divergence(model))


def test_partly_stochastic_model_survives(tmp_path):
    model = plain()
    zm.make_stochastic_(model, where=lambda name, module: name == "5")
    trained(model)
    assert_same(round_trip(model, plain(), tmp_path / "m.safetensors"), model, images())


def test_layer_by_itself_survives(tmp_path):
    layer = zm.Linear(3, 2, posterior=zm.Additive, prior=zm.ARD(), sampler=zm.flipout)
    for skeleton in (nn.Linear(3, 2), zm.Linear(3, 2)):
        loaded = round_trip(layer, skeleton, tmp_path / "m.safetensors")
        assert_same(loaded, layer, torch.ones(4, 3))


def test_transformer_converted_in_eval_mode_loads_into_the_plain_one(tmp_path):
    def encoder():
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 1).eval()

    model = encoder()
    zm.make_stochastic_(model, posterior=zm.Additive)
    loaded = round_trip(model, encoder(), tmp_path / "m.safetensors")
    x = {"src": torch.randn(2, 3, 8), "src_key_padding_mask": torch.tensor([[False] * 3] * 2)}
    x["src_key_padding_mask"][1, 2] = True
    with torch.no_grad():
        assert not torch.equal(loaded(**x), loaded(**x))
    assert_same(loaded, model, x)


def test_skeleton_is_left_as_it_was(tmp_path):
    zm.save(stochastic(), tmp_path / "m.safetensors")
    for skeleton in (plain(), stochastic(zm.ZeroMean)):
        modules, state = dict(skeleton.named_modules()), copy.deepcopy(skeleton.state_dict())
        zm.load(tmp_path / "m.safetensors", skeleton)
        assert dict(skeleton.named_modules()) == modules
        assert all(torch.equal(state[n], value) for n, value in skeleton.state_dict().items())


def test_dtype_mode_hooks_and_frozen_state_are_the_skeletons(tmp_path):
    zm.save(stochastic(), tmp_path / "m.safetensors")
    calls = []
    for skeleton in (plain(), stochastic(zm.ZeroMean)):
        skeleton.double().eval()[5].register_forward_hook(lambda *_: calls.append(1))
        skeleton[0].requires_grad_(False)
        loaded = zm.load(tmp_path / "m.safetensors", skeleton)
        assert loaded(images().double()).dtype == torch.float64
        assert calls.pop() == 1
        assert not any(module.training for module in loaded.modules())
        frozen = {name for name, p in loaded.named_parameters() if not p.requires_grad}
        assert frozen == {"0.weight.mean", "0.weight.log_variance", "0.bias"}


# The file.


def header_of(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["zeromean"])


def test_file_is_safetensors_with_a_json_header_and_no_pickle(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(prior=zm.Normal(0.3)), path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    assert set(entries) - {"__metadata__"} == set(stochastic().state_dict())
    assert header_of(path)["format_version"] == 1
    assert header_of(path)["layers"]["5"] == {
        "layer": "Linear",
        "posterior": "Additive",
        "noise": "normal",
        "prior": {"name": "Normal", "scale": 0.3, "learn": False},
        "sampler": "local",
        "tied_to": None,
    }


def test_others_may_read_the_file_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        zm.save(stochastic(), tmp_path / "m.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.safetensors").stat().st_mode) == 0o644


def test_failing_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    content = path.read_bytes()

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        zm.save(stochastic(zm.ZeroMean), path)
    monkeypatch.undo()
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        zm.save(stochastic(zm.ZeroMean), path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_recurrent_layer_with_several_kinds_of_posterior_is_refused(tmp_path):
    model = zm.GRU(3, 2)
    model.weight_hh_l0 = zm.ZeroMean((6, 2))
    with pytest.raises(ValueError, match="has posteriors of several kinds, which a file cannot"):
        zm.save(nn.Sequential(model), tmp_path / "m.safetensors")


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere; create it first"):
        zm.save(stochastic(), tmp_path / "nowhere" / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


# Refusals to save.


def own_sampler(op, x, posterior, bias=None):
    return zm.local(op, x, posterior, bias)


def own_noise(like):
    return torch.randn_like(like)


class OwnPrior:
    def kl(self, posterior):
        return torch.zeros(())


class OwnPosterior(zm.ZeroMean):
    pass


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("sampler", {"sampler": own_sampler}),
        ("noise", {"posterior": partial(zm.ZeroMean, noise=own_noise)}),
        ("prior", {"prior": OwnPrior()}),
        ("posterior", {"posterior": OwnPosterior}),
    ],
)
def test_what_a_file_cannot_describe_is_refused(what, options, tmp_path):
    model = stochastic(**options)
    sentence = rf"The {what} at 0, .* is not registered.*@zm.register\('{what}'\)"
    with pytest.raises(ValueError, match=sentence):
        zm.save(model, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"step": 3}


def test_state_without_values_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tensors with values, but weight is a meta tensor"):
        zm.save(nn.Linear(2, 2, device="meta"), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="_extra_state is a dict"):
        zm.save(WithExtraState(2, 2), tmp_path / "m.safetensors")


# Refusals to load.


def assert_refuses(path, sentence, skeleton=None, error=ValueError):
    skeleton = plain() if skeleton is None else skeleton
    with pytest.raises(error, match=sentence):
        zm.load(path, skeleton)


def test_missing_file_is_refused(tmp_path):
    assert_refuses(tmp_path / "m.safetensors", "There is no file .*m.safe", error=FileNotFoundError)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_file_is_refused(kept, tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    path.write_bytes(path.read_bytes()[:kept])
    assert_refuses(path, "m.safetensors is not a complete safetensors file.*cut short")


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text("epoch,loss\n1,0.5\n")
    assert_refuses(path, "is not a complete safetensors file")
    torch.save({"a": torch.ones(2)}, path)
    assert_refuses(path, "is not a complete safetensors file")
    save_file(plain().state_dict(), path)
    assert_refuses(path, "is a safetensors file, but not one that zm.save wrote")


def rewrite_header(path, change):
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, RUF100
    header = header_of(path)
    change(header)
    save_file(tensors, path, metadata={"zeromean": json.dumps(header)})


def test_newer_format_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    rewrite_header(path, lambda header: header.update(format_version=8))
    assert_refuses(path, "has format version 8, this zeromean reads up to 7; upgrade zeromean")


def test_masks_are_saved_and_only_files_with_masks_need_the_newer_format(tmp_path):
    path = tmp_path / "m.safetensors"
    model = stochastic()
    zm.save(model, path)
    assert header_of(path)["format_version"] == 1
    zm.prune_(model, sparsity=0.5)
    zm.save(model, path)
    assert header_of(path)["format_version"] == 2
    for fresh in (plain(), stochastic()):
        loaded = zm.load(path, fresh)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.clear(),
        lambda header: header.update(format_version="new"),
        lambda header: header.update(aliases={"5.bias": "9.bias"}),
        lambda header: header.pop("layers"),
        lambda header: header["layers"]["5"].pop("posterior"),
        lambda header: header["layers"]["5"].update(prior={"name": "Normal", "width": 1.0}),
        lambda header: header["layers"]["5"].update(tied_to="6"),
    ],
)
def test_damaged_header_is_refused(change, tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    rewrite_header(path, change)
    assert_refuses(path, "m.safetensors has a damaged header")


def test_a_part_that_is_not_registered_is_named(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    rewrite_header(path, lambda header: header["layers"]["5"].update(sampler="guess"))
    assert_refuses(path, "m.safetensors.* no sampler is registered as 'guess'; import")


def test_header_that_is_no_json_is_refused(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "m.safetensors", metadata={"zeromean": "{"})
    assert_refuses(tmp_path / "m.safetensors", "has a damaged header")


def test_other_architectures_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    sentence = "needs a Linear at '5', but the model has nothing there; build the architecture"
    assert_refuses(path, sentence, plain()[:5])
    other = plain()
    other[5] = nn.Identity()
    assert_refuses(path, "needs a Linear at '5', but the model has Identity there", other)
    other[5] = zm.Conv2d(2, 3, 1)
    assert_refuses(path, "needs a Linear at '5', but the model has Conv2d there", other)
    other[5] = nn.Linear(32, 4)
    assert_refuses(
        path, r"holds a model of another architecture: (.|\n)*size mismatch for 5.bias", other
    )
    assert_refuses(
        path, r"another architecture: (.|\n)*Missing key", plain().append(nn.Linear(3, 3))
    )
    zm.save(plain(), path)
    assert_refuses(path, "holds a model of another architecture", stochastic())


def test_a_subclass_of_a_layer_is_refused_when_it_is_saved(tmp_path):
    class Scaled(zm.Linear):
        pass

    with pytest.raises(ValueError, match=r"Scaled.* is not registered"):
        zm.save(nn.Sequential(Scaled(3, 2)), tmp_path / "model.safetensors")


@pytest.mark.parametrize("block", [lambda m: zm.sampling(m, zm.mean), zm.held_noise])
def test_files_hold_the_layers_own_samplers(block, tmp_path):
    model = nn.Sequential(zm.Linear(3, 2, sampler=zm.flipout))
    with block(model), zm.sampling(model, zm.mean):
        zm.save(model, tmp_path / "model.safetensors")
    loaded = zm.load(tmp_path / "model.safetensors", nn.Sequential(nn.Linear(3, 2)))
    assert loaded[0].sampler is zm.flipout
    assert model[0].sampler is zm.flipout


def test_a_model_on_the_meta_device_gets_the_values_of_the_file(tmp_path):
    model = nn.Sequential(
        zm.Linear(3, 4), nn.BatchNorm1d(4), zm.Linear(4, 2, posterior=zm.Additive)
    )
    zm.save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    loaded = zm.load(tmp_path / "model.safetensors", empty)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in loaded.parameters())


class TiedPlain(nn.Module):
    """Plain layers that share a weight, around a stochastic one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.hidden = zm.Linear(6, 6)
        self.decoder = nn.Linear(6, 10, bias=False)
        self.decoder.weight = self.embedding.weight


def test_tied_plain_weights_stay_one_parameter_on_a_meta_model(tmp_path):
    model = TiedPlain()
    zm.save(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        skeleton = TiedPlain()
    loaded = zm.load(tmp_path / "m.safetensors", skeleton)
    assert loaded.embedding.weight is loaded.decoder.weight
    assert torch.equal(loaded.decoder.weight, model.decoder.weight)
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


def test_loading_leaves_the_global_generator_alone(tmp_path):
    path = tmp_path / "m.safetensors"
    zm.save(stochastic(), path)
    skeletons = plain(), stochastic()
    state = torch.get_rng_state()
    for skeleton in skeletons:
        zm.load(path, skeleton)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_prior_with_a_numpy_number_is_saved(tmp_path):
    model = stochastic(prior=zm.Normal(scale=np.float32(0.5)))
    loaded = round_trip(model, plain(), tmp_path / "m.safetensors")
    assert next(iter(zm.stochastic_layers(loaded).values())).prior.scale == 0.5


# Ties by hand.


def tied_by_hand(*names, posterior=zm.Multiplicative, deep=3):
    """A chain of layers of one size whose posteriors share some of their parameters."""
    model = nn.Sequential(*(zm.Linear(4, 4, posterior=posterior) for _ in range(deep)))
    for name in names:
        for layer in model[1:]:
            setattr(layer if name == "bias" else layer.weight, name, name_of(model[0], name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def name_of(layer, name):
    return layer.bias if name == "bias" else getattr(layer.weight, name)


def plain_chain(deep=3):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(deep)))


def meta_chain():
    with torch.device("meta"):
        return plain_chain()


TIES = [
    (("log_alpha",), zm.Multiplicative),
    (("log_alpha",), partial(zm.Multiplicative, share="neuron")),
    (("mean",), zm.Additive),
    (("log_variance", "bias"), zm.Additive),
    (("scale",), zm.ZeroMean),
]


@pytest.mark.parametrize(("names", "posterior"), TIES)
@pytest.mark.parametrize("skeleton", [plain_chain, meta_chain, lambda: tied_by_hand()])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: model])
def test_parameters_tied_by_hand_stay_one(names, posterior, skeleton, copied, tmp_path):
    model = copied(tied_by_hand(*names, posterior=posterior))
    loaded = copied(round_trip(model, skeleton(), tmp_path / "m.safetensors"))
    assert_same(loaded, model, torch.randn(5, 4))
    assert len(list(loaded.parameters())) == len(list(model.parameters()))
    # Training goes on as it would have without the file.
    for network in (model, loaded):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(zm.parameter_groups(network, lr=0.1))
        for _ in range(2):
            loss = network(torch.ones(3, 4)).square().mean() + 0.01 * zm.kl_divergence(network)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_same(loaded, model, torch.randn(5, 4))
    for name in names:
        assert all(name_of(layer, name) is name_of(loaded[0], name) for layer in loaded)


def test_only_files_with_parameters_tied_by_hand_need_the_newer_format(tmp_path):
    versions = []
    for names in ((), ("bias",), ("log_alpha",)):
        zm.save(tied_by_hand(*names), tmp_path / "m.safetensors")
        with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
            versions.append(json.loads(file.metadata()["zeromean"])["format_version"])
    assert versions == [1, 1, 4]


def test_files_without_a_word_on_ties_are_tied_by_their_aliases(tmp_path):
    """Files of version 0.1.0 name the aliases, but nothing else."""
    path = tmp_path / "m.safetensors"
    zm.save(tied_by_hand("log_alpha"), path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["zeromean"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    del header["shared_posteriors"]
    header["format_version"] = 1
    save_file(tensors, path, metadata={"zeromean": json.dumps(header)})
    loaded = zm.load(path, plain_chain())
    assert loaded[2].weight.log_alpha is loaded[0].weight.log_alpha


class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(4, 4), nn.LSTM(4, 4)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_recurrent_posteriors_that_are_shared_are_shared_again(tmp_path):
    model = TwoReaders()
    zm.make_stochastic_(model, posterior=zm.Additive)
    model.second.weight_ih_l0 = model.first.weight_ih_l0
    model.second.weight_hh_l0.log_variance = model.first.weight_hh_l0.log_variance
    loaded = round_trip(model, TwoReaders(), tmp_path / "m.safetensors")
    assert loaded.second.weight_ih_l0 is loaded.first.weight_ih_l0
    assert loaded.second.weight_hh_l0.log_variance is loaded.first.weight_hh_l0.log_variance
    assert loaded.second.weight_hh_l0 is not loaded.first.weight_hh_l0
    torch.testing.assert_close(zm.kl_divergence(loaded), zm.kl_divergence(model))
    assert loaded(torch.ones(2, 3, 4)).shape == (2, 3, 4)


def test_ties_that_the_file_does_not_have_are_refused(tmp_path):
    untied = TiedTokens()
    untied.decoder.weight = nn.Parameter(torch.randn(6, 4))
    zm.save(untied, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"one parameter for embedding\.weight and"):
        zm.load(tmp_path / "m.safetensors", TiedTokens())


def test_means_tied_by_hand_are_one_plain_weight():
    model = tied_by_hand("mean", posterior=zm.Additive)
    plain = zm.to_deterministic(model)
    assert plain[1].weight is plain[0].weight
    assert len(list(plain.parameters())) == 1 + 3
    x = torch.randn(5, 4)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(plain(x), model(x))
    # Drawn weights are each their own, and so are those with masks of their own.
    drawn = zm.to_deterministic(model, "sample")
    assert not torch.equal(drawn[0].weight, drawn[1].weight)
    model[1].weight.mask = torch.rand(4, 4) < 0.5
    plain = zm.to_deterministic(model)
    assert plain[1].weight is not plain[0].weight
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(plain(x), model(x))
