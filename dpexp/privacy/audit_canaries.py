"""Dirac canaries: records whose gradients are bounded vectors in coordinates of their own.

Each canary is included by a fair coin. What the rounds release in its coordinates is its share of the sums and noise,
and nothing else: whoever looks there is the strongest attacker whom a release may have. Where records are units or
users, it has as many equal examples, so that what each of them would contribute alone is found.

Every vector of every group gets a table of extra coordinates: clipped in the same group, by the same S_g, noised by the
same α_j σ̃_g, so that what is accounted stays as it is. A canary has one coordinate in each vector. Its gradient is
longer than S_g allows, so that clipping has something to do, and changes its sign from vector to vector, group to group
and turn to turn, so that noise which these share would cancel. Coordinates without a canary show the noise alone.

A job's plan is audited by two trainings: `unsampled` shows what its noise hides, `nearly_noiseless` what is sampled and
how much of it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from dpexp._lightning_compat import pl
from dpexp.accounting.auditing import (
    POWER,
    Check,
    contribution,
    noise_reuse,
    noise_scale,
    participations,
    rate_of_inclusion,
)
from dpexp.accounting.composition import Array
from dpexp.accounting.sampling import CyclicPoisson, FullBatch, Policy
from dpexp.accounting.sampling.policy import at_q
from dpexp.errors import ConfigError
from dpexp.privacy.callback import PrivacyCallback
from dpexp.privacy.noise.continuous import SMALL
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.clipping import unbounded_clip_factors
from dpexp.privacy.plan.plan import Group, PrivacyPlan
from dpexp.privacy.plan.schedules import CONSTANT
from dpexp.privacy.sampling.fetching import sampled_dataset
from dpexp.privacy.sampling.loader import RoundSampler
from dpexp.privacy.sampling.privacy_unit import User

LENGTH = 10.0  # of a canary's gradient in a group's own scale, in units of S_g, if that contributes the most
_LENGTHS = torch.cat([torch.tensor([LENGTH]), torch.logspace(-6, 6, 2800)]).double()  # others, 1 % apart
_TABLES = "dpexp_canaries"  # an attribute of the audited module
_NONE = -1  # the canary that a record of the user's is
# What stands in the place of a canary that is not included (None: nothing), as a factor of its gradient.
ABSENT: dict[str, float | None] = {"add_remove": None, "replace_null": 0.0, "replace_one": -1.0}
_BLANK = 4000  # coordinates without a canary
_OTHERS = 256  # of the user's records, where their number does not matter
_SMALL_NOISE = 0.05  # z at which a contribution shows
_ERROR = 0.05  # of the rate of inclusion, to be found
_ROUNDS = 10  # at least, so that it shows if one round in ten is not in the ledger
_CERTAIN = 8  # standard deviations, by which noise is never off


def unsampled(plan: PrivacyPlan) -> PrivacyPlan:
    """The plan for a few rounds of all records, or with turns, of all whose turn it is: the claim is then as tight as
    can be. Its μ is about 2 if z lies between 1 and 4."""
    policy: Policy = FullBatch()
    rounds = min(max(math.ceil(4 * plan.noise_multiplier**2), 4), 64)
    if isinstance(plan.sampling, CyclicPoisson):
        parts = plan.sampling.rounds_apart
        policy, rounds = at_q(plan.sampling, 1 / parts), parts * max(1, min(4, plan.rounds // parts))
    return replace(plan, sampling=policy, rounds=rounds, schedule=replace(plan.schedule, q=CONSTANT))


def nearly_noiseless(plan: PrivacyPlan, canaries: int, level: float) -> PrivacyPlan:
    """The plan with next to no noise, so that each contribution shows: for as many rounds as show an error of the rate
    of inclusion of 5 %, at the level, and for ten, but no more than it has."""
    small = _SMALL_NOISE / plan.noise_multiplier
    groups = tuple(replace(group, sigma=group.sigma * small) for group in plan.groups)
    q = plan.sampling.q
    chances = (1 - q) / q * ((norm.isf(level) + norm.ppf(POWER)) / _ERROR) ** 2
    turns, per_epoch = plan.sampling.rounds_apart, math.floor(plan.sampling.rounds_per_epoch + 1e-9)
    epoch = turns if isinstance(plan.sampling, CyclicPoisson) else per_epoch
    rounds = min(plan.rounds, math.ceil(max(_ROUNDS, chances / canaries) / epoch) * epoch)
    return replace(plan, groups=groups, rounds=rounds, schedule=replace(plan.schedule, z=CONSTANT))


class Canaries(pl.Callback):
    """Puts canaries into a module, its data and its plan, and adds up what is released in their coordinates. It must
    stand behind the PrivacyCallback among the Trainer's callbacks; the module is of no use for anything else.

    Args:
        count: m; where the sampling policy relies on n, they take the places of records, and are at most n.
        stream: of the coins, or None: all canaries are included.
        reader: of what is released, an `Attack` or `Contributions`.

    Attributes:
        releases: how often each group's noisy sum reached the gradients.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plan: PrivacyPlan,
        count: int,
        stream: KeyStream | None,
        reader: "Attack | Contributions",
    ) -> None:
        self.replacing = plan.sampling.needs_exact_n
        self.count = min(count, plan.n) if self.replacing else count
        self.included = np.ones(self.count, dtype=np.bool_)
        if stream is not None:
            self.included = stream.words(self.count).lt(2**62).numpy()  # fair coins
        self.absent, self.reader = ABSENT[plan.adjacency], reader
        self._coordinates = self.count + _BLANK
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
        # Canaries have no input, and are in no round before training.
        self.plan = replace(plan, groups=tuple(groups), before_training=())
        self._record, local = plan.privacy_unit, plan.privacy_unit.local_training
        self._reach = (
            local.lr * len(local.batches(plan.privacy_unit.max_examples_in_round)) if local else 1.0
        )  # of a user who trains
        self._round, self.releases = 0, Counter[str]()
        self._turns = plan.sampling.rounds_apart
        if self._turns > plan.rounds:
            told = f"audit=dirac with sampling.partitions={self._turns} leaves records out of all {plan.rounds} rounds"
            raise ConfigError(f"{told}; choose more rounds.")
        self._places: NDArray[np.int64] | None = None  # among the records
        self._replace_step(module)

    def put_into(self, data: pl.LightningDataModule) -> None:
        """Lets a data module's training loader give canaries too."""
        original = data.train_dataloader

        def train_dataloader() -> DataLoader:
            loader = original()
            same = ("batch_size", "drop_last", "num_workers", "worker_init_fn", "multiprocessing_context")
            return DataLoader(
                self._records(sampled_dataset(loader)), shuffle=True, collate_fn=_Collate(loader.collate_fn),
                **{name: getattr(loader, name) for name in same},
            )  # fmt: skip

        data.train_dataloader = train_dataloader  # type: ignore[method-assign]

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
        difference, q = 1.0 if self.absent is None else 1.0 - self.absent, now.sampling.q
        own = zip(self.plan.groups, self._tables, strict=True)
        self.releases.update(group.name for group, tables in own if tables[0].grad is not None)
        for g, group in self._groups(now):
            averages = np.stack(
                [table.grad.double().cpu().numpy()[: self._coordinates, 0] for table in self._tables[g]]
            )
            by = np.array([(-1) ** j * q / now.sampling.weight * now.n / alpha for j, alpha in enumerate(group.alphas)])
            self.reader.add(self._round, g, group, by[:, None] * averages, self._sign(g) * difference, there)
        self.reader.end(self.count, now, self._round)
        self._round += 1

    def _there(self, sampler: RoundSampler) -> NDArray[np.bool_]:
        """Whether each canary might have been in the round: in what was sampled from, whatever that should have been.
        Those that are included are the last records; the others, and coordinates without one, are as others are."""
        if self._places is None:
            self._places = np.arange(self._coordinates) % sampler.size
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
        record, examples = self._record, self._record.max_examples_in_round
        values = [1.0 if included else self.absent for included in self.included]
        canaries = [(torch.zeros(()), i, value) for i, value in enumerate(values) if value is not None]
        if isinstance(record, User) and record.user_attribute is None:
            own = _Own(dataset, range(self._kept(len(dataset))), lists=True)
            return ConcatDataset([own, [[canary] * examples for canary in canaries]])  # type: ignore[list-item]
        added = [canary for canary in canaries for _ in range(examples)]
        if not isinstance(record, User):
            kept = self._kept(len(dataset) // examples) * examples  # a last unit may be shorter
            return ConcatDataset([_Own(dataset, range(kept)), added])  # type: ignore[list-item]
        of = [int(user) for user in getattr(dataset, str(record.user_attribute))]
        users = [*dict.fromkeys(of)]
        staying = {*users[: self._kept(len(users))]}
        positions = [position for position, user in enumerate(of) if user in staying]
        found: Dataset = ConcatDataset([_Own(dataset, positions), added])  # type: ignore[list-item]
        first = max(users, default=0) + 1
        setattr(
            found,
            str(record.user_attribute),
            [of[position] for position in positions] + [first + which for _, which, _ in added],
        )
        return found

    def _kept(self, records: int) -> int:
        return records - self.count if self.replacing else min(records, _OTHERS)

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
    return next(one for one in trainer.callbacks if isinstance(one, PrivacyCallback)).current_plan  # type: ignore[attr-defined]


@lru_cache(maxsize=256)
def _length(group: Group) -> float:
    """LENGTH, if the group's clip rule lets such a canary contribute all but the most, or else the length that
    contributes the most. Norms count as 0.1 % longer, since they are never taken for too small."""
    lengths = _LENGTHS * group.S
    contributed = (
        unbounded_clip_factors(group.clip_rule, 1.001 * lengths, torch.tensor(group.S).double()) * lengths
    ).clamp(max=group.S)
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
    """Collates a chunk of records with the user's `collate_fn`; of canaries, only their numbers and values."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[Any, int, float]]) -> tuple[Any, Tensor | None, Tensor | None]:
        records, which, values = zip(*items, strict=True)
        if which[0] == _NONE:
            return self._collate(list(records)), None, None
        return None, torch.tensor(which), torch.tensor(values, dtype=torch.float64)


class Attack:
    """Adds up what is released in each coordinate, in the combination that has the least noise. Where noise is
    correlated by plan it is undone first, and where samples come round, whose turn it is is known.

    Attributes:
        noise: [P, blanks] of each round, group and vector, in units of what was planned.
    """

    def __init__(self) -> None:
        self.noise: list[Array] = []
        self._rows: dict[tuple[int, int], Array] = {}
        self._adds: dict[tuple[int, int], tuple[float, NDArray[np.bool_]]] = {}
        self._sums, self._expected = np.zeros((2, 1))

    def add(self, t: int, g: int, group: Group, released: Array, difference: float, there: NDArray[np.bool_]) -> None:
        """Takes `released` [J, D] of a group's vectors in round t, to whose sum over J an included canary adds S √J
        times `difference`, if it was `there` [D]."""
        self._rows[t, g] = released / group.sigma
        self._adds[t, g] = difference * group.S / group.sigma, there
        past = [(i, c) for i, c in enumerate(group.bands) if (t - i, g) in self._rows]
        row = np.sum([c * self._rows[t - i, g] for i, c in past], axis=0)
        self.noise.append(row[:, -_BLANK:].astype(np.float32))
        for i, c in past:
            adds, those = self._adds[t - i, g]
            self._sums = self._sums + adds * c * those * row.sum(0) / math.sqrt(len(row))
            self._expected = self._expected + (adds * c) ** 2 * those
        self._rows.pop((t - len(group.bands) + 1, g), None)
        self._adds.pop((t - len(group.bands) + 1, g), None)

    def end(self, canaries: int, now: PrivacyPlan, t: int) -> None:
        """Nothing is to be done at a round's end."""

    def scores(self, canaries: int) -> Array:
        """The attacker's [m], in which an included canary counts 1 more than another on average."""
        found: Array = (self._sums / self._expected)[:canaries]
        return found

    def checks(self, level: float) -> list[Check]:
        """Of the noise."""
        noise = np.concatenate(self.noise)
        return [noise_scale(noise, level), noise_reuse(noise, level)]


class Contributions:
    """Counts the canaries that a sample has, and measures what they contribute, where noise hides neither."""

    def __init__(self) -> None:
        self._round: list[tuple[str, Array, float]] = []
        self._drawn, self._chances, self._expected = 0, 0, 0.0
        self._often, self._most, self._planned = np.zeros(0, dtype=np.int64), 0, 0  # in how many rounds of an epoch
        self._found: dict[str, list[Array]] = {}
        self._errors: dict[str, list[Array]] = {}

    def add(self, t: int, g: int, group: Group, released: Array, difference: float, there: NDArray[np.bool_]) -> None:
        """As `Attack.add`."""
        values = math.copysign(1, difference) * released.sum(0) / (group.S * math.sqrt(len(released)))
        self._round.append((group.name, values, _error(values)))

    def end(self, canaries: int, now: PrivacyPlan, t: int) -> None:
        """Takes what was added since the last round's end, of round t of the plan."""
        weights = np.array([1 / error**2 for _, _, error in self._round])
        together = weights @ np.stack([values for _, values, _ in self._round]) / weights.sum()
        drawn = together[:canaries] > 0.5
        self._drawn, self._chances = self._drawn + int(drawn.sum()), self._chances + canaries
        self._expected += canaries * now.sampling.q
        if now.sampling.drawn_with is not None:
            is_cyclic = isinstance(now.sampling, CyclicPoisson)
            epoch = now.sampling.rounds_apart if is_cyclic else int(now.sampling.rounds_per_epoch)
            there = together[:canaries] > max(0.5, _CERTAIN * _error(together))
            self._often = there + (self._often if t % epoch else 0)
            self._most, self._planned = (
                max(self._most, int(self._often.max())),
                getattr(now.sampling, "num_selected", 1),
            )
        for name, values, error in (*self._round, ("", together, _error(together))):
            self._found.setdefault(name, []).append(values[:canaries][drawn])
            self._errors.setdefault(name, []).append(np.full(int(drawn.sum()), error))
        self._round.clear()

    def checks(self, level: float) -> list[Check]:
        """Of the rate of inclusion, of a record's rounds in an epoch, and of each group's contributions."""
        q = self._expected / self._chances
        found = [rate_of_inclusion(self._drawn, self._chances, q, level)] if q < 1 else []
        found += [participations(self._most, self._planned)] if self._planned else []
        for name in self._found:
            values, errors = np.concatenate(self._found[name]), np.concatenate(self._errors[name])
            count = len(values)
            if count and name:
                error = math.sqrt((errors**2).mean() / count)
                found.append(contribution(f"contribution to {name}", float(values.mean()), error, level))
            elif count:  # one record that counts twice
                found.append(contribution("largest contribution", float(values.max()), errors.max(), level / count))
        return found


def _error(values: Array) -> float:
    """The standard deviation of the noise; a small positive number where there is no noise."""
    return max(float(values[-_BLANK:].std()), float(np.finfo(float).eps))
