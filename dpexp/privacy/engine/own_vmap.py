"""Where PyTorch hands the tensors of all records to code that means to see one's: no such code runs under vmap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from torch._functorch import autograd_function
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def no_modes_inside_vmap() -> Iterator[None]:
    """Meanwhile no mode of one's own sees what operators are given.

    Raises:
        RuntimeError: a step would have it otherwise.
    """

    def refuse(mode: Any) -> NoReturn:
        raise RuntimeError(f"the mode {type(mode).__name__} would see the tensors of all records.")

    with patch.object(TorchDispatchMode, "__enter__", refuse):
        yield


@contextmanager
def no_vmap_of_its_own() -> Iterator[None]:
    """Meanwhile an autograd function or custom operator with a vmap rule of its own, which may mix records, is refused.

    Raises:
        RuntimeError: one is called.
    """

    def refuse(interpreter: Any, rule: Any, function: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"the vmap rule of {getattr(function, '__name__', function)} would see all records.")

    with patch.object(autograd_function, "custom_function_call_vmap_helper", refuse):
        yield
