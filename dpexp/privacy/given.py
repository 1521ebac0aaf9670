"""What `training_step` gives for release beside gradients: values of the record that it sees."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from dpexp.privacy.engine.questions import Unreadable
from dpexp.privacy.groups import value_key

_given: ContextVar["_Given | None"] = ContextVar("given", default=None)


def release(name: str, value: Any) -> None:
    """Gives a value of the one record that `training_step` sees: a number, or a tensor of d numbers.

    If the plan releases values of this name (`metrics.release`), they are clipped, summed over the sample, and released
    with noise; a record that gives several, as does a layer that is called twice, contributes their mean, and one that
    gives none contributes zero. Other values, and what is given outside private training, are dropped.

    Raises:
        RuntimeError: it is called where another vmap runs, or for one record after another.
    """
    given = _given.get()
    if given is not None:
        given.add(name, value)


class _Given:
    """By key; of values that are not released nothing is kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.values: dict[str, list[Any]] = {key: [] for key in keys}
        self._level = _level()

    def add(self, name: str, value: Any) -> None:
        values = self.values.get(value_key(name))
        if values is None:
            return
        if _level() != self._level:  # else it would be taken for a value of every record
            raise RuntimeError(f"{name} is given for release where it is not a value of training_step's one record.")
        values.append(value)


class Values:
    """The values that a plan releases.

    Args:
        sizes: d of each, by its `value_key`.
        like: a tensor with their device, and in whose precision, or float32, they are summed.
    """

    def __init__(self, sizes: Mapping[str, int], like: Tensor) -> None:
        self.sizes = sizes
        self.device, self.dtype = like.device, torch.promote_types(torch.float32, like.dtype)

    @contextmanager
    def given(self) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Meanwhile `release` takes values of a record, or of each of several under vmap; afterwards, in the same vmap,
        the function gives them as [d], by key.

        Raises (the function):
            ValueError: a value has not as many numbers as the plan says.
        """
        given = _Given(self.sizes)
        token = _given.set(given)
        try:
            yield lambda: {key: self._one(key, values) for key, values in given.values.items() if values}
        finally:
            _given.reset(token)

    def _one(self, key: str, values: list[Any]) -> Tensor:
        found = [self._flat(key, value) for value in values]
        for value in found:
            if len(value) != self.sizes[key]:
                raise ValueError(
                    f"training_step gives {len(value)} numbers as the {key[1:]} for release; metrics.release says "
                    f"d={self.sizes[key]}."
                )
        return sum(found[1:], start=found[0]) / len(found)

    def _flat(self, key: str, value: Any) -> Tensor:
        if isinstance(value, Unreadable):
            value = value.tensor if value.tensor is not None else "metric"
        try:
            return torch.as_tensor(value, device=self.device).detach().to(self.dtype).reshape(-1)
        except Exception as error:
            raise ValueError(
                f"training_step gives a {type(value).__name__} as the {key[1:]} for release; give a number or a tensor."
            ) from error


def _level() -> int | None:
    """Of the innermost transform."""
    return _functorch.maybe_current_level()
