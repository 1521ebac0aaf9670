"""The graphs of a traced step: one trace of a record for each shape, lifted over chunks of any number of records."""

import math
import time
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.branches import describe, explain
from dpexp.privacy.gradients.chunk import NO_LOSS, Chunk, NoLoss, SyntheticRecords, public_leaves, synthetic_options
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.gradients.compiled import CompileDecision, flops_of, seconds
from dpexp.privacy.gradients.graph import Graph, Template, add_sums, compare, compile_and_compare, prove, rows_of, trace
from dpexp.privacy.gradients.lifted import Lifted
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.one_record import OneRecord, difference, trace_one
from dpexp.privacy.gradients.operators import NotTraceable
from dpexp.privacy.gradients.per_example import NO_GRADIENT
from dpexp.privacy.noise.randomness import own_state
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.sampling.policies import Policy
from dpexp.privacy.sampling.training_data import Memory

_MANY_SHAPES = 17  # from which on a warning is given
_PROVED_ROWS = 5

STEP_CHANGED = (
    "model: training_step has changed since it was last traced ({what}), by something other than a plain attribute of "
    "a module, so records of a new shape would be processed by another step than the others; keep what hooks change "
    "in buffers, or in attributes that change between epochs."
)


class Graphs:
    """Traces, proves and keeps the graphs of a step, and runs chunks by them.

    Args:
        zeros: gives a sum of zeros for each parameter and value, by name.
        usual: rows of a usual chunk (`usual_rows`).
        data: the training set's memory, which no graph may hold.

    Attributes:
        compiling: decides whether the graph of usual records is compiled.
        seconds_of_round: that the gradients of a sample of usual records take.
        constants: shapes of other tensors that the step reads.
        synthetic: how synthetic records are drawn.
    """

    def __init__(
        self, module: nn.Module, parameters: dict[str, Tensor], values: Values, clip: ClippedSums,
        zeros: Callable[[], dict[str, Tensor]], device: torch.device, usual: int, compiling: CompileDecision,
        data: Memory,
    ) -> None:  # fmt: skip
        self._module, self._parameters, self._values = module, parameters, values
        self._clip, self._zeros, self._device, self._usual, self._data = clip, zeros, device, usual, data
        self.compiling = compiling
        self.seconds_of_round = 0.0
        self.constants: list[str] = []
        self.synthetic = SyntheticRecords()
        self._reference: Chunk | None = None  # a synthetic record of usual shape
        self._steps: dict[Hashable, OneRecord] = {}  # by shape of records
        self._lifted: dict[Hashable, Lifted] = {}
        self._graphs: dict[tuple[Hashable, int], Graph] = {}
        self._templates: dict[Hashable, Template | None] = {}
        self._refused: dict[Hashable, str] = {}  # why records of this shape are not traced
        self._compiled_rows: dict[Hashable, int] = {}

    # ---- before the rounds, and where the step has changed -----------------------------------------------------------

    def trace(self, chunk: Chunk) -> OneRecord:
        """A new trace of the step, for a record of a chunk's shapes and types."""
        other = next((leaf for leaf in chunk.leaves if not isinstance(leaf, Tensor | bool | None)), None)
        if other is not None:
            raise NotTraceable(f"a batch holds a {type(other).__name__} besides tensors; leave out what is not used")
        with own_state(self._device):
            one = trace_one(chunk.loss_of, self._module, self._parameters, chunk, self._values)
        self._data.refuse(one.constants.items())
        return one

    def use(self, one: OneRecord, chunk: Chunk, public: Any = None) -> None:
        """Processes records of the usual shape as `one` says, from now on; all other graphs are dropped.

        Raises:
            NotTraceable: the graph cannot be proved. ConfigError: it gives no gradients.
        """
        if not any(name in self._parameters for name in one.used):
            raise ConfigError(NO_GRADIENT)
        for kept in (self._steps, self._lifted, self._graphs, self._templates, self._refused, self._compiled_rows):
            kept.clear()
        constants = (t for name, t in one.constants.items() if name not in one.literals)
        self.constants = [str(tuple(t.shape)) for t in constants if t.numel() > 1]
        with own_state(self._device):
            lifted = Lifted(one)
            self.synthetic = self._finite(lifted, chunk, public)
            self._prove(one, lifted, chunk)
            self._keep(one, lifted, chunk)
            self._reference = self.synthetic.records(chunk, 1, 3)
            self._compile(chunk)

    def changed(self, chunk: Chunk) -> OneRecord | None:
        """A new trace of the step, if it differs from the one in use."""
        assert self._reference is not None
        usual = replace(self._reference, loss_of=chunk.loss_of)
        again = self.trace(usual)
        if difference(self._steps[usual.key], again) is not None:
            return again
        self._steps[usual.key].attributes = again.attributes
        return None

    @property
    def stale(self) -> bool:
        """Whether a parameter or buffer has another shape or type than when the step was traced."""
        return any(one.specs != one.inputs.specs() for one in self._steps.values())

    @property
    def reference(self) -> Chunk:
        assert self._reference is not None
        return self._reference

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the module when the usual shape was traced."""
        return self._steps[self.reference.key].attributes

    @property
    def kept(self) -> list[str]:
        """Attributes that the step sets, on a copy of the module, and does not read again."""
        return self._steps[self.reference.key].kept

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return any(one.draws for one in self._steps.values())

    def digest(self) -> str:
        """Equal for equal steps."""
        return " ".join(sorted(one.text for one in self._steps.values()))

    def _finite(self, lifted: Lifted, chunk: Chunk, public: Any) -> SyntheticRecords:
        """Synthetic records with finite losses and gradients."""
        error: Exception | None = None
        for synthetic in synthetic_options(lifted.smallest_range or 2, public_leaves(public, chunk)):
            try:
                found = self._run_lifted(lifted, synthetic.records(chunk, 2, 0))
            except ConfigError:
                raise
            except Exception as caught:  # an operator refuses such records
                error = caught
                continue
            error = None
            if bool((found["finite"] & found["in_range"] & found["loss"].isfinite()).all()):
                return synthetic
        raise error or NoLoss(NO_LOSS)

    def _run_lifted(self, lifted: Lifted, records: Chunk) -> dict[str, Tensor]:
        counted = torch.ones(records.size, dtype=torch.bool, device=self._device)
        return self._outputs(
            lifted, lifted.inputs.tensors(), self._clip.clip_norms((), self._device), counted, records.tensors
        )

    def _outputs(
        self, lifted: Lifted, state: list[Tensor], clip_norms: Tensor, counted: Tensor, records: list[Tensor]
    ) -> dict[str, Tensor]:
        """`sum:name` for each parameter and value, and losses, norms and flags of each row."""
        sums = self._zeros()
        with torch.no_grad(), full_precision(self._device):
            gradients = lifted([t.detach() for t in state], [t.detach() for t in records])
            found = self._clip(gradients, clip_norms, sums, counted & gradients.in_range, lifted.draws)
        outputs = {f"sum:{name}": total for name, total in sums.items()}
        return outputs | found | {"loss": gradients.losses, "in_range": gradients.in_range}

    def _traced(self, lifted: Lifted, records: Chunk) -> Graph:
        """The graph of a chunk of this number of records."""
        state, counted = lifted.inputs.tensors(), torch.ones(records.size, dtype=torch.bool, device=self._device)
        inputs = [*state, self._clip.clip_norms((), self._device), counted, *records.tensors]

        def run(*inputs: Tensor) -> dict[str, Tensor]:
            k = len(state)
            return self._outputs(lifted, [*inputs[:k]], inputs[k], inputs[k + 1], [*inputs[k + 2 :]])

        return trace(run, inputs, lifted.inputs, lifted.draws)

    def _prove(self, one: OneRecord, lifted: Lifted, chunk: Chunk) -> None:
        """Raises NotTraceable unless lifting is proved to keep records apart, and gives the gradients of each."""
        some, others = (self.synthetic.records(chunk, _PROVED_ROWS, seed) for seed in (0, 1))
        compare(one, lifted, some)
        state, clip_norms = lifted.inputs.perturbed(), self._clip.clip_norms((), self._device)
        prove(
            lambda records, counted: self._outputs(lifted, state, clip_norms, counted, records.tensors),
            some,
            others,
            lifted.draws,
        )

    def _runner(self, lifted: Lifted, graph: Graph) -> Callable[[Chunk, Tensor], dict[str, Tensor]]:
        """Runs a graph with perturbed weights: (records, which rows count) -> results."""
        state, clip_norms = lifted.inputs.perturbed(), self._clip.clip_norms((), self._device)
        return lambda records, counted: graph([*state, clip_norms, counted, *records.tensors], self._device)

    def _keep(self, one: OneRecord, lifted: Lifted, chunk: Chunk) -> None:
        """Keeps a shape's graph of usual size."""
        key, rows = chunk.key, self._usual
        self._graphs[key, rows] = self._traced(lifted, self.synthetic.records(chunk, rows, 0))
        self._steps[key], self._lifted[key] = one, lifted

    def _compile(self, chunk: Chunk) -> None:
        """Compiles the graph of usual records, if that is asked for or saves time, compares and proves it."""
        key, usual, compiling = chunk.key, self._usual, self.compiling
        graph, lifted = self._graphs[key, usual], self._lifted[key]
        some = self.synthetic.records(chunk, usual, 0)
        counted = torch.ones(usual, dtype=torch.bool, device=self._device)

        def time_of(graph: Graph, records: Chunk) -> float:
            run = self._runner(lifted, graph)
            counted = torch.ones(records.size, dtype=torch.bool, device=self._device)
            return seconds(lambda: run(records, counted), self._device)

        before = time_of(graph, some)
        self.seconds_of_round, before = before * compiling.sample_size / usual, before * compiling.chunks(usual)
        if compiling.decided is False or not compiling.worth_trying(before, len(graph.run.graph.nodes)):
            return
        parameters = sum(zeros.numel() for zeros in self._zeros().values())
        flops = flops_of(lambda: self._runner(lifted, graph)(some, counted))
        rows = compiling.rows(usual, flops, parameters)
        graph, some = self._graph_of(chunk, key, rows), self.synthetic.records(chunk, rows, 0)
        inputs = [*lifted.inputs.tensors(), self._clip.clip_norms((), self._device)]
        inputs += [torch.ones(rows, dtype=torch.bool, device=self._device), *some.tensors]
        began = time.perf_counter()
        try:
            fast = compile_and_compare(graph, inputs, lifted.inputs, self._device, compiling.progress)
            prove(self._runner(lifted, fast), some, self.synthetic.records(chunk, rows, 1), fast.zeroing)
        except Exception as error:
            compiling.failed(explain(error))
            return
        after = compiling.chunks(rows) * time_of(fast, some)
        if compiling.compare(rows, before, after, time.perf_counter() - began):
            self._graphs[key, rows] = fast
            self._compiled_rows[key], self.seconds_of_round = rows, after

    # ---- in the rounds -----------------------------------------------------------------------------------------------

    def add(self, chunk: Chunk, clip_norms: Tensor, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on a chunk, adds to `sums`, and returns each record's loss, norms and flags.

        Rows of padding are copies of the first record, which no operator refuses that accepts the records. Records with
        a norm that is not finite add nothing: a graph that draws random numbers, which may be the cause, sets their
        gradients to zero; other graphs run again with copies of another record in their place. If an error is raised,
        nothing was added.

        Raises:
            NotTraceable: records of this shape cannot be traced.
        """
        key = chunk.key
        if key not in self._lifted:
            self._trace_new_shape(chunk, key)
        rows = self._compiled_rows.get(key) or rows_of_graph(chunk.size, self._usual)
        if rows < chunk.size:
            total: dict[str, Tensor] = {}
            each = [self.add(part, clip_norms, total) for part in chunk.split(rows)]
            add_sums({f"sum:{name}": value for name, value in total.items()}, sums)
            return {name: torch.cat([one[name] for one in each]) for name in each[0]}
        graph, state = self._graph_of(chunk, key, rows), self._lifted[key].inputs.tensors()
        index = torch.arange(rows, device=self._device)
        counted, padded = index < chunk.size, chunk.padded(rows)
        found = graph([*state, clip_norms, counted, *padded.tensors], self._device)
        if not graph.zeroing and not bool((finite := found["finite"]).all()):
            if not bool((finite & counted).any()):
                return rows_of(found, chunk.size)
            good = (finite & counted).nonzero()[0]
            replaced = padded.rows(torch.where(finite, index, good))
            again = graph([*state, clip_norms, counted & finite, *replaced.tensors], self._device)
            found = again | {name: value for name, value in found.items() if not name.startswith("sum:")}
        add_sums(found, sums)
        return rows_of(found, chunk.size)

    def _graph_of(self, chunk: Chunk, key: Hashable, rows: int) -> Graph:
        """The graph of a shape and number of rows: by the template, which the first two sizes make, else traced."""
        if (key, rows) not in self._graphs:
            template, lifted = self._templates.get(key), self._lifted[key]
            with own_state(self._device):
                if template is not None and rows > 1:  # vmap over one row is another graph
                    graph = template.of_rows(rows)
                else:
                    graph = self._traced(lifted, self.synthetic.records(chunk, rows, 0))
            if key not in self._templates and rows > 1 and self._usual > 1:
                self._templates[key] = Template.of(self._graphs[key, self._usual], self._usual, graph, rows)
            self._graphs[key, rows] = graph
        return self._graphs[key, rows]

    def _trace_new_shape(self, chunk: Chunk, key: Hashable) -> None:
        """Traces a shape that first occurs in a round, which private records make necessary.

        How a record is processed would depend on which shapes other records have, if the step had changed since it was
        traced for them: the usual shape is traced again.

        Raises:
            NotTraceable: it cannot be traced. ConfigError: the step has changed.
        """
        if key in self._refused:
            raise NotTraceable(self._refused[key])
        try:
            one = self.trace(chunk)
            with own_state(self._device):
                lifted = Lifted(one)
                self._prove(one, lifted, chunk)
                self._keep(one, lifted, chunk)
        except (torch.OutOfMemoryError, ConfigError):
            raise
        except Exception as error:
            shapes = describe([tensor[0] for tensor in chunk.tensors])
            self._refused[key] = f"training_step cannot be traced for records of {shapes}: {explain(error)}"
            raise NotTraceable(self._refused[key]) from None
        finally:
            if self.changed(chunk) is not None:
                raise ConfigError(STEP_CHANGED.format(what="a new trace of it differs"))
        if len(self._lifted) == _MANY_SHAPES:
            warnings.warn(
                f"data: records have {len(self._lifted)} shapes so far, and the step is traced for each, which takes "
                "as long as many rounds; pad records to a few shapes."
            )


def usual_rows(policy: Policy, n: int, limit: int | None = None) -> int:
    """Rows of a usual chunk: two standard deviations above a sample's mean size, within a limit."""
    mean, std = size_of_samples(policy, n)
    rows = max(1, math.ceil(mean + 2 * std - 1e-6))
    return rows if limit is None else min(rows, limit)


def size_of_samples(policy: Policy, n: int) -> tuple[float, float]:
    """Mean and standard deviation of a sample's size."""
    mean = policy.q * n
    return mean, 0 if policy.name in ("fixed_size", "shuffle") else math.sqrt(mean * (1 - policy.q))


def rows_of_graph(count: int, usual: int) -> int:
    """Rows of the graph for `count` records: the usual number plus or minus a multiple of its ninth, rounded up."""
    step = max(1, round(usual / 9))
    return usual + math.ceil((count - usual) / step) * step
