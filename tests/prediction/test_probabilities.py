"""What a model returns: logits or probabilities, of a softmax or a sigmoid, by name or alone."""

import inspect
import math
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Bernoulli, Categorical
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm

both = pytest.mark.parametrize("predict", [zm.predict_proba, zm.predictive_uncertainty])


class Apply(nn.Module):
    """A network with a function at its end, where no container shows it."""

    def __init__(self, function, num_outputs=3):
        super().__init__()
        self.function = function
        self.body = nn.Sequential(zm.Linear(4, 8), nn.Tanh(), nn.Linear(8, num_outputs))

    def forward(self, x):
        return self.function(self.body(x))


def chain(*ends, num_outputs=3):
    return nn.Sequential(zm.Linear(4, 8), nn.Tanh(), nn.Linear(8, num_outputs), *ends)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.randn(30, 4)


# Probabilities that come in place of logits.


@both
@pytest.mark.parametrize(
    "model",
    [
        lambda: chain(nn.Softmax(-1)),
        lambda: nn.Sequential(chain(), nn.Sequential(nn.Softmax(1))),
        lambda: Apply(lambda logits: logits.softmax(-1)),
        lambda: Apply(lambda logits: logits.double().softmax(-1)),
        lambda: Apply(lambda logits: logits.bfloat16().softmax(-1)),
        lambda: Apply(lambda logits: F.one_hot(logits.argmax(-1), 3).float()),
        lambda: Apply(lambda logits: {"logits": logits.softmax(-1)}),
    ],
)
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_a_second_softmax_is_refused(predict, model, chunk_size, x):
    with pytest.raises(ValueError, match=r"probabilities already.*pass outputs='probabilities'"):
        predict(model(), x, 5, chunk_size=chunk_size)


def test_probabilities_are_taken_when_they_are_said_to_be(x):
    logits = chain()
    model = nn.Sequential(logits, nn.Softmax(-1))
    for predict in (zm.predict_proba, zm.predictive_uncertainty):
        mine = predict(model, x, 20, seed=0, outputs="probabilities")
        torch.testing.assert_close(mine, predict(logits, x, 20, seed=0), rtol=1e-4, atol=1e-5)


def test_probabilities_along_another_dimension_are_found():
    model = nn.Sequential(zm.Conv2d(2, 3, 1), nn.Softmax2d())
    images = torch.randn(2, 2, 4, 4)
    with pytest.raises(ValueError, match=r"ends in nn\.Softmax2d"):
        zm.predict_proba(model, images, dim=1)
    picked = zm.predict_proba(model, images, dim=1, outputs="probabilities")
    torch.testing.assert_close(picked.sum(1), torch.ones(2, 4, 4))
    with pytest.raises(ValueError, match="sum to 1 over dimension 1"):
        zm.predict_proba(model, images, dim=1, select=lambda output: output)


@pytest.mark.parametrize(
    "end", [nn.LogSoftmax(-1), Apply(lambda logits: logits.log_softmax(-1), 3).function]
)
def test_logarithms_of_probabilities_are_logits(end, x):
    logits = chain()
    model = nn.Sequential(logits, end) if isinstance(end, nn.Module) else None
    if model is None:
        model = Apply(end)
        logits = model.body
    torch.testing.assert_close(
        zm.predict_proba(model, x, 20, seed=0), zm.predict_proba(logits, x, 20, seed=0)
    )


def test_logits_that_happen_to_sum_to_one_are_believed_when_they_are_said_to_be():
    model = nn.Identity()
    inputs = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    with pytest.raises(ValueError, match="outputs='logits' if they are logits after all"):
        zm.predict_proba(model, inputs)
    expected = inputs.softmax(-1)
    torch.testing.assert_close(zm.predict_proba(model, inputs, outputs="logits"), expected)
    # One row among many that sums to 1 says nothing.
    more = torch.cat([inputs, torch.tensor([[0.5, 0.4]])])
    torch.testing.assert_close(zm.predict_proba(model, more), more.softmax(-1))


def test_what_is_no_probability_is_not_taken_for_one(x):
    with pytest.raises(ValueError, match=r"needs outputs between 0 and 1, got -?\d.*outputs='log"):
        zm.predict_proba(chain(), x, outputs="probabilities")
    model = Apply(lambda logits: logits.sigmoid())
    with pytest.raises(ValueError, match=r"sum to 1 over dimension -1.*link='sigmoid'"):
        zm.predict_proba(model, x, outputs="probabilities")
    with pytest.raises(ValueError, match="link must be 'softmax' or 'sigmoid', got 'probit'"):
        zm.predict_proba(chain(), x, link="probit")
    with pytest.raises(ValueError, match="outputs must be 'logits' or 'probabilities', got 'p'"):
        zm.predictive_uncertainty(chain(), x, outputs="p")
    with pytest.raises(TypeError, match=r"floating point, got torch\.int64"):
        zm.predict_proba(Apply(lambda logits: logits.argmax(-1, keepdim=True)), x)


def test_a_sigmoid_in_front_of_a_softmax_is_refused_or_warned_about(x):
    with pytest.raises(ValueError, match="pass link='sigmoid', outputs='probabilities'"):
        zm.predict_proba(chain(nn.Sigmoid()), x)
    with pytest.warns(UserWarning, match="are between 0 and 1, as if they were probabilities"):
        zm.predict_proba(Apply(torch.sigmoid), x)
    zm.predict_proba(Apply(torch.sigmoid), x, outputs="logits")


def test_a_network_that_returns_its_biases_is_not_suspected():
    model = Apply(lambda logits: logits * 0 + torch.tensor([0.2, 0.3, 0.9]))
    zm.predict_proba(model, torch.randn(100, 4), 3)


# Yes or no.


@pytest.mark.parametrize("num_outputs", [1, 5])
def test_every_output_of_a_sigmoid_is_a_yes_or_no(num_outputs, x):
    model = chain(num_outputs=num_outputs)
    logits = zm.sample_outputs(model, x, 40, seed=0)
    probabilities, errors = zm.predict_proba(
        model, x, 40, seed=0, link="sigmoid", return_stderr=True
    )
    torch.testing.assert_close(probabilities, logits.sigmoid().mean(0))
    torch.testing.assert_close(errors, logits.sigmoid().std(0) / math.sqrt(40))
    uncertainty, spread = zm.predictive_uncertainty(
        model, x, 40, seed=0, link="sigmoid", return_stderr=True
    )
    total = Bernoulli(probs=logits.sigmoid().mean(0)).entropy()
    expected = Bernoulli(logits=logits).entropy().mean(0)
    torch.testing.assert_close(uncertainty.predictive_entropy, total)
    torch.testing.assert_close(uncertainty.expected_entropy, expected)
    torch.testing.assert_close(
        uncertainty.mutual_information, total - expected, rtol=1e-4, atol=1e-6
    )
    assert all(part.shape == (30, num_outputs) and part.isfinite().all() for part in spread)


def test_one_logit_is_two_classes_of_which_the_other_has_logit_zero(x):
    """softmax([0, z]) and sigmoid(z) are the same distribution, so all three measures agree."""
    one = chain(num_outputs=1)
    two = Apply(lambda logits: torch.cat([torch.zeros_like(logits), logits], -1), 1)
    two.body = one
    yes = zm.predict_proba(one, x, 20, seed=0, link="sigmoid")
    torch.testing.assert_close(yes[:, 0], zm.predict_proba(two, x, 20, seed=0)[:, 1])
    mine, mine_errors = zm.predictive_uncertainty(
        one, x, 20, seed=0, link="sigmoid", return_stderr=True
    )
    other, other_errors = zm.predictive_uncertainty(two, x, 20, seed=0, return_stderr=True)
    for a, b in zip((*mine, *mine_errors), (*other, *other_errors), strict=True):
        torch.testing.assert_close(a[:, 0], b, rtol=1e-3, atol=1e-5)


def test_probabilities_of_a_sigmoid_are_taken_or_refused(x):
    model = chain(nn.Sigmoid(), num_outputs=5)
    with pytest.raises(ValueError, match=r"ends in nn\.Sigmoid.*pass outputs='probabilities'"):
        zm.predict_proba(model, x, link="sigmoid")
    taken = zm.predict_proba(model, x, seed=0, link="sigmoid", outputs="probabilities")
    expected = zm.predict_proba(model[:-1], x, seed=0, link="sigmoid")
    torch.testing.assert_close(taken, expected)
    hidden = Apply(torch.sigmoid, 5)
    with pytest.warns(UserWarning, match="a sigmoid follows"):
        zm.predict_proba(hidden, x, link="sigmoid")


@both
def test_one_number_for_each_example_is_not_a_set_of_classes(predict, x):
    model = Apply(lambda logits: logits.squeeze(-1), 1)
    with pytest.raises(ValueError, match=r"one number for each of 30 examples.*link='sigmoid'"):
        predict(model, x)
    loader = DataLoader(TensorDataset(x), batch_size=10)
    with pytest.raises(ValueError, match=r"one number for each of 30 examples"):
        predict(model, loader)
    assert zm.predict_proba(model, x, link="sigmoid").shape == (30,)
    # One example that is no batch has classes in its only dimension.
    assert zm.predict_proba(chain(), x[0]).shape == (3,)


# Outputs with names.


@dataclass
class ModelOutput(OrderedDict):
    """As Hugging Face has them: a dataclass and a mapping of what is not None."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self):
        super().__init__({k: v for k, v in vars(self).items() if v is not None})


@dataclass
class Plain:
    logits: torch.Tensor
    attention: None = None


Pair = namedtuple("Pair", ["hidden", "logits"])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: ModelOutput(logits=logits),
        lambda logits: Plain(logits),
        lambda logits: Pair(logits + 1, logits),
        lambda logits: {"logits": logits, "loss": logits.sum()},
    ],
)
@pytest.mark.parametrize("batch_size", [None, 7])
def test_logits_are_found_by_their_name(wrap, batch_size, x):
    model = Apply(wrap)
    options = {"seed": 0, "batch_size": batch_size}
    for predict in (
        zm.predict_proba,
        zm.predictive_uncertainty,
        zm.sample_outputs,
        zm.predict_moments,
    ):
        found, expected = predict(model, x, 6, **options), predict(model.body, x, 6, **options)
        torch.testing.assert_close(found, expected)


def test_outputs_without_logits_are_described(x):
    Other = namedtuple("Other", ["hidden", "cell"])
    with pytest.raises(TypeError, match="called logits, got Other of hidden, cell; pass select="):
        zm.predict_proba(Apply(lambda logits: Other(logits, logits)), x)
    with pytest.raises(TypeError, match="got dict of logits; pass select="):
        zm.predict_proba(Apply(lambda logits: {"logits": None}), x)
    with pytest.raises(TypeError, match="got tuple; pass select="):
        zm.predict_proba(Apply(lambda logits: (logits, 1)), x)


# Loaders.


@pytest.mark.parametrize("sampler", [zm.local, zm.weight])
def test_a_loader_is_read_batch_by_batch(sampler, x):
    model = chain()
    targets = torch.arange(30)
    expected = zm.sample_outputs(model, x, 4, seed=0, sampler=sampler, batch_size=7)
    for loader in (
        DataLoader(TensorDataset(x, targets), batch_size=7),
        DataLoader(TensorDataset(x), batch_size=7),
        DataLoader(list(x), batch_size=7),
        DataLoader([{"input": row} for row in x], batch_size=7),
    ):
        outputs = zm.sample_outputs(model, loader, 4, seed=0, sampler=sampler)
        assert torch.equal(outputs, expected)
    assert zm.predict_proba(model, loader).shape == (30, 3)
    assert zm.predictive_uncertainty(model, loader).mutual_information.shape == (30,)
    assert zm.predict_moments(model, loader).mean.shape == (30, 3)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda x: DataLoader(TensorDataset(x), shuffle=True), "random order.*shuffle=False"),
        (lambda x: DataLoader(TensorDataset(x, x, x)), "got 3 things a batch; predict batch by"),
        (lambda x: DataLoader(TensorDataset(x[:0])), "DataLoader is empty"),
        (lambda x: DataLoader(TensorDataset(x * math.nan)), "must be finite"),
    ],
)
def test_loaders_that_say_too_little_are_refused(loader, message, x):
    with pytest.raises(ValueError, match=message):
        zm.predict_proba(chain(), loader(x))


def test_a_loader_has_its_own_batches(x):
    with pytest.raises(ValueError, match="has batches of its own; leave batch_size= out"):
        zm.predict_proba(chain(), DataLoader(TensorDataset(x)), batch_size=3)
    with pytest.raises(ValueError, match="a DataLoader needs outputs with the examples along"):
        zm.sample_outputs(chain(), DataLoader(TensorDataset(x)), select=lambda outputs: outputs.T)


# Losses and documentation.


def test_training_refuses_a_model_that_ends_in_softmax(x):
    pytest.importorskip("lightning")
    from zeromean.training import TrainingConfig
    from zeromean.training.elbo_module import ElboModule

    def step(model):
        module = ElboModule(model, TrainingConfig(epochs=1), num_data=30, steps_per_epoch=1)
        return module.training_step((x, torch.arange(30) % 3), 0)

    for model in (chain(nn.Softmax(-1)), Apply(lambda logits: logits.softmax(-1))):
        with pytest.raises(ValueError, match="Cross-entropy takes logits"):
            step(model)
    for model in (chain(), chain(nn.LogSoftmax(-1)), Apply(lambda logits: logits)):
        assert step(model).isfinite()


@pytest.mark.parametrize(
    "function",
    [zm.sample_outputs, zm.predict_proba, zm.predict_moments, zm.predictive_uncertainty],
)
def test_every_option_is_documented(function):
    text = inspect.getdoc(function)
    arguments = text.partition("Args:")[2]
    for name in inspect.signature(function).parameters:
        assert f"\n    {name}: " in arguments, name


def test_categorical_entropies_are_what_they_were(x):
    model = chain()
    logits = zm.sample_outputs(model, x, 30, seed=3)
    uncertainty = zm.predictive_uncertainty(model, x, 30, seed=3)
    total = Categorical(probs=logits.softmax(-1).mean(0)).entropy()
    torch.testing.assert_close(uncertainty.predictive_entropy, total)
