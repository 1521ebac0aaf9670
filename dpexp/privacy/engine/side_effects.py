"""Undoes the side effects of a trace that dpexp makes in the middle of a round.

Whether there is such a trace depends on private records, so that nothing may tell that there was one. What the step
does in the rounds is a graph, and has no side effects.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.privacy.engine.random_states import all_random_states, set_all_random_states
from dpexp.privacy.engine.reads import Reads, is_library_class, is_of_the_users, set_value, value_of

_DEPTH, _MANY = 8, 1000  # of containers: nested how deep, of how many entries these are looked into
_SEQUENCES = (list, set, deque)


@contextmanager
def side_effects_undone(
    module: nn.Module, reads: Sequence[Reads], device: torch.device
) -> Iterator[Callable[[Any, str], None]]:
    """Restores attributes of all modules, variables that the step reads, the entries of their containers and plain
    objects, and the states of random generators. What tensors hold is not restored: no trace may write to one that it
    did not make.

    Yields:
        what to call for a variable (where it is, name) that is found meanwhile, before it changes.
    """
    seen: dict[int, tuple[Any, Any]] = {}
    variables = []

    def keep(owner: Any, name: str) -> None:
        variables.append((owner, name, value_of(owner, name)))
        _snapshot(variables[-1][-1], seen)

    _snapshot(module, seen)
    classes = {kind for layer in module.modules() for kind in type(layer).__mro__}
    for kind in (kind for kind in classes if not is_library_class(kind)):
        for name, value in [*vars(kind).items()]:
            if name[:2] != "__" and not callable(value) and not hasattr(value, "__get__"):
                keep(kind, name)
    for owner, name in (variable for one in reads for variable in one.variables()):
        keep(owner, name)
    state = all_random_states(device)
    try:
        yield keep
    finally:
        set_all_random_states(device, *state)
        for container, content in seen.values():
            if isinstance(container, Tensor):
                if container.data_ptr() != content.data_ptr() or container.shape != content.shape:
                    container.data = content
            elif isinstance(container, np.ndarray):
                container[...] = content
            elif isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(content)
        for owner, name, value in variables:
            set_value(owner, name, value)
        for one in reads:
            one.note_values()


def _snapshot(value: Any, seen: dict[int, tuple[Any, Any]], depth: int = _DEPTH) -> None:
    """Copies the entries of containers and plain objects, nested ones included, into `seen`."""
    if not depth or id(value) in seen:
        return
    if isinstance(value, Tensor) and value.layout == torch.strided:
        seen[id(value)] = value, value.data
    elif isinstance(value, np.ndarray) and value.size <= _MANY and value.flags.writeable:
        seen[id(value)] = value, value.copy()
    elif isinstance(value, dict):
        seen[id(value)] = value, dict(value)
    elif isinstance(value, _SEQUENCES):
        seen[id(value)] = value, [*value]
    if isinstance(value, nn.Module) or is_of_the_users(value):
        _snapshot(getattr(value, "__dict__", None), seen, depth)
    if isinstance(value, (dict, tuple, *_SEQUENCES)) and len(value) <= _MANY:
        for one in value.values() if isinstance(value, dict) else value:
            _snapshot(one, seen, depth if isinstance(value, dict) and isinstance(one, nn.Module) else depth - 1)
