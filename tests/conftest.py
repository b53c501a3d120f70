import random

import pytest
import torch

pytest_plugins = ["processes"]


def pytest_addoption(parser):
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in any order"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Tests of a file stay together: they share fixtures that take long."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    # Every worker must come to the same order.
    rng = random.Random(seed)
    rng.shuffle(items)
    place = {path: rng.random() for path in sorted({item.path for item in items})}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Compiled code of one case must not count against the recompile limit of the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
