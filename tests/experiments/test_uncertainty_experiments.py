import torch
from torch import nn

import zeromean as zm
from zeromean.experiments.uncertainty.active_learning import Config, _first, network
from zeromean.experiments.uncertainty.last_layer_laplace import last_layer_laplace
from zeromean.experiments.uncertainty.rotating_digit import rotated


def test_a_sample_is_one_network_whatever_the_batch():
    model, x = network().eval(), torch.rand(5, 1, 28, 28)
    together = zm.sample_outputs(model, x, 4, seed=0)
    alone = zm.sample_outputs(model, x[3:], 4, seed=0)
    torch.testing.assert_close(together[:, 3:], alone)
    # nn.Dropout would draw another network for each image.
    twice = zm.sample_outputs(model, x[:1].repeat(2, 1, 1, 1), 4, seed=1)
    torch.testing.assert_close(twice[:, 0], twice[:, 1])
    assert twice[:, 0].std(0).min() > 0


def test_labels_begin_with_all_classes():
    labels = torch.randint(10, (400,))
    first = _first(labels, Config())
    assert labels[first].bincount().tolist() == [2] * 10
    assert _first(labels, Config(seed=1)).tolist() != first.tolist()


def test_laplace_draws_have_the_inverse_of_the_hessian_as_covariance():
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False)
    x, precision, draws = torch.randn(50, 4), 5.0, 20_000
    labels = torch.randint(3, (50,))
    found = last_layer_laplace(
        layer, x, (x, labels), num_draws=draws, seed=0, precisions=(precision,)
    )
    weights = torch.stack([state["weight"].flatten() for state in found.networks.states])
    with torch.no_grad():
        p = layer(x).softmax(-1)
    of_outputs = torch.diag(p.mean(0)) - p.T @ p / 50
    hessian = torch.kron(of_outputs, x.T @ x) + precision * torch.eye(12)
    expected = torch.linalg.inv(hessian)
    scale = expected.diagonal().sqrt()
    off = (weights.T.cov() - expected).abs() / torch.outer(scale, scale)
    assert off.max() < 5 * (2 / draws) ** 0.5
    mean_off = (weights.mean(0) - layer.weight.detach().flatten()).abs() / scale
    assert mean_off.max() < 5 / draws**0.5


def test_turning_by_quarters_moves_pixels():
    image = torch.rand(1, 1, 28, 28)
    torch.testing.assert_close(rotated(image, 90), image.rot90(1, (2, 3)), atol=1e-4, rtol=0)
    torch.testing.assert_close(rotated(image, 0), image, atol=1e-5, rtol=0)
