"""The noise from the key stream: how fast it is beside torch.randn, and whether it is normal as far out as it matters.

    python benchmarks/noise.py                  # throughput, then the quality of 10^10 numbers (a few minutes)
    python benchmarks/noise.py --device cuda    # throughput there
    python benchmarks/noise.py --numbers 1e8    # of fewer

Both add noise to a tensor in place, in turn (A B A B …); the ratio is minimum over minimum, and the median of pairs.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from scipy.stats import binomtest, chi2, norm

from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream

TURNS = 25
SIZES = (1_000, 30_000, 300_000, 3_500_000, 30_000_000)
AT_ONCE = 2**24


def seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def throughput(device: torch.device, most: int) -> None:
    print(f"{'numbers':>12} {'key stream, ms':>15} {'torch.randn, ms':>16} {'ratio':>7} {'median':>7}")
    noise, generator = GaussianNoise(), torch.Generator(device)
    for size in [size for size in SIZES if size <= most]:
        total = torch.zeros(size, device=device)

        def ours(total: torch.Tensor = total) -> None:
            noise.add_to([(total, 2.0)])

        def torchs(total: torch.Tensor = total, size: int = size) -> None:
            total.add_(torch.randn(size, generator=generator, device=device), alpha=2.0)

        pairs = [(seconds(ours, device), seconds(torchs, device)) for _ in range(TURNS + 3)][3:]
        ours_best, torchs_best = (min(times) for times in zip(*pairs, strict=True))
        median = statistics.median(a / b for a, b in pairs)
        print(
            f"{size:12,} {ours_best * 1e3:15.3f} {torchs_best * 1e3:16.3f} {ours_best / torchs_best:7.2f} {median:7.2f}"
        )


def quality(count: int) -> None:
    """Moments, cells and tails of `count` numbers in float32; every p-value should be unremarkable."""
    noise, sums = GaussianNoise(), torch.zeros(4, dtype=torch.float64)
    edges = torch.linspace(-4, 4, 65)
    cells, beyond, largest = torch.zeros(66), dict.fromkeys((4, 5, 6, 7), 0), 0.0
    total = torch.empty(AT_ONCE)
    for _ in range(rounds := math.ceil(count / AT_ONCE)):
        noise.add_to([(total.zero_(), 1.0)])
        sums += torch.stack([total.double().pow(k).sum() for k in (1, 2, 3, 4)])
        cells += torch.bincount(torch.bucketize(total[: 2**20], edges), minlength=66)
        for tail in total[total.abs() > 4].abs().split(AT_ONCE):
            for r in beyond:
                beyond[r] += int((tail > r).sum())
            largest = max(largest, float(tail.max()))
    count = rounds * AT_ONCE
    print(f"\n{count:,} numbers, largest {largest:.3f}")
    for k, (found, true, variance) in enumerate(
        zip(sums / count, (0, 1, 0, 3), (1, 2, 15, 96), strict=True), start=1
    ):  # fmt: skip
        off = (float(found) - true) / math.sqrt(variance / count)
        print(f"moment {k}: {float(found):+.7f}, {off:+.2f} standard errors from {true}")
    limits = torch.cat([torch.tensor([0.0]), torch.from_numpy(norm.cdf(edges.numpy())), torch.tensor([1.0])])
    expected = limits.diff() * cells.sum()
    statistic = float(((cells - expected) ** 2 / expected).sum())
    print(f"chi-square of 66 cells: {statistic:.1f}, p = {chi2.sf(statistic, 65):.3f}")
    for r, seen in beyond.items():
        rate = 2 * norm.sf(r)
        print(f"beyond {r}: {seen}, expected {rate * count:.1f}, p = {binomtest(seen, count, rate).pvalue:.3f}")


def stream(words: int) -> None:
    """Chi-square of the bytes at each place of the stream's words."""
    drawn = KeyStream().words(words)
    for shift in range(0, 56, 8):
        counts = torch.bincount(drawn.bitwise_right_shift(shift) & 255, minlength=256).double()
        statistic = float(((counts - words / 256) ** 2 / (words / 256)).sum())
        print(f"byte {shift // 8} of {words:,} words: chi-square {statistic:.1f}, p = {chi2.sf(statistic, 255):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numbers", type=float, default=1e10)
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {options.device}")
    numbers = int(options.numbers)
    throughput(torch.device(options.device), numbers)
    stream(min(numbers, 10_000_000))
    quality(numbers)
