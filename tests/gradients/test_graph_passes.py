"""Passes on traced graphs leave their results as they are."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dpexp.privacy.gradients.graph_passes import share


def written_between(x):
    """Reads a tensor, writes to it through a view, and reads it again."""
    y = x * 1
    before = y.sum()
    y.view(-1).add_(1)
    return before * 2, y.sum() * 3, (y.norm() * 2, y.norm() * 2)


def filled_by_parts(x):
    y = torch.zeros_like(x)
    first = y.norm()
    y[0:1] = x[0:1]
    second = y.norm()
    y[1:2] = x[1:2]
    return first * 2, second * 3, y.norm() * 4


def equal_results(x):
    """Results that are written to later must not share memory."""
    return (
        torch.linalg.matrix_power(x @ x.T, 2),
        torch.linalg.matrix_power(x @ x.T, 2),
        x.clone(),
        x.clone(),
        x * 2,
        x * 2,
    )


def drawn_twice(x):
    return torch.rand_like(x) - torch.rand_like(x), torch.bernoulli(x.abs().clamp(max=1)), torch.zeros_like(x).add_(1)


def copied_and_written(x):
    y = x.clone()
    y.mul_(3)
    return y.sum(), x.sum(), torch.where(x > 0, x, 0.0).sum(), torch.where(x > 0, 0.0, x).sum()


def scalar(x):
    return x * torch.scalar_tensor(2.0).detach(), x + torch.scalar_tensor(2.0)


@pytest.mark.parametrize(
    "function", [written_between, filled_by_parts, equal_results, drawn_twice, copied_and_written, scalar]
)
def test_shared_values_are_those_that_were_computed_twice(function):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    usual = make_fx(function)(x)
    shared = copy.deepcopy(usual)
    share(shared)
    shared.recompile()
    found = []
    for graph in (usual, shared):
        torch.manual_seed(1)
        found.append(torch.utils._pytree.tree_leaves(graph(x.clone())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    wide = [one for one in found[1] if one.dim()]
    assert len({one.untyped_storage().data_ptr() for one in wide}) == len(wide)
