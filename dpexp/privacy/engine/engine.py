"""Accumulates clipped sums over the chunks of a sample, and releases them with noise."""

import hashlib
import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError, RecordError, words_of
from dpexp.privacy.adaptive import Bounds
from dpexp.privacy.checks import STATE, StateCheck, StateFound, is_due, same_bits
from dpexp.privacy.correlated import CorrelatedNoise
from dpexp.privacy.engine.chunk import Chunk, records
from dpexp.privacy.engine.clipped_sums import ClippedSums
from dpexp.privacy.engine.graphs import Graphs, LossOf, own_state, random_state, set_random_state
from dpexp.privacy.engine.local import Training
from dpexp.privacy.engine.made_up import PLAIN, MadeUp, public_leaves, signature, smallest_table, tries
from dpexp.privacy.engine.passes import Gradients, VmapPass, gradients_of_one
from dpexp.privacy.engine.precision import full_precision
from dpexp.privacy.engine.slowness import why
from dpexp.privacy.engine.uses import Dense
from dpexp.privacy.engine.whole import WholeNoise, add_whole
from dpexp.privacy.given import Values
from dpexp.privacy.groups import trainable
from dpexp.privacy.mechanism import add_noise, by_parameter
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.processes import Processes
from dpexp.privacy.shared_ledger import SharedLedger
from dpexp.privacy.spectral import spectral_norms_fixed

_NOT_OF_A_RECORD = (torch.OutOfMemoryError, ConfigError)
_OTHERS = 5  # made-up records that are processed between one and the same
_TRACING = 0.02  # of the time
_CHANGES = 3  # of a step, after which it runs as written
_ENOUGH = 64  # records that fail, while none ever contributed, to end a round early

TRACED, VMAP, SINGLE, AUTOGRAD = "traced", "vmap", "one at a time", "one at a time by autograd"


class Engine:
    """Carries out a plan's mechanisms on a module's gradients, and on the values that its step gives for release.

    Per sample: `start`, then `accumulate` for each chunk, then `finish` and `release`. What a record contributes
    depends on no other.

    Args:
        observe: keep each chunk's per-record norms and losses in `observations`. They are private.
        bounds: where those of an adaptive plan have come to; by default they stay where they begin.
        processes: those that have a part of each sample.
        expected: records of a chunk; by default those of a sample.

    Attributes:
        mode: how records are processed, decided before the first of them: `traced`, all by a graph; or as the step is
            written, several under vmap, or one at a time under vmap, or by autograd.
        reason: why they are not traced.
        public: a batch of one public record, on which the step is tried; None: one is made up.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        noise: GaussianNoise,
        observe: bool = False,
        bounds: Bounds | None = None,
        processes: Processes | None = None,
        expected: float | None = None,
        data: Sequence[Tensor] = (),
    ) -> None:
        self.plan = self.now = plan
        self._processes = processes or Processes()
        self._bounds = bounds or (Bounds(plan.following) if plan.following else None)
        self._correlated = CorrelatedNoise(noise)
        self._whole = WholeNoise(noise.stream) if plan.exact else None
        self._module = module
        self._parameters: dict[str, Tensor] = {**trainable(module)}
        vectors = [vector for group in plan.groups for vector in group.vectors]
        values = {v.parameters[0]: v.d - self._numbers(v.parameters[1:]) for v in vectors if v.is_value}
        self._device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._values = Values(values, next(iter(self._parameters.values()), torch.zeros(())))
        planned = {name for vector in vectors for name in vector.parameters} - set(values)
        if planned != set(self._parameters):
            odd = sorted(planned.symmetric_difference(self._parameters))
            raise ConfigError(f"the plan was made for another model: they differ in {', '.join(odd)}.")
        for name, parameter in self._parameters.items():
            if parameter.is_complex():
                raise ConfigError(f"model: the parameter {name} is complex; give its real and imaginary parts as two.")
        self._sums: dict[str, Tensor] = {}
        self._pass = VmapPass(module, self._parameters, self._values)
        joint = self._bounds is not None and self._bounds.joint
        self._clip = ClippedSums(plan.groups, self._bounds is not None, joint, self._values.dtype)
        self._names = [name for _, _, name in by_parameter(plan.groups)]
        expected = expected or plan.sampling.q * plan.n
        self._graphs = Graphs(
            module, self._pass, self._clip, lambda: {name: self._zeros(name) for name in self._names},
            self._device, expected, data,
        )  # fmt: skip
        local = plan.record.local
        self._training = local and Training(module, self._parameters, self._values, local)
        self.mode: str | None = None
        self.reason = ""
        self.public: Any = None
        self._made_up: MadeUp | None = None
        self._check: StateCheck | None = None
        self._template: tuple[list[Any], Any, Any] | None = None  # a made-up record, and settings of a later round
        self._seen: list[Any] = []
        self._rounds_since, self._changes, self._tracing, self._began = 1, 0, 0.0, time.perf_counter()
        self._round = 0
        self._succeeded = False
        self._contributed = False  # a record has, in some process
        self._failed = 0
        self._reason_of_failure: Exception | None = None
        self._said: set[str] = set()
        self.observe = observe
        self.observations: list[dict[str, Tensor]] = []

    @property
    def held(self) -> list[str]:
        """Shapes of tensors that a traced step reads and that are neither parameters nor buffers."""
        return self._graphs.held

    @property
    def digest(self) -> int:
        """Of how records are processed, which is the same in all processes."""
        said = f"{self.mode} {self._graphs.digest()}"
        return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "big")

    def start(self, t: int = 0) -> None:
        """Begins round t's sample: all sums are zero.

        Raises:
            ConfigError: the module's trainable parameters are no longer those of the plan, or have hooks.
        """
        trained: dict[str, Tensor] = {**trainable(self._module)}
        changed = [
            name for name in {**trained, **self._parameters} if trained.get(name) is not self._parameters.get(name)
        ]
        if changed:
            raise ConfigError(
                f"model: {', '.join(sorted(changed))} became trainable, ceased to be, or was replaced during training, "
                "but the plan was made before; train in two jobs, the second from the first one's weights."
            )
        hooked = [name for name, p in self._parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
        if hooked:
            raise ConfigError(
                f"model: {', '.join(hooked)} has hooks on its gradient, which here is never that of a batch; change "
                "the private gradient in on_before_optimizer_step instead."
            )
        self.now = self._bounds.now(self.plan.at(t)) if self._bounds else self.plan.at(t)
        self._sums = {name: self._zeros(name) for name in self._names}
        self.observations = []
        self._round = t
        if self._check is not None and is_due(t):
            for parameter in self._module.parameters():
                parameter.grad = None
            self._check.before()

    def decide(
        self,
        loss_of: LossOf,
        leaves: list[Any],
        structure: Any,
        settings: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Decides for the whole job how records are processed, on made-up ones that look like these.

        Args:
            leaves: [size, ...] of which shapes and types alone are used.
            settings: under which the step must be the same to be traced, as another round's.

        Raises:
            StateFound: the step keeps something of records, or changes a weight.
        """
        weights = {name: p.detach().to("cpu", copy=True) for name, p in self._module.named_parameters()}
        with own_state(self._device), spectral_norms_fixed(self._module):
            self._made_up, error = self._made_up_records(loss_of, leaves, structure)
            if self._made_up is None:
                self.mode, self.reason = VMAP, why(error) if error else "no made-up record has a finite loss"
            elif self._training or self.plan.exact:  # what is rounded otherwise among others may be another integer
                self.mode = AUTOGRAD
            else:
                self._decide(loss_of, leaves, structure, settings)
                few = [leaf[:1] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
                self._template = self._made_up.records(few, 1, 0), structure, settings
                self._seen = self._attributes()
            if self._made_up is not None and self.mode != TRACED:
                self._try_state(loss_of, leaves, structure)
        for name, parameter in self._module.named_parameters():
            if name in weights and not same_bits(weights[name], parameter.cpu()):
                raise StateFound(STATE.format(what=f"{name} is changed inside training_step"))
        self._say_slowness()

    def _decide(
        self, loss_of: LossOf, leaves: list[Any], structure: Any, settings: Callable[[], AbstractContextManager]
    ) -> None:
        assert self._made_up
        try:
            key = signature(leaves, structure)
            odd = self._graphs.settle(loss_of, leaves, structure, key, self._made_up, settings)
            if odd is None:
                self.mode = TRACED
                return
            self.reason = f"the step is not the same each time it runs ({odd})"
        except ConfigError:
            raise
        except Exception as caught:
            self.reason = why(caught)
        for mode, size in ((VMAP, 2), (SINGLE, 1)):
            try:
                self._pass(loss_of, self._made_up.records(leaves, size, 0), structure, size)
            except ConfigError:
                raise
            except Exception as caught:
                self.reason = why(caught)
            else:
                self.mode = mode
                return
        self.mode = AUTOGRAD

    def trace_again(self, loss_of: LossOf, epoch_begins: bool = False) -> None:
        """Sees whether the step of a traced job is still what was traced, where a hook may have changed it: when plain
        attributes of modules changed, at epochs' starts and in rounds 2, 4, 8, …, as far as that takes 2 % of the time.

        A step that has changed is traced and proved; one that changes time and again runs as written from now on.
        """
        if self.mode != TRACED or self._template is None:
            return
        self._rounds_since += 1
        changed = self._attributes() != self._seen
        now = time.perf_counter()
        affordable = self._tracing < _TRACING * (now - self._began)
        if not changed and not ((epoch_begins or self._rounds_since.bit_count() == 1) and affordable):
            return
        leaves, structure, settings = self._template
        assert self._made_up
        for parameter in self._parameters.values():
            parameter.grad = None
        with own_state(self._device), spectral_norms_fixed(self._module):
            odd = self._graphs.changed(loss_of, leaves, structure, self._made_up)
            if odd is not None:
                self._changes += 1
                self._graphs.forget()
                self._decide(loss_of, leaves, structure, settings)
                if self._changes > _CHANGES and self.mode == TRACED:
                    self.mode, self.reason = VMAP, f"hooks change the step time and again ({odd})"
                if self.mode != TRACED:
                    self._try_state(loss_of, leaves, structure)
                    self._say_slowness()
        self._seen = self._attributes()
        self._tracing += time.perf_counter() - now

    def _attributes(self) -> list[Any]:
        """What is plain in the modules: numbers, texts, and short lists of them."""
        return [
            (key, value if not isinstance(value, list) else tuple(value))
            for layer in self._module.modules()
            for key, value in vars(layer).items()
            if _is_plain(value)
        ]

    def _try_state(self, loss_of: LossOf, leaves: list[Any], structure: Any) -> None:
        """Looks for state that a step keeps, on made-up records, and will look again in the rounds.

        Raises:
            StateFound: there is some.
        """
        assert self._made_up
        first, *others = (self._made_up.records(leaves, 1, seed) for seed in range(_OTHERS + 1))
        state = random_state(self._device), random.getstate(), np.random.get_state()

        def probe() -> list[Tensor]:
            before = random_state(self._device), random.getstate(), np.random.get_state()
            _set_random_states(self._device, *state)
            with spectral_norms_fixed(self._module):
                gradients = self._of_one(Chunk(loss_of, first, structure, 1), 0)
            _set_random_states(self._device, *before)
            return [gradients.losses, *(use.dense() for use in gradients.of.values())]

        check = StateCheck(self._module, probe)
        try:
            probe()  # which may fill caches
            check.before()
            for other in others:
                self._of_one(Chunk(loss_of, other, structure, 1), 0)
            check.after(-1)
        except ConfigError:
            raise
        except Exception as error:  # of what an earlier pass has left behind
            raise StateFound(STATE.format(what=f"training_step fails after other records ({why(error)})")) from error
        self._check = check

    def accumulate(self, loss_of: LossOf, batch: Any, size: int) -> None:
        """Adds one chunk's clipped vectors to the sums. A record whose loss cannot be computed contributes nothing,
        unless none ever could.

        Args:
            loss_of: the loss of one record, as a scalar.
            batch: what it is given, stacked over the records: tensors [size, ...] in any nesting of tuples, lists and
                dicts; whatever else the batch holds is the same for all of them.

        Raises:
            ConfigError: the batch cannot be split into records, or a parameter changed.
        """
        leaves, structure = records(batch, size)
        for parameter in self._module.parameters():
            parameter.grad = None
        if self.mode is None:
            self.decide(loss_of, leaves, structure)
        with spectral_norms_fixed(self._module):
            if self.mode == TRACED:
                self._accumulate_traced(loss_of, leaves, structure, size)
            else:
                self._accumulate(Chunk(loss_of, leaves, structure, size))

    def fail(self, count: int, reason: Exception) -> None:
        """Notes records that contribute nothing, because they could not even be fetched, or have no loss.

        Raises:
            ConfigError, or the reason: so many, and none ever contributed.
        """
        self._failed, self._reason_of_failure = self._failed + count, reason
        if "failure" not in self._said:
            self._said.add("failure")
            said = f"{type(reason).__name__}: {words_of(reason)}"
            warnings.warn(f"the loss of some records cannot be computed; they contribute nothing: {said}")
        if self._failed >= _ENOUGH and self._processes.alone:
            self.finish()

    def check_state(self) -> None:
        """Looks, once a round that is checked, whether the step has kept something of the sample's records.

        Raises:
            StateFound: it has.
        """
        if self._check is not None:
            self._check.after(self._round)

    def finish(self) -> None:
        """Ends the sample.

        Raises:
            ConfigError, or what the last record raised: more than one record has failed, and none ever contributed, in
                no process.
        """
        self.check_state()
        if not self._contributed:  # which all processes know alike
            every = self._processes.gathered([self._succeeded, self._failed])
            self._contributed = any(succeeded for succeeded, _ in every)
            failed = sum(failed for _, failed in every)
        if not self._contributed and failed > 1 and self._reason_of_failure is not None:
            reason = self._reason_of_failure
            if isinstance(reason, RecordError):
                raise ConfigError(str(reason)) from reason
            raise reason

    def release(self, ledger: LedgerWriter | SharedLedger) -> dict[str, Tensor]:
        """Writes the sum query events, and only then returns v̂ for each parameter, and each value by its key:
        (Σ_i c_i v^i + α N(0, σ̃²)) / qn. Of several processes the first adds the noise, to the sum of all parts."""
        for group in self.now.groups:
            ledger.query(group.query())
        ledger.commit()
        released = {name: self._sums[name] for _, _, name in by_parameter(self.now.groups)}
        self._sums = {}
        self._processes.add_up(released)
        if self._processes.first:
            released = self._noised(released)
        else:
            kinds = {name: self._kind(name) for name in released}
            released = {n: torch.empty(s.shape, device=kinds[n][0], dtype=kinds[n][1]) for n, s in released.items()}
        self._processes.hand_out(released)
        return released

    def _noised(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._whole:
            return {name: total.to(*self._kind(name)) for name, total in self._whole.released(self.now, sums).items()}
        add_noise(self.now.groups, sums, self._correlated, self.now.sampling.q * self.now.n)
        return sums

    def _numbers(self, parameters: Iterable[str]) -> int:
        return sum(self._parameters[name].numel() for name in parameters)

    def _kind(self, name: str) -> tuple[torch.device, torch.dtype]:
        """Where and in what the sum of a parameter's gradients, or of a value, is computed."""
        of = self._parameters.get(name, self._values)
        return of.device, _summed(of.dtype)

    def _zeros(self, name: str) -> Tensor:
        shape = self._parameters[name].shape if name in self._parameters else (self._values.sizes[name],)
        device, dtype = (torch.device("cpu"), torch.int64) if self._whole else self._kind(name)
        return torch.zeros(shape, dtype=dtype, device=device)

    # How records are processed

    def _made_up_records(
        self, loss_of: LossOf, leaves: list[Any], structure: Any
    ) -> tuple[MadeUp | None, Exception | None]:
        """A way to make records up that have finite losses and gradients; else why there is none."""
        public = public_leaves(self.public, leaves, structure)
        below = smallest_table(loss_of, leaves, structure)
        error: Exception | None = None
        for made_up in tries(below, public):
            try:
                one = Chunk(loss_of, made_up.records(leaves, 1, 0), structure, 1).one(0)
                found, loss = gradients_of_one(loss_of, one, self._parameters, self._values)
            except ConfigError:
                raise
            except Exception as caught:
                error = error or caught
            else:
                if loss.isfinite() and all(v.isfinite().all() for v in found.values()):
                    return made_up, None
        return None, error

    def _say_slowness(self) -> None:
        how = {
            VMAP: "together, but as training_step is written in every round, which is slower than a traced step",
            SINGLE: "one at a time, which is right but slow",
            AUTOGRAD: "one at a time, which is right but slow",
        }
        if self.mode in how:
            warnings.warn(f"this model's records are processed {how[self.mode]}: {self.reason}")

    def _accumulate_traced(self, loss_of: LossOf, leaves: list[Any], structure: Any, size: int) -> None:
        assert self._made_up
        numbers = self._clip.numbers(self.now.groups, self._device)
        key = signature(leaves, structure)
        try:
            found = self._graphs.add(loss_of, leaves, structure, key, self._made_up, size, numbers, self._sums)
        except _NOT_OF_A_RECORD:
            raise
        except Exception as error:
            raise ConfigError(
                f"model: the traced training_step cannot process the records of a round ({type(error).__name__}); a "
                "record's indices may be out of range. Check the data."
            ) from None
        self._note(found, size)

    def _note(self, found: dict[str, Tensor], size: int) -> None:
        failed = int((~found["in_range"]).sum())
        self._succeeded = self._succeeded or failed < size
        if failed:
            self.fail(failed, RecordError("an index or a label is out of range."))
        norms = {name.replace(":", "/"): value for name, value in found.items() if name.startswith("norm:")}
        for name, value in norms.items():
            if size > 1 and not value.is_cuda and "finite" not in self._said and not value.isfinite().any():
                self._said.add("finite")
                warnings.warn(
                    f"group {name.removeprefix('norm/')}: no vector of a whole chunk of records is finite; they "
                    "contribute nothing, and what is released is noise."
                )
        if self.observe:
            self.observations.append({"loss": found["loss"], **norms})

    def _accumulate(self, chunk: Chunk) -> None:
        """As the step is written."""
        if self.mode == VMAP:
            try:
                return self._clip_and_add(self._pass(chunk.loss_of, chunk.leaves, chunk.structure, chunk.size))
            except _NOT_OF_A_RECORD:
                raise
            except Exception as error:
                if chunk.size == 1:
                    return self.fail(1, error)
        for i in range(chunk.size):
            try:
                gradients = self._of_one(chunk, i)
            except _NOT_OF_A_RECORD:
                raise
            except Exception as error:
                self.fail(1, error)
            else:
                self._clip_and_add(gradients)

    def _of_one(self, chunk: Chunk, i: int) -> Gradients:
        if self.mode != AUTOGRAD:
            return self._pass(chunk.loss_of, chunk.row(i), chunk.structure, 1)
        if self._training:
            found, loss = self._training.one(chunk, i)
        else:
            found, loss = gradients_of_one(chunk.loss_of, chunk.one(i), self._parameters, self._values)
        dense: Any = {n: Dense(g[None].to(_summed(g.dtype))) for n, g in found.items()}
        return Gradients(dense, loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))

    def _clip_and_add(self, gradients: Gradients) -> None:
        size = len(gradients.losses)
        with full_precision(gradients.losses.device), torch.no_grad():
            if self._whole:
                found = add_whole(self.now.groups, gradients.of, self._sums)
            else:
                numbers = self._clip.numbers(self.now.groups, self._device)
                found = self._clip.add(gradients, numbers, self._sums)
        self._note(found | {"loss": gradients.losses, "in_range": gradients.in_range}, size)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= 8 and all(isinstance(one, PLAIN) for one in value)
    return isinstance(value, PLAIN)


def _set_random_states(device: torch.device, of_torch: tuple[Tensor, ...], of_python: Any, of_numpy: Any) -> None:
    set_random_state(device, of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)


def _summed(dtype: torch.dtype) -> torch.dtype:
    """What sums of gradients of such a parameter are computed in."""
    return torch.promote_types(torch.float32, dtype)
