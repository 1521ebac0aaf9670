"""Wide residual networks (Zagoruyko & Komodakis 2016, arXiv 1605.07146) as De et al. 2022 train them with privacy
("Unlocking high-accuracy differentially private image classification through scale", arXiv 2204.13650, section 3.1).

As in their code, jax_privacy, a convolution is fed by a group normalization, and that by a ReLU; the first one sees the
image itself, and the last block is followed by ReLU, normalization and the mean over positions. Convolutions have
standardised weights, gains and biases. Theirs are padded on one side where the stride is 2; these on both.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpexp.errors import ConfigError

GROUPS = 16  # of channels that are normalized together
_FIRST = 16  # channels
_LEAST = 1e-4  # Σ (w - mean)² that is divided by


def wrn(shape: Sequence[int], classes: int, depth: int = 16, width: int = 4) -> nn.Module:
    """WRN-depth-width for images [C, H, W]: three resolutions of 16, 32 and 64 times `width` channels and of
    (depth - 4)/6 blocks each.

    Raises:
        ConfigError: no such depth.
    """
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ConfigError(f"model.depth={depth} must be 4 more than a multiple of 6, such as 16, 28 or 40.")
    layers: list[nn.Module] = [StandardisedConv2d(shape[0], _FIRST, 3, padding=1)]
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
    """Two convolutions, beside them the input or, with a `stride`, a 1×1 convolution of it:
    [B, d, H, W] -> [B, p, H/stride, W/stride]."""

    def __init__(self, d: int, p: int, stride: int | None = None) -> None:
        super().__init__()
        self.inside = nn.Sequential(_convolved(d, p, 3, stride or 1), _convolved(p, p, 3))
        self.beside = nn.Identity() if stride is None else _convolved(d, p, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + self.beside(x)


def _convolved(d: int, p: int, size: int, stride: int = 1) -> nn.Sequential:
    convolution = StandardisedConv2d(d, p, size, stride=stride, padding=size // 2)
    return nn.Sequential(nn.ReLU(), nn.GroupNorm(GROUPS, d), convolution)


class StandardisedConv2d(nn.Conv2d):
    """A convolution by gain·(w - mean)/sqrt(Σ (w - mean)²), with mean and sum over each output channel's weights (Qiao
    et al. 2019, arXiv 1903.10520; with gains Brock et al. 2021, arXiv 2101.08692)."""

    def __init__(self, d: int, p: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(d, p, size, stride=stride, padding=padding)
        self.bias = nn.Parameter(torch.zeros(p))
        self.gain = nn.Parameter(torch.ones(p, 1, 1, 1))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding)

    def standardised(self) -> Tensor:
        """[p, d, size, size]."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        squares = centred.square().sum((1, 2, 3), keepdim=True)
        return self.gain * centred * squares.clamp(min=_LEAST).rsqrt()
