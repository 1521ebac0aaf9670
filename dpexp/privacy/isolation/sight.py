"""What a step calls is seen: PyTorch can run code past its function modes, and so past `Guard` and the engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from dpexp.errors import ConfigError

_SCRIPT = (
    "a function of TorchScript",
    "call the Python function that it was made from, or set PYTORCH_JIT=0 in the environment, which leaves all as they "
    "were written",
)
_HIDING: list[tuple[Any, str, tuple[str, str]]] = [
    (torch._C.ScriptFunction, "__call__", _SCRIPT),
    (torch._C.ScriptMethod, "__call__", _SCRIPT),
    (torch._C, "DisableTorchFunction", ("DisableTorchFunction", "leave it out")),
]


@contextmanager
def in_sight() -> Iterator[None]:
    """Meanwhile what torch.compile made runs as the Python that it was made from, and what cannot is refused.

    Raises:
        ConfigError: something was refused, even if training_step caught that.
    """
    before = [getattr(holder, name) for holder, name, _ in _HIDING]
    refused: list[ConfigError] = []
    for holder, name, words in _HIDING:
        setattr(holder, name, _refusing(*words, refused))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for (holder, name, _), found in zip(_HIDING, before, strict=True):
            setattr(holder, name, found)
        if refused:
            raise refused[0]


def _refusing(what: str, instead: str, refused: list[ConfigError]) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        refused.append(
            ConfigError(
                f"model: training_step calls {what}, inside which changes and uses of parameters and errors of one "
                f"record go unseen; {instead}."
            )
        )
        raise refused[-1]

    return refuse
