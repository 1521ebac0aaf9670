"""The models that ship with dpexp. Only resnet has layers that mix records (BatchNorm), and needs `batchnorm`."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.errors import ConfigError

GROUPS = 16  # of GroupNorm
_FIRST = 16  # channels
_MIN_SUM_OF_SQUARES = 1e-4  # Σ (w - mean)²


def wrn(shape: Sequence[int], classes: int, depth: int = 16, width: int = 4) -> nn.Module:
    """Wide residual network WRN-depth-width for images [C, H, W] (Zagoruyko & Komodakis 2016; without BatchNorm: De et
    al. 2022, arXiv 2204.13650): (depth - 4)/6 blocks at each of three resolutions, with 16, 32 and 64 times `width`
    channels."""
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ConfigError(f"model.depth={depth} must be 4 more than a multiple of 6, such as 16, 28 or 40.")
    layers: list[nn.Module] = [StandardizedConv2d(shape[0], _FIRST, 3, padding=1)]
    d = _FIRST
    for k in range(3):
        p = _FIRST * width * 2**k
        layers += [Block(d, p, stride=2 if k else 1), *(Block(p, p) for _ in range(blocks - 1))]
        d = p
    head = nn.Linear(d, classes)
    nn.init.normal_(head.weight, std=d**-0.5)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*layers, nn.ReLU(), nn.GroupNorm(GROUPS, d), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class Block(nn.Module):
    """Two convolutions with a shortcut: the identity or, with a `stride`, a 1×1 convolution. [B, d, H, W] -> [B, p,
    H/stride, W/stride]."""

    def __init__(self, d: int, p: int, stride: int | None = None) -> None:
        super().__init__()
        self.residual = nn.Sequential(_preactivated(d, p, 3, stride or 1), _preactivated(p, p, 3))
        self.shortcut = nn.Identity() if stride is None else _preactivated(d, p, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


def _preactivated(d: int, p: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = StandardizedConv2d(d, p, size, stride=stride, padding=size // 2)
    return nn.Sequential(nn.ReLU(), nn.GroupNorm(GROUPS, d), convolution)


class StandardizedConv2d(nn.Conv2d):
    """A convolution with the standardized weight gain·(w - mean)/sqrt(Σ (w - mean)²), over the weights of one output
    channel (Qiao et al. 2019, arXiv 1903.10520; with gains: Brock et al. 2021, arXiv 2101.08692)."""

    def __init__(self, d: int, p: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(d, p, size, stride=stride, padding=padding)
        self.bias = nn.Parameter(torch.zeros(p))
        self.gain = nn.Parameter(torch.ones(p, 1, 1, 1))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.standardized(), self.bias, self.stride, self.padding)

    def standardized(self) -> Tensor:
        """The standardized weight [p, d, size, size]."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        squares = centred.square().sum((1, 2, 3), keepdim=True)
        return self.gain * centred * squares.clamp(min=_MIN_SUM_OF_SQUARES).rsqrt()


def logistic(shape: Sequence[int], classes: int) -> nn.Module:
    """Logistic regression: one linear layer on the flattened record."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def scattering_linear(shape: Sequence[int], classes: int, groups: int = 27) -> nn.Module:
    """Parameter-free GroupNorm and one linear layer, for scattering features [channels, H, W] (Tramèr & Boneh 2021,
    arXiv 2011.11660)."""
    linear = nn.Linear(math.prod(shape), classes)
    return nn.Sequential(nn.GroupNorm(groups, shape[0], affine=False), nn.Flatten(), linear)


def mlp(shape: Sequence[int], classes: int, hidden: Sequence[int] = (128,)) -> nn.Module:
    """Fully connected tanh layers of the given widths."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for d, p in pairwise(widths):
        layers += [nn.Linear(d, p), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """The tanh CNNs of Papernot et al. 2021 ("Tempered sigmoid activations for deep learning with differential
    privacy", tables 1 and 2) for 28×28 and 32×32 images, and a small one for 8×8."""
    channels, side = shape[0], tuple(shape[1:])
    if side == (8, 8):
        return nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, classes),
        )  # fmt: skip
    if side == (28, 28):
        return nn.Sequential(
            nn.Conv2d(channels, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
            nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, classes),
        )  # fmt: skip
    if side == (32, 32):
        widths = [channels, 32, 32, 64, 64, 128, 128]
        layers: list[nn.Module] = []
        for i, (d, p) in enumerate(pairwise(widths)):
            layers += [nn.Conv2d(d, p, 3, padding=1), nn.Tanh()]
            if i % 2:
                layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, classes))
    raise ConfigError(
        f"model=cnn takes images of 8×8, 28×28 or 32×32; data.shape={list(shape)}. Use model=mlp or your own."
    )


def resnet(shape: Sequence[int], classes: int, widths: Sequence[int] = (16, 32)) -> nn.Module:
    """A small residual network with BatchNorm (He et al. 2016), of one block per width."""
    first = widths[0]
    layers: list[nn.Module] = [nn.Conv2d(shape[0], first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
    for k, (d, p) in enumerate(pairwise([first, *widths])):
        layers.append(Residual(d, p, stride=2 if k else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))


class Residual(nn.Module):
    """Two convolutions with a shortcut: [B, d, H, W] -> [B, p, H/stride, W/stride]."""

    def __init__(self, d: int, p: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(d, p, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(p), nn.ReLU(),
            nn.Conv2d(p, p, 3, padding=1, bias=False), nn.BatchNorm2d(p),
        )  # fmt: skip
        resized = stride > 1 or d != p
        layers = [nn.Conv2d(d, p, 1, stride=stride, bias=False), nn.BatchNorm2d(p)] if resized else []
        self.shortcut = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class Lstm(nn.Module):
    """Next-token scores [B, classes, T] for tokens [B, T] (McMahan et al. 2018, arXiv 1710.06963; on characters:
    McMahan et al. 2017, arXiv 1602.05629)."""

    def __init__(self, classes: int, width: int = 128, layers: int = 1, embedding: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, width, layers, batch_first=True)
        self.scores = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.lstm(self.embedding(x))[0]).transpose(1, 2)
