"""BatchNorm over several processes next to torch's over the whole mini-batch."""

import copy
import multiprocessing
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm
from zeromean.training import children
from zeromean.training.sync_batchnorm import (
    SyncedBatchNorm,
    forward_reads_buffers,
    running_statistics,
)

NETWORKS = {
    "features": lambda: nn.BatchNorm1d(3),
    "images": lambda: nn.BatchNorm2d(3, momentum=None),
    "plain": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    "double": lambda: nn.BatchNorm1d(3).double(),
}
SHAPES = {"features": (10, 3), "images": (10, 3, 4, 4), "plain": (10, 3, 2, 2), "double": (10, 3)}
# The shares of two processes, which need not be of one size.
ROWS = slice(0, 4), slice(4, 10)


def inputs_of(name):
    torch.manual_seed(len(name))
    return torch.randn(SHAPES[name], dtype=torch.float64 if name == "double" else None) * 2 + 5


def loss(outputs):
    """Of every example by itself, as a data term is, and with a gradient through the moments."""
    return (outputs + 0.3).pow(3).sum()


def share(networks, group):
    found = {}
    for name, network in networks.items():
        x = inputs_of(name)[ROWS[group.rank]].requires_grad_()
        for _ in range(2):
            with SyncedBatchNorm():
                outputs = network(x)
        loss(outputs).backward()
        found[name] = outputs.detach(), x.grad, network
    with SyncedBatchNorm(), pytest.raises(ValueError, match="more than one value a channel"):
        F.batch_norm(torch.ones(group.rank, 3), None, None, training=True)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs forks")
def test_two_processes_have_the_moments_of_the_whole_batch(monkeypatch):
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(children, "start_context", lambda: context)
    whole = {name: make() for name, make in NETWORKS.items()}
    with children.children(share, copy.deepcopy(whole), 2, "cpu") as group:
        found = share(copy.deepcopy(whole), group)
    for name, network in whole.items():
        x = inputs_of(name).requires_grad_()
        for _ in range(2):
            expected = network(x)
        loss(expected).backward()
        outputs, gradient, synced = found[name]
        torch.testing.assert_close(outputs, expected[ROWS[0]].detach())
        torch.testing.assert_close(gradient, x.grad[ROWS[0]], rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(synced.buffers(), network.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_evaluation_is_torchs_own():
    """Without a group of processes: nothing is asked of others."""
    network = nn.BatchNorm1d(3).eval()
    x = torch.randn(5, 3)
    with SyncedBatchNorm():
        assert torch.equal(network(x), F.batch_norm(x, torch.zeros(3), torch.ones(3)))


def test_statistics_are_told_from_buffers_that_a_step_reads():
    layers = nn.BatchNorm2d(3), nn.InstanceNorm1d(3, track_running_stats=True), nn.LayerNorm(3)
    model = nn.Sequential(*layers, zm.Linear(3, 3, posterior=zm.Additive))
    names = {"running_mean", "running_var", "num_batches_tracked"}
    assert running_statistics(model).keys() == {f"{i}.{name}" for i in (0, 1) for name in names}
    assert running_statistics(layers[0]).keys() == names
    zm.prune_(model, by="snr", sparsity=0.5)
    assert not forward_reads_buffers(model)
    model.register_buffer("codebook", torch.zeros(3))
    assert forward_reads_buffers(model)
