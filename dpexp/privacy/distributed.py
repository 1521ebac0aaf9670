"""Distributed training: several processes train one model, each on a part of every sample.

All processes draw the same sample, by a key from the main process, and the same assignment of its records to processes.
Each record is clipped by one process, so that contributions and sensitivity are those of a single process. The main
process writes the round to the ledger and confirms this to the others; then it adds up the parts, adds the noise once,
and broadcasts the release. No other process ever holds more than its own part of a sum without noise, nor a release
whose round is not in the ledger. All receive the same bits, so that their weights stay equal, which is compared every
round.
"""

import hashlib
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Dataset, Subset

from dpexp._lightning_compat import has_comm_hook, pl, start_method, syncs_batch_norm
from dpexp._torch_compat import tree_leaves, without_process_group
from dpexp.accounting.ledger import Ledger, LedgerWriter, Round
from dpexp.accounting.ledger.events import Query
from dpexp.accounting.sampling import SamplingEvent
from dpexp.errors import ConfigError, in_one_line, is_own
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.fetching import attempt
from dpexp.privacy.state_checks import bits_of, digest_as_integer
from dpexp.rows import PLAIN, PlacedRows

_COMPARED_RECORDS = 32
_MAX_MESSAGE = 5000  # characters
LOST = (
    "another process of this training ended, so this one ends too; the other's message says why. The ledger has every "
    "round that was released."
)


class Processes:
    """The processes of a training; by default a single one, which exchanges nothing.

    Args:
        device: of exchanged tensors.
    """

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.count = rank, count
        self.is_main, self.is_single = rank == 0, count == 1
        self._device = device or torch.device("cpu")

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Processes":
        return cls(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)

    @classmethod
    def of_torch(cls, device: torch.device | None = None) -> "Processes":
        """Those of torch.distributed; a single one if it is not initialized."""
        is_used = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size(), device) if is_used else cls()

    def refuse_several_processes(self, why: str) -> None:
        """Refuses several processes."""
        if not self.is_single:
            raise ConfigError(f"{why}, but there are {self.count}; train in a single process.")

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """An error in one process within this context ends all of them.

        Raises:
            ConfigError: another process failed; has its message.
        """
        if self.is_single:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if any(failed for (failed,) in self.gathered([failure is not None])):
            messages: list[Any] = [None] * self.count
            with _lost():
                dist.all_gather_object(messages, None if failure is None else _message(failure))
            if failure is None:
                rank, (own, text) = next((rank, found) for rank, found in enumerate(messages) if found is not None)
                # A cause marks a message that is not dpexp's own and may quote a record.
                raise ConfigError(f"process {rank} of {self.count} stopped: {text}.") from (
                    None if own else RuntimeError(text)
                )
        if failure is not None:
            raise failure

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """The 64-bit integers of each process."""
        own = torch.tensor([int(number) for number in numbers], dtype=torch.int64, device=self._device)
        if self.is_single:
            return [own.tolist()]
        every = [torch.empty_like(own) for _ in range(self.count)]
        with _lost():
            dist.all_gather(every, own)
        return torch.stack(every).tolist()

    def assert_equal(self, **digests: int) -> None:
        """Raises ConfigError: a digest differs between processes."""
        every = self.gathered([*digests.values()])
        for k, what in enumerate(digests):
            if len({numbers[k] for numbers in every}) > 1:
                raise ConfigError(_DIFFER[what])

    def broadcast_object(self, value: Any = None) -> Any:
        """The main process's object, which must be small."""
        box = [value]
        if not self.is_single:
            with _lost():
                dist.broadcast_object_list(box, 0, device=self._device)
        return box[0]

    def share(self, stream: KeyStream) -> None:
        """Gives all processes the main one's key, from memory to memory."""
        stream.key = self.broadcast_object(stream.key)

    def reduce_to_main(self, sums: Mapping[str, Tensor]) -> None:
        """Adds the other processes' tensors to the main one's. Only the main process receives them: a reduction would
        pass partial sums through the others."""
        for total in () if self.is_single else sums.values():
            own = total.to(self._device).contiguous()
            every = [torch.empty_like(own) for _ in range(self.count)] if self.is_main else None
            with _lost():
                dist.gather(own, every, 0)
            for other in (every or [])[1:]:
                total += other.to(total.device)

    def broadcast(self, released: Mapping[str, Tensor]) -> None:
        """Copies the main process's tensors to all others."""
        for tensor in () if self.is_single else released.values():
            own = tensor.to(self._device).contiguous()
            with _lost():
                dist.broadcast(own, 0)
            tensor.copy_(own)

    def broadcast_state(self, module: nn.Module) -> None:
        """Copies the main process's weights and buffers to all others."""
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.broadcast({name: tensor.detach() for name, tensor in state.items()})


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        raise ConfigError(LOST) from None


def _message(error: Exception) -> tuple[bool, str]:
    """Whether an error is dpexp's own, and its message."""
    text = in_one_line(error)[:_MAX_MESSAGE]
    is_config_error = isinstance(error, ConfigError)
    return is_config_error and is_own(error), text if is_config_error else f"{type(error).__name__}: {text}"


# What must be equal in all processes

_DIFFER = {
    "plan": "the processes have different plans; give all of them the same configuration.",
    "records": "data: the processes' training sets differ in records or order, so that a record could be in one "
    "sample twice; split and shuffle them by a fixed seed, such as pl.seed_everything(0).",
    "step": "model: the processes have different training steps; whatever training_step reads must be equal in every "
    "process.",
    "sample": "data: the processes drew different samples, which the accountant does not cover; their training sets "
    "must have the same length.",
    "weights": "model: the processes' weights differ; what changes them besides releases (a callback, a hook, an "
    "optimizer that draws random numbers) must do the same in every process.",
}


def digest_of_plan(plan: PrivacyPlan) -> int:
    """A digest of the plan; functions count by name."""
    every = [getattr(plan, field.name) for field in fields(plan)]
    return digest_as_integer(re.sub(r" at 0x\w+", "", repr(every)).encode())


def digest_of_rows(rows: Sequence[int]) -> int:
    """A digest of the indices of a sample, in order."""
    return digest_as_integer(np.asarray(rows, dtype=np.int64).tobytes())


def digest_of_records(dataset: Dataset, examples: Any = None) -> int:
    """A digest of a TensorDataset's tensors and of which rows can be used, of a Subset's indices, or else of 32 evenly
    spread records.

    Records are fetched with fixed seeds. examples: the examples of each record; None: one each.
    """
    size = len(dataset)  # type: ignore[arg-type]
    seen = hashlib.sha256(pickle.dumps((size, examples)))
    if type(dataset) is PlacedRows:
        seen.update(bits_of(dataset.usable))
    if type(dataset) in PLAIN:
        for tensor in dataset.tensors:  # type: ignore[attr-defined]
            seen.update(bits_of(tensor))
        return digest_as_integer(seen.digest())
    if type(dataset) is Subset:
        seen.update(np.asarray(dataset.indices, dtype=np.int64).tobytes())
    for k in range(min(size, _COMPARED_RECORDS)):
        with own_randomness(torch.device("cpu"), KeyStream(bytes(32))):
            record = attempt(lambda i: dataset[i], k * size // min(size, _COMPARED_RECORDS))
        for leaf in tree_leaves("failed" if isinstance(record, FailedRecord) else record):
            seen.update(bits_of(leaf))
    return digest_as_integer(seen.digest())


# Lightning's strategies


def disable_gradient_averaging(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Lets a DDPStrategy start and connect processes, but without DistributedDataParallel's gradient averaging.

    The main process's weights and buffers are copied to all.

    Raises:
        ConfigError: another strategy, or an option that needs DistributedDataParallel.
    """
    strategy = trainer.strategy
    if isinstance(strategy, pl.strategies.SingleDeviceStrategy):
        return
    name = type(strategy).__name__
    if type(strategy) is not pl.strategies.DDPStrategy:
        raise ConfigError(f"trainer.strategy={name} is not supported: {REASONS.get(name, OTHERS)}.")
    if start_method(strategy) != "popen":
        raise ConfigError(
            f"trainer.strategy=ddp_{start_method(strategy)} trains in processes that return nothing to the one that "
            "started them, ε included; choose ddp."
        )
    if syncs_batch_norm(strategy):
        raise ConfigError("trainer.sync_batchnorm=true mixes the records of all processes; leave it out.")
    if has_comm_hook(strategy):
        raise ConfigError(
            "trainer.strategy: ddp_comm_hook changes how gradients are averaged, but here clipped sums are added up; "
            "leave it out."
        )

    strategy.configure_ddp = lambda: Processes.of(trainer).broadcast_state(module)  # type: ignore[method-assign]


def restore_strategy(trainer: pl.Trainer) -> None:
    """Undoes `disable_gradient_averaging`."""
    trainer.strategy.__dict__.pop("configure_ddp", None)


OTHERS = "only ddp, where every process has the whole model, adds up clipped sums; choose ddp"
_SHARDED = (
    "it shards weights, so that no process can compute a record's norm by itself; choose ddp, or train "
    "few of its weights (docs/machines.md)"
)
REASONS = {"FSDPStrategy": _SHARDED, "ModelParallelStrategy": _SHARDED, "DeepSpeedStrategy": _SHARDED}


class SharedLedger:
    """A ledger written by the main process; the others count each round once it is in the file.

    Args:
        begin: opens the file; called in the main process only.
    """

    def __init__(self, processes: Processes, begin: Callable[[], LedgerWriter]) -> None:
        self._processes = processes
        self._writer: LedgerWriter | None = None
        with processes.fail_together():
            if processes.is_main:
                self._writer = begin()
        found: Ledger = processes.broadcast_object(self._writer.ledger if self._writer else None)
        self._begun, self._counts = found, Counter(found.rounds)
        self._sampling: SamplingEvent | None = None
        self._queries: list[Query] = []

    @property
    def ledger(self) -> Ledger:
        """The committed rounds."""
        return replace(self._begun, rounds=dict(self._counts))

    @property
    def position(self) -> dict[str, Any] | None:
        """See `LedgerWriter`; None except in the main process."""
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
        """Returns in every process once the round is in the file.

        Raises:
            ConfigError: in every process, if it is not.
        """
        with self._processes.fail_together():
            if self._writer:
                self._writer.commit()
        if self._sampling is None:
            raise RuntimeError("a round needs a sampling event.")
        self._counts[Round(self._sampling, tuple(self._queries))] += 1
        self._sampling = None

    def sync(self) -> None:
        if self._writer:
            self._writer.sync()

    def close(self) -> None:
        if self._writer:
            self._writer.close()


def ledger_of(processes: Processes, begin: Callable[[], LedgerWriter]) -> LedgerWriter | SharedLedger:
    return begin() if processes.is_single else SharedLedger(processes, begin)


_EXCHANGES = (
    "model: training_step exchanges something with other processes ({name}), which would mix their records with its "
    "own; compute a record's loss from that record alone."
)


@contextmanager
def collectives_refused() -> Iterator[None]:
    """Hides other processes in the block; a collective, which would tell them of a record, raises a ConfigError."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return

    def refuse() -> NoReturn:
        raise ConfigError(_EXCHANGES.format(name="a collective"))

    with without_process_group(refuse):
        yield
