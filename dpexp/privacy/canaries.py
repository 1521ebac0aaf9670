"""Dirac canaries: records whose gradients are bounded vectors in coordinates of their own.

Each canary is included by a fair coin. What the rounds release in its coordinates is its share of the sums and noise,
and nothing else: whoever looks there is the strongest attacker whom a release may have. Where records are units or
users, it has as many equal examples, so that what each of them would contribute alone is found.

Every vector of every group gets a table of extra coordinates: clipped in the same group, by the same S_g, noised by the
same α_j σ̃_g, so that what is accounted stays as it is. A canary has one coordinate in each vector. Its gradient is
longer than S_g allows, so that clipping has something to do, and changes its sign from vector to vector, group to group
and turn to turn, so that noise which these share would cancel. Who knows when it may have been sampled looks at these
rounds alone (see `Matched`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from inspect import signature
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset

from dpexp.accounting.auditing import scores
from dpexp.accounting.renyi import Array
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.clipping import asked
from dpexp.privacy.delivery import RoundSampler
from dpexp.privacy.keystream import KeyStream
from dpexp.privacy.mislabelled import replace_records
from dpexp.privacy.noise import SMALL
from dpexp.privacy.plan import Group, PrivacyPlan
from dpexp.privacy.records import User

LENGTH = 10.0  # of a canary's gradient in a group's own scale, in units of S_g, if that contributes the most
_LENGTHS = torch.cat([torch.tensor([LENGTH]), torch.logspace(-6, 6, 2800)]).double()  # others, 1 % apart
_TABLES = "dpexp_canaries"  # an attribute of the audited module
_NONE = -1  # the canary that a record of the user's is
# What stands in the place of a canary that is not included (None: nothing), as a factor of its gradient.
ABSENT: dict[str, float | None] = {"add_remove": None, "replace_null": 0.0, "replace_one": -1.0}


class Canaries(pl.Callback):
    """Puts canaries into a module, its data and its plan, and adds up what is released in their coordinates. It must
    stand behind the PrivacyCallback among the Trainer's callbacks; the module is of no use for anything else.

    Args:
        count: m; where the sampling policy relies on n, they take the places of records, and are at most n.
        stream: of the coins.
    """

    def __init__(self, module: pl.LightningModule, plan: PrivacyPlan, count: int, stream: KeyStream) -> None:
        self.replacing = plan.sampling.relies_on_n
        self.count = min(count, plan.n) if self.replacing else count
        self.included = stream.words(self.count).lt(2**62).numpy()  # fair coins
        self.absent = ABSENT[plan.adjacency]
        parts = len(plan.groups) * PARITIES
        self._coordinates = self.count + max(500, 10 * parts)  # those without a canary show the noise alone
        self._tables: Any = nn.ModuleList()
        groups = []
        for g, group in enumerate(plan.groups):
            # Large tensors get their noise in another way than small ones: canaries get it as the vector does.
            rows = [max(self._coordinates, SMALL if vector.d >= SMALL else 0) for vector in group.vectors]
            own = nn.ParameterList([nn.Parameter(torch.zeros(size, 1)) for size in rows])
            own.register_buffer("lengths", torch.zeros(len(rows)), persistent=False)  # a traced step reads it anew
            self._tables.append(own)
            vectors = tuple(
                replace(vector, parameters=(*vector.parameters, f"{_TABLES}.{g}.{j}"), d=vector.d + rows[j])
                for j, vector in enumerate(group.vectors)
            )
            groups.append(replace(group, vectors=vectors))
        module.add_module(_TABLES, self._tables)
        self.plan = replace(plan, groups=tuple(groups), preparations=())  # which canaries, having no input, are not in
        self._record, local = plan.record, plan.record.local
        self._reach = local.lr * len(local.batches(plan.record.largest)) if local else 1.0  # of a user who trains
        self._round = 0
        self._turns = plan.sampling.event(plan.n, 0).parts or 1
        if self._turns > plan.rounds:
            told = f"audit=dirac with sampling.parts={self._turns} leaves some records out of all {plan.rounds} rounds"
            raise ConfigError(f"{told}; choose more rounds.")
        self._stream = stream
        self._matched = [Matched(self._coordinates) for _ in groups]
        self._places: NDArray[np.int64] | None = None  # among the records
        self._replace_step(module)

    def put_into(self, data: pl.LightningDataModule) -> None:
        """Lets a data module's training loader give canaries too."""
        replace_records(data, self._records, _Collate)

    def scores(self) -> Array:
        """The attacker's [m], in which an included canary counts 1 more than another on average."""
        sums = np.concatenate([one.sums for one in self._matched])
        expected = np.concatenate([one.expected for one in self._matched])
        used = expected.min(1) > 0
        return scores(sums[used], expected[used], self.count)

    @property
    def middle(self) -> float:
        """Of the average scores of canaries that are included and that are not."""
        return 0.0 if self.absent == -1 else 0.5

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        for g, group in self._groups(_now(trainer)):
            length = _length(group) / math.sqrt(len(group.alphas)) / self._reach
            lengths = [self._sign(g + j) * length * alpha for j, alpha in enumerate(group.alphas)]
            self._tables[g].lengths.copy_(torch.tensor(lengths))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Reads the released averages."""
        now = _now(trainer)
        there = self._there(trainer.train_dataloader.sampler)  # type: ignore[union-attr]
        difference = 1.0 if self.absent is None else 1.0 - self.absent
        for g, group in self._groups(now):
            weight = now.sampling.event(now.n, 0).rate * difference * group.S / group.sigma
            sums = np.zeros(self._coordinates)
            for j, (table, alpha) in enumerate(zip(self._tables[g], group.alphas, strict=True)):
                numbers = table.grad.double().cpu().numpy()[: self._coordinates, 0]
                sums += (-1) ** j * numbers * now.sampling.q * now.n / (alpha * math.sqrt(len(group.alphas)))
            self._matched[g].add(self._round, sums / group.sigma, weight, self._sign(g), group.bands, there)
        self._round += 1

    def _there(self, sampler: RoundSampler) -> NDArray[np.bool_]:
        """Whether each canary might have been in the round: in what was sampled from, whatever that should have been.
        Those that are included are the last records; the others, and coordinates without one, are as others are."""
        if self._places is None:
            self._places = (self._stream.words(self._coordinates) % sampler.size).numpy()
            included = [k for k, included in enumerate(self.included) if included or self.absent is not None]
            self._places[included] = np.arange(sampler.size - len(included), sampler.size)
        return np.isin(self._places, np.asarray(sampler.sampled_from[self._round], dtype=np.int64))

    def _groups(self, now: PrivacyPlan) -> Iterator[tuple[int, Group]]:
        """Those that a round releases, with their places in the plan."""
        places = {group.name: g for g, group in enumerate(self.plan.groups)}
        yield from ((places[group.name], group) for group in now.groups)

    def _sign(self, place: int) -> int:
        return 1 - 2 * ((place + self._round // self._turns) % 2)

    def _records(self, dataset: Any) -> Dataset:
        """The user's records, as many as are kept, and then canaries: a user of its own, or a unit of equal examples.
        Where canaries take places, it is those of the last records."""
        record, examples = self._record, self._record.largest
        values = [1.0 if included else self.absent for included in self.included]
        canaries = [(torch.zeros(()), i, value) for i, value in enumerate(values) if value is not None]
        if isinstance(record, User) and record.by is None:
            own = _Own(dataset, range(self._kept(len(dataset))), lists=True)
            return ConcatDataset([own, [[canary] * examples for canary in canaries]])  # type: ignore[list-item]
        added = [canary for canary in canaries for _ in range(examples)]
        if not isinstance(record, User):
            kept = self._kept(len(dataset) // examples) * examples  # a last unit may be shorter
            return ConcatDataset([_Own(dataset, range(kept)), added])  # type: ignore[list-item]
        of = [int(user) for user in getattr(dataset, str(record.by))]
        users = [*dict.fromkeys(of)]
        staying = {*users[: self._kept(len(users))]}
        positions = [position for position, user in enumerate(of) if user in staying]
        found: Dataset = ConcatDataset([_Own(dataset, positions), added])  # type: ignore[list-item]
        first = max(users, default=0) + 1
        setattr(
            found, str(record.by), [of[position] for position in positions] + [first + which for _, which, _ in added]
        )
        return found

    def _kept(self, records: int) -> int:
        return records - self.count if self.replacing else records

    def _replace_step(self, module: pl.LightningModule) -> None:
        training_step = module.training_step
        held: Any = module.get_submodule(_TABLES)

        @wraps(training_step)
        def step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            own, which, value = batch
            if which is None:
                return training_step(own, *args, **kwargs)
            return _loss(held, which, value)  # weights that a user trains may be in the tables' place

        # Lightning asks what it takes, of the function beneath a method, and looks beneath one wrapper only.
        step.__signature__ = signature(getattr(training_step, "__func__", training_step))  # type: ignore[attr-defined]
        module.training_step = step  # type: ignore[method-assign]


def _now(trainer: pl.Trainer) -> PrivacyPlan:
    """The plan of the round."""
    return next(one for one in trainer.callbacks if isinstance(one, PrivacyCallback)).now  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _length(group: Group) -> float:
    """LENGTH, if the group's clip rule lets such a canary contribute all but the most, or else the length that
    contributes the most. Norms count as 0.1 % longer, since they are never taken for too small."""
    lengths = _LENGTHS * group.S
    contributed = (asked(group.clip, 1.001 * lengths, torch.tensor(group.S).double()) * lengths).clamp(max=group.S)
    return float(lengths[0 if contributed[0] >= 0.98 * contributed.max() else contributed.argmax()])


def _loss(tables: Any, which: Tensor, value: Tensor) -> Tensor:
    """Of the equal examples [B] of a canary: linear, with a gradient of the given length in its coordinate in each
    vector."""
    total = tables[0][0].new_zeros(())
    for own in tables:
        for table, length in zip(own, own.lengths, strict=True):
            total = total + (F.embedding(which, table).squeeze(-1) * length.to(table) * value.to(table)).mean()
    return total


class _Own(Dataset):
    """The user's examples at some positions, or lists of them: (example, no canary, no gradient of one). A canary has
    no example, and none of the user's has a part in what it contributes."""

    def __init__(self, dataset: Any, positions: Sequence[int], lists: bool = False) -> None:
        self._dataset, self._positions, self._lists = dataset, positions, lists

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> Any:
        own = self._dataset[self._positions[index]]
        return [(example, _NONE, 0.0) for example in own] if self._lists else (own, _NONE, 0.0)


class _Collate:
    """The user's collation of the records, each by itself. A canary's batch has other places filled than a record's."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[Any, int, float]]) -> tuple[Any, Tensor | None, Tensor | None]:
        records, which, values = zip(*items, strict=True)
        if which[0] == _NONE:
            return self._collate(list(records)), None, None
        return None, torch.tensor(which), torch.tensor(values, dtype=torch.float64)


PARITIES = 2  # of a record's turns, of which what is released is kept apart


class Matched:
    """Of one group's releases in D coordinates: `sums` and `expected` [PARITIES, D], what was found, and what a canary
    that is included adds to it on average."""

    def __init__(self, coordinates: int) -> None:
        self._released: dict[int, Array] = {}
        self._rounds: dict[int, tuple[float, NDArray[np.bool_], NDArray[np.int64]]] = {}
        self._turns = np.zeros(coordinates, dtype=np.int64)
        self.sums, self.expected = np.zeros((2, PARITIES, coordinates))

    def add(
        self, t: int, released: Array, weight: float, sign: int, bands: tuple[float, ...], there: NDArray[np.bool_]
    ) -> None:
        """Takes round t: `released` [D] in units of σ̃, to which an included canary adds ±`weight` on average, and
        whether each might have been `there` [D]."""
        self._released[t], self._rounds[t] = released, (sign * weight, there, self._turns % PARITIES)
        self._turns = self._turns + there
        row = sum(c * self._released[t - i] for i, c in enumerate(bands) if t - i in self._released)
        for i, c in enumerate(bands):
            if t - i not in self._rounds:
                continue
            adds, those, parity = self._rounds[t - i]
            for p in range(PARITIES):
                own = those & (parity == p)
                self.sums[p, own] += adds * c * np.broadcast_to(row, own.shape)[own]
                self.expected[p, own] += (adds * c) ** 2
        for past in (self._released, self._rounds):
            past.pop(t - len(bands) + 1, None)
