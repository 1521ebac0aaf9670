"""The key stream and the noise: RFC 8439's vectors and the normal distribution."""

import bisect
import math
import os
import subprocess
import sys

import pytest
import torch
from scipy.stats import chisquare, kstest

from dpexp.privacy.noise.continuous import PAIRS, BoxMuller, GaussianNoise, pairs_for
from dpexp.privacy.noise.randomness import BLOCK, KeyStream

RFC_KEY = bytes(range(32))
RFC_NONCE = bytes.fromhex("000000090000004a00000000")
# RFC 8439, section 2.3.2: the block of counter 1.
RFC_BLOCK = bytes.fromhex(
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)


def normals(count, stream=None, sigma=1.0, dtype=torch.float64):
    total = torch.zeros(count, dtype=dtype)
    GaussianNoise(stream).add_to([(total, sigma)])
    return total


def test_the_stream_is_chacha20():
    out = torch.zeros(BLOCK // 8, dtype=torch.int64)
    KeyStream(RFC_KEY).fill(out, RFC_NONCE, first=1)
    assert out.numpy().tobytes() == RFC_BLOCK


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux alone")
def test_the_kernel_for_cuda_is_the_same_stream_and_the_same_noise():
    """In Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""
    script = f"""
import torch, triton, triton.language as tl
from dpexp.privacy.noise import continuous, gaussian_cuda
from dpexp.privacy.noise.randomness import KeyStream

@triton.jit
def words(out, state):
    block = gaussian_cuda.chacha20(state, tl.arange(0, 2).to(tl.uint32))
    for k in tl.static_range(16):
        tl.store(out + tl.arange(0, 2) * 16 + k, block[k].to(tl.int32, bitcast=True))

out = torch.zeros(32, dtype=torch.int32)
state = torch.frombuffer(bytearray({RFC_KEY!r} + {RFC_NONCE!r}), dtype=torch.int32)
words[(1,)](out, state)
assert out[16:].numpy().tobytes() == {RFC_BLOCK!r}

continuous.PAIRS = 64  # several parts, the last one not whole
for n, dtype in ((1, torch.float32), (130, torch.float64), (130, torch.float32)):
    on_cpu, by_kernel = torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype)
    continuous.GaussianNoise(KeyStream({RFC_KEY!r}))._add_on_cpu(on_cpu, 3.0, 7.0)
    gaussian_cuda.add_normals(by_kernel, 3.0, 7.0, KeyStream({RFC_KEY!r}), 64)
    assert torch.allclose(on_cpu, by_kernel, rtol=1e-6 if dtype == torch.float32 else 1e-14), (n, dtype)
    assert (on_cpu != 1 / 7).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"TRITON_INTERPRET": "1"})


def test_no_part_of_the_stream_is_used_twice():
    stream = KeyStream()
    drawn = torch.cat([stream.words(100), stream.words(7), stream.words(1000)])
    assert len(set(drawn.tolist())) == len(drawn)
    noise = [normals(40, stream), normals(40, stream), normals(3 * 2 * PAIRS, stream)]
    every = torch.cat(noise)
    assert len(every.unique()) == len(every), "parts of a large tensor neither"
    assert not set(drawn.tolist()) & set(KeyStream().words(1000).tolist()), "fresh keys differ"


def test_a_known_seed_gives_another_stream_for_each_purpose_and_each_beginning():
    streams = [(5, "noise", 0), (5, "sampling", 0), (5, "noise", 3), (5 + 2**32, "noise", 0)]
    found = [KeyStream.known(*which).words(4).tolist() for which in streams]
    assert found == [KeyStream.known(*which).words(4).tolist() for which in streams]
    assert len({words[0] for words in found}) == 4, "every bit of the seed counts"


def test_words_are_uniform():
    words = KeyStream.known(0, "test", 0).words(200_000)
    assert words.min() >= 0
    for shift in (55, 20, 0):
        counts = torch.bincount(words.bitwise_right_shift(shift) & 255, minlength=256)
        assert chisquare(counts.numpy()).pvalue > 1e-3
    order = KeyStream.known(1, "test", 0).permutation(1000)
    assert sorted(order.tolist()) == list(range(1000)) and order[:5].tolist() != [0, 1, 2, 3, 4]


def test_the_noise_is_normal_and_independent():
    drawn = normals(400_000, KeyStream.known(0, "test", 0), sigma=2.5).numpy() / 2.5
    assert kstest(drawn, "norm").pvalue > 1e-3
    neighbours = [drawn[:-1] * drawn[1:], drawn[: 2 * PAIRS][:PAIRS] * drawn[PAIRS : 2 * PAIRS]]
    squares = (drawn[:PAIRS] ** 2 - 1) * (drawn[PAIRS : 2 * PAIRS] ** 2 - 1)  # of one radius, yet independent
    for products in (*neighbours, squares):
        assert abs(products.mean()) < 4 * products.std() / math.sqrt(len(products))


@pytest.mark.parametrize("size", [5, 2**15])
def test_the_noisy_sum_is_divided(size):
    whole, part = torch.ones(2, size)
    for total, divisor in ((whole, 1.0), (part, 8.0)):
        GaussianNoise(KeyStream(RFC_KEY)).add_to([(total, 2.0)], divisor)
    assert torch.equal(whole / 8, part)


def test_small_tensors_and_large_ones_are_noised_alike():
    sizes = [3, 0, 2**13, 100, 2**14 + 1, 2 * PAIRS + 5]
    totals = [torch.full((size,), 7.0) for size in sizes]
    GaussianNoise(KeyStream.known(3, "test", 0)).add_to([(total, 0.5) for total in totals])
    assert [total.shape[0] for total in totals] == sizes
    for some in (totals[:4], totals[4:]):
        assert kstest((torch.cat(some).double() - 7).numpy() / 0.5, "norm").pvalue > 1e-3
    assert pairs_for(1) == 8 and pairs_for(16) == 8 and pairs_for(17) == 16


def test_the_tails_have_their_right_mass():
    """float32 uniforms end at 5.77σ. Here, beyond r: the radii of the words below the one that gives r."""

    def radius(word):
        normal, _ = BoxMuller(1).normal(torch.tensor([[word], [0]]), 1.0)
        return math.hypot(*normal.tolist())

    for r in (1.0, 5.0, 7.0, 8.0, 9.0):
        below = bisect.bisect_left(range(2**63 - 1), True, key=lambda word, r=r: radius(word) <= r)
        assert below / 2**63 == pytest.approx(math.exp(-(r**2) / 2), rel=1e-4), r
    assert 9.3 < radius(0) < math.inf and 0 <= radius(2**63 - 1) < 1e-7
