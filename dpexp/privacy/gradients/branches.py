"""Python code that reads a record's data: branches, `.item()`, text.

A step is traced without numbers, so that Python code cannot act on a record's values. A number may be passed to a
logger, which drops it. Any other use of it raises `DataDependent`, and the records are then processed one at a time.
`explain` names the line of code and what to write instead.
"""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

import dpexp
from dpexp._torch_compat import tree_leaves
from dpexp.errors import words_of

_DEPENDS_ON_DATA = "a branch or a number depends on a record's data"


class DataDependent(RuntimeError):
    """Python code depends on a record's values, so that several records cannot be processed together.

    Attributes:
        raised: how many there were, also if the step caught them.
    """

    raised: ClassVar[int] = 0

    def __init__(self, message: str) -> None:
        super().__init__(message)
        DataDependent.raised += 1


class HiddenNumber:
    """Placeholder for a number that depends on a record, computed from `tensor` (None: it was never computed, as a
    metric's): it may be logged, and numbers be computed from it; every other use raises `DataDependent`.

    For isinstance it is of the class `kind`.
    """

    __class__ = property(lambda self: self.__dict__["kind"])  # type: ignore[assignment]

    def __init__(self, tensor: Tensor | None = None, kind: type = float) -> None:
        self.__dict__.update(tensor=tensor, kind=kind)

    def __getattr__(self, name: str) -> NoReturn:
        raise DataDependent(f"{_DEPENDS_ON_DATA} ({name})")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: HiddenNumber, *args: Any) -> NoReturn:
        raise DataDependent(f"{_DEPENDS_ON_DATA} ({name})")

    return refuse


def _computed(name: str) -> Callable[..., "HiddenNumber"]:
    def compute(self: HiddenNumber, *others: Any) -> HiddenNumber:
        if any(isinstance(other, Tensor) for other in others):
            raise DataDependent(f"{_DEPENDS_ON_DATA} ({name})")
        return HiddenNumber()

    return compute


_READS = "bool int float index complex len iter getitem setitem contains hash str repr format array lt le gt ge eq ne"
_ARITHMETIC = """
round trunc floor ceil add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg pos abs
"""
for _name in _READS.split():
    setattr(HiddenNumber, f"__{_name}__", _refused(f"__{_name}__"))
for _name in _ARITHMETIC.split():
    setattr(HiddenNumber, f"__{_name}__", _computed(f"__{_name}__"))


DATA_READS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist, Tensor.numpy,
    Tensor.__array__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__repr__, Tensor.__format__,
}  # fmt: skip


def read_value(read: Callable[..., Any], tensor: Tensor) -> Any:
    """A `HiddenNumber` in place of the result of one of `DATA_READS`; raises DataDependent."""
    if read is Tensor.numpy:
        return HiddenNumber(tensor, np.ndarray)
    if read is Tensor.item or (read is Tensor.tolist and not tensor.dim()):
        whole = not tensor.is_floating_point() and not tensor.is_complex()
        return HiddenNumber(tensor, bool if tensor.dtype == torch.bool else int if whole else float)
    raise DataDependent(f"{_DEPENDS_ON_DATA} ({read.__name__})")


def describe(value: Any) -> str:
    """Shapes and dtypes of the tensors in a nested value, and the types of its other leaves."""
    leaves = (
        f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, Tensor)
        else f"a {type(leaf).__name__}"
        for leaf in tree_leaves(value)[:4]
    )
    return ", ".join(leaves) or "nothing"


def explain(error: BaseException) -> str:
    """The line of the user's code that raised an error, the error's message, and what to write instead."""
    message = (words_of(error) or type(error).__name__).splitlines()[0]
    message = f"there is no key {message}" if isinstance(error, KeyError) else message
    frames = traceback.extract_tb(error.__traceback__)
    named = f"{type(error).__name__}: {message}"
    known = (advice for pattern, advice in _ADVICE if re.search(pattern, named))
    message = next(known, "{}.").format(message.removesuffix("."))
    frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]  # type: ignore[assignment]
    if not frames or not Path(frames[-1].filename).exists():
        return message
    return f"{'/'.join(Path(frames[-1].filename).parts[-2:])}, line {frames[-1].lineno}, `{frames[-1].line}`: {message}"


_LIBRARIES = tuple(f"{Path(package.__file__).parent}/" for package in (torch, dpexp))  # type: ignore[arg-type]
_ADVICE = (  # pattern in the error's class and message, what to say; {} is the message itself
    (
        "DynamicOutputShape|dynamic shape",
        "a shape depends on a record's data. Keep the shape and weight with a mask: torch.where(mask, x, 0), x * mask.",
    ),
    (
        "DataDependentOutput|data-dependent",
        "PyTorch itself reads a record's value. Keep it a tensor: torch.where(condition, a, b).",
    ),
    ("depends on a record's data", "{}. Keep it a tensor: torch.where(condition, a, b), a product instead of .item()."),
    (
        "different to the input size|Target size .* must be the same",
        "{}. A record is a batch of one, whose dimension squeeze() removes, too. Write squeeze(-1).",
    ),
    ("Python's or NumPy's generator", "{}. Use torch's generator, as torch.rand does."),
)
