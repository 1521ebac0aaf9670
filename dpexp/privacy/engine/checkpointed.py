"""Activation checkpointing, which computes anew in the backward pass, where records are no longer told apart.

Meanwhile a checkpointed function is simply called: what it says is the same, and its activations are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import checkpoint

from dpexp.privacy.engine.derived import inner


@contextmanager
def kept() -> Iterator[None]:
    """Meanwhile torch.utils.checkpoint.checkpoint keeps what a function computes."""
    with (
        patch.object(checkpoint, "CheckpointFunction", _Kept),
        patch.object(checkpoint, "_checkpoint_without_reentrant_generator", _nothing),
    ):
        yield


class _Kept:
    """Reentrant checkpointing passes gradients on only where an argument, itself, takes some."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        takes = any(isinstance(arg, Tensor) and inner(arg).requires_grad for arg in args)
        with torch.set_grad_enabled(takes and torch.is_grad_enabled()):
            return function(*args)


def _nothing(
    function: Callable[..., Any], preserve: bool, context_fn: Callable[[], Any], *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Before and after the function is called."""
    if context_fn is checkpoint.noop_context_fn:
        yield
    else:
        yield from _generator(function, preserve, context_fn, *args, **kwargs)


_generator = checkpoint._checkpoint_without_reentrant_generator
