"""A loop with accelerate: the KL counts once, and every rank draws noise of its own."""

import json
import os
import socket
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeromean as zm

pytest.importorskip("accelerate")

SCRIPT = """
import json
import sys
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import zeromean as zm

parts = int(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=parts)
torch.manual_seed(0)
x, y = torch.randn(16, 4), torch.randint(2, (16,))
model = nn.Sequential(zm.Linear(4, 2, posterior=zm.Additive, prior=zm.Normal(scale=0.1)))
loader = DataLoader(TensorDataset(x, y), 16 // parts // accelerator.num_processes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
zm.seed_ranks(0)
drawn = float(torch.randn(()))
with zm.sampling(model, zm.mean):  # Without noise, to compare with one process.
    for _ in range(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                nll = F.cross_entropy(model(inputs), targets)
                kl = zm.kl_divergence(accelerator.unwrap_model(model))
                accelerator.backward(zm.elbo_loss(nll, kl, num_data=16))
                optimizer.step()
                optimizer.zero_grad()
means = accelerator.unwrap_model(model)[0].weight.mean.tolist()
print(json.dumps({"means": means, "drawn": drawn}))
# The model goes before the process group: a wrapper that outlives it joins gloo's threads too late.
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
accelerator.end_training()
"""


def expected_means():
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(2, (16,))
    model = nn.Sequential(zm.Linear(4, 2, posterior=zm.Additive, prior=zm.Normal(scale=0.1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), 16)
    with zm.sampling(model, zm.mean):
        for _ in range(3):
            for inputs, targets in loader:
                nll = F.cross_entropy(model(inputs), targets)
                loss = zm.elbo_loss(nll, zm.kl_divergence(model), num_data=16)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model[0].weight.mean.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parts"), [(1, 2), (2, 1)])
def test_several_processes_and_accumulated_batches_train_as_one(processes, tmp_path, ranks, parts):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        env = os.environ | (common if ranks > 1 else {}) | own
        started.append(processes.start([sys.executable, script, str(parts)], env=env))
    said = [processes.finish(rank) for rank in started]
    assert all(each.returncode == 0 for each in said), [each.stderr for each in said]
    results = [json.loads(each.stdout.splitlines()[-1]) for each in said]
    for result in results:
        torch.testing.assert_close(torch.tensor(result["means"]), torch.tensor(expected_means()))
    assert len({result["drawn"] for result in results}) == ranks
