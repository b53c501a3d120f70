"""FSDP2 in a loop of one's own: parameters that are sharded, and a KL that counts once."""

import sys
import textwrap

import pytest
from test_processes_of_fit import ranks

SCRIPT = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import zeromean as zm


    class Objective(nn.Module):
        # Parameters are whole inside of a forward pass: that is where the KL belongs.
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            nll = F.cross_entropy(self.model(x), y)
            return zm.elbo_loss(nll, zm.kl_divergence(self.model), num_data=100)


    def trained(shard):
        torch.manual_seed(0)
        # Means alone: no noise, so that two processes must come to what one comes to.
        model = nn.Sequential(
            zm.Linear(4, 8, posterior=zm.Additive, sampler=zm.mean), nn.ReLU(), nn.Linear(8, 2)
        )
        objective = Objective(model)
        if shard:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(objective, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.Adam(objective.parameters(), lr=0.05)
        x = torch.randn(16, 4)
        y = (x[:, 0] > 0).long()
        mine = slice(dist.get_rank(), None, dist.get_world_size()) if shard else slice(None)
        for _ in range(5):
            objective(x[mine], y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(objective.named_parameters())


    dist.init_process_group("gloo")
    whole, sharded = trained(False), trained(True)
    for name, parameter in sharded.items():
        assert parameter.to_local().numel() < parameter.numel()
        torch.testing.assert_close(parameter.full_tensor(), whole[name], rtol=1e-4, atol=1e-6)
    print("alike")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sharded_model_trains_as_a_whole_one_does(processes):
    said = ranks(processes, [sys.executable, "-c", textwrap.dedent(SCRIPT)])
    assert said == ["alike\n", "alike\n"]
