"""The wide residual network of De et al. 2022; that its clipped sums are right and fast tests/gradients/test_models.py
says."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.training.models import StandardizedConv2d, wrn


def counted(depth, width, classes=10):
    """Parameters of convolutions (weights, biases, gains), normalizations before each but the first, and the head."""
    convolutions, channels = [(3, 16, 9)], 16
    for resolution in range(3):
        wide = 16 * width * 2**resolution
        convolutions += [(channels, wide, 1), (channels, wide, 9)] + [(wide, wide, 9)] * (2 * (depth - 4) // 6 - 1)
        channels = wide
    normalised = sum(2 * d for d, _, _ in convolutions[1:]) + 2 * channels
    return sum(d * p * k + 2 * p for d, p, k in convolutions) + normalised + classes * (channels + 1)


@pytest.mark.parametrize("depth, width", [(16, 4), (10, 1), (40, 4)])
def test_its_size(depth, width):
    model = wrn([3, 32, 32], 10, depth, width)
    size = sum(p.numel() for p in model.parameters())
    assert size == counted(depth, width) and (size == 2_753_818 or depth != 16)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == depth  # beside blocks, too


def test_every_normalization_is_fed_by_a_relu_and_feeds_a_convolution_but_the_last():
    torch.manual_seed(0)
    model, met = wrn([3, 8, 8], 10, depth=10, width=1), []
    for m in model.modules():
        if isinstance(m, nn.ReLU | nn.GroupNorm | StandardizedConv2d | nn.AdaptiveAvgPool2d | nn.Linear):
            m.register_forward_hook(lambda m, x, y: met.append((m, x[0], y)))
    model(torch.randn(2, 3, 8, 8))
    kinds = [type(m) for m, _, _ in met]
    unit = [nn.ReLU, nn.GroupNorm, StandardizedConv2d]
    assert kinds == [StandardizedConv2d, *unit * 9, nn.ReLU, nn.GroupNorm, nn.AdaptiveAvgPool2d, nn.Linear]
    assert all(m.num_groups == 16 for m, _, _ in met if isinstance(m, nn.GroupNorm))
    for (_, _, y), (m, x, _) in pairwise(met):
        if not isinstance(m, nn.ReLU | nn.Linear):  # a ReLU may be fed by what is beside a block
            assert x is y
    (pooled,) = [x for m, x, _ in met if isinstance(m, nn.AdaptiveAvgPool2d)]
    assert pooled.shape == (2, 64, 2, 2)


def test_standardized_weights():
    torch.manual_seed(0)
    layer = StandardizedConv2d(4, 5, 3)
    layer.gain.data *= 3
    w = layer.standardized()
    assert torch.allclose(w.mean((1, 2, 3)), torch.zeros(5), atol=1e-6)
    assert torch.allclose(w.square().sum((1, 2, 3)), torch.full((5,), 9.0))
    x = torch.randn(2, 4, 6, 6)
    shifted = layer(x)
    layer.weight.data = 7 * layer.weight.data + 2
    assert torch.allclose(layer(x), shifted, atol=1e-4)
    layer.weight.data.fill_(2.0)
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("depth", [4, 12, 17])
def test_a_depth_that_no_wide_residual_network_has_is_refused(depth):
    with pytest.raises(ConfigError, match=f"model.depth={depth} must be 4 more than a multiple of 6"):
        wrn([3, 32, 32], 10, depth)
