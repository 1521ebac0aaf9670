"""Where PyTorch hands the tensors of all records to code that means to see one's: no such code runs under vmap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _disabled_torch_dispatch_impl
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def nothing_behind_vmap() -> Iterator[None]:
    """Meanwhile saved tensors have no hooks, and no mode of one's own sees what operators are given.

    Raises:
        RuntimeError: a step would have it otherwise.
    """

    def refuse(mode: Any) -> NoReturn:
        raise RuntimeError(f"the mode {type(mode).__name__} would see the tensors of all records.")

    before = TorchDispatchMode.__enter__
    TorchDispatchMode.__enter__ = refuse  # type: ignore[method-assign, assignment]
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("hooks on saved tensors would see those of all records."):
            yield
    finally:
        TorchDispatchMode.__enter__ = before  # type: ignore[method-assign]


class Node:
    """Stands for a tensor's grad_fn, which leads to the gradients and saved tensors of all records."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"grad_fn.{name} would show the tensors of all records.")


def sees_behind(value: Any) -> bool:
    """Whether a tensor is of a class that has code of its own for what operators do."""
    return isinstance(value, Tensor) and type(value).__torch_dispatch__ is not _disabled_torch_dispatch_impl
