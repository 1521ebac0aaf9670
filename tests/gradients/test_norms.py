"""The bound in float32, for records whose sums of squares are hard to round."""

import math

import numpy as np
import pytest
import torch
from reference import engine_of, sums_of
from torch import nn

from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    RowsGradient,
    TiedGradient,
    outer_products,
)
from dpexp.privacy.gradients.norms import norms
from dpexp.privacy.gradients.products import in_full
from dpexp.privacy.mechanism import clip_factors
from dpexp.privacy.plan.clipping import Abadi

S = 0.3
TINY, HUGE = 2.0**-149, 3e38
DIGITS = {torch.float32: 23, torch.bfloat16: 8}


def exact(values):
    """The L2 norm of float32 numbers: their squares are exact in float64, and fsum rounds once."""
    return math.sqrt(math.fsum(np.square(np.asarray(values, dtype=np.float64).ravel())))


def awkward(generator, *shape):
    """Numbers whose sums of squares round one way: equal ones, powers and their neighbours, of very unlike sizes."""
    count = math.prod(shape)
    base = torch.rand(1, generator=generator).item() + 0.5
    kind, power = (int(torch.randint(most, (1,), generator=generator)) for most in (6, 120))
    some = torch.randn(count, generator=generator)
    numbers = (
        torch.full((count,), base),
        torch.logspace(-18, 0, count, 2.0) * base,
        torch.where(torch.arange(count) % 7 == 0, base * 4096, base),
        torch.full((count,), 1 + 2.0**-23) * 2.0 ** torch.randint(-3, 3, (count,), generator=generator),
        some,
        some.sign() * base,
    )[kind]
    scale = 2.0 ** (power - 60) if torch.rand(1, generator=generator) < 0.4 else 1
    return (numbers.float() * scale).view(shape)


def contribution(use, shape):
    """What one record adds to a sum, as it is."""
    norm = use.squared_norms().sqrt()
    if not norm.isfinite().all():  # the engine replaces the record
        return torch.zeros(shape)
    return use.weighted_sum(clip_factors(Abadi(), norm, torch.tensor(S).double(), torch.float32)).reshape(shape)


def uses(generator, dtype=torch.float32):
    """A record's uses of each kind, small and large, with the shape of the sum."""

    def factor(*shape):
        return awkward(generator, 1, *shape).to(dtype)

    def weight_gradient(x, g):
        how = (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False)
        return torch.ops.aten.convolution_backward(in_full(g), in_full(x), in_full(g).new_zeros(shape), None, *how)[1]

    sizes = 300, 200, 12, DIGITS[dtype]
    d, p, T, digit = (int(torch.randint(1, most, (1,), generator=generator)) for most in sizes)
    x, g, index = factor(T, d), factor(T, p), torch.randint(5, (1, T), generator=generator)
    cancelling = torch.cat([x, x * (1 + 2.0**-digit)], 1), torch.cat([g, -g], 1)
    compared = EmbeddingGradient(index, g, 5)
    compared._table = None
    yield DenseGradient(factor(d * p)), (d * p,)
    for factors in ((x[:, :1], g[:, :1]), (x, g), cancelling):
        yield OuterProductGradient(*factors), (p, d)
        yield outer_products(*factors), (p, d)
    yield EmbeddingGradient(index, g, 5), (5, p)
    yield compared, (5, p)
    yield RowsGradient([(0, 5, compared)], torch.Size([9, p])), (9, p)
    shape, same = torch.Size([30, 20, 3, 3]), torch.randn(1, 1, 20, 1, 1, generator=generator).expand(1, 1, 20, 6, 6)
    of_sum_zero = torch.randn(1, 1, 30, 4, 4, generator=generator)
    of_sum_zero[..., -1, -1] -= of_sum_zero.sum((-1, -2))
    for x, g in ((factor(1, 20, 6, 6), factor(1, 30, 4, 4)), (same.to(dtype), (1e7 * of_sum_zero).to(dtype))):
        yield ConvolutionGradient(x, g, weight_gradient, torch.func.vmap(weight_gradient), None, shape, 16), shape


@pytest.mark.parametrize("seed", range(20))
def test_no_record_contributes_more_than_its_bound(seed):
    generator = torch.Generator().manual_seed(seed)
    for use, shape in uses(generator):
        assert exact(contribution(use, shape)) <= S, type(use)


@pytest.mark.parametrize("d, value", [(2**18, 1.0), (2**18, 3e-4), (1_100_000, 0.1)])
def test_large_layers_are_clipped_to_the_bound(d, value):
    """One record of equal values, for which torch's own float32 norm is off by 2e-3."""
    x = torch.full((1, d), value)
    sums = sums_of(engine_of(nn.Linear(d, 1, bias=False), S), lambda module, one: 1e6 * module(one).sum(), x)
    assert 1 - 1e-6 < exact(sums["weight"]) / S <= 1
    found = DenseGradient(x.expand(3, -1).contiguous()).squared_norms().sqrt()
    assert torch.all(found >= exact(x)) and found[0] < exact(x) * (1 + 1e-6)


@pytest.mark.parametrize("d", [10_000, 20_000])
def test_norms_that_underflow(d):
    """‖x‖² is 0 in float32, and g is large: the product is not small."""
    engine = engine_of(nn.Linear(d, 1, bias=False), S)
    for value, factor in ((2.6e-23, 1e22), (2.6e-23, 1e26), (TINY, 1e27), (1e-30, 1e27), (1e15, 1e-20)):
        step, x = lambda module, one, factor=factor: factor * module(one).sum(), torch.full((1, d), value)
        assert exact(sums_of(engine, step, x)["weight"]) <= S
    use = OuterProductGradient(torch.full((2, 3, 50), 1e-25), torch.full((2, 3, 60), 1e20))
    assert_no_norm_is_too_small(use)


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


def assert_no_norm_is_too_small(use):
    found = use.squared_norms().sqrt()
    use.map_factors(lambda factor: factor.double() if factor.is_floating_point() else factor)
    true = use.materialize().flatten(1).norm(dim=1)
    assert (found >= true).all()
    return found / true


@pytest.mark.parametrize("closeness", [None, 1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("T, d, p", [(2, 2304, 256), (8, 300, 300), (64, 300, 700), (130, 256, 1024)])
def test_gram_norms_are_enlarged_by_what_float32_may_have_lost(T, d, p, closeness):
    """By three thousandths at most, if half of the positions do not all but take back what the other half gives."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(8, T, size, generator=generator) for size in (d, p))
    if closeness is not None:
        x[:, T // 2 :] = x[:, : T // 2] + closeness * x[:, T // 2 :]
        g[:, T // 2 :] = closeness * g[:, T // 2 :] - g[:, : T // 2]
    larger = assert_no_norm_is_too_small(OuterProductGradient(x, g))
    assert closeness is not None or (larger < 1.003).all()


@pytest.mark.parametrize("last", [-1.5, -1.0, 1.5])
def test_sums_that_overflow_below_zero_count_as_infinite(last):
    """Terms of opposite signs whose sum in float32 is -infinity are no norm of zero."""
    x, g = torch.full((1, 21, 300), 2.0**31 / 300**0.5), torch.full((1, 21, 200), 2.0**30.8 / 200**0.5)
    g[:, -1] *= last
    assert_no_norm_is_too_small(EmbeddingGradient(torch.zeros(1, 21, dtype=torch.long), 2.0**31 * g, 4000))
    assert_no_norm_is_too_small(OuterProductGradient(x, g))
    e, o, inputs = torch.zeros(1, 4, 30), torch.zeros(1, 12, 400), torch.zeros(1, 12, 30)
    e[0, 0, 0], inputs[0, :, 0], o[0, 3, 3], o[0, 11, 3] = last * 2.0**60, 2.0**50, 2.0**20, 2.0**20
    table = EmbeddingGradient(torch.tensor([[3, 5, 7, 9]]), e, 400)
    assert_no_norm_is_too_small(TiedGradient(table, OuterProductGradient(inputs, o)))
