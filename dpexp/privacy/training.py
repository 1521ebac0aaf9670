"""The rounds of a private training, whichever loop runs them: a Lightning Trainer, or a plain PyTorch loop."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpexp._torch_compat import is_compiled
from dpexp._transformers_compat import trained_privately
from dpexp.accounting.coverage import check_covered, check_delta
from dpexp.accounting.ledger import LedgerWriter
from dpexp.accounting.sampling import event_of
from dpexp.errors import ConfigError, positive_integer
from dpexp.privacy import refusals
from dpexp.privacy.distributed import Processes, SharedLedger, collectives_refused, digest_of_plan, ledger_of
from dpexp.privacy.dry_run import dry_run
from dpexp.privacy.gradients.per_example import undisturbed
from dpexp.privacy.gradients.step import Step
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.normalization import (
    RunningNorm,
    private_norm_layers,
    refuse_unreleased,
)
from dpexp.privacy.physical_batch import CPU_BATCH, FIRST_ON_GPU
from dpexp.privacy.plan.adaptive_clipping import AdaptiveState
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import prepare
from dpexp.privacy.private_metrics import UNCLIPPED, MetricEstimates, say_dropped
from dpexp.privacy.round import Performance, PrivateRound
from dpexp.privacy.running_epsilon import RunningEpsilon
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader
from dpexp.privacy.sampling.padding import lengths_for
from dpexp.privacy.state_checks import digest_of_weights


class DryRunDone(Exception):
    """The dry run has found no mistake in the step, and the training ends before its first round."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step


class PrivateTraining:
    """Carries out a plan round by round; see `PrivacyCallback` and `Private`, which run it, for the arguments."""

    def __init__(
        self,
        plan: PrivacyPlan,
        ledger: str | Path,
        *,
        delta: float | None = None,
        accountant: str = "pld",
        max_physical_batch_size: int | None = 256,
        compile: bool | None = None,
        memory: str = "usual",
        noise_seed: int | None = None,
        unsafe_diagnostics: bool = False,
        not_private_reason: str | None = None,
        pad_to: Sequence[int] | None = None,
    ) -> None:
        if max_physical_batch_size is not None:
            positive_integer("trainer.max_physical_batch_size", max_physical_batch_size)
        if memory not in ("usual", "low"):
            raise ConfigError(f"trainer.memory={memory} must be usual or low.")
        if memory == "low" and compile:
            raise ConfigError("trainer.memory=low does not compile the step; leave trainer.compile at auto or false.")
        delta = plan.delta if delta is None else delta
        if delta is not None:
            check_delta(delta)
            check_covered(type(plan.sampling), plan.adjacency, accountant)
        self.plan, self.delta, self.accountant = plan, delta, accountant
        self.ledger_path = Path(ledger)
        self.readings = RunningEpsilon(plan, delta, accountant) if delta is not None else None
        self.max_physical_batch_size = max_physical_batch_size
        self.compile, self.compiling = compile, ""  # the decision and its reason
        self.memory = memory
        self.unsafe_diagnostics = unsafe_diagnostics
        for length in pad_to or ():
            positive_integer("data.pad_to", length)
        self.pad_to = pad_to
        self.dry_run_only = False
        self.estimates = MetricEstimates()
        self.adaptive_state = AdaptiveState(plan.adaptive) if plan.adaptive else None
        self.rounds_done = 0
        self._noise_seed = noise_seed
        reasons = {"the noise seed is known": noise_seed is not None, "unsafe diagnostics": unsafe_diagnostics}
        own = "; ".join(reason for reason, holds in reasons.items() if holds)
        self._not_private_reason = not_private_reason or own or None
        self._position: dict[str, Any] | None = None  # in the ledger, of the checkpoint resumed from
        self._preprocessed = 0  # completed preprocessing steps
        self._preprocessing: Iterator[None] = iter(())
        self._sample_pending = False  # a sample was drawn but not processed
        self._released = False  # in this round
        self._until_closed = ExitStack()  # undoes replacements
        self._indicators = torch.zeros(0)  # released averages for adaptive clipping
        self._metrics: dict[str, float] = {}  # released in this round
        self._has_metrics = any(group.is_metric for group in plan.groups)
        self._norm_layers: list[RunningNorm] = []
        self._rounds_lost = 0  # rounds in the ledger less those that are counted here, at a resume
        self._search_batch_size = False
        self._rounds: RoundLoader | None = None
        self._ledger: LedgerWriter | SharedLedger | None = None
        self._processes = Processes()
        self._engine: PrivateRound | None = None

    @property
    def current_plan(self) -> PrivacyPlan:
        """The plan of the current round, or of the next one between rounds."""
        plan = self.plan.at_round(self.rounds_done)
        return self.adaptive_state.plan_of_round(plan) if self.adaptive_state else plan

    @property
    def ledger_opened(self) -> bool:
        """Whether a ledger was opened."""
        return self._ledger is not None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to resume; its rounds are on disk."""
        if self._ledger is not None:
            self._ledger.sync()
        position = self._ledger.position if self._ledger is not None else self._position
        multipliers = self.adaptive_state.multipliers if self.adaptive_state else []
        return {
            "completed": self.rounds_done, "prepared": self._preprocessed, "ledger": position, "bounds": multipliers,
            "values": self.estimates.history, "compiled": self.compile,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from what `state_dict` returned."""
        self.rounds_done, self._position = state_dict["completed"], state_dict.get("ledger")
        self._preprocessed = state_dict["prepared"]
        self.estimates = MetricEstimates(state_dict["values"])
        if self.adaptive_state:
            self.adaptive_state.restore(state_dict["bounds"])
        if self.compile is None:
            self.compile = state_dict["compiled"]
        self._ledger = None

    def _begin(
        self, module: nn.Module, loader: Any, processes: Processes, resumed_from: Any, check: Callable[[], None]
    ) -> None:
        """Opens the ledger and prepares the rounds; nothing is released.

        Args:
            loader: of the training set; its data set, collation and workers are used.
            resumed_from: the checkpoint, for messages; None: the training begins, or goes on where this object stands.
            check: refuses more, in all processes together.
        """
        self._processes = processes
        if goes_on := resumed_from is None and self._ledger is not None:
            resumed_from, self._position = self.ledger_path, self._ledger.position or {}  # the main process has one
        sampling, dealing, noise, randomness = streams = [KeyStream() for _ in range(4)]
        self._until_closed.enter_context(trained_privately(module))
        device = device_of(module)
        if any(map(is_compiled, module.modules())):
            warnings.warn(
                "model: torch.compile is not used in private rounds, which run a graph of the whole step; "
                "trainer.compile (compile=True) compiles that graph."
            )
        refusals.warn_of_noise(self.plan)
        max_records = self.max_physical_batch_size or (FIRST_ON_GPU if device.type == "cuda" else CPU_BATCH)
        with processes.fail_together():
            refusals.refuse_mixing_layers(module)
            refusals.refuse_not_finite(module)
            check()
            if self.memory == "low":
                refusals.refuse_low_memory(device)
            if self.unsafe_diagnostics:
                processes.refuse_several_processes("diagnostics=unsafe shows one process's records")
            refuse_unreleased(module, self.plan)
            refusals.refuse_other_sizes(module, self.plan)
            self._norm_layers = [*private_norm_layers(module)]
            pad_to = lengths_for(module) if self.pad_to is None else self.pad_to
            rounds = RoundLoader(loader, self.plan, max_records, sampling, randomness, processes, dealing, pad_to)
            self._engine = PrivateRound(
                self.plan, module, GaussianNoise(noise), self.unsafe_diagnostics, self.adaptive_state, processes,
                Performance(
                    max(1, max_records // self.plan.privacy_unit.max_examples_in_round),
                    self.compile if self.compile is not None or processes.is_single else False,
                    self.memory == "low",
                ),
                rounds.memory,
            )  # fmt: skip
            if resumed_from is not None and self._position is None:
                raise ConfigError(refusals.NO_POSITION.format(checkpoint=resumed_from, ledger=self.ledger_path))
        processes.assert_equal(plan=digest_of_plan(self.plan), records=rounds.digest)
        header = (
            self.plan.adjacency, self.plan.sampling_events(), resumed_from is not None, self._position,
            self._not_private_reason, self.plan.privacy_unit.to_header(), self.plan.part,
        )  # fmt: skip
        self._ledger = ledger_of(processes, lambda: LedgerWriter(self.ledger_path, *header))
        self._position = None  # where it stands is in the ledger now
        begun, completed = self._ledger.ledger.training_rounds, self.rounds_done
        self.rounds_done = self.plan.resumed_at(completed, self._ledger.ledger)
        if self.rounds_done > completed:
            left = self.plan.rounds - self.rounds_done
            then = f"a new epoch begins, and {left} rounds are left" if left else "no epoch is left; training ends"
            warnings.warn(
                f"sampling={self.plan.sampling.name}: the interrupted epoch's samples cannot be drawn again, and ε "
                f"counts the whole epoch, so {self.rounds_done - completed} rounds are lost; {then}."
            )
        if goes_on and self.rounds_done >= self.plan.rounds:
            warnings.warn(
                f"the plan's {self.plan.rounds} rounds are done, so that nothing more is trained: one loop over "
                "private.rounds, or one fit, trains all of them. More rounds need a plan of more."
            )
        if self.readings:
            self.readings.begin(self._ledger.ledger, self.rounds_done)
        if self._noise_seed is not None:
            own = "randomness" if processes.is_main else f"randomness of process {processes.rank}"
            for purpose, stream in zip(("sampling", "dealing", "noise", own), streams, strict=True):
                stream.key = KeyStream.known(self._noise_seed, purpose, begun).key
        processes.share(sampling)
        processes.share(dealing)
        if self.plan.before_training and not self.dry_run_only:
            self._preprocessing = prepare(
                module, self.plan, loader, max_records, self._ledger, noise, randomness, self._preprocessed, processes
            )
        self._rounds, rounds.sampler.completed = rounds, self.rounds_done
        self._rounds_lost = begun - self.rounds_done
        self._search_batch_size = self.max_physical_batch_size is None and device.type == "cuda"

    def _preprocess(self) -> None:
        for _ in self._preprocessing:
            self._preprocessed += 1

    def _begin_round(self) -> None:
        if self.rounds_done >= self.plan.rounds:
            raise ConfigError(f"the plan's {self.plan.rounds} rounds are spent; training beyond them is refused.")
        self._sample_pending, self._released = True, False

    def _sum_sample(self, step: TrainingStep) -> None:
        """Adds up the clipped gradients of the round's sample."""
        assert self._rounds and self._engine
        if not self._sample_pending:
            raise ConfigError("a round's sample was processed twice, or outside of its round; each time is a release.")
        if self._engine.plan is not self.plan:
            raise ConfigError("the plan was replaced during training; begin another training with the other plan.")
        self._sample_pending = False
        engine, device, step_digest = self._engine, self._engine.device, 0
        with self._processes.fail_together(), collectives_refused():
            if self._search_batch_size and (largest := self._largest_fitting_batch(step)) is not None:
                self._rounds.sampler.max_physical_batch_size = largest
            self._search_batch_size = False
            if engine.step.mode is None:
                self._dry_run(step)
                if self.dry_run_only:
                    raise DryRunDone(engine.step)
                step_digest = engine.step.digest
            else:
                engine.step.trace_again(step, self._rounds.epoch_began == self.rounds_done)
            random = engine.step.is_random or not (self._rounds.only_rows and self._rounds.of_examples)
            with own_randomness(device, self._rounds.randomness) if random else nullcontext():
                sample_digest = self._process_sample(step, device)
        with self._processes.fail_together():
            engine.end()
        if not self._processes.is_single:
            self._processes.assert_equal(
                plan=digest_of_plan(engine.current_plan), step=step_digest, sample=sample_digest,
                weights=digest_of_weights(step.module),
            )  # fmt: skip

    def _dry_run(self, training_step: TrainingStep) -> None:
        assert self._rounds and self._engine
        step = self._engine.step
        step.public = self._public_record()
        refusals.refuse_hooks(training_step.module)
        sampler = self._rounds.sampler
        later, within = (self._in_round(t, sampler.place(t)) for t in (self.plan.rounds - 1, self.rounds_done + 1))
        rounds = self._rounds
        undisturbed(lambda: dry_run(step, rounds, training_step, later, within))
        self._rounds.say_padding()
        refusals.refuse_read_by_hooks(training_step, self._readers(), step.kept)
        self._after_dry_run()
        if training_step.by_user:
            say_dropped(training_step.logged, self.plan)
        self.compile, self.compiling = step.compiling.decided, step.compiling.reason

    def _process_sample(self, step: TrainingStep, device: torch.device) -> int:
        """Adds this process's part of the sample; returns the sample's digest."""
        assert self._rounds and self._engine and self._ledger
        engine = self._engine
        for position, parts in self._rounds.sample(device):
            if position.first:
                epoch = position.epoch + self._rounds_lost
                sampling = self.plan.at_round(self.rounds_done).sampling
                self._ledger.sample(event_of(sampling, self.plan.n, epoch))
                engine.begin(self.rounds_done)
            for records in parts:
                if isinstance(records, FailedRecord):
                    engine.skip(1, records.reason)
                else:
                    engine.add_chunk(step, records.to(device).batch, records.size)
        return position.digest

    def _release(self, module: nn.Module) -> None:
        """Sets each parameter's gradient to the noisy average of the sample's clipped gradients, times its weight."""
        assert self._ledger and self._engine
        released, weight = self._engine.release(self._ledger), self._engine.current_plan.sampling.weight
        if self._has_metrics:
            self._metrics = self.estimates.add(self._engine.current_plan, self.rounds_done + 1, released)
        if self.adaptive_state:
            self._indicators = released[value_key(UNCLIPPED)]
        for layer in self._norm_layers:
            if (key := value_key(str(layer.metric_name))) in released:
                layer.update(released[key] * weight)
        for parameter in module.parameters():
            parameter.grad = None
        for name, trained in self._engine.parameters.items():
            trained.grad = released[name].to(trained.dtype) if name in released else None
            if weight < 1 and trained.grad is not None:
                trained.grad.mul_(weight)
        self._released = True

    def _end_round(self) -> None:
        """Counts a round, after the optimizer's step."""
        assert self._rounds and self._engine and self._released
        if self.adaptive_state:
            self._metrics |= self.adaptive_state.record_and_update(
                self._engine.current_plan, self._indicators, self.rounds_done + 1, self.estimates.history
            )
        self.rounds_done = self._rounds.sampler.completed = self.rounds_done + 1

    def _in_round(self, t: int, place: tuple[int, int]) -> Callable[[], AbstractContextManager]:
        """A context that imitates round `t`, at (epoch, batch) `place`."""
        return nullcontext

    def _public_record(self) -> Any:
        """A batch of one public record; None: there is none."""
        return None

    def _largest_fitting_batch(self, step: TrainingStep) -> int | None:
        """Records of the largest chunk that fits into a GPU's memory; None: it is not sought."""
        return None

    def _readers(self) -> list[tuple[Any, Sequence[str]]]:
        """Objects, and names of their methods, which must not read what a step keeps."""
        return []

    def _after_dry_run(self) -> None:
        """Refuses what would read private values later."""

    def _close(self) -> None:
        self._until_closed.close()
        if self._ledger is not None:
            self._ledger.close()
        if self._rounds is not None:
            self._rounds.close()
        if self._engine is not None:
            self._engine.close()
        self._rounds = self._engine = None


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
