"""The engine of the rounds: sums clipped gradients over the chunks of a sample, then releases the sums with noise.

A fit has one `RoundEngine`. For each sample it does `begin`, `add_chunk` for each chunk,
`raise_if_none_contributed` and `release`:

    sums = Σ_i c_i v^i over the chunks,   released = (sums + α N(0, σ̃²)) / (q n)   (`dpexp.privacy.mechanism`).

*A record that fails is skipped*: it contributes nothing, and the job goes on. An error would end the job, and so tell
that this one record was in the data. It is an error if none has ever contributed, after 64 failures in a fit.

| Case | What happens |
|---|---|
| empty sample | noise is added to zeros, and released |
| a record cannot be fetched or has no loss, or an index or a label is out of range | it is skipped, with a warning |
| the gradient of a record is infinite or NaN | it contributes nothing; a warning if that is so for a whole chunk |
| 64 failures, or n if that is fewer, and no record of the fit ever contributed | the last one's error |
| a group is not released in the round | its sums are dropped |
| the module's trainable parameters are other than at the start | ConfigError |
| the job ends between the ledger's line and the release | the round counts |

Read next: `dpexp.privacy.gradients.step` (how a chunk is processed), `dpexp.privacy.fit` (who calls this).
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.accounting.ledger import LedgerWriter
from dpexp.accounting.sampling import Policy
from dpexp.errors import ConfigError, RecordError, words_of
from dpexp.privacy.distributed import Processes, SharedLedger
from dpexp.privacy.gradients.chunk import Chunk
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.one_at_a_time import LocalTrainer, OneAtATime
from dpexp.privacy.gradients.per_example import undisturbed
from dpexp.privacy.gradients.step import Step
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.mechanism import add_noise, by_parameter
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise
from dpexp.privacy.plan.adaptive_clipping import AdaptiveState
from dpexp.privacy.plan.groups import trainable
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.training_memory import Memory

_MAX_FAILED = 64  # records without a loss, while none ever had one, after which the job ends with an error


@dataclass(frozen=True)
class Performance:
    """Settings of speed: they change time and memory, and a release by rounding only.

    Attributes:
        max_records: processed together; None: the whole sample.
        compile: whether graphs are compiled; None: where that saves time.
        low_memory: a graph runs twice, with recomputation, and is not compiled (`two_runs`).
    """

    max_records: int | None = None
    compile: bool | None = None
    low_memory: bool = False


class RoundEngine:
    """Carries out a plan's mechanisms on a module's gradients and on the metrics of its training step.

    What a record contributes depends on no other.

    Args:
        plan: of the job.
        module: whose parameters are trained.
        noise: the generator.
        observe: keep each chunk's per-record norms and losses in `observations`. They are private.
        adaptive_state: current clip norms of an adaptive plan; by default the initial ones, which then stay.
        processes: that share each sample.
        performance: by default whole samples are processed at once.
        data_memory: where the training set lies in memory, which no graph may reference.

    Attributes:
        parameters: those that are trained, by name; they lie on `device`.
        step: the training step, with its execution mode.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        noise: GaussianNoise,
        observe: bool = False,
        adaptive_state: AdaptiveState | None = None,
        processes: Processes | None = None,
        performance: Performance = Performance(),
        data_memory: Memory | None = None,
    ) -> None:
        self.plan = self.current_plan = plan
        self._processes = processes or Processes()
        self._adaptive = adaptive_state or (AdaptiveState(plan.adaptive) if plan.adaptive else None)
        self._correlated = CorrelatedNoise(noise)
        self._module = module
        self.parameters: dict[str, Tensor] = {**trainable(module)}
        vectors = [vector for group in plan.groups for vector in group.vectors]
        # The dimension of each released value. An audit appends the parameters of its canaries to a value's vector.
        values = {
            v.parameters[0]: v.d - sum(self.parameters[name].numel() for name in v.parameters[1:])
            for v in vectors
            if v.is_value
        }
        self.device = next((p.device for p in self.parameters.values()), torch.device("cpu"))
        self._values = Values(values, next(iter(self.parameters.values()), torch.zeros(())))
        planned = Counter(name for vector in vectors for name in vector.parameters if name not in values)
        _check_is_planned(self.parameters, planned)
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise ConfigError(f"model: the parameter {name} is complex; give its real and imaginary parts as two.")
        self._sums: dict[str, Tensor] = {}
        self._clip = ClippedSums(plan.groups, plan.adaptive, self.parameters, self._values)
        local = plan.privacy_unit.local_training
        training = LocalTrainer(module, self.parameters, self._values, local) if local else None
        alone = OneAtATime(module, self.parameters, self._values, training, self.device)
        self.step = Step(
            module,
            alone,
            clip=self._clip,
            device=self.device,
            usual=usual_rows(plan.sampling, plan.n, performance.max_records),
            sizes=sample_sizes(plan.sampling, plan.n),
            rounds=plan.rounds,
            compile=False if performance.low_memory else performance.compile,
            data=data_memory or Memory(),
            low_memory=performance.low_memory,
        )
        self._succeeded = False
        self._contributed = False  # a record has, in any process
        self._failed = 0
        self._reason_of_failure: Exception | None = None
        self._warned: set[str] = set()
        self.observe = observe
        self.observations: list[dict[str, Tensor]] = []

    def begin(self, t: int = 0) -> None:
        """Begins round t: all sums are zero.

        Raises:
            ConfigError: the module's trainable parameters are no longer those of the plan.
        """
        now = trainable(self._module)
        changed = [name for name in {**now, **self.parameters} if now.get(name) is not self.parameters.get(name)]
        if changed:
            raise ConfigError(
                f"model: {', '.join(sorted(changed))} became trainable, ceased to be, or was replaced during training, "
                "but the plan was made before; train in two jobs, the second from the first one's weights."
            )
        self.current_plan = (
            self._adaptive.plan_of_round(self.plan.at_round(t)) if self._adaptive else self.plan.at_round(t)
        )
        self._sums = {}
        self.observations = []

    def add_chunk(self, training_step: TrainingStep | Callable[[nn.Module, Any], Any], batch: Any, size: int) -> None:
        """Adds one chunk's clipped vectors to the sums. A record whose loss cannot be computed contributes nothing.

        Args:
            training_step: computes the loss of one record; or a function that does, see `TrainingStep.of`.
            batch: the records, stacked: tensors [size, ...] in any nesting of tuples, lists and dicts. Other objects in
                it are shared by all records.
            size: the number of records.

        Raises:
            ConfigError: the batch cannot be split into records, or a parameter changed.
        """
        if not isinstance(training_step, TrainingStep):
            training_step = TrainingStep.of(training_step, self._module)
        chunk = Chunk.of(training_step, batch, size)
        for parameter in self._module.parameters():
            parameter.grad = None
        if self.step.mode is None:
            undisturbed(lambda: self.step.decide(chunk))
        bounds = self._clip.bounds(self.current_plan.groups, self.device)
        for found in self.step.add(chunk, bounds, self._sums):
            if isinstance(found, Exception):
                self.skip(1, found)
            else:
                self._note(found)

    def skip(self, count: int, reason: Exception) -> None:
        """Counts records that contribute nothing, because they could not be fetched or have no loss.

        An error would tell of one record, so there is none as long as any record contributes.

        Raises:
            ConfigError, or `reason`: too many were skipped and none ever contributed.
        """
        self._failed, self._reason_of_failure = self._failed + count, reason
        if "failure" not in self._warned:
            self._warned.add("failure")
            description = f"{type(reason).__name__}: {words_of(reason)}"
            warnings.warn(f"the loss of some records cannot be computed; they contribute nothing: {description}")
        if self._failed >= _MAX_FAILED and self._processes.is_single:
            # No need to wait for the end of the sample; several processes decide there together.
            self.raise_if_none_contributed()

    def raise_if_none_contributed(self) -> None:
        """Refuses a job in which every record fails; to be called at the end of each sample.

        Raises:
            ConfigError, or the last record's error: 64 records failed, or as many as there are, and none ever
                contributed in any process.
        """
        if self._contributed:  # equal in all processes
            return
        counts = self._processes.gathered([self._succeeded, self._failed])
        self._contributed = any(succeeded for succeeded, _ in counts)
        reason = self._reason_of_failure
        enough = min(_MAX_FAILED, self.plan.n)
        if not self._contributed and reason is not None and sum(failed for _, failed in counts) >= enough:
            if isinstance(reason, RecordError):
                raise ConfigError(str(reason)) from reason
            raise reason

    def release(self, ledger: LedgerWriter | SharedLedger) -> dict[str, Tensor]:
        """Writes the sum query events, then returns the noisy averages by parameter or metric key.

        `dpexp.privacy.mechanism` has the formula. With several processes the main one adds the noise, to the sum over
        all of them.
        """
        for group in self.current_plan.groups:
            ledger.query(group.query)
        ledger.commit()
        sums, self._sums = self._clip.zeros() | self._sums, {}
        released = {name: sums[name] for _, _, name in by_parameter(self.current_plan.groups)}
        self._processes.reduce_to_main(released)
        if self._processes.is_main:
            plan = self.current_plan
            add_noise(plan.groups, released, self._correlated, plan.sampling.q * plan.n)
        else:
            released = {name: torch.zeros_like(total) for name, total in released.items()}
        self._processes.broadcast(released)
        return released

    def close(self) -> None:
        """Deletes the noise generators, with their key and unused random numbers."""
        del self._correlated

    def _note(self, found: dict[str, Tensor]) -> None:
        """Counts the records of a chunk that were processed, and warns of those that contribute nothing."""
        size = len(found["loss"])
        failed = int((~found["in_range"]).sum())
        self._succeeded = self._succeeded or failed < size
        if failed:
            self.skip(failed, RecordError("an index or a label is out of range."))
        if size > 1 and "finite" not in self._warned and not bool(found["finite"].any()):
            self._warned.add("finite")
            warnings.warn("no record of a chunk has finite gradients; they contribute nothing.")
        if self.observe:
            norms = {name.replace(":", "/"): value for name, value in found.items() if name.startswith("norm:")}
            self.observations.append({"loss": found["loss"], **norms})


def _check_is_planned(parameters: Mapping[str, Tensor], planned: Counter[str]) -> None:
    """Refuses a model unless each of its trained parameters is in exactly one vector of the plan, and no others are.

    Args:
        planned: in how many vectors of the plan each parameter is.
    """
    odd = sorted(name for name in {**planned, **parameters} if planned[name] != (name in parameters))
    if odd:
        raise ConfigError(
            f"the plan was made for another model: they differ in {', '.join(odd)}; make it for the module as "
            "it is trained, once all that is not trained is frozen."
        )


def sample_sizes(policy: Policy, n: int) -> NormalDist:
    """The distribution of a sample's size, as a normal one."""
    mean = policy.q * n
    return NormalDist(mean, 0.0 if policy.name in ("fixed_size", "shuffle") else math.sqrt(mean * (1 - policy.q)))


def usual_rows(policy: Policy, n: int, limit: int | None = None) -> int:
    """The usual size of a chunk: the mean size of a sample plus two standard deviations, at most `limit`."""
    sizes = sample_sizes(policy, n)
    rows = max(1, math.ceil(sizes.mean + 2 * sizes.stdev - 1e-6))
    return rows if limit is None else min(rows, limit)
