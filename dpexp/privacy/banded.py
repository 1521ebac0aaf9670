"""What is asked of correlated noise. Imports nothing slow."""

from dataclasses import dataclass

from dpexp.errors import ConfigError

COEFFICIENTS = ("optimal", "sqrt")
AUTO = "auto"


@dataclass(frozen=True)
class Banded:
    """Correlated noise.

    Args:
        bands: b, or `auto` for the power of two with the least predicted error (see `dpexp.privacy.bands`).
        coefficients: `optimal` for the workload, or `sqrt`, its square root, cut off after b.
        momentum: β of the optimizer.

    Raises:
        ConfigError: names what makes no sense.
    """

    bands: int | str = AUTO
    coefficients: str = "optimal"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.bands, int) and not isinstance(self.bands, bool) and self.bands >= 1
        if not whole and self.bands != AUTO:
            raise ConfigError(f"noise.bands={self.bands} must be a whole number of at least 1, or auto.")
        if self.coefficients not in COEFFICIENTS:
            raise ConfigError(f"noise.coefficients={self.coefficients} is unknown; known: {', '.join(COEFFICIENTS)}.")
        number = isinstance(self.momentum, int | float) and not isinstance(self.momentum, bool)
        if not (number and 0 <= self.momentum < 1):
            raise ConfigError(f"noise.momentum={self.momentum} must lie in [0, 1).")
