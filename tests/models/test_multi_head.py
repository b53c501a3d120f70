"""One network for several tasks."""

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.models import MultiHead


def test_the_head_of_the_task_answers():
    body, heads = nn.Linear(4, 5), [nn.Linear(5, 2), nn.Linear(5, 3)]
    model = MultiHead(body, heads)
    x = torch.randn(6, 4)
    for task, head in enumerate(heads):
        model.task = task
        assert torch.equal(model(x), head(body(x)))
        assert zm.predict_proba(model, x).shape == (6, task + 2)


def test_heads_are_added_and_old_ones_stay_as_they_were():
    torch.manual_seed(0)
    model = MultiHead(zm.Linear(4, 5, posterior=zm.Additive))
    assert model.add_head(zm.Linear(5, 2, posterior=zm.Additive, prior=zm.Normal())) == 0
    zm.become_prior_(model)
    assert model.add_head(zm.Linear(5, 2, posterior=zm.Additive, prior=zm.Normal())) == 1
    assert model.task == 1
    old = {n: p.clone() for n, p in model.heads[0].state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)).square().mean() + zm.kl_divergence(model)).backward()
        optimizer.step()
    assert all(torch.equal(old[n], p) for n, p in model.heads[0].state_dict().items())


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (1, ValueError, "task must be one of the 1 that have a head.*got 1; call add_head"),
        (-1, ValueError, "task must not be negative"),
        ("first", TypeError, "task must be an integer"),
    ],
)
def test_tasks_without_a_head_are_refused(task, error, message):
    model = MultiHead(nn.Linear(4, 5), [nn.Linear(5, 2)])
    with pytest.raises(error, match=message):
        model.task = task
    assert model.task == 0


def test_what_is_no_module_and_no_head_is_refused():
    with pytest.raises(TypeError, match="body must be a torch module"):
        MultiHead(nn.Linear)
    with pytest.raises(TypeError, match="head must be a torch module"):
        MultiHead(nn.Linear(4, 5), [2])
    with pytest.raises(ValueError, match="no head yet; call add_head"):
        MultiHead(nn.Linear(4, 5))(torch.randn(1, 4))
