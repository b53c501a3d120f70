"""The networks whose files of version 0.1.0 are in `fixtures`."""

from pathlib import Path

from torch import nn

FOLDER = Path(__file__).parent / "fixtures"


class SavedNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.gru = nn.GRU(6, 4, batch_first=True)
        self.last = nn.Linear(4, 3)

    def states(self, x):
        return self.gru(self.first(x).relu())[0]

    def forward(self, x):
        return self.last(self.states(x))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.gru = nn.GRU(12, 6, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x).relu()
        states, _ = self.gru(x + x.mean(dim=1, keepdim=True))
        return {"logits": self.last(states[:, -1])}["logits"]


def plain_network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 40),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Linear(40, 30),
        nn.ReLU(),
        nn.Linear(30, 3),
    )
