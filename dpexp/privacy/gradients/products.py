"""Matrix products of factors, with results of at least float32.

A product of two numbers in bfloat16 is exact in float32. So factors in bfloat16 are kept as they are, in half the
memory, and where a device multiplies such matrices with float32 results, as CUDA's tensor cores do, it does. A factor
in float32, such as c·g, is then the sum of three in bfloat16, and its product with x that of three products. Any other
device multiplies copies in float32.

How tensor cores add is assumed, since NVIDIA documents it nowhere: a sum of k products is off by at most k·2^-22 times
the sum of their absolute values, whatever the order. That holds if each addition aligns its terms with the largest one
and truncates them to 24 bits, instead of rounding to nearest (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor
cores"). Sums that would show less are tried on each device before it is used so (`keeps_bound`).
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

# The unit roundoff of sums of products, by the type in which numbers are multiplied: of bfloat16, by tensor cores.
UNIT = {torch.bfloat16: 2.0**-22, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ADDING = UNIT | {torch.bfloat16: 3 * 2.0**-22}  # of weighted sums, to which three products add each term


def full_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of a type are added: at least float32."""
    return torch.promote_types(torch.float32, dtype)


def in_full(x: Tensor) -> Tensor:
    """x in at least float32."""
    return x.to(full_type(x.dtype))


def least_exact(*factors: Tensor) -> torch.dtype:
    """The type of the factors in which products are least exact."""
    return max((x.dtype for x in factors), key=UNIT.__getitem__)


def as_multiplied(x: Tensor) -> Tensor:
    """x in the type in which its device multiplies it: at least float32, or bfloat16."""
    return x if x.dtype == torch.bfloat16 and multiplies_half(x.device) else in_full(x)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for matrices, or batches of them, with a result of at least float32."""
    a, b = as_multiplied(a), as_multiplied(b)
    if torch.bfloat16 in (a.dtype, b.dtype):
        first, *others = (_with_float32_result(x, y) for x in _parts(a) for y in _parts(b))
        return sum(others, first)
    return _multiply(a, b)


def _multiply(a: Tensor, b: Tensor, **how: Any) -> Tensor:
    return (torch.mm if a.dim() == 2 else torch.bmm)(a, b, **how)


_with_float32_result = partial(_multiply, out_dtype=torch.float32)


def _parts(x: Tensor) -> list[Tensor]:
    """Tensors in bfloat16 whose sum is x in float32, the smallest one first. Exact, but for entries below 2^-100."""
    high = x.bfloat16()
    if x.dtype == torch.bfloat16:
        return [high]
    middle = (x - high).bfloat16()
    return [(x - high - middle).bfloat16(), middle, high]


@cache
def multiplies_half(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bfloat16 with float32 results, within the bound that is assumed."""
    try:
        kept = keeps_bound(_with_float32_result, device)
    except (RuntimeError, TypeError):  # there is no such operator
        return False
    if not kept:
        warnings.warn(f"{device} adds products of bfloat16 less exactly than is assumed; float32 is used instead.")
    return kept


def keeps_bound(multiply: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> bool:
    """Whether products of bfloat16 are within the assumed bound, for sums that show truncation.

    A sum begins with a term that is 2^j times the others (0 <= j < 32), whose signs are equal or alternate by halves,
    quarters and so on, so that what is lost of each adds up.
    """
    place = torch.arange(2**10)[:, None]
    signed = (1 - 2 * (place >> torch.arange(16) & 1)) * (1 + place % 128 / 128)
    sized = (1 + place * 37 % 128 / 128) * torch.where(place == 0, 1, 2.0 ** -torch.arange(32))
    a, b = signed.T.to(device, torch.bfloat16), sized.to(device, torch.bfloat16)
    exact = a.double() @ b.double()
    limit = len(b) * UNIT[torch.bfloat16] * (a.abs().double() @ b.double())
    return all(bool(((c - exact).abs() <= limit).all()) for c in (multiply(a, b), multiply(a[None], b[None])))
