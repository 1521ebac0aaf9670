"""A fit: a plan's rounds from the opening of the ledger until the loop ends, with their samples, engine and keys.

The order of events, whichever loop runs it (`dpexp.privacy.callback`, `dpexp.privacy.private`):

    Fit(…)                         refuses what cannot be trained on; opens nothing
    open, prepare, preprocess      the ledger, the keys, and one-time releases
    in each round:
        begin_round                one more is allowed
        sum_sample(step)           in the first round, the dry run; then, chunk by chunk of the sample, which has one
                                   chunk at least: the first begins the round in ledger and engine, and each adds
                                   clipped gradients
        release                    the round is in the ledger, then noise is added, then p.grad is set
        (the optimizer's step)
        end_round                  the round counts as done
    close

Read `dpexp.privacy.round` next: it sums a sample's clipped gradients and releases the sums.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.accounting.ledger import LedgerWriter
from dpexp.accounting.sampling import event_of
from dpexp.errors import ConfigError, positive_integer
from dpexp.privacy import refusals
from dpexp.privacy.distributed import Processes, SharedLedger, collectives_refused, digest_of_plan, ledger_of
from dpexp.privacy.dry_run import dry_run
from dpexp.privacy.gradients.per_example import undisturbed
from dpexp.privacy.gradients.step import Step
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.loop import TrainingLoop
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import Keys, own_randomness
from dpexp.privacy.normalization import private_norm_layers, refuse_unreleased
from dpexp.privacy.physical_batch import CPU_BATCH, FIRST_ON_GPU
from dpexp.privacy.plan.adaptive_clipping import AdaptiveState
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import prepare
from dpexp.privacy.private_metrics import UNCLIPPED, MetricEstimates, say_dropped
from dpexp.privacy.round import Performance, RoundEngine
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader
from dpexp.privacy.sampling.padding import lengths_for
from dpexp.privacy.state_checks import digest_of_weights


class DryRunDone(Exception):
    """The dry run has found no mistake in the step, and the training ends before its first round."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step


@dataclass(frozen=True)
class FitOptions:
    """How a fit is carried out; see `PrivacyCallback` for what each option does.

    Raises:
        ConfigError: a value is out of range.
    """

    max_physical_batch_size: int | None = 256
    memory: str = "usual"
    noise_seed: int | None = None
    unsafe_diagnostics: bool = False
    not_private_reason: str | None = None
    pad_to: Sequence[int] | None = None
    dry_run_only: bool = False

    def __post_init__(self) -> None:
        if self.max_physical_batch_size is not None:
            positive_integer("trainer.max_physical_batch_size", self.max_physical_batch_size)
        if self.memory not in ("usual", "low"):
            raise ConfigError(f"trainer.memory={self.memory} must be usual or low.")
        for length in self.pad_to or ():
            positive_integer("data.pad_to", length)

    @property
    def why_not_private(self) -> str | None:
        """Why ε does not cover all that the run shows; None: it does."""
        reasons = []
        if self.noise_seed is not None:
            reasons.append("the noise seed is known")
        if self.unsafe_diagnostics:
            reasons.append("unsafe diagnostics")
        return self.not_private_reason or "; ".join(reasons) or None


@dataclass
class Progress:
    """How far a training has come. A checkpoint keeps all but `why_compiled`.

    Attributes:
        rounds: that are done.
        preprocessed: steps of preprocessing that are done.
        position: where a checkpoint that is resumed from, or an earlier fit, stood in the ledger (see
            `LedgerWriter.position`). None: neither is there, or the ledger knows, which the main process has open.
        estimates: the released metrics.
        adaptive: the clipping norms of an adaptive plan.
        compile: whether the step is compiled; None: it is not decided.
        why_compiled: the reason for that decision, in words.
    """

    adaptive: AdaptiveState | None = None
    compile: bool | None = None
    rounds: int = 0
    preprocessed: int = 0
    position: Mapping[str, Any] | None = None
    estimates: MetricEstimates = field(default_factory=MetricEstimates)
    why_compiled: str = ""

    @classmethod
    def at_start(cls, plan: PrivacyPlan, compile: bool | None) -> "Progress":
        return cls(AdaptiveState(plan.adaptive) if plan.adaptive else None, compile)


@dataclass
class PresentRound:
    """What has happened in a round so far.

    Attributes:
        sample_pending: the sample is drawn but not processed.
        released: the noisy averages are in the parameters' gradients.
        metrics: released in this round, by the name under which they are logged.
        indicators: the released averages for adaptive clipping.
    """

    sample_pending: bool = True
    released: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    indicators: Tensor = field(default_factory=lambda: torch.zeros(0))


class Fit:
    """The rounds of one fit, in the order of events above.

    Args:
        plan: is carried out.
        options: of the user.
        progress: how far the training has come; each round brings it up to date.
        loop: around the rounds; it is asked what it knows of other rounds.
        module: whose parameters are trained.
        processes: that train together, each on a part of every sample.
        loader: of the training set; its data set, collation and workers are used.
        check: refuses more, in all processes together.

    Attributes:
        engine: sums the clipped gradients of a sample, and releases the sums.
        samples: yields one sealed sample a round.
        present: the present round.

    Raises:
        ConfigError: the model, the data or an option cannot be trained on privately.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        options: FitOptions,
        progress: Progress,
        loop: TrainingLoop,
        module: nn.Module,
        loader: Any,
        processes: Processes,
        check: Callable[[], None],
    ) -> None:
        self.plan, self._options, self._progress, self._loop = plan, options, progress, loop
        self._module, self._loader, self.processes = module, loader, processes
        self._keys = keys = Keys()
        self._device = device = device_of(module)
        self._max_records = options.max_physical_batch_size or (FIRST_ON_GPU if device.type == "cuda" else CPU_BATCH)
        with processes.fail_together():
            self._refuse(check)
            pad_to = lengths_for(module) if options.pad_to is None else options.pad_to
            self.samples = RoundLoader(
                loader, plan, self._max_records, keys.sampling, keys.records, processes, keys.dealing, pad_to
            )
            noise, observe = GaussianNoise(keys.noise), options.unsafe_diagnostics
            self.engine = RoundEngine(
                plan, module, noise, observe, progress.adaptive, processes, self._performance(), self.samples.memory
            )
        processes.assert_equal(plan=digest_of_plan(plan), records=self.samples.digest)
        self.present = PresentRound(sample_pending=False)
        self._norm_layers = [*private_norm_layers(module)]
        self._has_metrics = any(group.is_metric for group in plan.groups)
        self._preprocessing: Iterator[None] = iter(())
        self._lost = 0  # rounds that are paid for in the ledger, but whose weights a crash has lost
        self._search_batch_size = options.max_physical_batch_size is None and device.type == "cuda"
        self._ledger: LedgerWriter | SharedLedger

    def _refuse(self, check: Callable[[], None]) -> None:
        module, plan = self._module, self.plan
        refusals.refuse_mixing_layers(module)
        refusals.refuse_not_finite(module)
        check()
        if self._options.memory == "low":
            refusals.refuse_low_memory(self._device)
        if self._options.unsafe_diagnostics:
            self.processes.refuse_several_processes("diagnostics=unsafe shows one process's records")
        refuse_unreleased(module, plan)
        refusals.refuse_other_sizes(module, plan)

    def _performance(self) -> Performance:
        compile = self._progress.compile
        if compile is None and not self.processes.is_single:
            compile = False
        units = max(1, self._max_records // self.plan.privacy_unit.max_examples_in_round)
        return Performance(units, compile, self._options.memory == "low")

    def open(self, path: Path, resumes: bool) -> LedgerWriter | SharedLedger:
        """Opens the ledger, and goes on after the rounds that are done.

        Args:
            resumes: the ledger exists, and the position in `progress` says where a checkpoint stood in it.
        """
        plan, progress, processes = self.plan, self._progress, self.processes
        header = (
            plan.adjacency, plan.sampling_events(), resumes, progress.position, self._options.why_not_private,
            plan.privacy_unit.to_header(), plan.part,
        )  # fmt: skip
        self._ledger = ledger = ledger_of(processes, lambda: LedgerWriter(path, *header))
        progress.position = None  # where it stands is in the ledger now
        begun = ledger.ledger.training_rounds
        progress.rounds = self.samples.sampler.completed = plan.resumed_at(progress.rounds, ledger.ledger)
        self._lost = begun - progress.rounds
        return ledger

    def prepare(self) -> None:
        """Gives all processes the same keys of samples and of dealing, and makes the preprocessing ready.

        The main process alone draws noise, by a key of its own; each process has a key of its own for its records.
        """
        plan, processes, keys = self.plan, self.processes, self._keys
        if self._options.noise_seed is not None:
            keys.make_known(self._options.noise_seed, len(self._ledger.ledger), processes.rank)
        processes.share(keys.sampling)
        processes.share(keys.dealing)
        if plan.before_training and not self._options.dry_run_only:
            self._preprocessing = prepare(
                self._module, plan, self._loader, self._max_records, self._ledger, keys.noise, keys.records,
                self._progress.preprocessed, processes,
            )  # fmt: skip

    def preprocess(self) -> None:
        """Releases what preprocessing needs, step by step."""
        for _ in self._preprocessing:
            self._progress.preprocessed += 1

    def begin_round(self) -> None:
        """Raises ConfigError: the plan's rounds are spent."""
        if self._progress.rounds >= self.plan.rounds:
            raise ConfigError(f"the plan's {self.plan.rounds} rounds are spent; training beyond them is refused.")
        self.present = PresentRound()

    def sum_sample(self, step: TrainingStep) -> None:
        """Adds up the clipped gradients of the round's sample; in the first round, tests the step before.

        With several processes, each adds up its part, and what must be equal is compared.

        Raises:
            DryRunDone: nothing more was asked for.
        """
        if not self.present.sample_pending:
            raise ConfigError("a round's sample was processed twice, or outside of its round; each time is a release.")
        self.present.sample_pending = False
        engine, samples = self.engine, self.samples
        with self.processes.fail_together(), collectives_refused():
            if engine.step.mode is None:
                step_digest = self._test(step)
            else:
                engine.step.trace_again(step, samples.epoch_began == self._progress.rounds)
                step_digest = 0
            # Not only a step may draw random numbers: a data set that computes its records may, and users' examples
            # are chosen at random.
            is_random = engine.step.is_random or not (samples.only_rows and samples.of_examples)
            with own_randomness(engine.device, samples.randomness) if is_random else nullcontext():
                sample_digest = self._add_chunks(step)
        with self.processes.fail_together():
            engine.raise_if_none_contributed()
        if not self.processes.is_single:
            self.processes.assert_equal(
                plan=digest_of_plan(engine.current_plan), step=step_digest, sample=sample_digest,
                weights=digest_of_weights(step.module),
            )  # fmt: skip

    def _test(self, training_step: TrainingStep) -> int:
        """Tests a step before the first round, and decides how it is carried out; returns its digest."""
        step, samples, place = self.engine.step, self.samples, self.samples.sampler.place
        if self._search_batch_size and (largest := self._loop.largest_fitting_batch(training_step)) is not None:
            samples.sampler.max_physical_batch_size = largest
        step.public = self._loop.public_record()
        refusals.refuse_hooks(training_step.module)
        last, following = self.plan.rounds - 1, self._progress.rounds + 1
        in_last = self._loop.in_round(last, place(last))
        in_following = self._loop.in_round(following, place(following))
        undisturbed(lambda: dry_run(step, samples, training_step, in_last, in_following))
        samples.say_padding()
        refusals.refuse_read_by_hooks(training_step, self._loop.readers(), step.kept)
        self._loop.refuse_monitors()
        if training_step.by_user:
            say_dropped(training_step.logged, self.plan)
        self._progress.compile, self._progress.why_compiled = step.compiling.decided, step.compiling.reason
        if self._options.dry_run_only:
            raise DryRunDone(step)
        return step.digest

    def _add_chunks(self, step: TrainingStep) -> int:
        """Adds this process's part of the sample; returns the sample's digest."""
        engine, done = self.engine, self._progress.rounds
        for position, parts in self.samples.sample(engine.device):
            if position.first:
                sampling = self.plan.at_round(done).sampling
                self._ledger.sample(event_of(sampling, self.plan.n, position.first_round + self._lost))
                engine.begin(done)
            for records in parts:
                if isinstance(records, FailedRecord):
                    engine.skip(1, records.reason)
                else:
                    engine.add_chunk(step, records.to(engine.device).batch, records.size)
        return position.digest

    def release(self) -> None:
        """Sets each parameter's gradient to the noisy average of the sample's clipped gradients.

        Released metrics and the statistics of private batch normalization are brought up to date.
        It is multiplied by the sampling policy's weight, which is below 1 for an epoch's last, smaller sample.
        """
        released, progress = self.engine.release(self._ledger), self._progress
        plan = self.engine.current_plan
        weight = plan.sampling.weight
        if self._has_metrics:
            self.present.metrics = progress.estimates.add(plan, progress.rounds + 1, released)
        if progress.adaptive:
            self.present.indicators = released[value_key(UNCLIPPED)]
        for layer in self._norm_layers:
            if (key := value_key(str(layer.metric_name))) in released:
                layer.update(released[key] * weight)
        for parameter in self._module.parameters():
            parameter.grad = None
        for name, trained in self.engine.parameters.items():
            trained.grad = released[name].to(trained.dtype) if name in released else None
            if weight < 1 and trained.grad is not None:
                trained.grad.mul_(weight)
        self.present.released = True

    def end_round(self) -> None:
        """Counts a round, after the optimizer's step."""
        assert self.present.released
        progress = self._progress
        if progress.adaptive:
            self.present.metrics |= progress.adaptive.record_and_update(
                self.engine.current_plan, self.present.indicators, progress.rounds + 1, progress.estimates.history
            )
        progress.rounds = self.samples.sampler.completed = progress.rounds + 1

    def close(self) -> None:
        """Stops loader workers, and deletes the keys of the noise."""
        self.samples.close()
        self.engine.close()


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's parameters."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
