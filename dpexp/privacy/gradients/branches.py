"""What code asks of a record's tensor that is no tensor: its number, its text, what it was computed from.

Under vmap a tensor stands for those of all records, which answer differently. A number may be passed on to a log, which
drops it; whatever else is done with it is a question about data, and ends the pass.

`why` says which line of code asked, and what to write instead.
"""

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import dpexp
from dpexp._torch_compat import has_own_dispatch, level_of, tree_leaves
from dpexp.errors import words_of


class DataDependent(RuntimeError):
    """Code depends on a record's numbers, so that several records cannot be processed together."""


class Unreadable:
    """A number of a record's, which may be logged and is not known to anybody.

    Attributes:
        tensor: it comes from; None: it was never computed, as that of a metric.
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.__dict__["tensor"] = tensor

    def __getattr__(self, name: str) -> NoReturn:
        raise DataDependent(f"a branch or a number in it depends on a record's data ({name})")


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Unreadable, *args: Any) -> NoReturn:
        raise DataDependent(f"a branch or a number in it depends on a record's data ({name})")

    return refuse


_OPERATIONS = """
bool int float index complex len iter getitem setitem contains hash str repr format array round trunc floor ceil
lt le gt ge eq ne add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod
neg pos abs matmul rmatmul and rand or ror xor rxor invert
"""
for _name in _OPERATIONS.split():
    setattr(Unreadable, f"__{_name}__", _refused(f"__{_name}__"))


QUESTIONS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist, Tensor.numpy,
    Tensor.__array__, Tensor.is_nonzero, torch.is_nonzero,
}  # fmt: skip
_PASSED_ON = {Tensor.item, Tensor.tolist, Tensor.numpy}


def answer(question: Callable[..., Any], tensor: Tensor, anchor: Tensor) -> Any:
    """What a tensor answers.

    Args:
        tensor: batched by the same vmap as `anchor`, if by any.

    Raises:
        DataDependent: it may be another answer for each record.
    """
    if level_of(tensor) != level_of(anchor):
        return question(tensor)  # of a vmap inside the model; or the same for all records
    if question in _PASSED_ON:
        return Unreadable(tensor)
    raise DataDependent(f"a branch or a number in it depends on a record's data ({question.__name__})")


class Node:
    """Stands for a tensor's grad_fn, which leads to the gradients and saved tensors of all records."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"grad_fn.{name} would show the tensors of all records.")


def sees_behind(value: Any) -> bool:
    """Whether a tensor is of a class that has code of its own for what operators do."""
    return has_own_dispatch(value)


def described(value: Any) -> str:
    """Shapes and types of the tensors in it, or what else it is."""
    told = (
        f"{list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        if isinstance(leaf, Tensor)
        else f"a {type(leaf).__name__}"
        for leaf in tree_leaves(value)[:4]
    )
    return ", ".join(told) or "nothing"


def failing_layer(module: nn.Module, run: Callable[[], Any]) -> str:
    """The innermost layer that `run` raises an error in, and what it was given, as part of a sentence."""
    names = {id(layer): name for name, layer in module.named_modules()}
    entered: list[str] = []

    def enter(layer: nn.Module, given: Any) -> None:
        entered.append(f"; its layer {names.get(id(layer), '')} ({type(layer).__name__}) was given {described(given)}")

    def leave(layer: nn.Module, given: Any, output: Any) -> None:
        entered.pop()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        run()
    except Exception:
        pass  # which is known
    finally:
        for hook in hooks:
            hook.remove()
    return entered[-1] if entered else ""


def why(error: BaseException) -> str:
    """The line of code, outside of PyTorch, in which an error arose, what it says, and what to write there."""
    said = (words_of(error) or type(error).__name__).splitlines()[0]
    said = f"there is no key {said}" if isinstance(error, KeyError) else said
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.endswith(_CHECKPOINT) for frame in frames):
        said = f"checkpointing: {said}"
    known = (words for pattern, words in _KNOWN if re.search(pattern, said))
    said = next(known, "{}.").format(said.removesuffix("."))
    frames = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]  # type: ignore[assignment]
    if not frames or not Path(frames[-1].filename).exists():
        return said
    return f"{'/'.join(Path(frames[-1].filename).parts[-2:])}, line {frames[-1].lineno}, `{frames[-1].line}`: {said}"


_NOT_THEIRS = tuple(f"{Path(package.__file__).parent}/" for package in (torch, dpexp))  # type: ignore[arg-type]
_CHECKPOINT = str(Path("torch", "utils", "checkpoint.py"))
_KNOWN = (
    (
        "checkpointing: .*setup_context",
        "reentrant checkpointing has a backward pass of its own. Give use_reentrant=False.",
    ),
    (
        "value out of a tracing tensor",
        "a weight's or a buffer's number is asked for, which may be another one in each round. Keep it a tensor: "
        "torch.where(condition, a, b), a product instead of .item().",
    ),
    (
        "dynamic shape|boolean mask|differently shaped|equal size",
        "a shape depends on a record's data. Keep the shape and weigh with a mask: torch.where(mask, x, 0), x * mask.",
    ),
    (
        "vmap: inplace|doesn't match the broadcast shape",
        "a tensor that is the same for all records is written to. Make it from a record's, as x.new_zeros(...) does, "
        "or use torch.cat, torch.stack, torch.where.",
    ),
    (
        r"calling \.item\(\)|data-dependent",
        "a record's number is asked for inside PyTorch. Keep it a tensor: torch.where(condition, a, b).",
    ),
    ("depends on a record's data", "{}. Keep it a tensor: torch.where(condition, a, b), a product instead of .item()."),
    ("data pointer|numpy", "NumPy cannot tell records apart. Stay with functions of torch."),
    ("Python's or NumPy's generator", "{}. Draw by torch, as torch.rand does."),
    ("setup_context", "a torch.autograd.Function has no setup_context. Give it one, and generate_vmap_rule = True."),
)
