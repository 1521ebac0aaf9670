"""How records are processed: together where that can be, else some modules of the model, or all of it, one by one.

In which way a record is processed is a matter of that record and the model. A way differs from another in how norms are
computed, and so in how far they are enlarged (see `rounding`): were it chosen by a record's company, one record more
would move what all others contribute. So a record takes the first way in which it can be processed by itself.

Some ways are known beforehand. Records that look alike, hold the same besides tensors, and have answered a model's
questions alike so far (see `branches`) have come to the same place in the same code. Where that is no place for records
that are processed together, though PyTorch has nothing against the record itself, it is none for the others either.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn

from dpexp.privacy.engine.branches import Restart


@dataclass(frozen=True)
class Way:
    """All records together, but for some modules; or wholly one at a time."""

    looped: frozenset[str] = frozenset()
    singly: bool = False

    def and_looped(self, root: nn.Module, name: str) -> "Way":
        """With all modules of a kind more: were they found one after the other, records would begin as often again."""
        kind = type(root.get_submodule(name))
        more = self.looped | {other for other, module in root.named_modules() if other and type(module) is kind}
        return Way(frozenset(other for other in more if not any(other.startswith(f"{outer}.") for outer in more)))


class Settled(Restart):
    """Records that have answered like this take another way."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way


class Ways:
    """The ways that are known beforehand.

    Args:
        first: the one that all records begin with.
    """

    def __init__(self, first: Way | None = None) -> None:
        self.first = first or Way()
        self._next: dict[Hashable, Way] = {}

    def settle(self, look: Hashable, way: Way, answers: tuple[Hashable, ...], instead: Way) -> None:
        """Notes what records of one look take instead of a way that ended after these answers."""
        self._next[look, way, answers] = instead

    def instead(self, look: Hashable, way: Way, answers: tuple[Hashable, ...] = ()) -> Way | None:
        """What is known for records that have answered like this so far; None: nothing."""
        if not self._next:
            return None
        found = self._next.get((look, way, answers))
        return found and (self.instead(look, found) or found)
