"""Private training in a plain PyTorch loop."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import Ledger, read_ledger
from dpexp.errors import ConfigError, checks_arguments
from dpexp.privacy import refusals
from dpexp.privacy.distributed import Processes
from dpexp.privacy.door import Door
from dpexp.privacy.fit import device_of
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.loader import SealedSample
from dpexp.privacy.training import PrivateTraining
from dpexp.rows import as_dataset


@checks_arguments
class Private(PrivateTraining):
    """Trains any `nn.Module` by DP-SGD, as `plan` says, in your own loop.

        private = dpexp.Private(model, optimizer, plan, "ledger.jsonl")
        for sample in private.rounds(dataset):
            private.step(loss_of, sample)  # loss_of(model, record) -> its loss

    The model satisfies the (ε, δ) of the ledger under the contract of `PrivacyCallback`, with `loss_of` in place of
    `training_step`. If torch.distributed is initialized, all processes train one model, each on a part of every sample.
    To resume, load what `state_dict` returned before the loop.

    Args:
        model: the plan's module.
        optimizer: of the model's parameters; `step` calls it once a round.
        plan: from `make_plan`.
        ledger: path of the ledger file; must not exist unless the training resumes.
        delta: the δ of `epsilon()`; by default the plan's.
        accountant: its name.
        max_physical_batch_size: records processed at once; affects memory and speed only.
        compile: compile a traced step by torch's inductor; None: if that saves at least three times its cost.
        memory: "low" runs a traced step twice, with recomputation and not compiled: slower, and the same sums.
        noise_seed: makes sampling and noise reproducible, and not private towards anyone who knows the seed.
        pad_to: public lengths to which a `collate_fn` that pads pads each record (see `PaddedCollation`).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        ledger: str | Path,
        *,
        delta: float | None = None,
        accountant: str = "pld",
        max_physical_batch_size: int = 256,
        compile: bool | None = None,
        memory: str = "usual",
        noise_seed: int | None = None,
        pad_to: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            plan, ledger, delta=delta, accountant=accountant, max_physical_batch_size=max_physical_batch_size,
            compile=compile, memory=memory, noise_seed=noise_seed, pad_to=pad_to,
        )  # fmt: skip
        self.model, self.optimizer = model, optimizer
        self._sample: SealedSample | None = None  # the present one, until its step

    def __repr__(self) -> str:
        return f"Private: {self.rounds_done} of {self.plan.rounds} rounds done, ledger {self.ledger_path}"

    def rounds(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int = 0
    ) -> "Rounds":
        """One sample a round, for `step`; ends after the plan's rounds. After a `break`, another call goes on.

        Args:
            dataset: of the training records, record i as dataset[i]; or a tuple of arrays or tensors, (X, y), whose
                rows are the records. Their floating-point numbers get the model's dtype.
            collate_fn: makes a batch of one record, as `DataLoader` passes it; by default PyTorch's.
            num_workers: processes that fetch records.

        Raises:
            ConfigError: the model, the optimizer or the data cannot be trained on privately, or a round had no `step`.
        """
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError("private.rounds takes one data set, as the tuple (X, y), and then a collate_fn.")
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
        loader = DataLoader(as_dataset(dataset, dtype), collate_fn=collate_fn, num_workers=num_workers)
        return Rounds(self, self._samples(loader))

    def _samples(self, loader: DataLoader) -> Generator[SealedSample, None, None]:
        if self._fit is not None:
            raise ConfigError("an earlier loop of private.rounds has not ended; go on with it, or call its close().")
        resumed_from = "given" if self.progress.position is not None else None
        self.model.train()
        try:
            processes = Processes.of_torch(device_of(self.model))
            processes.broadcast_state(self.model)
            fit = self._begin(self.model, loader, processes, self._door(), resumed_from, self._check)
            fit.preprocess()
            while self.rounds_done < self.plan.rounds:
                for sample in fit.samples:
                    fit.begin_round()
                    self._sample = sample
                    yield sample
                    if self._sample is not None:
                        raise ConfigError(f"round {self.rounds_done + 1} ended without private.step(loss_of, sample).")
        finally:
            self._sample = None
            self._close()

    def step(self, loss_of: Callable[[nn.Module, Any], Tensor], sample: SealedSample) -> None:
        """One round: releases the sample's average gradient with noise, and lets the optimizer step.

        Args:
            loss_of: the loss of one record, from the model, or a copy of it, and the record as a batch of one. Its
                Python runs only while it is traced: in the first round, and where it, what it reads by name, attributes
                or shapes are new. What it reads besides the model and the record is read then.
            sample: the present one of `rounds`.
        """
        if self._sample is None or sample is not self._sample:
            raise ConfigError("private.step takes the present sample of private.rounds.")
        assert self._fit
        self._sum_sample(self._training_step(loss_of))
        self._fit.release()
        self._optimize()
        self.optimizer.zero_grad()
        self._fit.end_round()
        self._sample = None

    def epsilon(self, delta: float | None = None) -> float:
        """The ε spent so far, at `delta` or the one that was given at first."""
        delta = self.delta if delta is None else delta
        if delta is None:
            raise ConfigError("epsilon needs a delta: private.epsilon(1e-5), or Target(…, delta=1e-5) in the plan.")
        if self._ledger is None and not self.ledger_path.exists():
            return 0.0
        return epsilon(self.ledger, delta, self.accountant)

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._ledger.ledger if self._ledger else read_ledger(self.ledger_path)

    def _training_step(self, loss_of: Callable[[nn.Module, Any], Tensor]) -> TrainingStep:
        return TrainingStep.of(loss_of, self.model)

    def _optimize(self) -> None:
        self.optimizer.step()

    def _door(self) -> Door:
        return Door(self.optimizer)

    def _check(self) -> None:
        refusals.refuse_optimizer(self.optimizer, self.model)


@dataclass
class Rounds(Iterator[SealedSample]):
    """The samples of the rounds that are left, as many as `len` tells a progress bar."""

    _private: Private
    _samples: Generator[SealedSample, None, None]

    def __next__(self) -> SealedSample:
        return next(self._samples)

    def __len__(self) -> int:
        return self._private.plan.rounds - self._private.rounds_done

    def close(self) -> None:
        """Ends the loop, as `break` does if no variable holds the rounds."""
        self._samples.close()
