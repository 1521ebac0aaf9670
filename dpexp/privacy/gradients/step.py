"""Decides how a job's records are processed: by a traced graph, by vmap, or one at a time."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.branches import describe, explain, failing_layer
from dpexp.privacy.gradients.chunk import (
    NO_LOSS,
    Chunk,
    LossOf,
    NoLoss,
    SyntheticRecords,
    public_leaves,
    smallest_index_range,
    synthetic_options,
)
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.graph_cache import Graphs
from dpexp.privacy.gradients.layer_gradients import DenseGradient
from dpexp.privacy.gradients.local_training import LocalTrainer
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.per_example import ChunkGradients, VmapPass, gradients_of_one_record, no_seeds
from dpexp.privacy.gradients.state_tests import StateTests
from dpexp.privacy.gradients.traced import MixesRecords, NotTraceable
from dpexp.privacy.gradients.tracer import side_effects_undone
from dpexp.privacy.noise.randomness import all_random_states, own_state, set_all_random_states
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.state_checks import (
    KEEPS_STATE,
    StateFound,
    digest,
    digest_as_integer,
    digests_of_training,
)

TRACED, VMAP, LOOP = "traced", "vmap", "one at a time"
_NOT_A_RECORDS_FAULT = (torch.OutOfMemoryError, ConfigError)
_MAX_TRACING_TIME = 0.02  # as a fraction of the time since the start
_SOME_SHAPES, _MANY_SHAPES = 4, 12  # of 16 records
_PAD = "Pad records to a few lengths, or let a collate_fn that pads do so: pad_to=[…] (data.pad_to)."
_MAX_STEP_CHANGES = 3  # with more, the step is no longer traced

_NO_GRADIENT = (
    "model: training_step's loss depends on none of the trainable parameters; remove .detach(), torch.no_grad() and "
    ".item() between them and the loss."
)

_Settings = Callable[[], AbstractContextManager]


class Step:
    """The training step of a job, applied to records.

    Args:
        training: local training of users; None: a record's vector is its gradient.

    Attributes:
        graphs: of a traced step.
        mode: `TRACED`, `VMAP` or `LOOP`, decided once before the first record; None: not yet.
        reason: why the job is not traced.
        is_random: whether the step draws random numbers; True while unknown.
        synthetic: how synthetic records are drawn, once that is decided.
        public: a batch of one public record, on which the step is tried; None: there is none.
        seconds_of_round: estimated in the dry run; 0: unknown.
        states: tests of a step that is not traced.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, Tensor],
        values: Values,
        graphs: Graphs,
        run_pass: VmapPass,
        clip: ClippedSums,
        training: LocalTrainer | None,
        device: torch.device,
    ) -> None:
        self._module, self._parameters, self._values = module, parameters, values
        self.graphs, self._pass, self._clip = graphs, run_pass, clip
        self._training, self._device = training, device
        self.mode: str | None = None
        self.reason = ""
        self.is_random = True
        self.public: Any = None
        self.synthetic: SyntheticRecords | None = None
        self.states = StateTests(module, lambda one: self.gradients_of_record(one, 0), device)
        self._first_state: tuple = ()
        self._template: tuple[Chunk, _Settings] | None = None  # a synthetic record; settings of a later round
        self._calls = 1
        self._last_traced_round = 0  # rounds completed then
        self._step_changes = 0
        self._tracing = self.seconds_of_round = 0.0
        self._began = time.perf_counter()

    @property
    def digest(self) -> int:
        """A digest of the mode and graphs, which all processes must have in common."""
        return digest_as_integer(f"{self.mode} {self.graphs.digest()}".encode())

    def decide(self, chunk: Chunk, settings: _Settings = nullcontext, others: Sequence[Chunk] = ()) -> None:
        """Decides `mode` for the job, on synthetic records of which only shapes and types are those of `chunk`.

        A step is traced only if its graph is the same under `settings`, those of a later round, and if 16 records have
        at most 12 shapes: that of `chunk` and those of `others`. Raises StateFound if the step keeps state of records
        or changes a weight, ConfigError if it fails.
        """
        before, shapes = self._digests(), 1 + len(others)
        with own_state(self._device):
            first = [self._gradients_in_fresh_modules(one) for one in others[:1]]
            synthetic, error = self._synthetic_records(chunk)
            self.synthetic = synthetic or SyntheticRecords()
            if error is not None:
                raise NoLoss(self._failure_message(chunk, error)) from error
            if synthetic is None and not self._training:
                raise NoLoss(NO_LOSS)
            if synthetic is None or self._training:
                self.mode = LOOP
            elif shapes > _MANY_SHAPES:
                self.mode, self.reason = LOOP, f"the data's records have too many shapes to trace each. {_PAD}"
            else:
                self._trace(chunk, settings)
                self._template = synthetic.records(chunk.row(0), 1, 0), settings
            if self.mode != TRACED:
                for one in (chunk, *others):
                    self.states.test(one, self.synthetic, is_new=one is not chunk)
            if first and first[0] is not None and first[0] != self._gradient_digests(others[0]):
                raise StateFound(KEEPS_STATE.format(what="what training_step sets depends on the first record's shape"))
        now = self._digests()
        changed = next((name for name, was in before.items() if now.get(name, was) != was), None)
        if changed is not None:
            raise StateFound(KEEPS_STATE.format(what=f"{changed} is changed inside training_step"))
        self._warn_if_slow(shapes)

    def _gradient_digests(self, like: Chunk) -> list[bytes] | None:
        """Digests of the loss and gradients of a synthetic record of this shape; None: it has none."""
        state = all_random_states(self._device)
        set_all_random_states(self._device, *self._first_state)
        try:
            one = SyntheticRecords().records(like, 1, 0).batch_of(0)
            with spectral_norms_fixed(self._module):
                found, loss = gradients_of_one_record(like.loss_of, one, self._parameters, self._values)
        except Exception:
            return None
        finally:
            set_all_random_states(self._device, *state)
        return [*map(digest, (loss, *found.values()))]

    def _gradients_in_fresh_modules(self, like: Chunk) -> list[bytes] | None:
        """`_gradient_digests` before the step has set an attribute, after which attributes are as before."""
        self._first_state = all_random_states(self._device)
        with side_effects_undone(self._module, (self.graphs.reads,), self._device):
            return self._gradient_digests(like)

    def _digests(self) -> dict[str, bytes]:
        """Digests of what a step may not set. Buffers are left out, since a step may fill caches once."""
        weights = {name: digest(p) for name, p in self._module.named_parameters()}
        return weights | digests_of_training(self._module)

    def trace_again(self, loss_of: LossOf, completed: int, epoch_begins: bool = False) -> None:
        """Traces the step of a traced job again, and proves it if it has changed, since hooks may change it.

        That is done whenever a value that the step reads has changed, and, within 2 % of the time, at the start of
        epochs and in rounds 2, 4, 8, …. A step that changes more than three times is no longer traced.
        """
        if self.mode != TRACED or self._template is None:
            return
        self._calls += 1
        now = time.perf_counter()
        due = (epoch_begins or self._calls.bit_count() == 1) and self._tracing < _MAX_TRACING_TIME * (now - self._began)
        changed = self.graphs.stale()
        if not due and changed is None:
            return
        chunk, settings = replace(self._template[0], loss_of=loss_of), self._template[1]
        self._last_traced_round = completed
        for parameter in self._parameters.values():
            parameter.grad = None
        with own_state(self._device):
            self._trace_if_changed(chunk, settings)
            if changed is not None:
                self.graphs.drop(lambda key: key == chunk.key)
            if self.mode != TRACED:
                assert self.synthetic
                self.states.test(chunk, self.synthetic)
                self._warn_if_slow()
        self._tracing += time.perf_counter() - now

    def _trace_if_changed(self, chunk: Chunk, settings: _Settings) -> None:
        try:
            difference = self.graphs.changed(chunk)
        except ConfigError:
            raise
        except Exception as error:
            difference = explain(error)
        if difference is None:
            self.graphs.reads.note_step_unaffected()
            return
        self._step_changes += 1
        self.graphs.drop()
        self._trace(chunk, settings)
        if self._step_changes > _MAX_STEP_CHANGES and self.mode == TRACED:
            self.reason = f"hooks change the step repeatedly ({difference})"
            self._decide_untraced(chunk)

    def add(self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]) -> Iterator[dict[str, Tensor] | Exception]:
        """Adds the clipped vectors of a chunk's records to `sums`; `clip_norms`: see `ClippedSums.clip_norms`.

        Yields losses, norms and flags of some of the records in order, or the error of a record without a loss. Raises
        ConfigError if the step keeps state, or has changed unseen.
        """
        if self.mode == TRACED:
            yield from self._add_by_graph(chunk, clip_norms, sums)
            return
        found = self._gradients(chunk) if self.mode == VMAP else None
        if isinstance(found, ChunkGradients):
            yield self._clipped(found, clip_norms, sums)
        else:
            yield from self._add_each(chunk, clip_norms, sums)

    def _add_each(
        self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor] | Exception]:
        if self.synthetic is not None and not self._training:
            self.states.test_if_new(chunk, self.synthetic)
        for i in range(chunk.size):
            one = self._gradients(chunk, i)
            yield self._clipped(one, clip_norms, sums) if isinstance(one, ChunkGradients) else one

    def _gradients(self, chunk: Chunk, i: int | None = None) -> ChunkGradients | Exception:
        """Gradients of all records by vmap, or of record i; or the error that they raise."""
        try:
            return self._pass(chunk) if i is None else self.gradients_of_record(chunk, i)
        except _NOT_A_RECORDS_FAULT:
            raise
        except Exception as error:
            return error

    def _add_by_graph(
        self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]
    ) -> Iterator[dict[str, Tensor] | Exception]:
        try:
            yield self.graphs.add(chunk, clip_norms, sums)
        except StateFound as found:
            found.last_clean_round = self._last_traced_round
            raise
        except _NOT_A_RECORDS_FAULT:
            raise
        except NotTraceable as reason:
            self._begin_untraced(reason)
            with own_state(self._device):
                each = [*self._add_each(chunk, clip_norms, sums)]
            yield from each
        except Exception as error:
            if chunk.size == 1:
                yield error
                return
            for i in range(chunk.size):
                yield from self._add_by_graph(chunk.row(i), clip_norms, sums)

    def _begin_untraced(self, reason: NotTraceable) -> None:
        """Says that a traced job has records whose shape cannot be traced.

        They are processed by the step as written, as in an untraced job: the shapes of other records, which decide the
        mode, must not decide what a record contributes.
        """
        if not self.states.running:
            warnings.warn(f"some records are processed one at a time, which is slow: {reason}")
            self.is_random = True

    def gradients_of_record(self, chunk: Chunk, i: int) -> ChunkGradients:
        """Gradients of one record, untraced. In mode `VMAP` vmap computes them, so that norms allow for the same
        rounding; where vmap fails for the record's shape, ordinary autograd does."""
        if self.mode == VMAP:
            try:
                return self._pass(chunk.row(i))
            except _NOT_A_RECORDS_FAULT:
                raise
            except Exception:
                pass
        with spectral_norms_fixed(self._module):
            if self._training:
                found, loss = self._training.vector_of(chunk, i)
            else:
                found, loss = gradients_of_one_record(chunk.loss_of, chunk.batch_of(i), self._parameters, self._values)
        dense: Any = {
            n: DenseGradient(g[None].to(torch.promote_types(torch.float32, g.dtype))) for n, g in found.items()
        }
        return ChunkGradients(dense, loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))

    def _clipped(self, gradients: ChunkGradients, clip_norms: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad(), full_precision(self._device):
            found = self._clip.add(gradients, clip_norms, sums)
        return found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def _trace(self, chunk: Chunk, settings: _Settings) -> None:
        assert self.synthetic
        try:
            difference = self.graphs.trace_and_prove(chunk, self.synthetic, settings)
            if difference is None:
                self.mode, self.is_random = TRACED, self.graphs.draws
                return
            self.reason = f"the step is not the same each time it runs ({difference})"
        except ConfigError:
            raise
        except Exception as caught:
            self.reason = explain(caught)
            if isinstance(caught, MixesRecords):
                self.mode = LOOP
                return
        self._decide_untraced(chunk)

    def _decide_untraced(self, chunk: Chunk) -> None:
        """Decides between `VMAP`, if that is proved to keep records apart, and `LOOP`."""
        assert self.synthetic
        self.mode = VMAP
        try:
            self.graphs.tracer.prove_untraced(chunk, self.synthetic)
        except ConfigError:
            raise
        except Exception:  # self.reason already says why the step is not traced
            self.mode = LOOP

    def _synthetic_records(self, chunk: Chunk) -> tuple[SyntheticRecords | None, Exception | None]:
        """Synthetic records with finite losses and gradients, if any; and the error, if all raise one."""
        public = public_leaves(self.public, chunk)
        with own_state(self._device), no_seeds():
            below = smallest_index_range(chunk)
        error: Exception | None = None
        failed = True
        for synthetic in synthetic_options(below, public):
            try:
                one = synthetic.records(chunk, 1, 0).batch_of(0)
                with self.graphs.reads.variables_recorded():
                    found, loss = gradients_of_one_record(chunk.loss_of, one, self._parameters, self._values)
            except ConfigError:
                raise
            except Exception as caught:
                error = error or caught
                if synthetic.floats == "same":  # the public record itself
                    warnings.warn(f"the first record of the validation set has no loss: {explain(caught)}")
            else:
                gradients = [found[name] for name in found if name in self._parameters]
                if not gradients:
                    raise ConfigError(_NO_GRADIENT)
                if loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients):
                    return synthetic, None
                failed = False
        return None, error if failed else None

    def _failure_message(self, chunk: Chunk, error: Exception) -> str:
        """Says how all synthetic records fail, and in which layer."""
        layer = failing_layer(self._module, lambda: chunk.loss_of(SyntheticRecords().records(chunk, 1, 0).batch_of(0)))
        records = [leaf[0] if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
        remedy = "" if self.public is not None else " Or give a validation set, whose first record is tried."
        return (
            f"model: training_step fails for every synthetic record; the data's are {describe(records)}{layer}: "
            f"{explain(error)}{remedy}"
        )

    def _warn_if_slow(self, shapes: int = 1) -> None:
        if self.mode == TRACED and shapes > _SOME_SHAPES:
            warnings.warn(
                f"data: 16 records have {shapes} shapes. Only those of one shape are processed together, and the step "
                f"is traced for each, which is slow. {_PAD}"
            )
        if self.mode == VMAP:
            how = "by vmap of training_step in every round, which is slower than a traced graph"
        elif self.mode != TRACED and not self._training:
            job = self.graphs.compiling
            self.seconds_of_round = self.states.seconds_of_record * job.sample_size
            total = timedelta(seconds=round(self.seconds_of_round * job.rounds))
            rate = 1 / max(self.states.seconds_of_record, 1e-6)
            slow = f"about {rate:.0f} records a second, and about {total} (h:mm:ss) for this job"
            how = f"one at a time, which is slow: {slow}"
        else:
            return
        warnings.warn(f"this model's records are processed {how}: {self.reason}")
