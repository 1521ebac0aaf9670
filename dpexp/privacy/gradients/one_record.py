"""The gradient of one record as a graph of PyTorch's operators.

The training step is traced on throwaway copies of the module and of its owner, on fake tensors, for one record, by
ordinary autograd: (parameters and buffers, record, torch's random numbers) -> (loss, gradients, values for release).
The function that is traced has seen one record and no numbers: fake tensors have shapes and types alone. What the step
keeps lands in the copies. The rounds run operators of this graph, and no Python of the user's.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    distributions_unchecked,
    inputs_of,
    own_tensors,
    proxy_tensor,
    quick_tracing,
    tree_unflatten,
    without_mkldnn,
)
from dpexp.errors import RecordError
from dpexp.privacy.gradients.branches import DATA_READS, DataDependent, read_value
from dpexp.privacy.gradients.chunk import Chunk, copied
from dpexp.privacy.gradients.module_copy import changed
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.operators import (
    WITHOUT_WRITES,
    NotTraceable,
    check_operators,
    check_writes,
    dependents,
    drop_copies,
    is_random,
    simplify,
)
from dpexp.privacy.gradients.per_example import (
    ONE_LOSS,
    no_seeds,
    python_random_states,
    refuse_other_parameters,
)
from dpexp.privacy.gradients.recurrent import RecurrentLayersAsOperators
from dpexp.privacy.private_metrics import Values
from dpexp.privacy.state_checks import BUFFER, digest, refuse_kept

aten = torch.ops.aten


class Inputs:
    """The parameters and buffers that a step reads: the module's, and those of networks outside of it.

    Each is looked up by the name of its layer and its own each time, since a hook may replace a tensor or a layer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        places: dict[int, tuple[int, str, int, str]] = {}  # module, layer, parameters or buffers, own name
        for k, module in enumerate(modules):
            for layer, part in module.named_modules():
                for kind, owner in enumerate(own_tensors(part)):
                    for key, tensor in owner.items():
                        if tensor is not None and not is_lazy(tensor):
                            places.setdefault(id(tensor), (k, layer, kind, key))
        self._places = [*places.values()]

    def _found(self) -> list[Tensor | None]:
        """The tensors; None in the place of one that is no longer there."""
        layers = {(k, layer): _layer(self._modules[k], layer) for k, layer, *_ in self._places}
        owners = {place: ({}, {}) if layer is None else own_tensors(layer) for place, layer in layers.items()}
        return [owners[k, layer][kind].get(key) for k, layer, kind, key in self._places]

    def tensors(self) -> list[Tensor]:
        return [t for t in self._found() if t is not None]

    def perturbed(self) -> list[Tensor]:
        """The same, with noise on trainable parameters, so that no parameter is exactly zero."""
        generator = torch.Generator().manual_seed(0)
        return [
            t + (1e-3 * (1 + t.detach().abs()) * torch.randn(t.shape, generator=generator).to(t)).to(t)
            if isinstance(t, nn.Parameter) and t.requires_grad and t.is_floating_point()
            else t
            for t in self.tensors()
        ]

    def names(self) -> list[str]:
        kinds = [f"{type(module).__name__}" if k else "" for k, module in enumerate(self._modules)]
        return [".".join(filter(None, (kinds[k], layer, key))) for k, layer, _, key in self._places]

    def specs(self) -> list[Any]:
        """(shape, dtype, device) of each, on which a graph relies; None where there is none."""
        return [None if t is None else (t.shape, t.dtype, t.device) for t in self._found()]

    @contextmanager
    def replaced(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Replaces them in the block, wherever they are registered."""
        new = {id(old): t for old, t in zip(self.tensors(), tensors, strict=True)}
        owners = [owner for module in self._modules for layer in module.modules() for owner in own_tensors(layer)]
        before = [(owner, dict(owner)) for owner in owners]
        try:
            for owner, _ in before:
                owner.update({key: new.get(id(t), t) for key, t in owner.items()})
            yield
        finally:
            for owner, content in before:
                owner.clear()
                owner.update(content)


def _layer(module: nn.Module, name: str) -> nn.Module | None:
    """The layer of a dotted name; None: there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


@dataclass
class OneRecord:
    """The traced gradient of one record.

    Attributes:
        graph: (parameters and buffers, the record's tensors) -> loss, gradients of `used`, `values`.
        inputs: the parameters and buffers.
        specs: of `inputs` when traced.
        used: names of the parameters that have a gradient.
        values: keys of the values for release.
        attributes: of the module and the owner when traced (`TrainingStep.attributes`).
        kept: names of those that the step set on its copies.
    """

    graph: fx.GraphModule
    inputs: Inputs
    specs: list[Any]
    used: list[str]
    values: list[str]
    attributes: dict[str, Any]
    kept: list[str]

    @cached_property
    def text(self) -> str:
        """Its code; equal code with equal constants computes the same."""
        return f"{self.graph.code} {self.inputs.names()} {self.used} {self.values}"

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(map(is_random, self.graph.graph.nodes))

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """Tensors that the graph holds."""
        names = [str(node.target) for node in self.graph.graph.nodes if node.op == "get_attr"]
        return {name: getattr(self.graph, name) for name in names}

    @cached_property
    def literals(self) -> set[str]:
        """Names of the constants that are literals in the code, as in torch.tensor([0.5, 2.0])."""
        lifted = [node.args[0] for node in self.graph.graph.nodes if "lift_fresh" in str(node.target)]
        names = {str(node.target) for node in lifted if isinstance(node, fx.Node)}
        return {name for name in names if name in self.constants and self.constants[name].numel() <= _MAX_LITERAL}


_MAX_LITERAL = 64  # entries of a constant that counts as a literal in the code


def difference(some: OneRecord, other: OneRecord) -> str | None:
    """The first line of code or constant in which two traces differ; None: they are equal."""
    if some.text != other.text:
        lines = zip(some.text.splitlines(), other.text.splitlines(), strict=False)
        return next((b.strip()[:150] for a, b in lines if a != b), "its length")
    for (name, a), b in zip(some.constants.items(), other.constants.values(), strict=True):
        if a.data_ptr() != b.data_ptr() and digest(a) != digest(b):
            return f"the tensor {name} {tuple(a.shape)}"
    return None


def trace_one(parameters: dict[str, Tensor], chunk: Chunk, values: Values) -> OneRecord:
    """Traces the step for one record of a chunk's shapes and types; its numbers are not read.

    Raises:
        NotTraceable: the step is not a function of operators alone, such as one that branches on a record's values.
        ConfigError: the step keeps state of a record that it reads again.
    """
    # Networks in lists and objects, and of the step's owner; those that are found while they are called are added.
    outside = [value for value in chunk.step.attributes().values() if isinstance(value, nn.Module)]
    while True:
        with _Tracing(parameters, chunk, values, outside) as tracing:
            one = tracing.run()
            if not tracing.found:
                _refuse_read_again(one, tracing)
                return one
        outside += tracing.found


def _refuse_read_again(one: OneRecord, tracing: "_Tracing") -> None:
    """Raises ConfigError for what the step sets if a second trace on the same copies, which has it, differs."""
    if one.kept:
        again = None
        with suppress(Exception):
            again = tracing.run()
        refuse_kept(one.kept, again is None or difference(one, again) is not None)


class _Tracing:
    """Traces a step on one stand-in, once or twice. A context, within which its copies live.

    Attributes:
        found: networks outside of the module that the step was found to call.
        kept: attributes of the copies that the step set, with a value that may depend on the record or on itself.
    """

    def __init__(
        self, parameters: dict[str, Tensor], chunk: Chunk, values: Values, outside: list[nn.Module]
    ) -> None:  # fmt: skip
        self._chunk, self._values, self._module = chunk, values, chunk.step.module
        self._inputs, self._outside = Inputs([self._module, *outside]), outside
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        real = self._inputs.tensors()
        self._state = [self._fake.from_tensor(t, static_shapes=True) for t in real]
        self._fakes = {id(t): fake for t, fake in zip(real, self._state, strict=True)}
        self._parameters: dict[str, Tensor] = {name: self._fakes[id(p)] for name, p in parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None  # of the last round
        some = [(self._fake.from_tensor(t[0].detach(), static_shapes=True), t.requires_grad) for t in chunk.tensors]
        self._record = [t.clone().requires_grad_(trained) for t, trained in some]
        self._of_gpu = any(t.device.type != "cpu" for t in self._state)  # whose kernels of attention have no vmap rule
        self._until_left, self._held = ExitStack(), chunk.step.attributes()
        self.found: list[nn.Module] = []
        self.kept: list[str] = []

    def __enter__(self) -> "_Tracing":
        with self._inputs.replaced(self._state):
            stand_in = self._chunk.step.stand_in(lambda t: self._fakes.get(id(t), t))
            self._own = self._until_left.enter_context(stand_in)
        return self

    def __exit__(self, *_: Any) -> None:
        self._until_left.close()

    def run(self) -> OneRecord:
        mode, refused, python_random = _Reads(), DataDependent.raised, python_random_states()
        buffers = [owner for layer in self._own.module.modules() for owner in own_tensors(layer)]
        before, held = self._own.attributes(), [dict(owner) for owner in buffers]
        names: list[list[str]] = []

        def flat(*tensors: Tensor) -> list[Tensor]:
            given = map(copied, tensors[len(self._state) :])  # a step may write to its batch
            leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._chunk.leaves]
            with (
                self._inputs.replaced(self._state),
                self._values.marked() as released,
                _modules_seen({*self._own.module.modules(), *self._module.modules(), *self._outside}, self.found),
            ):
                with mode, RecurrentLayersAsOperators():
                    loss = self._own.loss(tree_unflatten(leaves, self._chunk.structure))
                if loss.dim():
                    raise RecordError(ONE_LOSS)
                refuse_other_parameters(loss, self._parameters)
                if loss.requires_grad:
                    with full_precision(loss.device), mode:
                        loss.backward()
                values = released()
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            for p in self._parameters.values():
                p.grad = None
            kept = self._kept(before, [*zip(buffers, held, strict=True)])
            traced = {name: t for name, t in kept.items() if isinstance(t, FakeTensor)}
            names[:] = [*gradients], [*values], [*traced]
            self.kept = [name for name in kept if name not in traced and not isinstance(kept[name], Tensor)]
            return [loss.detach(), *gradients.values(), *values.values(), *traced.values()]

        with (
            self._fake, quick_tracing(), without_mkldnn(), distributions_unchecked(), no_seeds(),
            torch.enable_grad(), torch.compiler.set_stance("force_eager"),
            sdpa_kernel(SDPBackend.MATH) if self._of_gpu else nullcontext(),
        ):  # fmt: skip
            graph = proxy_tensor.make_fx(flat)(*self._state, *self._record)
        if mode.error is not None or DataDependent.raised > refused:
            raise NotTraceable("training_step catches an error, which may concern only some records") from mode.error
        if python_random_states() != python_random:
            raise NotTraceable("training_step draws by Python's or NumPy's generator, once for all records")
        check_operators(graph)
        drop_copies(graph.graph)
        if check_writes(graph):
            inputs = [t.detach() for t in (*self._state, *self._record)]
            with self._fake, quick_tracing():
                graph = proxy_tensor.make_fx(torch.func.functionalize(graph, remove="mutations"), WITHOUT_WRITES)(
                    *inputs
                )
        used, released_values, kept_tensors = names
        self.kept += _depend_on_inputs(graph.graph, kept_tensors)
        simplify(graph.graph)
        graph.recompile()
        one = OneRecord(graph, self._inputs, self._inputs.specs(), used, released_values, self._held, self.kept)
        if any(isinstance(t, FakeTensor) for t in one.constants.values()):
            raise NotTraceable("it reads a tensor that it computed when it was traced before")
        return one

    def _kept(self, before: dict[str, Any], buffers: list[tuple[dict, dict]]) -> dict[str, Any]:
        """What the step set in the copies: attributes and buffers."""
        now = self._own.attributes()
        kept = {name: now.get(name) for name in changed(before, now)}
        for owner, held in buffers:
            kept |= {f"{BUFFER}{key}": t for key, t in owner.items() if t is not held.get(key)}
        return kept


def _depend_on_inputs(graph: fx.Graph, names: list[str]) -> list[str]:
    """Takes the last outputs, of these names, from a graph; returns those that depend on an input or on random numbers,
    others being caches, which are computed in the graph."""
    of_inputs = dependents(graph, [node for node in graph.nodes if node.op == "placeholder"])
    (outputs,) = inputs_of(graph.output_node())
    count = len(outputs) - len(names)
    graph.output_node().args = (outputs[:count],)
    return [name for name, node in zip(names, outputs[count:], strict=True) if node in of_inputs]


class _Reads(TorchFunctionMode):
    """Gives a number of a record, which a fake tensor does not have, a placeholder that may be logged; and makes
    gradients of tables dense.

    Attributes:
        error: the last one that a function of torch raised, even if the caller caught it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            if func in DATA_READS and isinstance(args[0], FakeTensor):
                return read_value(func, args[0])
            if func is F.embedding_bag and (found := _of_bags(*args, **(kwargs or {}))) is not None:
                return found
            if kwargs and kwargs.get("sparse"):  # embedding and embedding_bag
                kwargs = kwargs | {"sparse": False}
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def _of_bags(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor | None:  # fmt: skip
    """F.embedding_bag of bags of equal length, by an embedding, which vmap knows; None: of other bags."""
    if input.dim() != 2 or max_norm is not None or scale_grad_by_freq or mode == "max":
        return None
    counted = torch.ones_like(input) if padding_idx is None else input != padding_idx % len(weight)
    weights = counted.to(weight.dtype) if per_sample_weights is None else per_sample_weights * counted
    total = (F.embedding(input, weight) * weights[..., None]).sum(1)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


@contextmanager
def _modules_seen(known: set[nn.Module], found: list[nn.Module]) -> Iterator[None]:
    """Collects modules that are called in the block, hold tensors, and are not known."""

    def note(layer: nn.Module, _: Any) -> None:
        if layer not in known and any(
            isinstance(t, Tensor) and not isinstance(t, FakeTensor)
            for owner in own_tensors(layer)
            for t in owner.values()
        ):
            found.append(layer)
            known.update(layer.modules())

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
