"""Several processes that train one model as one would, each with a part of every sample.

All draw the same sample, from one key that the first process makes and sends to the others, and for each record of it
which process takes it and clips it by itself. So what a record contributes, and how far it moves the sum, is as in one
process. The parts are added up in the first process, which writes the round into the ledger, tells the others that it
is there, adds the noise, once, to the whole sum, and hands out what is released. No other process ever holds more than
its own part of a sum that has no noise, and none holds a release whose round is not in the ledger. Since all are handed
the same bits, and begin with the same ones, their weights stay equal; this is compared every round.
"""

import hashlib
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import Dataset, Subset, TensorDataset

from dpexp._lightning_compat import has_comm_hook, start_method, syncs_batch_norm
from dpexp._torch_compat import tree_leaves
from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SamplingEvent
from dpexp.accounting.ledger.events import Query
from dpexp.errors import ConfigError, is_own
from dpexp.privacy.checks import bits_of, digest_as_integer
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan

_AT_ONCE = 2**22  # numbers that are sent together
_LOOKED_AT = 32  # records, to see whether all processes have the same
_WORDS = 5000
LOST = (
    "another process of this training ended, so that this one does too; its own words say why. The ledger has every "
    "round that was released."
)


class Processes:
    """Those that train together; by default one alone, which then exchanges nothing.

    Args:
        device: of what is exchanged.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.count = rank, count
        self._device = device or torch.device("cpu")

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Processes":
        return cls(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)

    @property
    def is_main(self) -> bool:
        """Whether this one writes the ledger and adds the noise."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        return self.count == 1

    def refuse_several_processes(self, why: str) -> None:
        """Raises ConfigError: there are several, where that is of no use."""
        if not self.is_single:
            raise ConfigError(f"{why}, and there are {self.count}; train in one.")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """What goes wrong in one process meanwhile ends all of them.

        Raises:
            ConfigError: of another process, with what it says.
        """
        if self.is_single:
            yield
            return
        wrong: Exception | None = None
        try:
            yield
        except Exception as error:
            wrong = error
        if any(failed for (failed,) in self.gathered([wrong is not None])):
            said: list[Any] = [None] * self.count
            with _lost():
                dist.all_gather_object(said, None if wrong is None else _words(wrong))
            if wrong is None:
                rank, (own, words) = next((rank, told) for rank, told in enumerate(said) if told is not None)
                # what is not dpexp's own sentence may quote a record, and says so by its cause
                raise ConfigError(f"process {rank} of {self.count} stopped: {words}") from (
                    None if own else RuntimeError(words)
                )
        if wrong is not None:
            raise wrong

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """The whole numbers of each process, of 64 bits."""
        own = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device=self._device)
        if self.is_single:
            return [own.tolist()]
        every = [torch.empty_like(own) for _ in range(self.count)]
        with _lost():
            dist.all_gather(every, own)
        return torch.stack(every).tolist()

    def assert_equal(self, **digests: int) -> None:
        """
        Raises:
            ConfigError: a number is not the same in all processes.
        """
        every = self.gathered([*digests.values()])
        for k, what in enumerate(digests):
            if len({numbers[k] for numbers in every}) > 1:
                raise ConfigError(_DIFFER[what])

    def broadcast_object(self, what: Any = None) -> Any:
        """What the first process tells the others; it has to be small."""
        box = [what]
        if not self.is_single:
            with _lost():
                dist.broadcast_object_list(box, 0, device=self._device)
        return box[0]

    def share(self, stream: KeyStream) -> None:
        """Gives all processes the first one's key, from memory to memory."""
        stream.key = self.broadcast_object(stream.key)

    def reduce_to_main(self, sums: Mapping[str, Tensor]) -> None:
        """Adds the other processes' parts to the first one's tensors, which alone is sent them: a reduction would pass
        sums of several through the others."""
        if not self.is_single:
            self._in_turn([*sums.values()], self._gather)

    def broadcast(self, released: Mapping[str, Tensor]) -> None:
        """Gives all processes what the first one's tensors hold."""
        if not self.is_single:
            self._in_turn([*released.values()], lambda flat: dist.broadcast(flat, 0))

    def _gather(self, flat: Tensor) -> None:
        every = [torch.empty_like(flat) for _ in range(self.count)] if self.is_main else None
        dist.gather(flat, every, 0)
        for other in (every or [])[1:]:
            flat += other

    def _in_turn(self, tensors: Sequence[Tensor], exchange: Any) -> None:
        for some in _parcels(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in some]).to(self._device)
            with _lost():
                exchange(flat)
            for tensor, part in zip(some, flat.split([tensor.numel() for tensor in some]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _parcels(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device after another, about as many numbers as are sent together."""
    parcel: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda tensor: (str(tensor.dtype), str(tensor.device))):  # stable
        kind = (tensor.dtype, tensor.device)
        if parcel and ((parcel[0].dtype, parcel[0].device) != kind or sum(t.numel() for t in parcel) >= _AT_ONCE):
            yield parcel
            parcel = []
        parcel.append(tensor)
    if parcel:
        yield parcel


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        raise ConfigError(LOST) from None


def _words(error: Exception) -> tuple[bool, str]:
    """Whether it is a sentence of dpexp's own, and what it says."""
    text = " ".join(str(error).split())[:_WORDS]
    named = isinstance(error, ConfigError)
    return named and is_own(error), text if named else f"{type(error).__name__}: {text}"


# What must be the same everywhere

_DIFFER = {
    "plan": "the processes have different plans, so that none would hold; give all of them the same configuration.",
    "records": "data: the training sets of the processes hold other records, or in another order, so that a record "
    "could be in one sample twice; split and shuffle them by a fixed seed, such as pl.seed_everything(0).",
    "step": "model: the processes found different steps, so that no one model would be trained; what training_step "
    "reads must be the same in every process.",
    "sample": "data: the processes drew different samples, so that sampling is not what is accounted; their training "
    "sets must have the same length.",
    "weights": "model: the processes' weights differ, which releases leave equal; whatever else changes them "
    "(a callback, a hook, an optimizer that draws random numbers) must do the same in every process.",
}


def digest_of_plan(plan: PrivacyPlan) -> int:
    """Of all that it says; functions count by name."""
    return digest_as_integer(re.sub(r" at 0x\w+", "", repr(plan)).encode())


def digest_of_rows(rows: Sequence[int]) -> int:
    """Of which records a sample holds, in which order."""
    return digest_as_integer(np.asarray(rows, dtype=np.int64).tobytes())


def digest_of_records(dataset: Dataset, examples: Any = None) -> int:
    """Of the tensors of a TensorDataset, of the places of a Subset, else of some of a data set's records, evenly
    spread; what is random about them is drawn from a fixed seed.

    Args:
        examples: which of them each record has; None: one each.
    """
    size = len(dataset)  # type: ignore[arg-type]
    seen = hashlib.sha256(pickle.dumps((size, examples)))
    if type(dataset) is TensorDataset:
        for tensor in dataset.tensors:
            seen.update(bits_of(tensor))
        return digest_as_integer(seen.digest())
    if type(dataset) is Subset:
        seen.update(np.asarray(dataset.indices, dtype=np.int64).tobytes())
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([]):
            for k in range(min(size, _LOOKED_AT)):
                random.seed(0), np.random.seed(0), torch.manual_seed(0)  # type: ignore[func-returns-value]
                try:
                    leaves = tree_leaves(dataset[k * size // min(size, _LOOKED_AT)])
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # of a record that cannot be fetched
                    leaves = [type(error).__name__]
                for leaf in leaves:
                    seen.update(bits_of(leaf))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return digest_as_integer(seen.digest())


# Lightning's strategies


def take_over(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Lets Lightning's DDPStrategy start and connect processes, but not average gradients: the module is not wrapped
    into DistributedDataParallel, whose hooks do that. The first process's weights and buffers go to all.

    Raises:
        ConfigError: another strategy, or something that only that wrapper could honour.
    """
    strategy = trainer.strategy
    if isinstance(strategy, SingleDeviceStrategy):
        return
    name = type(strategy).__name__
    if type(strategy) is not DDPStrategy:
        raise ConfigError(f"trainer.strategy={name} cannot be honoured: {REASONS.get(name, OTHERS)}.")
    if start_method(strategy) != "popen":
        raise ConfigError(
            f"trainer.strategy=ddp_{start_method(strategy)} trains in processes of which the one that began it learns "
            "nothing, ε included; choose ddp."
        )
    if syncs_batch_norm(strategy):
        raise ConfigError("trainer.sync_batchnorm=true mixes the records of all processes; leave it out.")
    if has_comm_hook(strategy):
        raise ConfigError(
            "trainer.strategy: a DDPStrategy with a ddp_comm_hook changes how gradients are averaged, and here clipped "
            "sums are added up instead; leave it out."
        )

    def configure() -> None:
        processes = Processes.of(trainer)
        kept = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        processes.broadcast({name: tensor.detach() for name, tensor in kept.items()})

    strategy.configure_ddp = configure  # type: ignore[method-assign]


def give_back(trainer: pl.Trainer) -> None:
    """What `take_over` has taken: the strategy may train again."""
    trainer.strategy.__dict__.pop("configure_ddp", None)


OTHERS = "only ddp, where every process holds the whole model, adds up clipped sums; choose ddp"
_SHARDED = (
    "it gives each process a part of every weight, so that none could tell a record's norm before all have spoken; "
    "choose ddp (docs/fsdp.md says what it would take)"
)
REASONS = {"FSDPStrategy": _SHARDED, "ModelParallelStrategy": _SHARDED, "DeepSpeedStrategy": _SHARDED}


class SharedLedger:
    """A ledger that the first process writes. The others learn of each round when it is in the file, and count it too.

    Args:
        begin: opens the file; called in the first process only.
    """

    def __init__(self, processes: Processes, begin: Callable[[], LedgerWriter]) -> None:
        self._processes = processes
        self._writer: LedgerWriter | None = None
        with processes.fail_together():
            if processes.is_main:
                self._writer = begin()
        found: Ledger = processes.broadcast_object(self._writer.ledger if self._writer else None)
        self._adjacency, self._counts, self._exposed = found.adjacency, Counter(found.rounds), found.not_private_reason
        self._sampling: SamplingEvent | None = None
        self._queries: list[Query] = []

    @property
    def ledger(self) -> Ledger:
        """What has been committed so far."""
        return Ledger(self._adjacency, dict(self._counts), not_private_reason=self._exposed)

    @property
    def position(self) -> dict[str, Any] | None:
        """See `LedgerWriter`; None in processes that write neither ledger nor checkpoint."""
        return self._writer.position if self._writer else None

    def sample(self, event: SamplingEvent) -> None:
        self._sampling, self._queries = event, []
        if self._writer:
            self._writer.sample(event)

    def query(self, event: Query) -> None:
        self._queries.append(event)
        if self._writer:
            self._writer.query(event)

    def commit(self) -> None:
        """Returns when the round is in the file, in every process.

        Raises:
            ConfigError: it is not, in every process.
        """
        with self._processes.fail_together():
            if self._writer:
                self._writer.commit()
        if self._sampling is None:
            raise RuntimeError("a round needs a sampling event.")
        self._counts[Round(self._sampling, tuple(self._queries))] += 1
        self._sampling = None

    def not_private(self, reason: str) -> None:
        """See `LedgerWriter`."""
        self._exposed = self._exposed or reason
        if self._writer:
            self._writer.not_private(reason)

    def sync(self) -> None:
        if self._writer:
            self._writer.sync()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def ledger_of(processes: Processes, begin: Callable[[], LedgerWriter]) -> LedgerWriter | SharedLedger:
    return begin() if processes.is_single else SharedLedger(processes, begin)
