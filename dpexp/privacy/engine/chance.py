"""What of a step random numbers may have reached, and what they cannot have."""

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch

from dpexp.privacy.isolation.randomness import of_python


class Chance:
    """Follows a step, function by function, under a vmap that gives each record random numbers of its own.

    Until numbers are drawn they have reached nothing. From then on a record's tensor is known to be free of them only
    if it is of the record itself, or if a function of PyTorch's made it of such tensors alone, drawing nothing. What
    was not seen to be made is not known. A tensor that is the same for all records is free: no record's own numbers can
    be in it.

    Args:
        questions: how many are expected; what comes after is not followed.

    Attributes:
        asked: how many were.
    """

    def __init__(self, device: torch.device, questions: float = math.inf) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._of_python = of_python()
        self._states = self._at_first = self._states_now()
        self.asked, self._questions = 0, questions
        self._drawn = 0
        self._lost = False

    def free(self, value: Any) -> None:
        """Notes that random numbers have not reached the tensors in a value."""
        for leaf in leaves_of(value):
            if isinstance(leaf, Tensor) and _functorch.is_batchedtensor(leaf):
                leaf._free_of_chance = _version(leaf)  # type: ignore[attr-defined]

    def reaches(self, tensor: Tensor) -> bool:
        """Whether random numbers may be in a tensor."""
        return self._lost or (self._drawn > 0 and not _is_free(tensor)) or of_python() != self._of_python

    def began_to_draw(self) -> bool:
        """Whether the generators have left the states that they had at first."""
        return self._states_now() != self._at_first or of_python() != self._of_python

    @property
    def is_over(self) -> bool:
        """Whether no more questions are expected."""
        return self.asked >= self._questions

    def unseen(self) -> None:
        """Notes that something ran which was not followed."""
        self._drawn += 1

    def follow(self, func: Callable[..., Any], given: list[Any], run: Callable[[], Any]) -> Any:
        """Runs a call of a function that PyTorch's function modes see, with its arguments' leaves."""
        own = is_torchs(func) and all(type(leaf) in _TENSORS or isinstance(leaf, _PLAIN) for leaf in given)
        free = own and all(_is_free(leaf) for leaf in given if isinstance(leaf, Tensor))
        drawn = self._drawn
        result = run()
        before, self._states = self._states, self._states_now()
        if not own or self._states != before:
            self._drawn += 1
        if self._drawn == drawn:
            if free:
                self.free((result, given))  # some of which may have been written to
            elif self._drawn and "batch_norm" in getattr(func, "__name__", ""):
                self._lost = True  # running statistics are written to, of which no version tells
        elif not all(isinstance(leaf, Tensor) and _functorch.is_batchedtensor(leaf) for leaf in leaves_of(result)):
            self._lost = True
        return result

    def _states_now(self) -> list[bytes]:
        return [generator.get_state().numpy().tobytes() for generator in self._generators]


_TENSORS = {Tensor, nn.Parameter, nn.Buffer}
_PLAIN = (
    int, float, complex, str, type(None), type(Ellipsis), slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_OF_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
_HELD = {Tensor.grad.__get__, Tensor.grad.__set__}  # type: ignore[union-attr]
_FOLDER = f"{Path(torch.__file__).parent}/"


def is_torchs(func: Any) -> bool:
    """Whether a function can only have got hold of what it was given."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(func).startswith("aten.")
    if isinstance(func, types.FunctionType):
        return func.__code__.co_filename.startswith(_FOLDER)
    return isinstance(func, _OF_C) and func not in _HELD


def _is_free(tensor: Tensor) -> bool:
    return not _functorch.is_batchedtensor(tensor) or getattr(tensor, "_free_of_chance", None) == _version(tensor)


def _version(tensor: Tensor) -> int:
    """Another one as soon as a record's tensor, or one that shares its memory, is written to."""
    while _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor._version


def leaves_of(value: Any) -> list[Any]:
    kind = type(value)
    if kind is dict:
        value = [*value.values()]
    elif kind not in (list, tuple, torch.Size) and kind.__module__ != "torch.return_types":
        return [value]
    return [leaf for item in value for leaf in (leaves_of(item) if isinstance(item, list | tuple | dict) else (item,))]
