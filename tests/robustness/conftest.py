"""Small classifiers of scikit-learn's digits, trained once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm


@pytest.fixture(scope="session")
def digits():
    datasets = pytest.importorskip("sklearn.datasets")
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(bunch.target)


def trained(digits, *layers, epochs=12):
    images, labels = digits
    model = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(100):
            nll = F.cross_entropy(model(images[batch]), labels[batch])
            loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=1400)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def plain(digits):
    torch.manual_seed(0)
    return trained(digits, nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


@pytest.fixture(scope="session")
def variance(digits):
    torch.manual_seed(0)
    middle = nn.Linear(64, 50), nn.ReLU(), zm.Linear(50, 50), nn.ReLU()
    return trained(digits, *middle, nn.Linear(50, 10))


@pytest.fixture(scope="session")
def dropout(digits):
    torch.manual_seed(0)
    return trained(digits, nn.Linear(64, 50), nn.ReLU(), nn.Dropout(0.5), nn.Linear(50, 10))


@pytest.fixture(scope="session")
def images(digits):
    return digits[0][1400:1450]


@pytest.fixture(scope="session")
def labels(digits):
    return digits[1][1400:1450]
