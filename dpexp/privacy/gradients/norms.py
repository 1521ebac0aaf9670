"""Norms that are never too small, although floating point rounds.

Write u for the unit roundoff of a type (2^-24 in float32, 2^-53 in float64) and γ_k = k·u. Whatever the order in which
k numbers are added up, the sum is off by at most γ_k times the sum of their absolute values (Higham 2002, section 4.2),
to first order in u; so that

1. a norm of k numbers, squared, added up and rooted, is off by at most (k + 1)u/2 of itself. Few numbers are added up
   in float64, where that is nothing; of many, each RUN in float32 and the runs in float64, which leaves
   8.5 u = 5e-7.
2. a square below the smallest normal number may be lost: each number's part in a norm by as much as that number's
   root, 2^-63 in float32, or 2^-511 where they are squared in float64. It is added.
3. a matrix product of k terms is off by at most γ_k times the product of the factors' absolute values. A vector that
   is a sum of outer products is never held; its squared norm Σ_ts A_ts G_ts, from Gram matrices A = x xᵀ and G = g gᵀ,
   is off by at most γ_d ‖x‖² ‖G‖ + γ_p ‖g‖² ‖A‖ in Frobenius norms (Cauchy & Schwarz), and by γ_T ‖A‖ ‖G‖ for adding
   up T² terms, row by row in float32.
4. such a vector is added to a sum in T steps, each of which rounds what it has come to: in all by up to T u times
   c Σ_t ‖g_t‖ ‖x_t‖, which cancellation may make far larger than the vector. That counts as part of its norm.
5. a record with a factor beyond LARGEST counts as infinite, since its weight c would have too few digits.
6. where what is allowed for 3 and 4 is more than LOOSE of a record's norm, and the clip rule would answer otherwise
   without, its factors are taken in float64. Else a vector that all but cancels would be clipped to far less than where
   it is held, and its norm is its own. The one norm goes over into the other between LOOSE and twice that, since what
   is allowed varies in its last digits with how many records are processed together: at a threshold, one record more
   would change the norms of all that lie near it.

`clip_factors` takes from S what rounding c, c·g and c·g·x can add, 3 u, and what rounding S and c in float64 can. By S
less that, divided by such a norm, it bounds c, whatever the rule (`dpexp.privacy.plan.clipping`). What is left, and is
no matter of one record's norm, is that a sum of many records is itself rounded, at each addition by up to u of what it
has come to.

Norms, sums and noise are never computed in the autocast type, nor in TF32 or bfloat16 behind float32's back
(`full_precision`).
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RUN = 16
_FEW = 2**14  # numbers of a vector; up to there, float64 costs no more time than runs of float32
_PIECE = 2**18  # numbers whose float64 copies stay in the cache
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
LARGEST = {torch.float32: 2.0**90, torch.float64: 2.0**900}
_LOST = {torch.float32: 2.0**-63, torch.float64: 2.0**-511}
LOOSE = 2.0**-7
_STRIP = 32  # positions; shorter strips save multiplications but run slower (measured)
_ROUGH = 1.01  # makes up for what rounds in the error terms themselves


def norms(x: Tensor) -> Tensor:
    """[B] in float64: at least the L2 norm of each of B vectors [B, ...]; infinite beyond LARGEST."""
    flat = x.reshape(len(x), -1)
    d, dtype = flat.shape[1], x.dtype
    if dtype == torch.float64 or d <= _FEW:
        each = [
            torch.linalg.vector_norm(piece, dim=1, dtype=torch.float64)
            for piece in pieces(flat, max(1, _PIECE // max(1, d)))
        ]
        found = (torch.cat(each) if len(each) > 1 else each[0]) * (1 + (d + 2) * 2.0**-53)
        lost = _LOST[torch.float64] if dtype == torch.float64 else 0.0
    else:
        whole = d // RUN * RUN
        runs = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, RUN)), dim=2)
        rest = torch.linalg.vector_norm(flat[:, whole:], dim=1)
        found = (torch.linalg.vector_norm(runs.double(), dim=1).square() + rest.double().square()).sqrt()
        found, lost = found * (1 + (RUN + 1) / 2 * UNIT[dtype] + d * 2.0**-53), _LOST[dtype]
    found = found + d**0.5 * lost if lost else found
    return torch.where(found <= LARGEST[dtype], found, torch.inf)


def pieces(x: Tensor, rows: int) -> list[Tensor]:
    """x [B, ...] in pieces of so many rows, and a last one with the rest, so that a graph of as many pieces holds for
    other B, too."""
    count = max(1, len(x) // rows)
    return [*(x[i * rows : (i + 1) * rows] for i in range(count - 1)), x[(count - 1) * rows :]]


def gram_norms(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """[B] in float64: at least ‖Σ_t g_t ⊗ x_t‖ for x [B, T, d] and g [B, T, p], by 3 and 4 above; and [B], how much of
    that is allowed for rounding.

    Both Gram matrices are symmetric, so that strips below the diagonal suffice.
    """
    _, T, d = x.shape
    p, u, lost = g.shape[2], UNIT[x.dtype], _LOST[x.dtype] ** 2
    strip = max(_STRIP, math.ceil(T / 4))
    total, A_squared, G_squared, lengths = (x.new_zeros(len(x), dtype=torch.float64) for _ in range(4))
    for start in range(0, T, strip):
        end = min(start + strip, T)
        A = torch.bmm(x[:, start:end], x[:, :end].transpose(1, 2))
        G = torch.bmm(g[:, start:end], g[:, :end].transpose(1, 2))
        A_squared += _symmetric(A, start, lambda part: torch.linalg.vector_norm(part, dim=2).double().square())
        G_squared += _symmetric(G, start, lambda part: torch.linalg.vector_norm(part, dim=2).double().square())
        A *= G
        total += _symmetric(A, start, lambda part: part.sum(2).double())
        lengths += A[:, :, start:].diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().double().sum(1)
    x_squared, g_squared = norms(x).square(), norms(g).square()
    norm_A = A_squared.sqrt() * _ROUGH + d * (u * x_squared + T * lost)
    norm_G = G_squared.sqrt() * _ROUGH + p * (u * g_squared + T * lost)
    error = d * (u * x_squared + T * lost) * norm_G + p * (u * g_squared + T * lost) * norm_A + T * u * norm_A * norm_G
    total = total.clamp(min=0)
    most = _or_infinite((total + _ROUGH * error).sqrt() + _ROUGH * T * u * lengths)
    return most, most - total.sqrt()


def _symmetric(strip: Tensor, start: int, sums: Callable[[Tensor], Tensor]) -> Tensor:
    """[B]: row sums of a strip of a symmetric matrix, where what lies left of its square stands for two."""
    found = sums(strip[:, :, start:]).sum(1)
    return found + 2 * sums(strip[:, :, :start]).sum(1) if start else found


def row_norms(same_row: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """[B] in float64: at least the norm of a table whose rows are sums of g_t [B, T, p], as same_row [B, T, T] says;
    and [B], how much of that is allowed for rounding."""
    _, T, p = g.shape
    u, lost = UNIT[g.dtype], _LOST[g.dtype] ** 2
    G = torch.bmm(g, g.transpose(1, 2))
    length = G.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
    total = torch.where(same_row, G, 0).sum(2).double().sum(1)
    lengths = torch.where(same_row, length[:, :, None] * length[:, None, :], 0).sum(2).double().sum(1)
    lengths = _ROUGH * lengths + T**2 * p * lost
    error = (p + T + 2) * u * lengths + T**2 * p * lost
    total = total.clamp(min=0)
    most = _or_infinite((total + _ROUGH * error).sqrt() + T * u * lengths.sqrt())
    return most, most - total.sqrt()


def _or_infinite(found: Tensor) -> Tensor:
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), _no_shortcuts():
        yield


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """PyTorch has two ways to set what products in float32 are computed in, and one refuses once the other was used."""
    try:
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        backends: list[Any] = [
            torch.backends.cuda.matmul,
            *(getattr(torch.backends.cudnn, kind) for kind in ("conv", "rnn")),
            *(getattr(torch.backends.mkldnn, kind) for kind in ("matmul", "conv", "rnn")),
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
