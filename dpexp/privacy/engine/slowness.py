"""Why records cannot be processed together: which line, and what to write instead."""

import re
import traceback
from pathlib import Path

import torch

import dpexp
from dpexp.errors import words_of


def why(error: BaseException) -> str:
    """The line of code, outside of PyTorch, in which an error arose, what it says, and what to write there."""
    said = (words_of(error) or type(error).__name__).splitlines()[0]
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
