"""Per-example gradients by one forward and backward pass: of a chunk under vmap, or of one record by autograd.

Under vmap, activation checkpointing is disabled: it would recompute activations in the backward pass, where records can
no longer be told apart.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from dpexp._torch_compat import checkpointing_disabled, distributions_unchecked, tree_unflatten
from dpexp.errors import ConfigError, RecordError, words_of
from dpexp.privacy.gradients.chunk import Chunk, LossOf, copied
from dpexp.privacy.gradients.derived_parameters import DerivedParameters
from dpexp.privacy.gradients.inner_gradients import CopiesNeeded
from dpexp.privacy.gradients.interception import ConstantWritten, Interceptor
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient, merge
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.torch_functions import MixingRefused, custom_vmap_rules_refused
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import Values

ONE_LOSS = "training_step must return one number for a record: its loss."


def loss_of_step(step: Callable[[], Any]) -> Tensor:
    """The loss that a step returns, by itself or in a dictionary.

    Raises:
        RecordError: it returned none.
        RuntimeError: it tried to end the program, which a single record must not do.
    """
    try:
        output = step()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {words_of(error)}") from None
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise RecordError(f"training_step must return a loss for every record; it returned a {type(loss).__name__}.")
    return loss.reshape(()) if loss.numel() == 1 else loss


@dataclass
class ChunkGradients:
    """Per-example gradients and losses of a chunk of B records.

    Attributes:
        by_name: gradients of each parameter that was used, and the values marked for release.
        losses: [B].
        in_range: [B], whether all indices and labels of a record were in range.
    """

    by_name: dict[str, LayerGradient]
    losses: Tensor
    in_range: Tensor


class VmapPass:
    """Computes the per-example gradients of a chunk by one forward and backward pass under vmap."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values
        self._copies, self._own_constants = False, False

    def __call__(self, chunk: Chunk) -> ChunkGradients:
        """
        Raises:
            Exception: the records cannot be processed together.
        """
        try:
            return self._gradients(chunk)
        except CopiesNeeded:
            self._copies = True
        except ConstantWritten:
            self._own_constants = True
        return self(chunk)

    def _gradients(self, chunk: Chunk) -> ChunkGradients:
        size = chunk.size
        uses: dict[int, list[LayerGradient]] = defaultdict(list)

        def record(parameter: Tensor, gradient: LayerGradient) -> None:
            uses[id(parameter)].append(gradient)

        device = next(iter(self._parameters.values())).device
        anchor = torch.zeros(size, device=device, requires_grad=True)
        derived = DerivedParameters(self._parameters.values())
        states_before = python_random_states()
        seed = torch.default_generator.initial_seed()

        def loss_of_one(anchor: Tensor, *leaves: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            interceptor = Interceptor(derived, anchor, record, self._copies, self._own_constants)
            hooks = torch.autograd.graph.disable_saved_tensors_hooks(
                "hooks on saved tensors would see those of all records."
            )
            with (
                self._values.marked() as values,
                checkpointing_disabled(interceptor.watch_inputs),
                hooks,
                custom_vmap_rules_refused(),
                no_seeds(),
                distributions_unchecked(),
                interceptor,
            ):
                loss = chunk.loss_of(tree_unflatten(list(leaves), chunk.structure))
            interceptor.refuse_modified_inputs()
            if interceptor.error is not None and (size > 1 or torch.compiler.is_compiling()):  # a graph serves all
                raise RuntimeError(
                    "training_step catches an error, which may concern only one of the records."
                ) from interceptor.error
            in_range = torch.ones_like(anchor, dtype=torch.bool)
            for one in interceptor.in_range:
                in_range = in_range & one
            return loss, in_range, values()

        in_dims = (0, *(0 if isinstance(leaf, Tensor) else None for leaf in chunk.leaves))
        batched_loss = torch.func.vmap(loss_of_one, in_dims=in_dims, randomness="different")
        # Inside compiled functions, calls could not be intercepted.
        with spectral_norms_fixed(self._module), torch.compiler.set_stance("force_eager"):
            losses, in_range, values = batched_loss(anchor, *map(copied, chunk.leaves))
        if losses.dim() != 1:
            raise RecordError(ONE_LOSS)
        _refuse_other_parameters(losses, self._parameters)
        backward(losses.sum())
        if python_random_states() != states_before:
            raise RuntimeError(
                "training_step draws random numbers by Python's or NumPy's generator, once for all records."
            )
        _refuse_new_seed(seed)
        if any(p.grad is not None for p in self._parameters.values()):
            raise RuntimeError("a parameter is used by a function that cannot be intercepted.")
        with full_precision(device), torch.no_grad():
            for parameter, gradient in derived.to_parameters(uses):
                record(parameter, gradient)
            gradients = {name: merge(uses.pop(id(p))) for name, p in self._parameters.items() if id(p) in uses}
            return ChunkGradients(
                gradients | {key: DenseGradient(value) for key, value in values.items()}, losses.detach(), in_range
            )


def gradients_of_one_record(
    loss_of: LossOf, one: Any, parameters: dict[str, Tensor], values: Values
) -> tuple[dict[str, Tensor], Tensor]:
    """One record's gradients and released values by name, and its loss, by ordinary autograd.

    Raises:
        RecordError: the record has no scalar loss.
    """
    seed = torch.default_generator.initial_seed()
    for parameter in parameters.values():
        parameter.grad = None
    try:
        with values.marked() as given, no_seeds(), MixingRefused(indices=True):
            loss = loss_of(one)
        if loss.dim():
            raise RecordError(ONE_LOSS)
        released = {key: value.clone() for key, value in given().items()}
        _refuse_other_parameters(loss, parameters)
        backward(loss)
        _refuse_new_seed(seed)
        gradients = {n: _dense(p.grad) for n, p in parameters.items() if p.grad is not None}
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return gradients | released, loss.detach()


def _refuse_other_parameters(loss: Tensor, parameters: dict[str, Tensor]) -> None:
    """Refuses a loss that would give gradients, unclipped, to a parameter that no group releases."""
    known, seen, nodes = {id(parameter) for parameter in parameters.values()}, set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf.numel() and id(leaf) not in known:
            raise ConfigError(
                f"model: the loss trains a parameter {[*leaf.shape]} that no group releases: it is not the model's, or "
                "became trainable during training; register its layer in the model before the plan is made."
            )
        nodes += [following for following, _ in node.next_functions]


def backward(loss: Tensor) -> None:
    """Runs the backward pass in full precision, if the loss depends on anything that is trained."""
    if loss.requires_grad:
        with torch.no_grad(), full_precision(loss.device), MixingRefused():
            loss.backward()


def python_random_states() -> tuple:
    """The states of Python's and NumPy's global generators, by which a draw is noticed."""
    _, key, *rest = np.random.get_state()  # type: ignore[misc]
    return random.getstate(), key.tobytes(), *rest  # type: ignore[attr-defined]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


@contextmanager
def no_seeds() -> Iterator[None]:
    """Meanwhile functions that seed a generator raise a ConfigError; restoring a state, as checkpointing does, may."""
    originals = [(place, name, getattr(place, name)) for place, name in _SEEDING]
    for place, name, _ in originals:
        setattr(place, name, _refuse_seeding)
    try:
        yield
    finally:
        for place, name, function in originals:
            setattr(place, name, function)


_SEEDING: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed"), (np.random, "seed"),
)  # fmt: skip


def _refuse_seeding(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "model: a random number generator is seeded inside training_step, which makes its random numbers known; leave "
        "seeding to dpexp, whose generators are secret."
    )


def _refuse_new_seed(seed: int) -> None:
    if torch.default_generator.initial_seed() != seed:
        _refuse_seeding()
