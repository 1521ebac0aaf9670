"""The noise from the key stream: how fast it is beside torch.randn, and whether it is normal as far out as it matters.

    python benchmarks/noise.py                  # throughput, then the quality of 10^10 numbers (a few minutes)
    python benchmarks/noise.py --device cuda    # throughput there
    python benchmarks/noise.py --numbers 1e8    # of fewer

Both add noise to a tensor in place, in turn (A B A B …); the ratio is minimum over minimum, and the median of pairs.
"""

import math
import statistics
import time
from collections.abc import Callable

import torch
from report import head, parser, row
from scipy.stats import binomtest, chi2, norm

from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream

TURNS = 25
SIZES = (1_000, 30_000, 300_000, 3_500_000, 30_000_000)
AT_ONCE = 2**24


def now(device: torch.device) -> float:
    """Seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work: Callable[[], None], device: torch.device) -> float:
    started = now(device)
    work()
    return now(device) - started


def throughput(device: torch.device, most: int) -> None:
    print(head("numbers", "key stream, ms", "torch.randn, ms", "ratio", "median"))
    noise, generator = GaussianNoise(), torch.Generator(device)
    for size in [size for size in SIZES if size <= most]:
        total = torch.zeros(size, device=device)

        def ours(total: torch.Tensor = total) -> None:
            noise.add_to([(total, 2.0)])

        def torchs(total: torch.Tensor = total) -> None:
            total.add_(torch.randn(len(total), generator=generator, device=device), alpha=2.0)

        pairs = [(seconds(ours, device), seconds(torchs, device)) for _ in range(TURNS + 3)][3:]
        a, b = (min(times) for times in zip(*pairs, strict=True))
        median = statistics.median(a / b for a, b in pairs)
        print(row(f"{size:,}", f"{a * 1e3:.3f}", f"{b * 1e3:.3f}", f"{a / b:.2f}", f"{median:.2f}"))


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
    for k, true, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        found = float(sums[k - 1]) / count
        off = (found - true) / math.sqrt(variance / count)
        print(f"moment {k}: {found:+.7f}, {off:+.2f} standard errors from {true}")
    limits = torch.cat([torch.tensor([0.0]), torch.from_numpy(norm.cdf(edges.numpy())), torch.tensor([1.0])])
    print(f"66 cells: {chi_square(cells, limits.diff() * cells.sum())}")
    for r, seen in beyond.items():
        rate = 2 * norm.sf(r)
        print(f"beyond {r}: {seen}, expected {rate * count:.1f}, p = {binomtest(seen, count, rate).pvalue:.3f}")


def stream(words: int) -> None:
    """The bytes at each place of the stream's words."""
    drawn = KeyStream().words(words)
    for shift in range(0, 56, 8):
        counts = torch.bincount(drawn.bitwise_right_shift(shift) & 255, minlength=256).double()
        print(f"byte {shift // 8} of {words:,} words: {chi_square(counts, torch.full_like(counts, words / 256))}")


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> str:
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return f"chi-square {statistic:.1f}, p = {chi2.sf(statistic, len(counts) - 1):.3f}"


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--numbers", type=float, default=1e10)
    given = options.parse_args()
    print(f"{torch.get_num_threads()} threads, {given.device}")
    numbers = int(given.numbers)
    throughput(torch.device(given.device), numbers)
    stream(min(numbers, 10_000_000))
    quality(numbers)
