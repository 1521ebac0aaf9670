"""What a preparation is: a sum over all records that is released once, and a layer that makes use of it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dpexp.accounting.laplace import pure_below
from dpexp.accounting.ledger import PartsEvent, QueryEvent
from dpexp.errors import ConfigError


class Preparation(nn.Module, ABC):
    """A vector of each record is summed over all of them, noise is added once, and what comes of it is kept in buffers:
    it is in checkpoints and in the kept model, and inputs go through `forward` wherever the model does.

    Its noise is given in one of two ways. `noise_multiplier` is σ/S, or of Laplace noise b/S, with the sensitivity S
    under add_remove. `share` is a part w of what may be spent: were training a Gaussian mechanism, the target would be
    spent by some μ* of Gaussian DP, and squares of μ add up; the preparation gets the noise with which its own μ² is
    w μ*² (Laplace noise: at most that).

    Args:
        share: w, in (0, 1); noise_multiplier: instead.

    Attributes:
        d: how many numbers a record's vector has.
        S, S_replaced: how far the sum moves when a record is added or removed, or replaced: in L2 norm for Gaussian
            noise, in L1 norm for Laplace noise.
    """

    noise: str = "gaussian"
    d: int
    S: float
    S_replaced: float

    def __init__(self, share: float | None = None, noise_multiplier: float | None = None) -> None:
        super().__init__()
        name = f"prepare: {type(self).__name__}"
        if (share is None) == (noise_multiplier is None):
            raise ConfigError(
                f"{name} needs share={share} or noise_multiplier={noise_multiplier}: exactly one of them."
            )
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"{name}: share={share} must lie strictly between 0 and 1; 0.1 is a tenth.")
        if noise_multiplier is not None and not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise ConfigError(f"{name}: noise_multiplier={noise_multiplier} must be a finite number above 0.")
        self.share, self.noise_multiplier = share, noise_multiplier

    def query(self, name: str, adjacency: str, mu: float | None) -> QueryEvent | PartsEvent:
        """The event that the release writes.

        Args:
            mu: μ* of what may be spent; None if no target is known.

        Raises:
            ConfigError: a share of what is not known.
        """
        if self.noise_multiplier is not None:
            return QueryEvent(name, self.noise, self.S, self.S_replaced, self.noise_multiplier * self.S)
        assert self.share is not None
        if mu is None:
            raise ConfigError(
                f"prepare.{name}.share={self.share} is a part of privacy.epsilon, advantage or tpr, of which none is "
                f"given; give one of them, or prepare.{name}.noise_multiplier."
            )
        own = math.sqrt(self.share) * mu
        if self.noise == "laplace":
            own = pure_below(own)
        moved = self.S_replaced if adjacency == "replace_one" else self.S
        return QueryEvent(name, self.noise, self.S, self.S_replaced, moved / own)

    @abstractmethod
    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Σ of the records' vectors [d], in float64: each bounded, and a function of its own record alone. A record of
        which nothing can be made, such as one that is not finite, contributes zero; where this raises, or gives what is
        not d finite numbers, it is asked of each record by itself, and those of which it still does contribute zero.

        Args:
            x: [B, …] inputs, as the preparations before have left them; y: [B, …] labels.
        """

    @abstractmethod
    def use(self, noisy: Tensor, n: int) -> None:
        """Takes in the noisy sum [d]. n: the published number of records."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, …] inputs as the model shall see them."""
        return x

    def told(self) -> list[float]:
        """Numbers to be shown, which are released."""
        return []


class Prepared(nn.Module):
    """A model whose inputs go through preparations first, in their order."""

    def __init__(self, preparations: Mapping[str, Preparation], model: nn.Module) -> None:
        super().__init__()
        self.preparations = nn.ModuleDict(preparations)
        self.model = model

    def forward(self, x: Tensor) -> Any:
        for preparation in self.preparations.values():
            x = preparation(x)
        return self.model(x)


def preparations_of(module: nn.Module) -> dict[str, Preparation]:
    """Those that a module holds, by name and in their order.

    Raises:
        ConfigError: they are in two places.
    """
    found = [layer for layer in module.modules() if isinstance(layer, Prepared)]
    if len(found) > 1:
        raise ConfigError("model: it has several parts that are Prepared; give one all of the preparations.")
    return dict(found[0].preparations.items()) if found else {}  # type: ignore[arg-type]


def queries(module: nn.Module, adjacency: str, mu: float | None) -> tuple[QueryEvent | PartsEvent, ...]:
    """What the preparations of a module will release, as for `Preparation.query`.

    Raises:
        ConfigError: shares that leave nothing, or as `Preparation.query`.
    """
    found = preparations_of(module)
    shares = {name: preparation.share for name, preparation in found.items() if preparation.share is not None}
    if sum(shares.values()) >= 1:
        asked = " and ".join(f"prepare.{name}.share={share:g}" for name, share in shares.items())
        raise ConfigError(f"{asked} leave nothing for training; together they must be below 1.")
    return tuple(preparation.query(name, adjacency, mu) for name, preparation in found.items())
