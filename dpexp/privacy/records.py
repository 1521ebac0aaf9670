"""Whose data a record is: one example's, a unit's of k examples, or a user's (McMahan et al. 2018, section 1: "a record
might be a single example, or all of a user's").

Everything else is about records: they are sampled, a record's vector is clipped to S, n counts them, and neighbours
differ in one of them. A record's examples are collated as one batch, which is what `training_step` sees, so that its
mean loss gives the mean v = (1/m) Σ ∇ℓ of the record's m gradients, clipped once.

*Units of k examples.* Unit i has the examples at positions ik, …, ik + k - 1 of the data set, and the last unit what is
left. Positions say nothing of what the examples are; which unit an example is in is public, and so is the number of
units, ⌈n/k⌉. A unit's clipped vector has a norm of at most S, so that adding or removing a unit moves the sum by at
most S, and replacing one by another by at most 2S. This is what is claimed: neighbours differ in a *unit*.

What follows for one example: if it is replaced by another in its place, all units but one are the same and that one's
vector moves by at most 2S, so that the guarantee for replacing a unit is one for replacing an example
(`privacy.adjacency=replace_one`). No guarantee for removing one example follows: those behind it would move up by a
position, and so change all later units. (An example that is blanked out in its place is one that is replaced.) Since
only the mean of a unit is bounded, averaging over k examples does not make S smaller: in exchange for gradients with
less variance one pays with n/k in place of n in the denominator.

*Users.* All examples of a user are one record, of which at most `most` take part in a round, chosen at random for that
round; the bound of S holds whichever they are, and how many they are. n counts users.

*Local training.* A user's vector may also be θ_before - θ_after of training on these examples from the current weights
on (McMahan et al. 2018, arXiv 1710.06963, algorithm 1; Reddi et al. 2021, arXiv 2003.00295): see
`dpexp.privacy.engine.local`.

Imports nothing slow.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dpexp.accounting.ledger.units import unit
from dpexp.errors import ConfigError

if TYPE_CHECKING:
    from dpexp.privacy.keystream import KeyStream


class Units(ABC):
    """The records of a data set, by number, with what says which examples each has."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def draw(self, i: int, stream: "KeyStream") -> Any:
        """What record i contributes in a round: an index of `examples`."""

    @abstractmethod
    def size(self, drawn: Any) -> int:
        """How many examples that is, as far as is known."""

    @abstractmethod
    def examples(self, dataset: Any, drawn: Any) -> list[Any]:
        """The examples themselves, which a record's collation is given."""


@dataclass(frozen=True)
class Record:
    """A record is what the data set gives for an index: an example."""

    kind: str = field(default="example", init=False)

    @property
    def local(self) -> "Local | None":
        return None

    @property
    def largest(self) -> int:
        """How many examples it may have."""
        return 1

    @property
    def counted_by(self) -> str:
        """The key of the published number of records."""
        return "data.n"

    def count(self, n: int, users: int | None = None) -> int:
        """The published number of records, of n examples of so many users."""
        return n

    def units(self, dataset: Any) -> Units | None:
        """None: the data set gives records as they are."""
        return None

    def told(self) -> dict[str, Any] | None:
        """As in a ledger's header."""
        return None

    def __str__(self) -> str:
        return unit(self.told())

    @property
    def plural(self) -> str:
        one, *rest = str(self).split()
        return " ".join([f"{one}s", *rest])


@dataclass(frozen=True)
class Microbatch(Record):
    """Record i is the examples [ik, (i+1)k), by position.

    Raises:
        ConfigError: k is not a whole number of at least 1.
    """

    k: int = 1
    kind: str = field(default="microbatch", init=False)

    def __post_init__(self) -> None:
        _whole("record.k", self.k)

    @property
    def largest(self) -> int:
        return self.k

    @property
    def counted_by(self) -> str:
        return "data.n/record.k"

    def count(self, n: int, users: int | None = None) -> int:
        return math.ceil(n / self.k)

    def units(self, dataset: Any) -> Units:
        n, k = len(dataset), self.k
        return _Positions([range(start, min(start + k, n)) for start in range(0, n, k)])

    def told(self) -> dict[str, Any]:
        return {"kind": self.kind, "k": self.k}


@dataclass(frozen=True)
class Local:
    """How a user's vector is found by training (see `dpexp.privacy.engine.local`).

    Attributes:
        lr: of the user's SGD.
        steps: how many it takes, or epochs: how often it goes through the user's examples.
        batch_size: examples of a step, in the order in which the record has them, the last of an epoch fewer; None:
            all.

    Raises:
        ConfigError: a value out of range, or none or both of steps and epochs.
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.lr, int | float) and math.isfinite(self.lr) and self.lr > 0):
            raise ConfigError(f"record.local.lr={self.lr} must be a finite number above 0.")
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(
                f"exactly one of record.local.steps or record.local.epochs must be given; got {self.steps} and "
                f"{self.epochs}."
            )
        for name in ("steps", "epochs", "batch_size"):
            if getattr(self, name) is not None:
                _whole(f"record.local.{name}", getattr(self, name))

    def batches(self, m: int) -> list[range]:
        """The rows of each step's batch, of m."""
        size = min(self.batch_size or m, m)
        epoch = [range(start, min(start + size, m)) for start in range(0, m, size)]
        steps = self.steps if self.steps is not None else (self.epochs or 0) * len(epoch)
        return [epoch[step % len(epoch)] for step in range(steps)]


@dataclass(frozen=True)
class User(Record):
    """A record is what one user has.

    Attributes:
        most: examples of a user that take part in a round, at most; of more, a random part.
        by: attribute of the training data set that has the user of each example; None: the data set gives for an index
            a list of one user's examples.
        local: how its vector is found by training; None: it is the mean gradient.

    Raises:
        ConfigError: most is not a whole number of at least 1.
    """

    most: int = 1
    by: str | None = None
    local: Local | None = None  # type: ignore[assignment]
    kind: str = field(default="user", init=False)

    def __post_init__(self) -> None:
        _whole("record.most", self.most)

    @property
    def largest(self) -> int:
        return self.most

    @property
    def counted_by(self) -> str:
        return "data.users" if self.by is not None else "data.n"

    def count(self, n: int, users: int | None = None) -> int:
        if self.by is not None and users is None:
            raise ConfigError(
                "record=user counts users: give data.users, their published number, or record.by=null for a data set "
                "of which each index is a user."
            )
        if users is not None:
            _whole("data.users", users)
        return users if users is not None else n

    def units(self, dataset: Any) -> Units:
        if self.by is None:
            from torch.utils.data import TensorDataset  # slow, and of no use before there are data

            if isinstance(dataset, TensorDataset):
                raise ConfigError(
                    "record.by=null takes a data set that has for each index a list of a user's examples; a "
                    "TensorDataset has tensors. Name with record.by its attribute that has the user of each example."
                )
            return _Lists(len(dataset), self.most, self.local is not None)
        user_of: Any = getattr(dataset, self.by, None)
        listed = hasattr(user_of, "__len__") and hasattr(user_of, "__getitem__") and not isinstance(user_of, Mapping)
        if not listed or len(user_of) != len(dataset) or not all(map(_is_number, user_of)):
            has = f"none on its {type(dataset).__name__}" if user_of is None else f"a {type(user_of).__name__}"
            raise ConfigError(
                f"record.by={self.by} must be an attribute of the training data set that has the user of each of its "
                f"examples, a list of as many whole numbers; there is {has}."
            )
        examples: dict[int, list[int]] = defaultdict(list)
        for position, user in enumerate(user_of):
            examples[int(user)].append(position)
        return _Positions([*examples.values()], self.most, self.local is not None)

    def told(self) -> dict[str, Any]:
        return asdict(self)


class _Positions(Units):
    """Records with the positions of their examples."""

    def __init__(self, of: Sequence[Sequence[int]], most: int | None = None, in_random_order: bool = False) -> None:
        self._of, self._most, self._shuffled = of, most, in_random_order

    def __len__(self) -> int:
        return len(self._of)

    def draw(self, i: int, stream: "KeyStream") -> list[int]:
        positions = [*self._of[i]]
        if self._shuffled or (self._most is not None and len(positions) > self._most):
            return [positions[k] for k in stream.permutation(len(positions))[: self._most].tolist()]
        return positions

    def size(self, drawn: list[int]) -> int:
        return len(drawn)

    def examples(self, dataset: Any, drawn: list[int]) -> list[Any]:
        return [dataset[position] for position in drawn]


class _Lists(Units):
    """Records that the data set gives as lists of examples: how many is known when a list is there, so that a key is
    drawn of which the choice follows."""

    def __init__(self, size: int, most: int, in_random_order: bool) -> None:
        self._size, self._most, self._shuffled = size, most, in_random_order

    def __len__(self) -> int:
        return self._size

    def draw(self, i: int, stream: "KeyStream") -> tuple[int, bytes]:
        return i, stream.words(8).numpy().tobytes()[:32]

    def size(self, drawn: tuple[int, bytes]) -> int:
        return self._most

    def examples(self, dataset: Any, drawn: tuple[int, bytes]) -> list[Any]:
        from dpexp.privacy.keystream import KeyStream

        i, key = drawn
        examples = dataset[i]
        if not isinstance(examples, list | tuple):
            raise ConfigError(
                f"record.by=null takes a data set that has for each index a list of a user's examples; it has a "
                f"{type(examples).__name__}."
            )
        if self._shuffled or len(examples) > self._most:
            return [examples[k] for k in KeyStream(key).permutation(len(examples))[: self._most].tolist()]
        return [*examples]


def make_record(
    kind: str = "example",
    k: int | None = None,
    most: int | None = None,
    by: str | None = None,
    local: Mapping[str, Any] | None = None,
) -> Record:
    """What a record is, as a configuration says it.

    Raises:
        ConfigError: names the value and what would be accepted.
    """
    given = {"k": k, "most": most, "by": by, "local": local}
    takes = {"example": (), "microbatch": ("k",), "user": ("most", "by", "local")}
    if kind not in takes:
        raise ConfigError(f"record.kind={kind} is unknown; known: {', '.join(takes)}.")
    for key, value in given.items():
        if value is not None and key not in takes[kind]:
            raise ConfigError(f"record.{key}={value} is not for record={kind}, which takes {takes[kind] or 'nothing'}.")
    if kind == "microbatch":
        return Microbatch(k)  # type: ignore[arg-type]
    if kind == "example":
        return Record()
    try:
        return User(most, by, None if local is None else Local(**local))  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"record.local={dict(local or {})} must give lr, and steps or epochs, and may give batch_size ({error})."
        ) from error


def _is_number(user: Any) -> bool:
    try:
        return operator.index(user) == user
    except TypeError:
        return False


def _whole(key: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key}={value} must be a whole number of at least 1.")
