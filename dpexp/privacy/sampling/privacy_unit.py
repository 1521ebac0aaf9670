"""Whose data a record is: one example's, a unit's of k examples, or a user's (McMahan et al. 2018, section 1: "a record
might be a single example, or all of a user's").

Everything else is about records: they are sampled, a record's vector is clipped to S, n counts them, and neighbours
differ in one of them. A record's examples are collated as one batch, which is what `training_step` sees, so that its
mean loss gives the mean v = (1/m) Σ ∇ℓ of the record's m gradients, clipped once.

What is claimed of units, and of one example of theirs, is in docs/records.md, as is local training, by which a user's
vector may be found (`LocalTraining`).

Imports nothing slow.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dpexp.accounting.ledger.events import unit
from dpexp.errors import ConfigError, exactly_one, positive, positive_integer

if TYPE_CHECKING:
    from dpexp.privacy.noise.randomness import KeyStream


@dataclass(frozen=True)
class Example:
    """A record is what the data set gives for an index: an example."""

    kind: str = field(default="example", init=False)

    @property
    def local_training(self) -> "LocalTraining | None":
        return None

    @property
    def max_examples_in_round(self) -> int:
        """How many examples it may have."""
        return 1

    @property
    def count_key(self) -> str:
        """The key of the published number of records."""
        return "data.n"

    def num_records(self, n: int, users: int | None = None) -> int:
        """The published number of records, of n examples of so many users."""
        return n

    def units(self, dataset: Any) -> "Units | None":
        """None: the data set gives records as they are."""
        return None

    def to_header(self) -> dict[str, Any] | None:
        """The privacy unit in a ledger's header; None: an example."""
        return None

    def __str__(self) -> str:
        return unit(self.to_header())

    @property
    def plural(self) -> str:
        one, *rest = str(self).split()
        return " ".join([f"{one}s", *rest])


@dataclass(frozen=True)
class Microbatch(Example):
    """Record i is the examples [ik, (i+1)k), by position."""

    size: int = 1
    kind: str = field(default="microbatch", init=False)

    def __post_init__(self) -> None:
        positive_integer("privacy_unit.size", self.size)

    @property
    def max_examples_in_round(self) -> int:
        return self.size

    @property
    def count_key(self) -> str:
        return "data.n/privacy_unit.size"

    def to_header(self) -> dict[str, Any]:
        return {"kind": self.kind, "k": self.size}

    def num_records(self, n: int, users: int | None = None) -> int:
        return math.ceil(n / self.size)

    def units(self, dataset: Any) -> "Units":
        n, k = len(dataset), self.size
        return Units([range(start, min(start + k, n)) for start in range(0, n, k)])


@dataclass(frozen=True)
class LocalTraining:
    """How a user's vector is found by training (see `dpexp.privacy.gradients.local_training`).

    Attributes:
        lr: of the user's SGD.
        steps: how many it takes, or epochs: how often it goes through the user's examples.
        batch_size: examples of a step, in the order in which the record has them, the last of an epoch fewer; None:
            all.
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        positive("privacy_unit.local_training.lr", self.lr)
        exactly_one("privacy_unit.local_training", steps=self.steps, epochs=self.epochs)
        for name in ("steps", "epochs", "batch_size"):
            if getattr(self, name) is not None:
                positive_integer(f"privacy_unit.local_training.{name}", getattr(self, name))

    def batches(self, m: int) -> list[range]:
        """The rows of each step's batch, of m."""
        size = min(self.batch_size or m, m)
        epoch = [range(start, min(start + size, m)) for start in range(0, m, size)]
        steps = self.steps if self.steps is not None else (self.epochs or 0) * len(epoch)
        return [epoch[step % len(epoch)] for step in range(steps)]


@dataclass(frozen=True)
class User(Example):
    """A record is what one user has.

    Attributes:
        max_examples: of a user in a round; of more, a random part takes part.
        user_attribute: attribute of the training data set that has the user of each example; None: the data set gives
            for an index a list of one user's examples.
        local_training: how its vector is found by training; None: it is the mean gradient.
    """

    max_examples: int = 1
    user_attribute: str | None = None
    local_training: LocalTraining | None = None  # type: ignore[assignment]
    kind: str = field(default="user", init=False)

    def __post_init__(self) -> None:
        positive_integer("privacy_unit.max_examples", self.max_examples)

    @property
    def max_examples_in_round(self) -> int:
        return self.max_examples

    @property
    def count_key(self) -> str:
        return "data.users" if self.user_attribute is not None else "data.n"

    def to_header(self) -> dict[str, Any]:
        local = None if self.local_training is None else asdict(self.local_training)
        return {"kind": self.kind, "most": self.max_examples, "by": self.user_attribute, "local": local}

    def num_records(self, n: int, users: int | None = None) -> int:
        if self.user_attribute is not None and users is None:
            raise ConfigError(
                "privacy_unit=user counts users: give data.users, their published number, or "
                "privacy_unit.user_attribute=null for a data set "
                "of which each index is a user."
            )
        return n if users is None else positive_integer("data.users", users)

    def units(self, dataset: Any) -> "Units":
        if self.user_attribute is None:
            from torch.utils.data import TensorDataset  # slow, and of no use before there are data

            if isinstance(dataset, TensorDataset):
                raise ConfigError(
                    f"{_OF_LISTS}; a TensorDataset has tensors. Name with privacy_unit.user_attribute its attribute "
                    f"that has the user of "
                    "each example."
                )
            return _Lists([()] * len(dataset), self.max_examples, self.local_training is not None)
        user_of: Any = getattr(dataset, self.user_attribute, None)
        listed = hasattr(user_of, "__len__") and hasattr(user_of, "__getitem__") and not isinstance(user_of, Mapping)
        if not listed or len(user_of) != len(dataset) or not all(map(_is_number, user_of)):
            has = f"none on its {type(dataset).__name__}" if user_of is None else f"a {type(user_of).__name__}"
            raise ConfigError(
                f"privacy_unit.user_attribute={self.user_attribute} must be an attribute of the training data set "
                f"that has the user "
                f"of each of its "
                f"examples, a list of as many whole numbers; there is {has}."
            )
        examples: dict[int, list[int]] = defaultdict(list)
        for position, user in enumerate(user_of):
            examples[int(user)].append(position)
        return Units([*examples.values()], self.max_examples, self.local_training is not None)


class Units:
    """The records of a data set, by number, with what says which examples each has: their positions.

    Args:
        most: examples of a record that take part in a round, of more a random part; None: all.
        in_random_order: for every round another.
    """

    def __init__(self, of: Sequence[Sequence[int]], most: int | None = None, in_random_order: bool = False) -> None:
        self._of, self._most, self._shuffled = of, most, in_random_order

    def __len__(self) -> int:
        return len(self._of)

    def draw(self, i: int, stream: "KeyStream") -> Any:
        """What record i contributes in a round: an index of `examples`."""
        return [self._of[i][k] for k in self._chosen(len(self._of[i]), stream)]

    def _chosen(self, m: int, stream: "KeyStream") -> Sequence[int]:
        """Which of m examples take part, in which order."""
        if self._shuffled or (self._most is not None and m > self._most):
            return stream.permutation(m)[: self._most].tolist()
        return range(m)

    def size(self, drawn: Any) -> int:
        """How many examples that is, as far as is known."""
        return len(drawn)

    def examples(self, dataset: Any, drawn: Any) -> list[Any]:
        """The examples themselves, which a record's collation is given."""
        return [dataset[position] for position in drawn]


class _Lists(Units):
    """Records that the data set gives as lists of examples: how many is known when a list is there, so that a key is
    drawn of which the choice follows."""

    def draw(self, i: int, stream: "KeyStream") -> Any:
        return i, stream.words(8).numpy().tobytes()[:32]

    def size(self, drawn: Any) -> int:
        return int(self._most or 1)

    def examples(self, dataset: Any, drawn: Any) -> list[Any]:
        from dpexp.privacy.noise.randomness import KeyStream

        i, key = drawn
        examples = dataset[i]
        if not isinstance(examples, list | tuple):
            raise ConfigError(f"{_OF_LISTS}; it has a {type(examples).__name__}.")
        return [examples[k] for k in self._chosen(len(examples), KeyStream(key))]


_OF_LISTS = "privacy_unit.user_attribute=null takes a data set that has for each index a list of a user's examples"


def make_privacy_unit(kind: str = "example", **options: Any) -> Example:
    """The privacy unit that a configuration's `privacy_unit` section asks for. Options that are null are left out."""
    takes = {"example": (), "microbatch": ("size",), "user": ("max_examples", "user_attribute", "local_training")}
    if kind not in takes:
        raise ConfigError(f"privacy_unit.kind={kind} is unknown; known: {', '.join(takes)}.")
    for key, value in options.items():
        if value is not None and key not in takes[kind]:
            raise ConfigError(
                f"privacy_unit.{key}={value} is not for privacy_unit={kind}, which takes {takes[kind] or 'nothing'}."
            )
    if kind == "example":
        return Example()
    if kind == "microbatch":
        return Microbatch(options["size"])
    local = options.get("local_training")
    try:
        training = None if local is None else LocalTraining(**local)
    except TypeError as error:
        raise ConfigError(
            f"privacy_unit.local_training={dict(local or {})} must give lr, and steps or epochs, and may give "
            f"batch_size "
            f"({error})."
        ) from error
    return User(options["max_examples"], options["user_attribute"], training)


def _is_number(user: Any) -> bool:
    try:
        return operator.index(user) == user
    except TypeError:
        return False
