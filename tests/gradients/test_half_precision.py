"""Factors in bfloat16: products with float32 results, of three parts of a float32; norms that are never too small."""

import adversarial
import pytest
import torch
from test_factors import lifted_from_one, loss_of
from test_norms import S, assert_no_norm_is_too_small, awkward, contribution, exact, uses
from torch import nn

from dpexp.privacy.gradients import products
from dpexp.privacy.gradients.layer_gradients import (
    ConvolutionGradient,
    DenseGradient,
    EmbeddingGradient,
    OuterProductGradient,
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


@pytest.mark.parametrize("seed", range(10))
def test_three_parts_give_the_sum(seed, tensor_cores):
    """Of positions that cancel, too."""
    generator = torch.Generator().manual_seed(seed)
    c = awkward(generator, 40, 17) * torch.rand(17, generator=generator)
    x = awkward(generator, 17, 30).bfloat16()
    assert torch.equal(sum(part.double() for part in products._parts(c)), c.double())
    for a, b in ((c, x), (torch.cat([c, -c], 1), torch.cat([x, x])), (c.bfloat16(), x), (x.T, c.T)):
        found, off = product(a, b), ADDING[torch.bfloat16] * a.shape[1] * (a.double().abs() @ b.double().abs())
        assert found.dtype == torch.float32 and ((found - a.double() @ b.double()).abs() <= off).all()


@pytest.mark.parametrize("seed", range(12))
def test_no_record_contributes_more_than_its_bound(seed, tensor_cores):
    for use, shape in uses(torch.Generator().manual_seed(seed), torch.bfloat16):
        added, norm = exact(contribution(use, shape)), use.squared_norms().sqrt().item()
        assert added <= S, type(use)
        if 2.0**-40 < norm < 2.0**40 and not isinstance(use, DenseGradient | ConvolutionGradient):
            assert_no_norm_is_too_small(use)
            true = exact(use.materialize())
            assert added >= (1 - 1e-4) * min(1, S / norm) * true, type(use)


def half(module, x):
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(module, x).float()


LAYERS = {
    "by Gram matrices": (lambda: nn.Linear(300, 200, bias=False), (8, 300), OuterProductGradient),
    "one position": (lambda: nn.Linear(300, 70, bias=False), (1, 300), OuterProductGradient),
    "stored": (lambda: nn.Linear(24, 20, bias=False), (40, 24), DenseGradient),
    "table": (lambda: nn.Embedding(400, 30).bfloat16(), 400, EmbeddingGradient),
    "convolution by Gram matrices": (lambda: nn.Conv2d(64, 80, 3, bias=False), (64, 4, 4), ConvolutionGradient),
    "convolution in pieces": (lambda: nn.Conv2d(20, 30, 3, bias=False), (20, 8, 8), ConvolutionGradient),
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
    assert found.materialize().dtype == torch.float32
    dense, c, squares = found.materialize().flatten(1).double(), torch.rand(4), found.squared_norms()
    total = found.weighted_sum(c)
    for i, one in enumerate(torch.eye(4)):
        norm = squares[i].sqrt()
        assert norm >= dense[i].norm() * (1 - 1e-6) and exact(found.weighted_sum(one)) <= norm * (1 + 2.0**-22)
    assert (total.flatten() - c.double() @ dense).norm() <= 1e-5 * dense.norm()
    found.map_factors(lambda factor: in_full(factor) if factor.is_floating_point() else factor)
    assert torch.equal(total, found.weighted_sum(c)) and (found.squared_norms() / squares - 1).abs().max() < 1e-5


RULES = ("linear", "linear, held", "linear, by Gram matrices", "table, by positions", "convolution, in pieces",
         "convolution, by Gram matrices", "tied, held", "tied, by positions", "attention")  # fmt: skip


@pytest.mark.parametrize("tensor_cores", [None, rounding], indirect=True)
def test_no_record_of_a_step_in_half_precision_exceeds_its_bound(tensor_cores):
    with torch.autocast("cpu", torch.bfloat16):
        shares = adversarial.largest_share(15, False, RULES)
    assert all(0.9 < share <= 1 for share in shares.values()), shares
