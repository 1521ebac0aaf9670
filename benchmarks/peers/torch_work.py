"""The data and the models of the scripts that use torch."""

import torch
from setting import arguments, images, initial
from torch import nn
from torch.utils.data import TensorDataset

WORK, SEED, FOLDER, DATA = arguments()


def data(part: str) -> TensorDataset:
    return TensorDataset(*(torch.from_numpy(values) for values in images(part, DATA)))


def architecture(work: str) -> nn.Module:
    if work == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.Tanh(), nn.Linear(256, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def model() -> nn.Module:
    """With the initial weights."""
    module = architecture(WORK)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in initial(WORK, SEED, FOLDER).items()})
    return module


@torch.no_grad()
def accuracy(module: nn.Module) -> float:
    x, y = data("t10k").tensors
    return (module(x).argmax(1) == y).float().mean().item()
