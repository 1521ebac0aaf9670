"""Branches on data: what a model asks a record's tensor, all records of a chunk are asked at once. Where they agree the
model goes on for all of them; where they do not, those that answer alike are processed together, from the start, each
as it would be by itself: a decision tree over records.

To start again is to draw random numbers again. Were that decided by what had been drawn, a record's random numbers
would depend on whom it is together with. So nothing that they may have reached is asked (see `chance`), and the tree
follows from the records alone.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _functorch

from dpexp.privacy.engine.chance import Chance

QUESTIONS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist,
    Tensor.is_nonzero, torch.is_nonzero,
}  # fmt: skip

_NUMBERS = {Tensor.__float__, Tensor.item, Tensor.tolist}  # of which NaN is one of many


class Restart(Exception):
    """Ends a pass of records, which are then begun with again in another way."""


class Asked(Restart):
    """Before what random numbers reach was followed."""


class Differ(Restart):
    """The records of a chunk answer differently.

    Attributes:
        parts: the rows that answer alike.
    """

    def __init__(self, question: str, parts: list[list[int]]) -> None:
        super().__init__(f"a branch or a number in it depends on a record's data ({question})")
        self.parts = parts


def answer(
    question: Callable[..., Any],
    tensor: Tensor,
    anchor: Tensor,
    chance: Chance | None,
    answered: Callable[[Hashable], None],
) -> Any:
    """What each record's tensor answers.

    Args:
        tensor: batched by the same vmap as `anchor`, if by any.
        answered: told what all of them answer.

    Raises:
        Asked: nobody follows what random numbers reach.
        Differ: not all answers are the same.
        RuntimeError: random numbers may have reached the tensor.
    """
    if chance is None:
        raise Asked
    if chance.reaches(tensor):
        raise RuntimeError("a branch or a number in it depends on random numbers of each record.")
    chance.asked += 1
    if _functorch.maybe_get_level(tensor) != _functorch.maybe_get_level(anchor):
        return question(tensor)  # of a vmap inside the model; or the same for all records
    values = _functorch.get_unwrapped(tensor).detach().movedim(_functorch.maybe_get_bdim(tensor), 0).cpu()
    rows = defaultdict(list)
    with DisableTorchFunction():
        answers = [question(value) for value in values.unbind(0)]
        bits = values.reshape(len(values), -1).contiguous().view(torch.uint8) if question in _NUMBERS else None
    for row, given in enumerate(answers):
        rows[given if bits is None else bits[row].numpy().tobytes()].append(row)
    if len(rows) > 1:
        raise Differ(question.__name__, list(rows.values()))
    answered((question.__name__, *rows))
    return answers[0]
