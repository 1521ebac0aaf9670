"""Is a record's loss another one in company? Then training, which sees records one at a time, is not what was meant.

Contrastive losses, mixup, statistics over a batch: the engine never lets one record see another, so they would not
break privacy. They would train on nothing, or on something else, and spend ε on it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpexp.errors import ConfigError
from dpexp.privacy.batches import flattened
from dpexp.privacy.engine.torch_functions import Refusing
from dpexp.privacy.isolation.randomness import own_randomness
from dpexp.privacy.keystream import KeyStream

_TRIES = 6  # what mixes at random may leave two records as they are


def refuse_company(module: nn.Module, loss_of: Callable[[Any], Tensor], batch: Any, device: torch.device) -> None:
    """Compares the losses of two records together, L(a, b), when each is disturbed or not. Where each record has a loss
    of its own, which a reduction adds up with weights, L(a, b) - L(a', b) - L(a, b') + L(a', b') = 0: with the same
    random numbers, so that randomness does not matter, and the same labels, so that weights do not. A layer that is
    random in training may take more or fewer random numbers for another record; there it is judged in evaluation alone.

    The two are made up, of random numbers and ones: what a record holds decides nothing.

    Args:
        loss_of: the loss of a batch.
        batch: tensors [B, 1, ...], of which the shapes are taken.

    Raises:
        ConfigError: names the innermost module that mixes the two, or training_step.
    """
    leaves, structure = flattened(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.dim() < 2 or leaf.shape[1] != 1 for leaf in tensors):
        return
    modes = {layer: layer.training for layer in module.modules()}
    refused: ConfigError | None = None
    try:
        for pair in _pairs(leaves):
            moved, mixing = _mixing(module, loss_of, tree_unflatten(pair, structure), device, modes)
            if moved and mixing is None:
                return
            refused = refused or mixing
    except _Incomputable:  # for two, so that it does not rely on company
        return
    finally:
        for layer, mode in modes.items():
            layer.training = mode
    if refused:
        raise refused


def _pairs(leaves: list[Any]) -> Iterator[list[Any]]:
    """Two records of random numbers; and, where several tensors could be masks, with each of them once all ones."""
    several = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for masks in (set[int](), *({k} for k in several if len(several) > 1 and leaves[k][0].numel() > 1)):
        yield [
            _made_up(torch.cat([leaf[0], leaf[0]]), k in masks) if isinstance(leaf, Tensor) else leaf
            for k, leaf in enumerate(leaves)
        ]


def _mixing(
    module: nn.Module,
    loss_of: Callable[[Any], Tensor],
    pair: Any,
    device: torch.device,
    modes: dict[nn.Module, bool],
) -> tuple[bool, ConfigError | None]:
    """Whether what is disturbed changes the loss; and which module mixes the two, if one does."""
    moved = False
    for training in (False, True):
        for layer, mode in modes.items():
            layer.training = mode and training
        for seed in range(_TRIES):
            runs = {which: _run(module, loss_of, pair, which, seed, device) for which in _WHICH}
            losses = [runs[which].loss for which in _WHICH]
            moved = moved or losses[0] != losses[1]
            interaction = losses[0] - losses[1] - losses[2] + losses[3]
            judged = not (training and any(run.random for run in runs.values()))
            tolerated = _tolerance(module) * max(map(abs, losses))
            if not judged or abs(interaction) <= tolerated:
                continue
            again = [_run(module, loss_of, pair, _WHICH[0], seed, device).loss for _ in range(2)]
            if max(abs(loss - losses[0]) for loss in again) <= tolerated:  # else it is state, which is looked for next
                return moved, ConfigError(_sentence(module, runs[_WHICH[0]], runs[_WHICH[1]]))
    return moved, None


def _made_up(x: Tensor, mask: bool = False) -> Tensor:
    """Numbers of that type and shape: normal ones; whole ones that are labels, indices and masks of most models."""
    if mask or not (x.is_floating_point() or x.is_complex()):
        return torch.ones_like(x)
    normal = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return normal.to(x.device, x.dtype).requires_grad_(x.requires_grad)


_WHICH = [(False, False), (False, True), (True, False), (True, True)]  # of the two records is disturbed


class _Incomputable(Exception):
    pass


@dataclass
class _Run:
    """A loss; whether random numbers were taken; each module's inputs and outputs, in the order in which they end."""

    loss: float = 0.0
    random: bool = False
    modules: list[tuple[str, list[Tensor], list[Tensor]]] = field(default_factory=list)


def _run(
    module: nn.Module,
    loss_of: Callable[[Any], Tensor],
    pair: Any,
    disturbed: tuple[bool, bool],
    seed: int,
    device: torch.device,
) -> _Run:
    """Disturbed is every number of a record that is no label, be it given or looked up in an embedding."""
    run = _Run()

    def disturb(x: Tensor) -> Tensor:
        if (
            not x.is_floating_point()
            or x.dim() < 2
            or len(x) != 2
            or x[0].numel() < 2
            or bool(((x == 0) | (x == 1)).all())
        ):
            return x
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x)
        return torch.stack([x[k] + (x[k].detach().std() + 1e-3) * noise[k] if disturbed[k] else x[k] for k in range(2)])

    def watch(name: str) -> Callable[..., Any]:
        def hook(layer: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                output = disturb(output)
            run.modules.append((name, _of_both(inputs), _of_both(output)))
            return output

        return hook

    handles = []
    try:
        handles += [child.register_forward_hook(watch(name)) for name, child in module.named_modules()]
        leaves, structure = tree_flatten(pair)
        given = tree_unflatten([disturb(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
        randomness = own_randomness(device, KeyStream.known(seed, "company", 0))
        with randomness, torch.autocast(device.type, enabled=False), Refusing():
            before = _generators(device)
            run.loss = float(loss_of(given).detach())
            run.random = _generators(device) != before
    except ConfigError:
        raise
    except Exception as error:
        raise _Incomputable from error
    finally:
        for handle in handles:
            handle.remove()
    return run


def _of_both(things: Any) -> list[Tensor]:
    found = [leaf.detach() for leaf in tree_leaves(things) if isinstance(leaf, Tensor)]
    return [leaf for leaf in found if leaf.dim() > 1 and len(leaf) == 2 and leaf.is_floating_point()]


def _generators(device: torch.device) -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    return torch.get_rng_state().numpy().tobytes(), on_gpu, random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[index,union-attr]


def _tolerance(module: nn.Module) -> float:
    """Relative, for what rounding may do in the module's type."""
    types = {parameter.dtype for parameter in module.parameters()}
    return 1e-3 if types <= {torch.float32, torch.float64} else 0.1


def _sentence(module: nn.Module, run: _Run, other: _Run) -> str:
    """Blames the first module that gives the undisturbed record, from the same input, another output because the other
    record is disturbed."""
    for (name, inputs, outputs), (_, same, others) in zip(run.modules, other.modules, strict=False):
        if _first_alike(inputs, same) and not _first_alike(outputs, others):
            return (
                f"model: the module {name or '(root)'} ({type(module.get_submodule(name)).__name__}) mixes the "
                "records of a batch: its output for a record depends on the others; make it treat each alone."
            )
    return (
        "model: the loss that training_step gives a record depends on the others of its batch, as in contrastive "
        "losses and mixup; private training sees each record alone, where it would be another loss, or none."
    )


def _first_alike(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(
        a.shape == b.shape and torch.allclose(a[0], b[0], rtol=1e-3, atol=1e-4 * float(a.abs().max()), equal_nan=True)
        for a, b in zip(some, others, strict=False)
    )
