"""How many records each class has, by the Laplace or the Gaussian mechanism."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dpexp.accounting.ledger import PartsEvent, QueryEvent
from dpexp.errors import ConfigError
from dpexp.privacy.preparations.preparation import Preparation


class ClassCounts(Preparation):
    """Counts the records of each class. It leaves inputs as they are; the counts are shown, and kept with the model.

    A record's class is its own label, so that classes are disjoint parts of the records: one record more moves one
    count, by 1, and all together cost what one does (parallel composition). Another in its place moves up to two of
    them: in L1 norm by 2, in L2 norm by √2.

    Args:
        classes: labels are 0 … classes-1; records with others are in none.
        noise: `laplace` or `gaussian`.
    """

    S = 1.0
    counts: Tensor

    def __init__(
        self,
        classes: int,
        noise: str = "laplace",
        share: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        super().__init__(share, noise_multiplier)
        if noise not in ("laplace", "gaussian"):
            raise ConfigError(f"prepare.class_counts.noise={noise} is unknown; choose laplace or gaussian.")
        if not isinstance(classes, int) or classes < 1:
            raise ConfigError(f"prepare.class_counts.classes={classes} must be a whole number, at least 1.")
        self.noise, self.d = noise, classes
        self.S_replaced = 2.0 if noise == "laplace" else math.sqrt(2)
        self.register_buffer("counts", torch.zeros(classes))

    def query(self, name: str, adjacency: str, mu: float | None) -> PartsEvent:
        one = super().query(name, adjacency, mu)
        assert isinstance(one, QueryEvent)
        counted = (replace(one, query=str(k), S_replaced=1.0) for k in range(len(self.counts)))
        return PartsEvent(name, "class", tuple(counted))

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        if y.dim() != 1 or y.is_floating_point() or y.is_complex():
            raise ConfigError(
                "prepare.class_counts: a record's label must be one whole number, its class; with others it is in none "
                "or in several, which are no disjoint parts."
            )
        known = y[(y >= 0) & (y < self.d)]
        return torch.bincount(known.long(), minlength=self.d).double()

    def use(self, noisy: Tensor, n: int) -> None:
        self.counts.copy_(noisy)

    def told(self) -> list[float]:
        return [float(count) for count in self.counts]
