"""The states of the generators that a step may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of torch's generators that a step on the device draws from."""
    cuda = (torch.cuda.get_rng_state(device),) if device.type == "cuda" else ()
    return torch.get_rng_state(), *cuda


def set_random_state(device: torch.device, state: tuple[Tensor, ...]) -> None:
    for of, to in zip((torch.set_rng_state, lambda to: torch.cuda.set_rng_state(to, device)), state, strict=False):
        of(to)


@contextmanager
def own_state(device: torch.device) -> Iterator[None]:
    """Meanwhile whatever is drawn leaves torch's generators as they were."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(device, state)


def all_random_states(device: torch.device) -> tuple[Any, ...]:
    """Of torch, Python and NumPy."""
    return random_state(device), random.getstate(), np.random.get_state()


def set_all_random_states(device: torch.device, of_torch: tuple[Tensor, ...], of_python: Any, of_numpy: Any) -> None:
    set_random_state(device, of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
