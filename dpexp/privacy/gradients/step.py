"""How the records of a job are processed: traced, all by a graph, or as the training step is written."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.checks import FIRST, STATE, StateCheck, StateFound, digest, digests_of_training, number_of
from dpexp.privacy.gradients.branches import described, failing_layer, why
from dpexp.privacy.gradients.chunk import NO_LOSS, Chunk, LossOf, MadeUp, NoLoss, public_leaves, smallest_table, tries
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import CompileDecision
from dpexp.privacy.gradients.graphs import Graphs
from dpexp.privacy.gradients.layer_gradients import DenseGradient
from dpexp.privacy.gradients.local_training import Training
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import Gradients, VmapPass, gradients_of_one, no_seeds
from dpexp.privacy.gradients.traced import Mixes
from dpexp.privacy.noise.randomness import all_random_states, own_state, set_all_random_states
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import Values

TRACED, VMAP, LOOP = "traced", "vmap", "one at a time"
NOT_OF_A_RECORD = (torch.OutOfMemoryError, ConfigError)
_OTHERS = (1, 2, 4)  # made-up records that are processed between one and the same
_SCALES = (8, 0.125)  # of more such records, since thresholds may lie anywhere
_TRACING = _CHECKING = 0.02  # of the time
_STEPS_CHANGED = 3  # how often, after which a step runs as written

_NO_GRADIENT = (
    "model: training_step's loss depends on none of the parameters that are trained; leave out .detach(), "
    "torch.no_grad() and .item() on the way from them to the loss."
)

_Settings = Callable[[], AbstractContextManager]


class Step:
    """The training step of a job, applied to records.

    Args:
        training: of users, one after another; None: a record's vector is its gradient.
        alone: each record is to be processed by itself.

    Attributes:
        mode: decided once, before the first record: `traced`; or, as the step is written, several records under vmap,
            or one at a time by ordinary autograd.
        reason: why the job is not traced.
        is_random: whether the step draws random numbers, as far as is known.
        made_up: how records are made up, once that was found out.
        public: a batch of one public record, on which the step is tried; None: records are made up.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, Tensor],
        values: Values,
        graphs: Graphs,
        run_pass: VmapPass,
        clip: ClippedSums,
        training: Training | None,
        alone: bool,
        device: torch.device,
    ) -> None:
        self._module, self._parameters, self._values = module, parameters, values
        self._graphs, self._pass, self._clip = graphs, run_pass, clip
        self._training, self._alone, self._device = training, alone, device
        self.mode: str | None = None
        self.reason = ""
        self.is_random = True
        self.public: Any = None
        self.made_up: MadeUp | None = None
        self._check: StateCheck | None = None
        self._template: tuple[Chunk, _Settings] | None = None  # a made-up record; settings of a later round
        self._asked = 1
        self._clean = 0  # rounds completed when the step was last traced
        self._steps_changed = 0
        self._tracing = self._checking = 0.0  # seconds
        self._began = time.perf_counter()

    @property
    def compiling(self) -> CompileDecision:
        """Whether a traced step is compiled."""
        return self._graphs.compiling

    @property
    def held(self) -> list[str]:
        """Shapes of tensors that a traced step reads and that are neither parameters nor buffers."""
        return self._graphs.tracer.held

    @property
    def digest(self) -> int:
        """Of how records are processed, which is the same in all processes."""
        return number_of(f"{self.mode} {self._graphs.digest()}".encode())

    def decide(self, chunk: Chunk, settings: _Settings = nullcontext) -> None:
        """Decides for the whole job, on made-up records that look like these, what `mode` is.

        Args:
            chunk: of which shapes and types alone are used.
            settings: under which the step must be the same to be traced, as another round's.

        Raises:
            StateFound: the step keeps something of records, or changes a weight.
            ConfigError: a mistake in the step.
        """
        before = self._held()
        with own_state(self._device):
            made_up, error = self._made_up_records(chunk)
            self.made_up = made_up or MadeUp()
            if error is not None:
                raise NoLoss(self._mistake(chunk, error)) from error
            if made_up is None and not self._training:
                raise NoLoss(NO_LOSS)
            if made_up is None or self._training or self._alone:
                self.mode = LOOP
            else:
                self._trace(chunk, settings)
                self._template = made_up.records(chunk.row(0), 1, 0), settings
            if self.mode != TRACED:
                self._try_state(chunk)
        self._refuse_changes(before)
        self._say_slowness()

    def _held(self) -> dict[str, bytes]:
        """Of what a step may not set. It may fill buffers at first, as caches are."""
        weights = {name: digest(p) for name, p in self._module.named_parameters()}
        return weights | digests_of_training(self._module)

    def _refuse_changes(self, before: dict[str, bytes]) -> None:
        """Raises StateFound: the step set something."""
        now = self._held()
        changed = next((name for name, was in before.items() if now.get(name, was) != was), None)
        if changed is not None:
            raise StateFound(STATE.format(what=f"{changed} is changed inside training_step"))

    def trace_again(self, loss_of: LossOf, completed: int, epoch_begins: bool = False) -> None:
        """Sees whether the step of a traced job is still what was traced, where a hook may have changed it: when
        something that the step reads has changed, and, as far as that takes 2 % of the time, at epochs'
        starts and in rounds 2, 4, 8, …

        A step that has changed is traced and proved. One that changes time and again runs as written from then on.
        """
        if self.mode != TRACED or self._template is None:
            return
        self._asked += 1
        now = time.perf_counter()
        due = (epoch_begins or self._asked.bit_count() == 1) and self._tracing < _TRACING * (now - self._began)
        changed = self._graphs.stale()
        if not due and changed is None:
            return
        chunk, settings = replace(self._template[0], loss_of=loss_of), self._template[1]
        assert self.made_up
        self._clean = completed
        for parameter in self._parameters.values():
            parameter.grad = None
        with own_state(self._device):
            self._trace_if_changed(chunk, settings)
            if changed is not None:
                self._graphs.forget(but=chunk)
            if self.mode != TRACED:
                self._try_state(chunk)
                self._say_slowness()
        self._tracing += time.perf_counter() - now

    def _trace_if_changed(self, chunk: Chunk, settings: _Settings) -> None:
        assert self.made_up
        try:
            odd = self._graphs.changed(chunk, self.made_up)
        except ConfigError:
            raise
        except Exception as error:
            odd = why(error)
        if odd is None:
            self._graphs.reads.step_unaffected()
            return
        self._steps_changed += 1
        self._graphs.forget()
        self._trace(chunk, settings)
        if self._steps_changed > _STEPS_CHANGED and self.mode == TRACED:
            self.reason = f"hooks change the step time and again ({odd})"
            self._untraced(chunk)

    def versions(self) -> dict[tuple[str, int], Any]:
        """See `Graphs.versions`."""
        return self._graphs.versions()

    def begin_round(self, t: int) -> None:
        """Before a round's records: their step is tried on made-up ones in the first rounds, and then as often as that
        takes 2 % of the time. Weights and buffers are looked at in each round."""
        if self._check is None:
            return
        began = time.perf_counter()
        for parameter in self._module.parameters():
            parameter.grad = None
        with suppress(Exception):  # of a made-up record that has no loss with the weights as they are
            self._check.before(t < FIRST or self._checking <= _CHECKING * (began - self._began))
        self._checking += time.perf_counter() - began

    def check_state(self, t: int) -> None:
        """After a round's records."""
        if self._check is not None:
            began = time.perf_counter()
            self._check.after(t)
            self._checking += time.perf_counter() - began

    def add(self, chunk: Chunk, numbers: Tensor, sums: dict[str, Tensor]) -> Iterator[dict[str, Tensor] | Exception]:
        """Adds the clipped vectors of a chunk's records to `sums`, of all together, or of one after the other; gives
        what is found of each, or an error in place of a record's that has no loss.

        Args:
            numbers: see `ClippedSums`.

        Raises:
            ConfigError: there is no graph that is proved for their number, or the step keeps state.
        """
        if self.mode == TRACED:
            yield from self._add_by_graph(chunk, numbers, sums)
            return
        found = self._gradients(chunk) if self.mode == VMAP else None
        if isinstance(found, Gradients):
            yield self._clipped(found, numbers, sums)
            return
        for i in range(chunk.size):
            one = self._gradients(chunk, i)
            yield self._clipped(one, numbers, sums) if isinstance(one, Gradients) else one

    def _gradients(self, chunk: Chunk, i: int | None = None) -> Gradients | Exception:
        """Of all records together, or of one; or why they have none."""
        try:
            return self._pass(chunk) if i is None else self.of_one(chunk, i)
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            return error

    def _add_by_graph(
        self, chunk: Chunk, numbers: Tensor, sums: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor] | Exception]:
        assert self.made_up
        try:
            yield self._graphs.add(chunk, self.made_up, numbers, sums)
        except StateFound as found:
            found.last_clean_round = self._clean
            raise
        except NOT_OF_A_RECORD:
            raise
        except Exception as error:
            if chunk.size == 1:
                yield error
                return
            for i in range(chunk.size):
                yield from self._add_by_graph(chunk.row(i), numbers, sums)

    def of_one(self, chunk: Chunk, i: int) -> Gradients:
        """A record's gradients as the step is written. Where others are taken together, it is taken as they are, with
        norms that allow for rounding alike."""
        if self.mode == VMAP:
            return self._pass(chunk.row(i))
        with spectral_norms_fixed(self._module):
            if self._training:
                found, loss = self._training.one(chunk, i)
            else:
                found, loss = gradients_of_one(chunk.loss_of, chunk.one(i), self._parameters, self._values)
        dense: Any = {
            n: DenseGradient(g[None].to(torch.promote_types(torch.float32, g.dtype))) for n, g in found.items()
        }
        return Gradients(dense, loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))

    def _clipped(self, gradients: Gradients, numbers: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad(), full_precision(self._device):
            found = self._clip.add(gradients, numbers, sums)
        return found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def _trace(self, chunk: Chunk, settings: _Settings) -> None:
        assert self.made_up
        try:
            odd = self._graphs.settle(chunk, self.made_up, settings)
            if odd is None:
                self.mode, self.is_random = TRACED, self._graphs.draws
                return
            self.reason = f"the step is not the same each time it runs ({odd})"
        except ConfigError:
            raise
        except Exception as caught:
            self.reason = why(caught)
            if isinstance(caught, Mixes):
                self.mode = LOOP
                return
        self._untraced(chunk)

    def _untraced(self, chunk: Chunk) -> None:
        """Decides how records are processed by the step as it is written: several under vmap, if that is proved."""
        assert self.made_up
        self.mode = VMAP
        try:
            self._graphs.tracer.prove_untraced(chunk, self.made_up)
        except ConfigError:
            raise
        except Exception:  # what stands in the way of a graph was said
            self.mode = LOOP

    def _try_state(self, chunk: Chunk) -> None:
        """Looks for state that a step keeps, on made-up records, and will look again in the rounds."""
        assert self.made_up
        first, *others = (self.made_up.records(chunk, 1, seed) for seed in range(sum(_OTHERS) + 1))
        probed = [first]
        state = all_random_states(self._device)

        def probe() -> list[Tensor]:
            before = all_random_states(self._device)
            set_all_random_states(self._device, *state)
            try:
                each = [self.of_one(one, 0) for one in probed]
            finally:
                set_all_random_states(self._device, *before)
            return [t for one in each for t in (one.losses, *(use.materialize() for use in one.of.values()))]

        check = StateCheck(self._module, probe)
        try:
            probe()  # which may fill caches
            for scale in _SCALES:
                scaled = first.having([leaf * scale if leaf.is_floating_point() else leaf for leaf in first.tensors])
                with suppress(Exception):  # of numbers that the step does not take
                    self.of_one(scaled, 0)
                    probed.append(scaled)
            for count in _OTHERS:
                check.before()
                for _ in range(count):
                    self._meet(others.pop())
                check.after(-1)
        except ConfigError:
            raise
        except Exception as error:  # of what an earlier pass has left behind
            if isinstance(error, RecordError):
                raise ConfigError(str(error)) from error
            raise StateFound(STATE.format(what=f"training_step fails after other records ({why(error)})")) from error
        self._check = check

    def _meet(self, chunk: Chunk) -> None:
        """Processes a made-up record, which may have no loss."""
        try:
            self.of_one(chunk, 0)
        except NOT_OF_A_RECORD:
            raise
        except Exception:
            pass

    def _made_up_records(self, chunk: Chunk) -> tuple[MadeUp | None, Exception | None]:
        """A way to make records up that have finite losses and gradients; else why they have none at all."""
        public = public_leaves(self.public, chunk)
        with own_state(self._device), no_seeds():
            below = smallest_table(chunk)
        error: Exception | None = None
        failed = True
        for made_up in tries(below, public):
            try:
                one = made_up.records(chunk, 1, 0).one(0)
                with self._graphs.reads.variables_noted():
                    found, loss = gradients_of_one(chunk.loss_of, one, self._parameters, self._values)
            except ConfigError:
                raise
            except Exception as caught:
                error = error or caught
                if made_up.floats == "same":  # the public record as it is
                    warnings.warn(f"the first record of the validation set has no loss: {why(caught)}")
            else:
                gradients = [found[name] for name in found if name in self._parameters]
                if not gradients:
                    raise ConfigError(_NO_GRADIENT)
                if loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients):
                    return made_up, None
                failed = False
        return None, error if failed else None

    def _mistake(self, chunk: Chunk, error: Exception) -> str:
        """What every record that was made up fails with, and in which layer."""
        layer = failing_layer(self._module, lambda: chunk.loss_of(MadeUp().records(chunk, 1, 0).one(0)))
        records = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
        way_out = "" if self.public is not None else " Or give a validation set, whose first record is tried."
        return (
            f"model: training_step fails for every record that was made up like those of the data, which are "
            f"{described(records)}{layer}: {why(error)}{way_out}"
        )

    def _say_slowness(self) -> None:
        if self.mode == VMAP:
            how = "together, but by training_step as it is written in every round, which is slower than a graph of it"
        elif self.mode != TRACED and not (self._training or self._alone):
            how = "one at a time, which is right but slow"
        else:
            return
        warnings.warn(f"this model's records are processed {how}: {self.reason}")
