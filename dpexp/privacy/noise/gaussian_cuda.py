"""Gaussian noise on CUDA: ChaCha20 and Box & Muller in one Triton kernel.

It uses the same words of the stream for the same entries as `dpexp.privacy.noise.continuous` does on a CPU, so that
both give the same noise but for the last bits of log, sin and cos.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpexp.privacy.noise.randomness import KeyStream

_TILE = 64  # a program computes 16 times as many numbers


def add_normals(total: Tensor, sigma: float, divisor: float, stream: KeyStream, pairs: int) -> None:
    """Adds N(0, σ²) to each entry of a contiguous tensor [n] on a CUDA device and divides it, in place.

    Args:
        pairs: `dpexp.privacy.noise.continuous.PAIRS`.
    """
    state = torch.frombuffer(bytearray(stream.key + stream.nonce()), dtype=torch.int32).to(total.device)
    # As plain arguments they would be float32.
    scales = torch.tensor([sigma, divisor], dtype=torch.float64, device=total.device)
    n = total.numel()
    with torch.cuda.device_of(total):
        _add_normals[(triton.cdiv(n, 16 * _TILE),)](total, state, scales, n, PAIRS=pairs, TILE=_TILE)


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def _quarter_round(a, b, c, d):
    """RFC 8439, section 2.1."""
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _word(state, k: tl.constexpr, counter):
    """Word k of the key and nonce, one copy for each counter."""
    return tl.load(state + k).to(tl.uint32, bitcast=True) + tl.zeros_like(counter)


@triton.jit
def chacha20(state, counter):
    """The 16 words of each block (RFC 8439, section 2.3).

    Args:
        state: pointer to key and nonce, 11 words; counter: uint32 [TILE].
    """
    zero = tl.zeros_like(counter)
    i0, i1, i2, i3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    i4, i5, i6, i7 = (_word(state, 0, zero), _word(state, 1, zero), _word(state, 2, zero), _word(state, 3, zero))
    i8, i9, i10, i11 = (_word(state, 4, zero), _word(state, 5, zero), _word(state, 6, zero), _word(state, 7, zero))
    i12, i13, i14, i15 = counter, _word(state, 8, zero), _word(state, 9, zero), _word(state, 10, zero)
    x0, x1, x2, x3, x4, x5, x6, x7 = i0, i1, i2, i3, i4, i5, i6, i7
    x8, x9, x10, x11, x12, x13, x14, x15 = i8, i9, i10, i11, i12, i13, i14, i15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + i0, x1 + i1, x2 + i2, x3 + i3, x4 + i4, x5 + i5, x6 + i6, x7 + i7, x8 + i8, x9 + i9, x10 + i10,
        x11 + i11, x12 + i12, x13 + i13, x14 + i14, x15 + i15,
    )  # fmt: skip


@triton.jit
def _long(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def _add_pair(total, n, first, second, inside, r_low, r_high, a_low, a_high, sigma, divisor):
    uniform = ((_long(r_low, r_high) & 0x7FFFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.0842021724855044e-19  # 2^-63
    radius = tl.sqrt(-2.0 * sigma * sigma * tl.log(uniform))
    angle = _long(a_low, a_high).to(tl.float64) * 3.4061215800865545e-19  # π 2^-63
    one = inside & (first < n)
    other = inside & (second < n)
    dtype = total.dtype.element_ty
    x = tl.load(total + first, mask=one, other=0.0).to(tl.float64)
    tl.store(total + first, ((x + radius * tl.cos(angle)) / divisor).to(dtype), mask=one)
    y = tl.load(total + second, mask=other, other=0.0).to(tl.float64)
    tl.store(total + second, ((y + radius * tl.sin(angle)) / divisor).to(dtype), mask=other)


@triton.jit(do_not_specialize=["n"])
def _add_normals(total, state, scales, n, PAIRS: tl.constexpr, TILE: tl.constexpr):
    sigma, divisor = tl.load(scales), tl.load(scales + 1)
    eight = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # eight pairs each
    part, within = eight // (PAIRS // 8), eight % (PAIRS // 8)
    left = n - part * (2 * PAIRS)
    pairs = tl.minimum((left + 15) // 16 * 8, PAIRS)
    inside = (left > 0) & (within * 8 < pairs)
    block = part * (PAIRS // 4) + within
    r = chacha20(state, block.to(tl.uint32))
    a = chacha20(state, (block + pairs // 8).to(tl.uint32))
    first = part * (2 * PAIRS) + within * 8
    for i in tl.static_range(8):
        at = first + i
        _add_pair(total, n, at, at + pairs, inside, r[2 * i], r[2 * i + 1], a[2 * i], a[2 * i + 1], sigma, divisor)
