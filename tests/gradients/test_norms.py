"""The bound in float32: a directed search for records whose true contribution exceeds S, beside random ones."""

import math

import numpy as np
import pytest
import torch
from plans import plan_of
from torch import nn

from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    TiedGradient,
    outer_products,
)
from dpexp.privacy.gradients.norms import norms
from dpexp.privacy.mechanism import clip_factors
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping
from dpexp.privacy.plan.clipping import Abadi
from dpexp.privacy.round import RoundEngine

S = 0.3
TINY, HUGE = 2.0**-149, 3e38


def exact(values):
    """The L2 norm of float32 numbers: their squares are exact in float64, and fsum rounds once."""
    return math.sqrt(math.fsum(np.square(np.asarray(values, dtype=np.float64).ravel())))


def awkward(generator, *shape):
    """Numbers whose sums of squares round one way: equal ones, powers and their neighbours, of very unlike sizes."""
    count = math.prod(shape)
    base = torch.rand(1, generator=generator).item() + 0.5
    kind = int(torch.randint(6, (1,), generator=generator))
    numbers = {
        0: lambda: torch.full((count,), base),
        1: lambda: torch.logspace(-18, 0, count, 2.0) * base,
        2: lambda: torch.where(torch.arange(count) % 7 == 0, base * 4096, base),
        3: lambda: torch.full((count,), 1 + 2.0**-23) * 2.0 ** torch.randint(-3, 3, (count,), generator=generator),
        4: lambda: torch.randn(count, generator=generator),
        5: lambda: torch.randn(count, generator=generator).sign() * base,
    }[kind]()
    scale = (
        2.0 ** float(torch.randint(-60, 60, (1,), generator=generator))
        if torch.rand(1, generator=generator) < 0.4
        else 1
    )
    return (numbers.float() * scale).view(shape)


def contribution(use, shape):
    """What one record adds to a sum, as it is."""
    c = clip_factors(Abadi(), use.squared_norms().sqrt(), torch.tensor(S, dtype=torch.float64), torch.float32)
    if not use.squared_norms().isfinite().all():  # the engine replaces the record
        return torch.zeros(shape)
    return use.weighted_sum(c).reshape(shape)


def uses(generator):
    """A record's uses of each kind, small and large, with the shape of the sum."""
    d, p, T = (int(torch.randint(1, most, (1,), generator=generator)) for most in (300, 200, 12))
    x, g = awkward(generator, 1, T, d), awkward(generator, 1, T, p)
    yield DenseGradient(awkward(generator, 1, d * p)), (d * p,)
    yield OuterProductGradient(x[:, :1], g[:, :1]), (p, d)
    yield OuterProductGradient(x, g), (p, d)
    if T > 1:  # all but cancelling
        close = 2.0 ** -float(torch.randint(1, 23, (1,), generator=generator))
        both = torch.cat([x, x * (1 + close)], 1), torch.cat([g, -g], 1)
        yield outer_products(*both), (p, d)
        yield OuterProductGradient(*both), (p, d)
    index = torch.randint(5, (1, T), generator=generator)
    yield EmbeddingGradient(index, g, 5), (5, p)
    compared = EmbeddingGradient(index, g, 5)
    compared._table = None
    yield compared, (5, p)
    images, gradients = awkward(generator, 1, 1, 20, 6, 6), awkward(generator, 1, 1, 30, 4, 4)
    same, cancelling = (
        torch.randn(1, 1, 20, 1, 1, generator=generator),
        torch.randn(1, 1, 30, 4, 4, generator=generator),
    )
    cancelling[..., -1, -1] -= cancelling.sum((-1, -2))

    def weight_gradient(x, g):
        how = (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False)
        return torch.ops.aten.convolution_backward(g, x, torch.zeros(shape), None, *how)[1]

    shape = torch.Size([30, 20, 3, 3])
    for x, g in ((images, gradients), (same.expand_as(images), 1e7 * cancelling)):
        yield ConvolutionGradient(x, g, weight_gradient, torch.func.vmap(weight_gradient), None, shape, 16), shape


@pytest.mark.parametrize("seed", range(20))
def test_no_record_contributes_more_than_its_bound(seed):
    generator = torch.Generator().manual_seed(seed)
    for use, shape in uses(generator):
        assert exact(contribution(use, shape)) <= S, type(use)


def test_a_directed_search_finds_no_record_beyond_the_bound():
    """Climbs towards larger contributions, bit by bit; starts where float32 sums are at their worst."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for d in (24, 25, 3000):
        x, g = torch.full((1, 1, d), 1 + 2.0**-12), torch.full((1, 1, 7), 3.0)
        reached = 0.0
        for _ in range(150):
            tried = x * (1 + 2.0**-23 * torch.randint(-3, 4, x.shape, generator=generator))
            found = exact(contribution(OuterProductGradient(tried, g), (7, d))) / S
            if found >= reached:
                reached, x = found, tried
        worst = max(worst, reached)
    assert 1 - 1e-6 < worst <= 1


@pytest.mark.parametrize("d, value", [(2**18, 1.0), (2**18, 3e-4), (1_100_000, 0.1)])
def test_large_layers_are_clipped_to_the_bound(d, value):
    """One record of equal values, for which torch's own float32 norm is off by 2e-3."""
    module = nn.Linear(d, 1, bias=False)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(S))
    engine = RoundEngine(plan, module, GaussianNoise())
    engine.begin()
    x = torch.full((1, 1, d), value)
    engine.add_chunk(lambda module, one: 1e6 * module(one).sum(), x, 1)
    reached = exact(engine._sums["weight"]) / S
    assert 1 - 1e-6 < reached <= 1
    dense = DenseGradient(x.view(1, -1).expand(3, -1).contiguous())
    assert torch.all(dense.squared_norms().sqrt() >= exact(x)) and dense.squared_norms()[0].sqrt() < exact(x) * (
        1 + 1e-6
    )


@pytest.mark.parametrize("d", [10_000, 20_000])
def test_norms_that_underflow(d):
    """‖x‖² is 0 in float32, and g is large: the product is not small."""
    module = nn.Linear(d, 1, bias=False)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(S))
    engine = RoundEngine(plan, module, GaussianNoise())
    for value, factor in ((2.6e-23, 1e22), (2.6e-23, 1e26), (TINY, 1e27), (1e-30, 1e27), (1e15, 1e-20)):
        engine.begin()
        engine.add_chunk(lambda module, one, factor=factor: factor * module(one).sum(), torch.full((1, 1, d), value), 1)
        assert exact(engine._sums["weight"]) <= S
    x = torch.full((2, 3, 50), 1e-25)
    true = torch.bmm(torch.full((2, 60, 3), 1e20, dtype=torch.float64), x.double()).flatten(1).norm(dim=1)
    use = OuterProductGradient(x, torch.full((2, 3, 60), 1e20))
    assert (use.squared_norms().sqrt() >= true).all()


def test_norms_that_overflow_count_as_infinite():
    assert norms(torch.tensor([[HUGE, 1.0], [1e20, 0.0], [math.nan, 0.0], [math.inf, 1.0]])).isfinite().tolist() == [
        False, True, False, False,
    ]  # fmt: skip
    large = torch.full((1, 3_000_000), 1e20)
    assert norms(large).isinf().all() or norms(large)[0] >= exact(large)


@pytest.mark.parametrize("shape", [(7, 10), (3, 3000), (600, 784), (40, 90_000), (2, 3, 4, 5)])
def test_norms_are_enlarged_by_less_than_a_millionth(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    true = torch.tensor([exact(row) for row in x[:40]], dtype=torch.float64)
    found = norms(x)[:40] / true - 1
    assert found.min() >= 0 and found.max() < 1e-6


@pytest.mark.parametrize("closeness", [None, 1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("T, d, p", [(2, 2304, 256), (8, 300, 300), (64, 300, 700), (130, 256, 1024)])
def test_gram_norms_are_enlarged_by_what_float32_may_have_lost(T, d, p, closeness):
    """By three thousandths at most, if half of the positions do not all but take back what the other half gives."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(8, T, size, generator=generator) for size in (d, p))
    if closeness is not None:
        x[:, T // 2 :] = x[:, : T // 2] + closeness * x[:, T // 2 :]
        g[:, T // 2 :] = closeness * g[:, T // 2 :] - g[:, : T // 2]
    true = torch.bmm(g.double().transpose(1, 2), x.double()).flatten(1).norm(dim=1)
    found = OuterProductGradient(x, g).squared_norms().sqrt() / true
    assert (found >= 1).all() and (closeness is not None or (found < 1.003).all()), found


@pytest.mark.parametrize("last", [-1.5, -1.0, 1.5])
def test_sums_that_overflow_below_zero_count_as_infinite(last):
    """Terms of opposite signs whose sum in float32 is -infinity are no norm of zero."""
    x = torch.full((1, 21, 300), 2.0**31 / 300**0.5)
    g = torch.full((1, 21, 200), 2.0**30.8 / 200**0.5)
    g[:, -1] *= last
    true = torch.bmm(g.double().transpose(1, 2), x.double()).norm()
    assert OuterProductGradient(x, g).squared_norms().sqrt() >= true
    index, e = torch.tensor([[3, 5, 7, 9]]), torch.zeros(1, 4, 30)
    o, inputs = torch.zeros(1, 12, 400), torch.zeros(1, 12, 30)
    e[0, 0, 0], inputs[0, :, 0], o[0, 3, 3], o[0, 11, 3] = last * 2.0**60, 2.0**50, 2.0**20, 2.0**20
    tied = TiedGradient(EmbeddingGradient(index, e, 400), OuterProductGradient(inputs, o))
    assert tied.squared_norms().sqrt() >= tied.materialize().double().norm()
    table = EmbeddingGradient(torch.zeros(1, 21, dtype=torch.long), 2.0**31 * g, 4000)
    assert table.squared_norms().sqrt() >= table.materialize().double().norm()
