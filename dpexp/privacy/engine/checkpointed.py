"""Activation checkpointing, which computes anew in the backward pass, where records are no longer told apart.

Meanwhile a checkpointed function is simply called: what it says is the same, and its activations are kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils import checkpoint


@contextmanager
def kept(met: Callable[[Any], None]) -> Iterator[None]:
    """Meanwhile torch.utils.checkpoint.checkpoint keeps what a function computes, unless it is reentrant, which makes
    another thing of gradients.

    Args:
        met: is told what such a function is given.
    """

    def nothing(function: Any, preserve: bool, context_fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Before and after the function is called."""
        if preserve and context_fn is checkpoint.noop_context_fn:
            yield
            met((args, kwargs))
        else:
            yield from _generator(function, preserve, context_fn, *args, **kwargs)

    with patch.object(checkpoint, "_checkpoint_without_reentrant_generator", nothing):
        yield


_generator = checkpoint._checkpoint_without_reentrant_generator
