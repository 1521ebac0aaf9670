"""Tests of a step that runs as written for state that it keeps of records, on synthetic records of each shape."""

import itertools
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.branches import explain
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.per_example import ChunkGradients
from dpexp.privacy.noise.randomness import all_random_states, own_state, set_all_random_states
from dpexp.privacy.state_checks import KEEPS_STATE, ROUNDS_ALWAYS_CHECKED, StateCheck, StateFound

_OTHER_RECORDS = (1, 2, 4)  # numbers of other records between two probes of the same ones
_PROBE_SCALES = (8, 0.125)  # factors of further probes, since a step may have thresholds anywhere
_MAX_PROBES = 36
_SHAPES_ALWAYS_TESTED = 12
_MAX_TIME = 0.02  # as a fraction of the time since the start


class StateTests:
    """Tests for state in the dry run, where a shape first occurs, and in the rounds.

    Args:
        gradients_of: of a chunk of one record.

    Attributes:
        seconds_of_record: as measured by the last test.
    """

    def __init__(
        self, module: nn.Module, gradients_of: Callable[[Chunk], ChunkGradients], device: torch.device
    ) -> None:
        self._module, self._gradients_of, self._device = module, gradients_of, device
        self._check: StateCheck | None = None
        self._tested: dict[Hashable, Chunk] = {}  # a synthetic record of each shape
        self._probed: list[Chunk] = []
        self._round = 0
        self._spent, self._began = 0.0, time.perf_counter()
        self.seconds_of_record = 0.0

    @property
    def running(self) -> bool:
        """Whether the rounds are tested."""
        return self._check is not None

    @property
    def _has_time(self) -> bool:
        return self._spent <= _MAX_TIME * (time.perf_counter() - self._began)

    def begin_round(self, t: int) -> None:
        """Notes weights, buffers and, in the first rounds and then within 2 % of the time, gradients of probes."""
        self._round = t
        if self._check is None:
            return
        began = time.perf_counter()
        for parameter in self._module.parameters():
            parameter.grad = None
        with suppress(Exception):  # a synthetic record may have no loss with the present weights
            self._check.before(t < ROUNDS_ALWAYS_CHECKED or self._has_time)
        self._spent += time.perf_counter() - began

    def check(self, t: int) -> None:
        """Compares what `begin_round` noted with what it is after the round's records."""
        if self._check is not None:
            began = time.perf_counter()
            self._check.after(t)
            self._spent += time.perf_counter() - began

    def test_if_new(self, chunk: Chunk, synthetic: SyntheticRecords) -> None:
        """Tests records of a shape not tested before: of the first 12, and of others within 2 % of the time."""
        if chunk.key in self._tested or not (len(self._tested) < _SHAPES_ALWAYS_TESTED or self._has_time):
            return
        began = time.perf_counter()
        with own_state(self._device):
            self.check(self._round)
            self.test(chunk, synthetic, is_new=True)
            self.begin_round(self._round)
        self._spent += time.perf_counter() - began

    def test(self, chunk: Chunk, synthetic: SyntheticRecords, is_new: bool = False) -> None:
        """Raises StateFound unless synthetic records of the shape of `chunk` have the same gradients before and after
        others, of that shape and of those tested before; sets up the tests of the rounds. Not `is_new`: it has a loss.
        """
        first = synthetic.records(chunk, 1, 0)
        self._tested[chunk.key] = first
        shapes = itertools.cycle([first, *reversed(self._tested.values())])
        others = [
            synthetic.records(replace(next(shapes), loss_of=chunk.loss_of), 1, seed + 1)
            for seed in range(sum(_OTHER_RECORDS))
        ]
        probed, state = [first], all_random_states(self._device)

        def probe(some: list[Chunk]) -> list[Tensor]:
            before = all_random_states(self._device)
            set_all_random_states(self._device, *state)
            try:
                each = [self._gradients_of(one) for one in some]
            finally:
                set_all_random_states(self._device, *before)
            return [t for one in each for t in (one.losses, *(use.materialize() for use in one.by_name.values()))]

        check = StateCheck(self._module, partial(probe, probed))
        if is_new:
            check.before(probing=False)
            if not self._has_gradients(first):
                probed.clear()  # such records contribute nothing
            check.after(-1)
        try:
            probe(probed)  # a step may fill caches once
            for scale in _PROBE_SCALES if probed else ():
                leaves = [leaf * scale if leaf.is_floating_point() else leaf for leaf in first.tensors]
                if self._has_gradients(scaled := first.with_tensors(leaves)):  # the step may not accept such values
                    probed.append(scaled)
            began = time.perf_counter()
            for count in _OTHER_RECORDS:
                check.before()
                for _ in range(count):
                    self._has_gradients(others.pop())
                check.after(-1)
            self.seconds_of_record = (time.perf_counter() - began) / sum(_OTHER_RECORDS)
        except ConfigError:
            raise
        except Exception as error:  # caused by what an earlier pass left behind
            if isinstance(error, RecordError):
                raise ConfigError(str(error)) from error
            what = f"training_step fails after other records ({explain(error)})"
            raise StateFound(KEEPS_STATE.format(what=what)) from error
        self._probed = (self._probed + probed)[-_MAX_PROBES:]
        self._check = StateCheck(self._module, partial(probe, self._probed))

    def _has_gradients(self, one: Chunk) -> bool:
        try:
            self._gradients_of(one)
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except Exception:
            return False
        return True
