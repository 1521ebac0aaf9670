"""Puts back what a call of the step that no round asked for leaves behind in modules and global variables."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpexp.privacy.engine.random_states import all_random_states, set_all_random_states
from dpexp.privacy.engine.reads import Reads, is_of_the_users, set_value

_DEPTH, _MANY = 4, 100
_CONTAINERS = (dict, list, set, deque)


@contextmanager
def undone(module: nn.Module, reads: Reads, device: torch.device) -> Iterator[None]:
    """Attributes of all modules, global variables that the step reads, and what their containers and plain objects
    hold, are afterwards what they were, as are the states of random generators. Tensors are not: no graph writes to one
    that it did not make."""
    seen: dict[int, tuple[Any, list[Any]]] = {}
    for layer in module.modules():
        _keep(vars(layer), _DEPTH, seen)
    variables = reads.variables()
    for _, _, value in variables:
        _keep(value, _DEPTH, seen)
    state = all_random_states(device)
    try:
        yield
    finally:
        set_all_random_states(device, *state)
        for container, content in seen.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for owner, name, value in variables:
            set_value(owner, name, value)
        reads.note_again()


def _keep(value: Any, depth: int, seen: dict[int, tuple[Any, list[Any]]]) -> None:
    if is_of_the_users(value):
        value = getattr(value, "__dict__", None)
    if not isinstance(value, _CONTAINERS) or id(value) in seen or not depth:
        return
    seen[id(value)] = value, [*(value.items() if isinstance(value, dict) else value)]
    for one in (value.values() if isinstance(value, dict) else value) if len(value) <= _MANY else ():
        _keep(one, depth - 1, seen)
