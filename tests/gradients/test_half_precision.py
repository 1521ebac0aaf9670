"""Factors in bfloat16: products with float32 results, of three parts of a float32; norms that are never too small."""

import adversarial
import pytest
import torch
from test_factors import lifted_from_one
from test_norms import S, awkward, contribution, exact
from torch import nn

from dpexp.privacy.gradients import products
from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
    RowsGradient,
    outer_products,
)
from dpexp.privacy.gradients.products import ADDING, in_full, keeps_bound, multiplies_half, product

CPU = torch.device("cpu")


def rounding(a, b):
    """As a tensor core that rounds to nearest."""
    return a.float() @ b.float()


def truncating(a, b, bits=24):
    """As a tensor core that adds one exact product after another, and cuts each sum to so many bits."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64)
    for k in range(a.shape[-1]):
        digits, exponent = torch.frexp(total + a[..., k, None].double() * b[..., k, None, :].double())
        total = torch.ldexp((digits * 2**bits).trunc(), exponent - bits)
    return total.float()


@pytest.fixture(params=[None, rounding, truncating], ids=["none", "rounding", "truncating"])
def tensor_cores(request, monkeypatch):
    """Of a device, as simulated here."""
    if request.param is not None:
        monkeypatch.setattr(products, "multiplies_half", lambda device: True)
        monkeypatch.setattr(products, "_with_float32_result", request.param)


def test_the_assumed_bound_is_tried():
    assert keeps_bound(rounding, CPU) and keeps_bound(truncating, CPU)
    assert not keeps_bound(lambda a, b: truncating(a, b, 21), CPU)
    assert not keeps_bound(lambda a, b: (a @ b).float(), CPU)


def test_a_device_that_breaks_the_bound_multiplies_in_float32(monkeypatch):
    assert not multiplies_half(CPU)  # has no such operator
    monkeypatch.setattr(products, "_with_float32_result", lambda a, b: (a @ b).float())
    with pytest.warns(UserWarning, match="float32 is used instead"):
        assert not multiplies_half.__wrapped__(CPU)


def of_half(generator, *shape):
    return awkward(generator, *shape).bfloat16()


@pytest.mark.parametrize("seed", range(10))
def test_three_parts_give_the_sum(seed, tensor_cores):
    """Of positions that cancel, too."""
    generator = torch.Generator().manual_seed(seed)
    c, x = awkward(generator, 40, 17) * torch.rand(17, generator=generator), of_half(generator, 17, 30)
    assert torch.equal(sum(part.double() for part in products._parts(c)), c.double())
    for a, b in ((c, x), (torch.cat([c, -c], 1), torch.cat([x, x])), (c.bfloat16(), x), (x.T, c.T)):
        found, off = product(a, b), ADDING[torch.bfloat16] * a.shape[1] * (a.double().abs() @ b.double().abs())
        assert found.dtype == torch.float32 and ((found - a.double() @ b.double()).abs() <= off).all()


def uses(generator):
    """A record's uses of each kind, with the shape of the sum, and the record's gradient in float64."""
    d, p, T = (int(torch.randint(1, most, (1,), generator=generator)) for most in (200, 150, 12))
    x, g = of_half(generator, 1, T, d), of_half(generator, 1, T, p)
    close = 1 + 2.0 ** -float(torch.randint(1, 8, (1,), generator=generator))
    cancelling = torch.cat([x, (x * close)], 1), torch.cat([g, -g], 1)
    for a, b in ((x[:, :1], g[:, :1]), (x, g), cancelling):
        true = b[0].double().T @ a[0].double()
        yield OuterProductGradient(a, b), true
        yield outer_products(a, b), true
    index = torch.randint(5, (1, T), generator=generator)
    true = torch.zeros(5, p, dtype=torch.float64).index_add(0, index[0], g[0].double())
    yield EmbeddingGradient(index, g, 5), true
    compared = EmbeddingGradient(index, g, 5)
    compared._table = None
    yield compared, true
    yield RowsGradient([(0, 5, compared)], torch.Size([9, p])), nn.functional.pad(true, (0, 0, 0, 4))


@pytest.mark.parametrize("seed", range(12))
def test_no_record_contributes_more_than_its_bound(seed, tensor_cores):
    for use, true in uses(torch.Generator().manual_seed(seed)):
        of_what_is_added = exact(contribution(use, true.shape))
        assert of_what_is_added <= S, type(use)
        norm = use.squared_norms().sqrt().item()
        whole = 2.0**-40 < norm < 2.0**40 and not isinstance(use, DenseGradient)
        assert not whole or norm >= exact(true), type(use)
        assert not whole or of_what_is_added >= (1 - 1e-4) * min(1, S / norm) * exact(true), type(use)


def half(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        return (y * torch.linspace(0.5, 2, y.numel()).sin().view(y.shape)).square().sum().float()


LAYERS = {
    "by Gram matrices": (lambda: nn.Linear(300, 200, bias=False), (8, 300), OuterProductGradient),
    "one position": (lambda: nn.Linear(300, 70, bias=False), (1, 300), OuterProductGradient),
    "stored": (lambda: nn.Linear(24, 20, bias=False), (40, 24), DenseGradient),
    "table": (lambda: nn.Embedding(400, 30).bfloat16(), 400, EmbeddingGradient),
    "convolution by Gram matrices": (lambda: nn.Conv2d(64, 80, 3, bias=False), (64, 4, 4), ConvolutionGradient),
    "convolution in pieces": (lambda: nn.Conv2d(20, 30, 3, bias=False), (20, 6, 6), ConvolutionGradient),
}


@pytest.mark.parametrize("name", LAYERS)
def test_factors_of_a_step_stay_in_half_precision(name):
    """Norms and sums are those of the factors in float32, which the CPU multiplies."""
    make, shape, kind = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(4, *shape) if isinstance(shape, tuple) else torch.randint(shape, (4, 12))
    found = lifted_from_one(make(), x, half)[1].by_name["weight"]
    assert type(found) is kind
    of_factors = {value.dtype for value in vars(found).values() if isinstance(value, torch.Tensor)}
    assert of_factors - {torch.long} == {torch.float32 if kind is DenseGradient else torch.bfloat16}
    dense, c, squares = found.materialize().flatten(1).double(), torch.rand(4), found.squared_norms()
    assert (squares.sqrt() >= dense.norm(dim=1) * (1 - 1e-6)).all() and found.materialize().dtype == torch.float32
    for i, one in enumerate(torch.eye(4)):
        assert exact(found.weighted_sum(one)) <= squares[i].sqrt() * (1 + 2.0**-22)
    assert (found.weighted_sum(c).flatten() - c.double() @ dense).norm() <= 1e-5 * dense.norm()
    total = found.weighted_sum(c)
    found.map_factors(lambda factor: in_full(factor) if factor.is_floating_point() else factor)
    assert torch.equal(total, found.weighted_sum(c)) and (found.squared_norms() / squares - 1).abs().max() < 1e-5


RULES = ("linear", "linear, held", "linear, by Gram matrices", "table, by positions", "convolution, in pieces",
         "convolution, by Gram matrices", "tied, held", "tied, by positions", "attention")  # fmt: skip


@pytest.mark.parametrize("device_multiplies", [False, True])
def test_no_record_of_a_step_in_half_precision_exceeds_its_bound(device_multiplies, monkeypatch):
    if device_multiplies:
        monkeypatch.setattr(products, "multiplies_half", lambda device: True)
        monkeypatch.setattr(products, "_with_float32_result", rounding)
    with torch.autocast("cpu", torch.bfloat16):
        shares = adversarial.largest_share(15, False, RULES)
    assert all(0.9 < share <= 1 for share in shares.values()), shares
