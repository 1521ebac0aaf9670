"""The privacy unit: a record is an example, a microbatch of k examples, or the data of a user.

Records are what is sampled, what n counts, what is clipped to S, and what neighbouring data sets differ in (arXiv
1812.06210, section 1). The examples of a record are collated as one batch for `training_step`, so that its mean loss
gives the mean v = (1/m) Σ ∇ℓ of the record's m gradients, which is clipped once. See docs/privacy_units.md. Imports
nothing slow.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpexp.accounting.ledger.events import unit
from dpexp.errors import (
    ConfigError,
    Count,
    Positive,
    checks_arguments,
    exactly_one,
    key_in,
    made_from,
    positive_integer,
)

if TYPE_CHECKING:
    from dpexp.privacy.noise.randomness import KeyStream

NOBODY = -1  # the user of an example whose user is not known


@checks_arguments
@dataclass(frozen=True)
class Example:
    """A record is an example: what the data set gives for an index.

    Examples:
        >>> from dpexp import Example
        >>> Example().num_records(n=1000), Example().max_examples_in_round
        (1000, 1)
    """

    @property
    def local_training(self) -> "LocalTraining | None":
        return None

    @property
    def max_examples_in_round(self) -> int:
        """The largest number of examples of a record in a round."""
        return 1

    @property
    def count_key(self) -> str:
        """The configuration key of the published number of records."""
        return "data.n"

    def num_records(self, n: int, users: int | None = None) -> int:
        """The published number of records, for n examples of so many users."""
        return n

    def units(self, dataset: Any) -> "Units | None":
        """The records of a data set; None: each index is one."""
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


@checks_arguments
@dataclass(frozen=True)
class Microbatch(Example):
    """Record i is the k examples at positions ik to (i+1)k - 1; `size` is k.

    Examples:
        >>> from dpexp import Microbatch
        >>> Microbatch(size=4).num_records(n=1002), str(Microbatch(size=4))
        (251, 'unit of 4 examples')
    """

    size: Count

    @property
    def max_examples_in_round(self) -> int:
        return self.size

    @property
    def count_key(self) -> str:
        return "data.n/privacy_unit.size"

    def to_header(self) -> dict[str, Any]:
        return {"kind": "microbatch", "k": self.size}

    def num_records(self, n: int, users: int | None = None) -> int:
        return math.ceil(n / self.size)

    def units(self, dataset: Any) -> "Units":
        n, k = len(dataset), self.size
        return Units([range(start, min(start + k, n)) for start in range(0, n, k)])


@checks_arguments
@dataclass(frozen=True)
class LocalTraining:
    """A user's vector is the change of the weights by SGD (see `dpexp.privacy.gradients.one_at_a_time`).

    Examples:
        >>> from dpexp import LocalTraining
        >>> LocalTraining(lr=0.1, epochs=1, batch_size=4).batches(m=10)
        [range(0, 4), range(4, 8), range(8, 10)]

    Attributes:
        lr: learning rate of the user's SGD.
        steps: its number of steps; or epochs: its passes over the user's examples.
        batch_size: examples of a step, in the record's order; the last step of an epoch may have fewer; None: all.
    """

    lr: Positive
    steps: Count | None = None
    epochs: Count | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        exactly_one("privacy_unit.local_training", steps=self.steps, epochs=self.epochs)

    def batches(self, m: int) -> list[range]:
        """The rows of each step's batch, for m examples."""
        size = min(self.batch_size or m, m)
        epoch = [range(start, min(start + size, m)) for start in range(0, m, size)]
        steps = self.steps if self.steps is not None else (self.epochs or 0) * len(epoch)
        return [epoch[step % len(epoch)] for step in range(steps)]


@checks_arguments
@dataclass(frozen=True)
class User(Example):
    """A record is all examples of a user.

    Examples:
        >>> from dpexp import User
        >>> User(max_examples=32, user_attribute="user_of").num_records(n=50_000, users=2000)
        2000

    Attributes:
        max_examples: of a user in a round; of more examples a random subset is used.
        user_attribute: attribute of the training data set with the user of each example, -1 where nobody knows: such an
            example is of no record; None: each index of the data set is a list of one user's examples.
        local_training: the user's vector is found by training, with these arguments of `LocalTraining`; None: it is the
            mean gradient.
    """

    max_examples: Count = 1
    user_attribute: str | None = None
    local_training: LocalTraining | None = None  # type: ignore[assignment]  # a mapping becomes one

    def __post_init__(self) -> None:
        if self.local_training is not None and not isinstance(self.local_training, LocalTraining):
            object.__setattr__(self, "local_training", _local_training(self.local_training))

    @property
    def max_examples_in_round(self) -> int:
        return self.max_examples

    @property
    def count_key(self) -> str:
        return "data.users" if self.user_attribute is not None else "data.n"

    def to_header(self) -> dict[str, Any]:
        local = None if self.local_training is None else asdict(self.local_training)
        return {"kind": "user", "most": self.max_examples, "by": self.user_attribute, "local": local}

    def num_records(self, n: int, users: int | None = None) -> int:
        if self.user_attribute is not None and users is None:
            raise ConfigError(
                "privacy_unit=user counts users: give data.users, their published number, or "
                "privacy_unit.user_attribute=null for a data set in which each index is a user."
            )
        return n if users is None else positive_integer("data.users", users)

    def units(self, dataset: Any) -> "Units":
        if self.user_attribute is None:
            from torch.utils.data import TensorDataset  # slow to import

            if isinstance(dataset, TensorDataset):
                raise ConfigError(
                    f"{_OF_LISTS}; a TensorDataset has tensors: set privacy_unit.user_attribute to the name of its "
                    "attribute with the user of each example."
                )
            return _Lists([()] * len(dataset), self.max_examples, self.local_training is not None)
        user_of: Any = getattr(dataset, self.user_attribute, None)
        listed = hasattr(user_of, "__len__") and hasattr(user_of, "__getitem__") and not isinstance(user_of, Mapping)
        if not listed or len(user_of) != len(dataset) or not all(map(_is_number, user_of)):
            has = f"none on its {type(dataset).__name__}" if user_of is None else f"a {type(user_of).__name__}"
            has += " of another length" if listed and len(user_of) != len(dataset) else ""
            raise ConfigError(
                f"privacy_unit.user_attribute={self.user_attribute} must be an attribute of the training data set "
                f"with the user of each example, a list of as many integers; there is {has}."
            )
        examples: dict[int, list[int]] = defaultdict(list)
        for position, user in enumerate(user_of):
            examples[int(user)].append(position)
        examples.pop(NOBODY, None)
        # Sorted, so that the place of a user does not depend on which of its examples comes first.
        return Units([examples[user] for user in sorted(examples)], self.max_examples, self.local_training is not None)


class Units:
    """The records of a data set.

    Args:
        positions: of the examples of each record.
        max_examples: of a record in a round; of more a random subset is used; None: all.
        shuffle: the examples are in a new random order in every round.
    """

    def __init__(
        self, positions: Sequence[Sequence[int]], max_examples: int | None = None, shuffle: bool = False
    ) -> None:
        self._positions, self._max_examples, self._shuffle = positions, max_examples, shuffle

    def __len__(self) -> int:
        return len(self._positions)

    def draw(self, i: int, stream: "KeyStream") -> Any:
        """What record i contributes to a round, for `examples`."""
        return [self._positions[i][k] for k in self._chosen(len(self._positions[i]), stream)]

    def _chosen(self, m: int, stream: "KeyStream") -> Sequence[int]:
        """The indices among m examples that are used, in order."""
        if self._shuffle or (self._max_examples is not None and m > self._max_examples):
            return stream.permutation(m)[: self._max_examples].tolist()
        return range(m)

    def size(self, drawn: Any) -> int:
        """The number of examples, or the largest it may be."""
        return len(drawn)

    def examples(self, dataset: Any, drawn: Any) -> list[Any]:
        """The examples of what was drawn of a record, to be collated; those that cannot be fetched are left out.

        Raises:
            Exception: that of the last one, if none can be fetched.
        """
        found, failed = [], None
        for position in drawn:
            try:
                found.append(dataset[position])
            except Exception as error:
                failed = error
        if failed is not None and not found:
            raise failed
        return found


class _Lists(Units):
    """Records that the data set gives as lists of examples.

    The length of a list is known only when it is fetched, so that a key is drawn, from which the examples are chosen.
    """

    def draw(self, i: int, stream: "KeyStream") -> Any:
        return i, stream.words(8).numpy().tobytes()[:32]

    def size(self, drawn: Any) -> int:
        return int(self._max_examples or 1)

    def examples(self, dataset: Any, drawn: Any) -> list[Any]:
        from dpexp.privacy.noise.randomness import KeyStream

        i, key = drawn
        examples = dataset[i]
        is_example = isinstance(examples, tuple) and not all(isinstance(one, tuple | list | dict) for one in examples)
        if is_example or not isinstance(examples, list | tuple):
            raise ConfigError(f"{_OF_LISTS}; it has a {type(examples).__name__}{', as an example is' * is_example}.")
        return [examples[k] for k in self._chosen(len(examples), KeyStream(key))]


_OF_LISTS = "privacy_unit.user_attribute=null needs a data set in which each index is a list of a user's examples"


def _local_training(options: Any) -> LocalTraining:
    try:
        with made_from(key_in("local_training")):
            return LocalTraining(**options)
    except TypeError as error:
        raise ConfigError(
            f"privacy_unit.local_training={options} must give lr, and steps or epochs, and may give batch_size; it "
            "has no other keys."
        ) from error


def _is_number(user: Any) -> bool:
    try:
        return operator.index(user) == user
    except TypeError:
        return False
