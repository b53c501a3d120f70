"""Models with `save_pretrained`: a stand-in that saves, loads and calls as Hugging Face's do."""

import copy
import io
import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zeromean as zm


@dataclass
class Config:
    vocabulary: int = 20
    width: int = 6
    classes: int = 3

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def from_pretrained(cls, folder):
        return cls(**json.loads((Path(folder) / "config.json").read_text()))


class PreTrainedModel(nn.Module):
    """What transformers.PreTrainedModel does with files, without the rest of it."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def save_pretrained(self, save_directory, state_dict=None, **kwargs):
        self.config.save_pretrained(save_directory)
        state = self.state_dict() if state_dict is None else state_dict
        save_file(dict(state), Path(save_directory) / "model.safetensors")

    def push_to_hub(self, folder):
        self.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder):
        model = cls(Config.from_pretrained(folder))
        model.load_state_dict(load_file(Path(folder) / "model.safetensors"), strict=False)
        return model


class Body(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dense = nn.Linear(config.width, config.width)

    def forward(self, tokens):
        return self.dense(self.embedding(tokens)).tanh().mean(1)


class Classifier(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.body = Body(config)
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, tokens):
        return {"logits": self.head(self.body(tokens))}

    def save_pretrained(self, save_directory, **kwargs):
        super().save_pretrained(save_directory, **kwargs)


TOKENS = torch.arange(12).view(3, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Classifier(Config())


def test_the_stand_in_would_lose_posteriors_without_a_word(model, tmp_path):
    zm.make_stochastic_(model, posterior=zm.Additive)
    Classifier.save_pretrained(model, tmp_path)
    loaded = Classifier.from_pretrained(tmp_path)
    assert not torch.equal(loaded.head.weight, model.head.weight.mean)


def test_a_stochastic_model_refuses_to_lose_its_posteriors(model, tmp_path):
    zm.make_stochastic_(model, posterior=zm.Additive)
    for lose in (model.save_pretrained, model.push_to_hub, model.body.save_pretrained):
        with pytest.raises(TypeError, match=r"would lose the posteriors.*zm\.save\(model, path\)"):
            lose(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_stochastic_refuses(model, tmp_path):
    zm.make_stochastic_(model, posterior=zm.Additive, where=lambda name, module: name == "head")
    with pytest.raises(TypeError, match="would lose"):
        model.save_pretrained(tmp_path)
    model.body.save_pretrained(tmp_path)
    loaded = Body.from_pretrained(tmp_path)
    assert torch.equal(loaded.dense.weight, model.body.dense.weight)
    wrapped = nn.ModuleDict({"reader": Body(Config()), "plain": Body(Config())})
    zm.make_stochastic_(wrapped, where=lambda name, module: name.startswith("reader"))
    with pytest.raises(TypeError, match="would lose"):
        wrapped["reader"].save_pretrained(tmp_path)
    wrapped["plain"].save_pretrained(tmp_path)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def torch_saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled, torch_saved])
def test_copies_work_and_refuse_too(model, copied, tmp_path):
    zm.make_stochastic_(model, posterior=zm.Additive)
    again = copied(model)
    expected = zm.predict_proba(model, TOKENS, seed=0)
    assert torch.equal(zm.predict_proba(again, TOKENS, seed=0), expected)
    assert again.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(TypeError, match="would lose"):
        again.save_pretrained(tmp_path)


def test_the_ways_that_the_error_names_work(model, tmp_path):
    zm.make_stochastic_(model, posterior=zm.Additive)
    zm.save(model, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path / "config")
    plain = Classifier(Config.from_pretrained(tmp_path / "config"))
    loaded = zm.load(tmp_path / "model.safetensors", plain)
    expected = zm.predict_proba(model, TOKENS, seed=0)
    assert torch.equal(zm.predict_proba(loaded, TOKENS, seed=0), expected)
    with pytest.raises(TypeError, match="would lose"):
        loaded.save_pretrained(tmp_path)
    deterministic = zm.to_deterministic(loaded)
    deterministic.save_pretrained(tmp_path / "plain")
    again = Classifier.from_pretrained(tmp_path / "plain")
    assert torch.equal(again(TOKENS)["logits"], deterministic(TOKENS)["logits"])
    plain.save_pretrained(tmp_path / "skeleton")
