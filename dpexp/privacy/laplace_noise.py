"""The Laplace noise, from a key stream."""

from collections.abc import Iterable

from torch import Tensor

from dpexp.privacy.keystream import KeyStream


def add_laplace(sums: Iterable[tuple[Tensor, float]], stream: KeyStream) -> None:
    """Adds independent noise of density e^(-|x|/b)/2b to each coordinate of tensors [d] in float64, in place, for pairs
    (tensor, b).

    The size is -b log u with u of 62 random bits, and reaches 43 b; the sign is the bit that is left.
    """
    for total, b in sums:
        words = stream.words(len(total))
        size = (words >> 1).double().add_(0.5).mul_(2.0**-62).log_().neg_()
        total.add_(size * (1 - 2 * (words & 1)), alpha=b)
