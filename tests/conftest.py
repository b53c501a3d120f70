import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Compiled code of one case must not count against the recompile limit of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
