"""The wide residual network of De et al. 2022; that its clipped sums are right and fast tests/gradients/test_models.py
says."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.training.models import StandardizedConv2d, wrn


@pytest.mark.parametrize("depth, width, size", [(16, 4, 2_753_818), (10, 1, 78_938), (40, 4, 8_961_306)])
def test_its_size(depth, width, size):
    """Counted by hand: weights, biases and gains of convolutions, normalizations but before the first, and the head."""
    model = wrn([3, 32, 32], 10, depth, width)
    assert sum(p.numel() for p in model.parameters()) == size
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == depth  # beside blocks, too


def test_every_normalization_is_fed_by_a_relu_and_feeds_a_convolution_but_the_last():
    torch.manual_seed(0)
    model, met = wrn([3, 8, 8], 10, depth=10, width=1), []
    unit = nn.ReLU, nn.GroupNorm, StandardizedConv2d
    for m in model.modules():
        if isinstance(m, (*unit, nn.AdaptiveAvgPool2d, nn.Linear)):
            m.register_forward_hook(lambda m, x, y: met.append((m, x[0], y)))
    model(torch.randn(2, 3, 8, 8))
    kinds = [type(m) for m, *_ in met]
    assert kinds == [StandardizedConv2d, *unit * 9, nn.ReLU, nn.GroupNorm, nn.AdaptiveAvgPool2d, nn.Linear]
    assert {m.num_groups for m, *_ in met if isinstance(m, nn.GroupNorm)} == {16}
    fed = [x is y for (*_, y), (m, x, _) in pairwise(met) if not isinstance(m, nn.ReLU | nn.Linear)]
    assert all(fed)  # a ReLU may be fed by what is beside a block
    assert met[-2][1].shape == (2, 64, 2, 2)


def test_standardized_weights():
    torch.manual_seed(0)
    layer, x = StandardizedConv2d(4, 5, 3), torch.randn(2, 4, 6, 6)
    layer.gain.data *= 3
    w = layer.standardized().flatten(1)
    assert torch.allclose(w.mean(1), torch.zeros(5), atol=1e-6)
    assert torch.allclose(w.square().sum(1), torch.full((5,), 9.0))
    before = layer(x)
    layer.weight.data = 7 * layer.weight.data + 2
    assert torch.allclose(layer(x), before, atol=1e-4)
    layer.weight.data.fill_(2.0)
    assert layer(x).isfinite().all()


@pytest.mark.parametrize("depth", [4, 12, 17])
def test_a_depth_that_no_wide_residual_network_has_is_refused(depth):
    with pytest.raises(ConfigError, match=f"model.depth={depth} must be 4 more than a multiple of 6"):
        wrn([3, 32, 32], 10, depth)
