"""Accumulates clipped sums over the chunks of a sample, and releases them with noise."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.accounting.ledger import LedgerWriter
from dpexp.errors import ConfigError, RecordError, words_of
from dpexp.privacy.adaptive import UNCLIPPED, Bounds
from dpexp.privacy.correlated import CorrelatedNoise, Noisy
from dpexp.privacy.engine.branches import Differ
from dpexp.privacy.engine.chunk import PLAIN, Chunk, look, records
from dpexp.privacy.engine.clipping import add_clipped, by_parameter
from dpexp.privacy.engine.local import Training
from dpexp.privacy.engine.looped import DEDUCED, culprit
from dpexp.privacy.engine.passes import Together, gradients_of_one
from dpexp.privacy.engine.precision import full_precision
from dpexp.privacy.engine.slowness import why
from dpexp.privacy.engine.uses import Dense, Use
from dpexp.privacy.engine.ways import Settled, Way, Ways
from dpexp.privacy.engine.whole import WholeNoise, add_whole
from dpexp.privacy.given import Values
from dpexp.privacy.groups import trainable, value_key
from dpexp.privacy.isolation.reached import Reached
from dpexp.privacy.isolation.state import State
from dpexp.privacy.isolation.surroundings import Surroundings
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import PrivacyPlan
from dpexp.privacy.processes import Processes
from dpexp.privacy.shared_ledger import SharedLedger

_NOT_OF_A_RECORD = (torch.OutOfMemoryError, ConfigError)
_PARTS = 16  # of a chunk whose records branch differently, or of larger ones parts of as many records: more are slow
_ENOUGH = 64  # records that fail, while none ever contributed, to end a round early; or that are slow, to say so


class Engine:
    """Carries out a plan's mechanisms on a module's gradients, and on the values that its step gives for release.

    Per sample: `start`, then `accumulate` for each chunk, then `finish` and `release`. What a record contributes
    depends on no other: together are processed those that look alike and that could be so each by itself.

    Args:
        observe: keep each chunk's per-record norms and losses in `observations`. They are private.
        bounds: where those of an adaptive plan have come to; by default they stay where they begin.
        processes: those that have a part of each sample.

    Attributes:
        around: what a step might change besides the module.

    Raises:
        ConfigError: the plan was made for other parameters than the module's trainable ones, or one is complex.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        module: nn.Module,
        noise: GaussianNoise,
        observe: bool = False,
        bounds: Bounds | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.plan = self.now = plan
        self._processes = processes or Processes()
        self.around = Surroundings()
        self._bounds = bounds or (Bounds(plan.following) if plan.following else None)
        self._noise = noise
        self._correlated = CorrelatedNoise(noise)
        self._whole = WholeNoise(noise.stream) if plan.exact else None
        self._module = module
        self._parameters: dict[str, Tensor] = {**trainable(module)}
        vectors = [vector for group in plan.groups for vector in group.vectors]
        values = {v.parameters[0]: v.d - self._numbers(v.parameters[1:]) for v in vectors if v.is_value}
        self._values = Values(values, next(iter(self._parameters.values()), torch.zeros(())))
        planned = {name for vector in vectors for name in vector.parameters} - set(values)
        if planned != set(self._parameters):
            odd = sorted(planned.symmetric_difference(self._parameters))
            raise ConfigError(f"the plan was made for another model: they differ in {', '.join(odd)}.")
        for name, parameter in self._parameters.items():
            if parameter.is_complex():
                raise ConfigError(f"model: the parameter {name} is complex; give its real and imaginary parts as two.")
        self._sums: dict[str, Tensor] = {}
        self._ways = Ways(Way(singly=plan.exact))  # in company what is rounded may be rounded otherwise
        self._together = Together(module, self._parameters, self._values, self._ways)
        local = plan.record.local
        self._training = local and Training(module, self._parameters, self._values, local)
        self._reached: Reached | None = None
        self._succeeded = False
        self._contributed = False  # a record has, in some process
        self._failed = self._odd = 0
        self._reason_of_failure: Exception | None = None
        self._said: set[str] = set()
        self.observe = observe
        self.observations: list[dict[str, Tensor]] = []

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
        self._sums = {name: self._zeros(name) for _, _, name in by_parameter(self.now.groups)}
        self.observations = []

    def accumulate(self, loss_of: Callable[[Any], Tensor], batch: Any, size: int) -> None:
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
        handed = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN]
        state = State(self._module, self.around, self._reached, handed)
        self._reached = state.reached
        try:
            chunk = Chunk(loss_of, leaves, structure, size, state, max(_PARTS, size // _PARTS), look(leaves, structure))
            self._accumulate_singly(chunk) if self._training else self._accumulate(chunk, self._ways.first)
        except BaseException:
            self._restore(state)
            raise

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

    def finish(self) -> None:
        """Ends the sample.

        Raises:
            ConfigError, or what the last record raised: more than one record has failed, and none ever contributed, in
                no process.
        """
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
        released, self._sums = self._sums, {}
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
        groups = by_parameter(self.now.groups)
        noisy = [Noisy(name, sums[name], alpha * group.sigma, group.bands) for group, alpha, name in groups]
        self._correlated.add_to(noisy, divisor=self.now.sampling.q * self.now.n)
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

    def _restore(self, state: State) -> list[str]:
        changed = state.restore()
        state.renew_randomness()
        news = [name for name in changed if name not in self._said and not name.endswith(DEDUCED)]
        if news:
            self._said.update(news)
            warnings.warn(
                f"training_step changes {', '.join(news)}, which is set back after each chunk of records, since "
                "data would pass the noise that way."
            )
        return changed

    def _warn_of_slow_way(self, way: Way, reason: str) -> None:
        what = "this model's records"
        if not way.singly:
            kinds = [f"{name} ({type(self._module.get_submodule(name)).__name__})" for name in sorted(way.looped)]
            what = f"the records of the module{'s' if len(kinds) > 1 else ''} {', '.join(kinds)}"
        self._warn_of_slowness(what, "one at a time", reason)

    def _warn_of_slowness(self, what: str, how: str, reason: str) -> None:
        if what not in self._said:
            self._said.add(what)
            warnings.warn(
                f"{what} are processed {how}, which is right but slow. They cannot be processed together: {reason}"
            )

    def _accumulate(self, chunk: Chunk, way: Way) -> bool:
        """Processes records, each in the first way in which it can be by itself, from this one on; returns whether that
        was a way for all, and PyTorch had nothing against one of them."""
        way = self._ways.instead(chunk.look, way) or way
        if way.singly:
            return self._accumulate_singly(chunk)
        found = self._uses(chunk, way)
        if isinstance(found, Settled):
            return self._accumulate(chunk, found.way)
        if isinstance(found, Exception):
            return self._take_next(chunk, way, found) if chunk.size == 1 else self._by_parts(chunk, way, found)
        uses, losses = found
        with full_precision(losses.device), torch.no_grad():
            self._clip_and_add(uses, losses)
        self._succeeded = True
        return self._together.own_error is None

    def _uses(self, chunk: Chunk, way: Way) -> tuple[dict[str, Use], Tensor] | Exception:
        """What `Together` finds, or why it does not."""
        try:
            return self._together.uses(chunk, way, self._restore)
        except _NOT_OF_A_RECORD:
            raise
        except Exception as reason:
            return reason
        finally:
            self._restore(chunk.state)

    def _by_parts(self, chunk: Chunk, way: Way, reason: Exception) -> bool:
        """Takes a chunk apart whose records cannot be processed together: into those that answer alike, or into those
        that cannot be processed so by themselves either, and the others."""
        said, of = why(reason), 1
        reason.__traceback__ = None  # which holds what the pass did
        if isinstance(reason, Differ):
            parts = reason.parts
            of = len(parts)
        else:
            half = chunk.size // 2
            parts = [
                rows
                for some in (range(half), range(half, chunk.size))
                for rows in self._without_odd(chunk, way, [*some])
            ]
            if sum(map(len, parts)) < chunk.size:
                parts = [[row for rows in parts for row in rows]] if parts else []
        if len(parts) > chunk.parts:
            self._warn_of_slowness("this model's records", "in many parts", said)
        for rows in parts:
            self._accumulate(chunk.part(rows, of), way)
        return False

    def _without_odd(self, chunk: Chunk, way: Way, rows: list[int]) -> list[list[int]]:
        """Those of some rows that can be processed in a way, as they can be together; the others, found by halves, are
        in their next ways."""
        part, known = chunk.part(rows), self._ways.instead(chunk.look, way)
        found = Settled(known) if known else self._uses(part, way)
        if isinstance(found, Settled):
            self._accumulate(part, found.way)
            return []
        if isinstance(found, Differ) or not isinstance(found, Exception):
            return [rows]
        if len(rows) == 1:
            self._take_next(part, way, found)
            return []
        del found
        half = len(rows) // 2
        return self._without_odd(chunk, way, rows[:half]) + self._without_odd(chunk, way, rows[half:])

    def _take_next(self, one: Chunk, way: Way, reason: Exception) -> bool:
        """Processes a record with one kind of modules more, or the whole model, by itself; this is settled for others
        like it, unless it is a matter of its own."""
        name = culprit(reason, self._module, way.looped)
        instead = Way(singly=True) if name is None else way.and_looped(self._module, name)
        said, failed, answers = why(reason), self._failed, tuple(self._together.answers)
        succeeded = self._accumulate(one, instead)
        if succeeded:
            self._ways.settle(one.look, way, answers, instead)
            self._warn_of_slow_way(self._ways.instead(one.look, way, answers) or instead, said)
        elif self._failed == failed:
            self._odd += 1
            if self._odd == _ENOUGH:
                self._warn_of_slowness(f"{_ENOUGH} records", "one at a time", said)
        return succeeded

    def _accumulate_singly(self, chunk: Chunk) -> bool:
        """Whether all records contributed, and PyTorch had nothing against one of them."""
        well = True
        for i in range(chunk.size):
            try:
                gradients, loss, caught = self._of_one(chunk, i)
                self._restore(chunk.state)
                with full_precision(loss.device), torch.no_grad():
                    uses: dict[str, Use] = {n: Dense(g[None].to(_summed(g.dtype))) for n, g in gradients.items()}
                    self._clip_and_add(uses, loss[None])
            except _NOT_OF_A_RECORD:
                raise
            except Exception as error:
                self._restore(chunk.state)
                self.fail(1, error)
                well = False
            else:
                self._succeeded = True
                well = well and caught is None
        return well

    def _of_one(self, chunk: Chunk, i: int) -> tuple[dict[str, Tensor], Tensor, Exception | None]:
        if self._training:
            return self._training.one(chunk, i)
        return gradients_of_one(chunk.loss_of, chunk.one(i), self._parameters, self._values, chunk.state)

    def _clip_and_add(self, uses: dict[str, Use], losses: Tensor) -> None:
        observation = {"loss": losses}
        joint = self._bounds is not None and self._bounds.joint
        within: list[Tensor] = []  # [·, B] of each group
        for group in self.now.groups:
            if group.name == UNCLIPPED:
                uses[value_key(UNCLIPPED)] = Dense(torch.cat(within).T.to(self._values.dtype) - 0.5)
            found = add_whole(group, uses, self._sums) if group.exact else add_clipped(group, uses, self._sums, joint)
            if self._bounds is not None and not group.is_of_values:
                within.append(self._bounds.within(group, found, losses))
            if found is None:
                continue
            norms, _ = found
            observation[f"norm/{group.name}"] = norms
            if len(norms) > 1 and not norms.is_cuda and "finite" not in self._said and not norms.isfinite().any():
                self._said.add("finite")
                warnings.warn(
                    f"group {group.name}: no vector of a whole chunk of records is finite; they contribute nothing, "
                    "and what is released is noise."
                )
        if self.observe:
            self.observations.append(observation)


def _summed(dtype: torch.dtype) -> torch.dtype:
    """What sums of gradients of such a parameter are computed in."""
    return torch.promote_types(torch.float32, dtype)
