"""The Laplace noise, from a key stream."""

from torch import Tensor

from dpexp.privacy.keystream import KeyStream


def add_laplace(total: Tensor, scale: float, stream: KeyStream) -> None:
    """Adds independent noise of density e^(-|x|/scale)/(2 scale) to each coordinate [d] in float64, in place.

    The size is -log u with u of 62 random bits, and reaches 43 scales; the sign is the bit that is left.
    """
    words = stream.words(len(total))
    size = (words >> 1).double().add_(0.5).mul_(2.0**-62).log_().neg_()
    total.add_(size * (1 - 2 * (words & 1)).double(), alpha=scale)
