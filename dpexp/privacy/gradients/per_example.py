"""One forward and one backward pass: of several records under vmap, or of one by ordinary autograd.

Activation checkpointing computes anew in the backward pass, where records are no longer told apart: what it would drop
is kept.
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

from dpexp._torch_compat import checkpointing_disabled, tree_unflatten
from dpexp.errors import ConfigError, RecordError, words_of
from dpexp.privacy.gradients.chunk import Chunk, LossOf, copied
from dpexp.privacy.gradients.derived_parameters import Derived
from dpexp.privacy.gradients.interception import Capture
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient, merged
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.torch_functions import Refusing, no_vmap_of_its_own
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import Values

ONE_LOSS = "training_step must return one number for a record: its loss."


def loss_in(step: Callable[[], Any]) -> Tensor:
    """The loss that a step returns, by itself or in a dictionary.

    Raises:
        RecordError: it returned none.
        RuntimeError: it wanted to end the program, which one record may not.
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
    return loss


@dataclass
class Gradients:
    """What a pass of B records gives.

    Attributes:
        of: the gradients of each parameter that was used, and the values given for release, by name.
        losses: [B].
        in_range: [B], whether all indices and labels of a record were.
    """

    of: dict[str, LayerGradient]
    losses: Tensor
    in_range: Tensor


class VmapPass:
    """Passes of several records at once."""

    def __init__(self, module: nn.Module, parameters: dict[str, Tensor], values: Values) -> None:
        self._module = module
        self._parameters = parameters
        self._values = values

    def __call__(self, chunk: Chunk) -> Gradients:
        """
        Raises:
            Exception: they cannot be processed together.
        """
        size = chunk.size
        uses: dict[int, list[LayerGradient]] = defaultdict(list)

        def record(parameter: Tensor, use: LayerGradient) -> None:
            uses[id(parameter)].append(use)

        device = next(iter(self._parameters.values())).device
        anchor = torch.zeros(size, device=device, requires_grad=True)
        derived = Derived(self._parameters.values())
        drawn = python_randomness()
        seed = torch.default_generator.initial_seed()

        def loss_of_one(anchor: Tensor, *leaves: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            capture = Capture(derived, anchor, record)
            hooks = torch.autograd.graph.disable_saved_tensors_hooks(
                "hooks on saved tensors would see those of all records."
            )
            with (
                self._values.given() as values,
                checkpointing_disabled(capture.met),
                hooks,
                no_vmap_of_its_own(),
                no_seeds(),
                capture,
            ):
                loss = chunk.loss_of(tree_unflatten(list(leaves), chunk.structure))
            capture.refuse_changes()
            if capture.error is not None and (size > 1 or torch.compiler.is_compiling()):  # a trace is of all records
                raise RuntimeError(
                    "training_step catches an error, which may be of one record alone."
                ) from capture.error
            in_range = torch.ones_like(anchor, dtype=torch.bool)
            for one in capture.in_range:
                in_range = in_range & one
            return loss, in_range, values()

        in_dims = (0, *(0 if isinstance(leaf, Tensor) else None for leaf in chunk.leaves))
        together = torch.func.vmap(loss_of_one, in_dims=in_dims, randomness="different")
        with (
            spectral_norms_fixed(self._module),
            torch.compiler.set_stance("force_eager"),
        ):  # in compiled functions, uses of parameters would not be seen
            losses, in_range, values = together(anchor, *map(copied, chunk.leaves))
        if losses.dim() != 1:
            raise RecordError(ONE_LOSS)
        backward(losses.sum())
        if python_randomness() != drawn:
            raise RuntimeError(
                "training_step draws random numbers by Python's or NumPy's generator, once for all records."
            )
        _refuse_seeds(seed)
        if any(p.grad is not None for p in self._parameters.values()):
            raise RuntimeError("a parameter is used in a way that was not seen.")
        with full_precision(device), torch.no_grad():
            for parameter, use in derived.passed_on(uses):
                record(parameter, use)
            found = {name: merged(uses.pop(id(p))) for name, p in self._parameters.items() if id(p) in uses}
            return Gradients(
                found | {key: DenseGradient(value) for key, value in values.items()}, losses.detach(), in_range
            )


def gradients_of_one(
    loss_of: LossOf, one: Any, parameters: dict[str, Tensor], values: Values
) -> tuple[dict[str, Tensor], Tensor]:
    """A record's gradients with respect to the parameters that it reaches, by ordinary autograd, the values that it
    gave for release, and its loss.

    Raises:
        RecordError: it has none.
    """
    seed = torch.default_generator.initial_seed()
    for parameter in parameters.values():
        parameter.grad = None
    try:
        with values.given() as given, no_seeds(), Refusing(indices=True):
            loss = loss_of(one)
        if loss.dim():
            raise RecordError(ONE_LOSS)
        released = {key: value.clone() for key, value in given().items()}
        backward(loss)
        _refuse_seeds(seed)
        gradients = {n: _dense(p.grad) for n, p in parameters.items() if p.grad is not None}
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return gradients | released, loss.detach()


def backward(loss: Tensor) -> None:
    if loss.requires_grad:
        with torch.no_grad(), full_precision(loss.device), Refusing():
            loss.backward()


def python_randomness() -> tuple:
    """The states of Python's and NumPy's generators, to see whether numbers were drawn."""
    _, key, *rest = np.random.get_state()  # type: ignore[misc]
    return random.getstate(), key.tobytes(), *rest  # type: ignore[attr-defined]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


@contextmanager
def no_seeds() -> Iterator[None]:
    """Meanwhile the functions that seed generators refuse to; to set a state, as checkpointing does, is no seed."""
    seeding = [(place, name, getattr(place, name)) for place, name in _SEEDING]
    for place, name, _ in seeding:
        setattr(place, name, _refuse_seed)
    try:
        yield
    finally:
        for place, name, function in seeding:
            setattr(place, name, function)


_SEEDING: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed"), (np.random, "seed"),
)  # fmt: skip


def _refuse_seed(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "model: a generator of random numbers is seeded inside training_step, so that what is drawn there is known; "
        "leave that to dpexp, whose generators are secret."
    )


def _refuse_seeds(seed: int) -> None:
    if torch.default_generator.initial_seed() != seed:
        _refuse_seed()
