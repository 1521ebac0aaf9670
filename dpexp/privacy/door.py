"""What the rounds ask of the loop that runs them: a Lightning Trainer, a Trainer of transformers, or a plain loop."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from dpexp.privacy.gradients.training_step import TrainingStep


class Door:
    """A loop of which nothing is known but the optimizers.

    A step is traced under the settings of several rounds, and must not read a record's values later; a loop says how
    other rounds look, and what could read them.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        """A context that imitates round `t`, from 0, at (epoch, batch) `place`."""
        return (lambda: later_settings(self._optimizers)) if self._optimizers else nullcontext

    def public_record(self) -> Any:
        """A batch of one public record; None: there is none."""
        return None

    def largest_fitting_batch(self, step: TrainingStep) -> int | None:
        """Records of the largest chunk that fits into a GPU's memory; None: it is not sought."""
        return None

    def readers(self) -> list[tuple[Any, Sequence[str]]]:
        """Objects, and names of their methods, which must not read what a step keeps."""
        return []

    def refuse_monitors(self) -> None:
        """Raises ConfigError: something of the loop would read private values later."""


@contextmanager
def later_settings(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Halves the optimizers' settings in the block, as a scheduler may do."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    settings = [(group, key, value) for group in groups for key, value in group.items() if _is_number(value)]
    try:
        for group, key, value in settings:
            group[key] = value / 2
        yield
    finally:
        for group, key, value in settings:
            group[key] = value


def _is_number(value: Any) -> bool:
    return type(value) is float or (isinstance(value, torch.Tensor) and value.dim() == 0)
