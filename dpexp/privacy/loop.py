"""What the rounds of a fit ask of the loop around them: a Lightning Trainer, a Trainer of transformers, a plain loop.

`dpexp.privacy.fit` asks, before the first round:

- `in_round`: how will another round look? The step is traced under the settings of other rounds, too, so that one that
  depends on the round's number or on the learning rate is noticed.
- `readers`, `refuse_monitors`: what could read what a step stores or logs? It is computed from records without noise.
- `public_record`, `largest_fitting_batch`: with what, and in what size, can the step be tried?
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from dpexp.privacy.gradients.training_step import TrainingStep


class TrainingLoop:
    """A plain loop, of which nothing is known but its optimizers; other loops override what they know better."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        """A function that makes a context in which the loop looks as in round `t`, from 0, at (epoch, batch) `place`.

        A plain loop has no counters: only the optimizers' settings differ there, as by a scheduler.
        """
        return partial(later_settings, self._optimizers)

    def public_record(self) -> Any:
        """A batch of one public record; None: there is none."""
        return None

    def largest_fitting_batch(self, step: TrainingStep) -> int | None:
        """Records of the largest chunk that fits into a GPU's memory; None: it is not sought."""
        return None

    def readers(self) -> list[tuple[Any, Sequence[str]]]:
        """Objects, and names of their methods, which must not read the attributes that a step sets."""
        return []

    def refuse_monitors(self) -> None:
        """Raises ConfigError: something of the loop would read private values later."""


@contextmanager
def later_settings(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Changes the optimizers' numbers, such as learning rates, in the block: halves them, and makes 1 of 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = [(group, key, value) for group in groups for key, value in group.items() if _is_number(value)]
    try:
        for group, key, value in settings:
            group[key] = value / 2 if value != 0 else value + 1
        yield
    finally:
        for group, key, value in settings:
            group[key] = value


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, torch.Tensor) and value.dim() == 0)
