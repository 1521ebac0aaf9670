"""Norms of per-example gradients that are never too small, although floating point rounds.

Let u be the unit roundoff of a type (2^-24 in float32, 2^-53 in float64) and γ_k = k·u. Whatever the order in which k
numbers are added, their sum is off by at most γ_k times the sum of their absolute values (Higham 2002, section 4.2), to
first order in u. It follows:

- *Stored vectors.* The norm of k numbers, by squaring, adding and taking the root, has a relative error of at most
  (k + 2)u/2. Vectors of few entries are added in float64, where that is negligible. Of longer ones, each RUN of entries
  is added in float32 and the runs in float64, which leaves 9 u = 5e-7.
- *Underflow.* A square below the smallest normal number may underflow. Each entry's part in a norm is then off by up to
  that number's root: 2^-63 in float32, 2^-511 if squared in float64. This is added to the norm.
- *Gram matrices.* A matrix product of k terms is off by at most γ_k times the product of the factors' absolute values.
  A vector that is a sum of outer products is not materialized. Its squared norm Σ_ts A_ts G_ts, from the Gram matrices
  A = x xᵀ and G = g gᵀ, is off by at most γ_d ‖x‖² ‖G‖ + γ_p ‖g‖² ‖A‖ in Frobenius norms (Cauchy-Schwarz), and by
  γ_T ‖A‖ ‖G‖ for adding T² terms, row by row in float32.
- *Adding in steps.* Such a vector is added to a sum in T steps, each of which rounds the intermediate sum: by up to
  T u c Σ_t ‖g_t‖ ‖x_t‖ in all, which is much more than the vector itself if its terms cancel. This is added to its
  norm.
- *Large records.* A record with a factor beyond LARGEST counts as infinite, since its c would have too few digits.
- *Tensor cores.* Where they multiply factors in bfloat16, u is 2^-22 in *Gram matrices*, and in *Adding in steps* for
  each of the three products that add to the sum, even if T is 1 (`dpexp.privacy.gradients.products`).

*The margin of S.* `clip_factors` subtracts from S what rounding c, c·g and c·g·x can add, 3 u, and what rounding S and
c in float64 can. For any clip rule, c is at most this S divided by such a norm (`dpexp.privacy.plan.clipping`). One
error remains, which is no matter of one record's norm: each addition to the sum over records rounds that sum by up to u
of its value.

Norms, sums and noise are never computed in the autocast type, nor in TF32 or bfloat16 in place of float32
(`full_precision`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpexp.privacy.gradients.products import ADDING, UNIT, as_multiplied, full_type, least_exact, product

RUN = 16
_SHORT = 2**14  # entries; up to there, float64 takes no more time than runs of float32
_CACHED = 2**18  # entries whose float64 copies fit in the cache
LARGEST = {torch.bfloat16: 2.0**60, torch.float32: 2.0**90, torch.float64: 2.0**900}
_UNDERFLOW = {torch.bfloat16: 2.0**-63, torch.float32: 2.0**-63, torch.float64: 2.0**-511}
_STRIP = 32  # positions; shorter strips take fewer multiplications but more time (measured)
_SLACK = 1.01  # for the rounding of the error terms themselves


def norms(x: Tensor) -> Tensor:
    """[B] in float64: at least the L2 norm of each of B vectors [B, ...]; infinite beyond LARGEST."""
    return squared_norms([x.reshape(len(x), -1)])[0].sqrt() * (1 + 2.0**-52)


def squared_norms(vectors: Sequence[Tensor]) -> list[Tensor]:
    """[B] in float64 each: at least the squared L2 norms of the rows of vectors [B, d]; infinite beyond LARGEST.

    What follows the sums over entries is done for all vectors together, since on a GPU each operator costs a launch.
    """
    found: list[Tensor] = [torch.empty(0)] * len(vectors)
    for kind in dict.fromkeys(map(_kind, vectors)):
        dtype, in_runs = full_type(kind[0]), kind[1]
        places = [k for k, x in enumerate(vectors) if _kind(x) == kind]
        d = max(vectors[k].shape[1] for k in places)
        if in_runs:
            raw = [_norms_in_runs(vectors[k]) for k in places]
            rounding, lost = (RUN + 2) / 2 * UNIT[dtype] + d * 2.0**-53, _UNDERFLOW[dtype]
        else:
            raw = [_norms_in_float64(vectors[k]) for k in places]
            rounding, lost = (d + 2) * 2.0**-53, _UNDERFLOW[dtype] if dtype == torch.float64 else 0.0
        together = torch.stack(raw) * (1 + rounding)
        together = together + d**0.5 * lost if lost else together
        squares = torch.where(together <= LARGEST[kind[0]], together, torch.inf).square()
        for k, one in zip(places, squares.unbind(0), strict=True):
            found[k] = one
    return found


def _kind(x: Tensor) -> tuple[torch.dtype, bool]:
    """The type of vectors [B, d], and whether their entries are added in runs of float32."""
    return x.dtype, x.dtype != torch.float64 and x.shape[1] > _SHORT


def _norms_in_float64(x: Tensor) -> Tensor:
    """[B], for vectors [B, d]."""
    chunks = row_chunks(x, max(1, _CACHED // max(1, x.shape[1]))) if x.device.type == "cpu" else [x]
    each = [torch.linalg.vector_norm(chunk, dim=1, dtype=torch.float64) for chunk in chunks]
    return torch.cat(each) if len(each) > 1 else each[0]


def _norms_in_runs(x: Tensor) -> Tensor:
    """[B] in float64, for vectors [B, d], each RUN of entries added in float32."""
    whole, dtype = x.shape[1] // RUN * RUN, full_type(x.dtype)
    runs = torch.linalg.vector_norm(x[:, :whole].unflatten(1, (-1, RUN)), dim=2, dtype=dtype)
    rest = torch.linalg.vector_norm(x[:, whole:], dim=1, keepdim=True, dtype=dtype)
    return torch.linalg.vector_norm(torch.cat([runs, rest], 1), dim=1, dtype=torch.float64)


def row_chunks(x: Tensor, rows: int) -> list[Tensor]:
    """x [B, ...] in chunks of so many rows; the remainder joins the last one, so that a graph fits other B as well."""
    count = max(1, len(x) // rows)
    return [*(x[i * rows : (i + 1) * rows] for i in range(count - 1)), x[(count - 1) * rows :]]


def outer_product_norms(x: Tensor, g: Tensor, x_squared: Tensor, g_squared: Tensor) -> Tensor:
    """[B] in float64: at least ‖Σ_t g_t ⊗ x_t‖, by *Gram matrices* and *Adding in steps* above.

    Both Gram matrices are symmetric: only strips up to the diagonal are computed.

    Args:
        x: [B, T, d].
        g: [B, T, p].
        x_squared: [B] in float64, at least ‖x‖².
        g_squared: [B] in float64, at least ‖g‖².
    """
    x, g = as_multiplied(x), as_multiplied(g)
    _, T, d = x.shape
    p, dtype = g.shape[2], least_exact(x, g)
    u, lost = UNIT[dtype], _UNDERFLOW[dtype] ** 2
    strip = max(_STRIP, math.ceil(T / 4)) if x.device.type == "cpu" else T
    found, lengths = [], []
    for start in range(0, T, strip):
        end = min(start + strip, T)
        A = product(x[:, start:end], x[:, :end].transpose(1, 2))
        G = product(g[:, start:end], g[:, :end].transpose(1, 2))
        AG = A * G
        rows = torch.stack([_row_sums(strip, start) for strip in (A * A, G * G, AG)], 1)
        found.append(rows.sum(2, dtype=torch.float64))
        lengths.append(AG[:, :, start:].diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1, dtype=torch.float64))
    A_squared, G_squared, total = sum(found[1:], found[0]).unbind(1)
    error_x = d * u * x_squared + d * T * lost  # of A: γ_d ‖x‖², and underflow
    error_g = p * u * g_squared + p * T * lost  # of G
    norm_A = A_squared.sqrt() * _SLACK + error_x + T * _UNDERFLOW[dtype]
    norm_G = G_squared.sqrt() * _SLACK + error_g + T * _UNDERFLOW[dtype]
    norm_A, norm_G = torch.minimum(norm_A, x_squared), torch.minimum(norm_G, g_squared)  # ‖x xᵀ‖ <= ‖x‖²
    error = error_x * norm_G + error_g * norm_A + T * u * norm_A * norm_G  # the last term for adding T² terms
    squared = _at_least_zero(total) + _SLACK * error + T**2 * lost
    added = T * ADDING[dtype] * sum(lengths[1:], lengths[0])
    return _or_infinite(squared.sqrt() + _SLACK * added)


def _row_sums(strip: Tensor, start: int) -> Tensor:
    """[B, rows] of a strip [B, rows, columns] of a symmetric matrix; entries left of its diagonal block count twice."""
    rows = strip[:, :, start:].sum(2)
    return torch.add(rows, strip[:, :, :start].sum(2), alpha=2) if start else rows


def embedding_norms(same_row: Tensor, g: Tensor) -> Tensor:
    """[B] in float64: at least the norm of a table's gradient.

    Args:
        same_row: [B, T, T], whether two positions have the same row.
        g: [B, T, p], what each position adds to its row.
    """
    g = as_multiplied(g)
    _, T, p = g.shape
    u, lost = UNIT[g.dtype], _UNDERFLOW[g.dtype] ** 2
    G = product(g, g.transpose(1, 2))
    length = G.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    total = torch.where(same_row, G, 0).sum(2).double().sum(1)
    lengths = torch.where(same_row, length[:, :, None] * length[:, None, :], 0).sum(2).double().sum(1)
    lengths = _SLACK * lengths + T**2 * p * lost  # Σ ‖g_t‖ ‖g_s‖ over positions of the same row, or more
    error = (p + T + 2) * u * lengths + T**2 * p * lost  # of p terms in each product, and T that are added
    return _or_infinite((_at_least_zero(total) + _SLACK * error).sqrt() + T * u * lengths.sqrt())


def tied_norms(index: Tensor, e: Tensor, x: Tensor, o: Tensor, squares: Tensor) -> Tensor:
    """[B] in float64: at least ‖E + O‖ for E = Σ_t δ_{index_t} ⊗ e_t and O = Σ_s o_s ⊗ x_s.

    The inner product of E and O is Σ_st (x_s·e_t) o_s[index_t]. As computed, it is off by at most γ_{d+T+3}
    Σ_st ‖x_s‖ ‖e_t‖ |o_s[index_t]| (*Gram matrices* above): a product x_s·e_t has d terms, and their sum is taken row
    by row. Adding a vector to a sum in S + T steps costs (S + T) u (Σ_s ‖o_s‖ ‖x_s‖ + Σ_t ‖e_t‖) (*Adding in steps*).

    Args:
        index: [B, T], rows of the table.
        e: [B, T, d], what each position adds to its row.
        x: [B, S, d].
        o: [B, S, V].
        squares: [B], at least ‖E‖² + ‖O‖².
    """
    e, x, o = as_multiplied(e), as_multiplied(x), as_multiplied(o)
    (_, T, d), S, dtype = e.shape, x.shape[1], least_exact(e, x, o)
    u, lost = UNIT[dtype], _UNDERFLOW[dtype] ** 2
    at_rows = o.gather(2, index[:, None, :].expand(-1, S, -1))
    inner = (product(x, e.transpose(1, 2)) * at_rows).sum(2).sum(1, dtype=torch.float64)
    e_norms, x_norms, o_norms = (torch.linalg.vector_norm(t, dim=2, dtype=torch.float64) for t in (e, x, o))
    sizes = at_rows.abs().double()
    size = (torch.bmm(sizes, e_norms[:, :, None])[:, :, 0] * x_norms).sum(1)
    error = (d + T + 3) * u * size + d * lost * sizes.sum((1, 2)) + S * T * lost
    length = (o_norms * x_norms).sum(1) + e_norms.sum(1)
    total = _at_least_zero(squares + 2 * (inner + _SLACK * error))
    return _or_infinite(total.sqrt() + _SLACK * (S + T) * ADDING[dtype] * length)


def _at_least_zero(total: Tensor) -> Tensor:
    """A sum that may be below zero by rounding; infinite if its terms overflowed, to NaN or to -infinity."""
    return torch.where(total > -torch.inf, total.clamp(min=0), torch.inf)


def _or_infinite(found: Tensor) -> Tensor:
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Meanwhile float32 products are computed in float32: no autocast, no TF32, no bfloat16."""
    with torch.autocast(device.type, enabled=False), _ieee_float32():
        yield


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """PyTorch has two interfaces for the precision of float32 products, and refuses one after use of the other."""
    try:
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        backends: list[Any] = [
            torch.backends.cuda.matmul,
            *(getattr(torch.backends.cudnn, name) for name in ("conv", "rnn")),
            *(getattr(torch.backends.mkldnn, name) for name in ("matmul", "conv", "rnn")),
        ]
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
