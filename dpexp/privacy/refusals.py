"""What cannot be trained privately, refused by name before training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dpexp.errors import ConfigError


def refuse_mixing_layers(module: nn.Module) -> None:
    """Refuses layers that combine the records of a batch, or store statistics of them.

    Raises:
        ConfigError: names the layer and what to use instead.
    """
    for name, layer in module.named_modules():
        where = f"model: the layer {name or '(root)'} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and _learns_statistics(layer):
            raise ConfigError(
                f"{where} mixes the records of a batch, which no clipping of single records can bound; "
                "use GroupNorm, LayerNorm or InstanceNorm, or freeze it with eval()."
            )
        if (
            isinstance(layer, nn.modules.instancenorm._InstanceNorm)
            and _learns_statistics(layer)
            and layer.track_running_stats
        ):
            raise ConfigError(
                f"{where} stores running statistics of the data without noise; set track_running_stats=False."
            )
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ConfigError(f"{where} has no sizes yet; run the model once on an example before training.")
        if type(layer).__name__ == "OptimizedModule":
            raise ConfigError(f"{where} is compiled, so its gradients cannot be taken apart; pass the plain module.")


def refuse_mixing_modules(module: nn.Module, step: Callable[[Any], Any], batch: Any) -> None:
    """Refuses modules of any type that give a record another output alone than beside others.

    The engine never lets one record see another, so such a module would not break privacy; it would train on
    batches of one, which is hardly what its author means. Modules with randomness of their own are not judged.

    Args:
        step: what training does with a batch.
        batch: two records along the first dimension of every tensor.

    Raises:
        ConfigError: names the innermost such module.
    """
    first = tree_map(lambda leaf: leaf[:1] if isinstance(leaf, Tensor) else leaf, batch)
    with _undisturbed(module):
        together, alone, again = (
            _outputs(module, step, part, seed) for part, seed in ((batch, 0), (first, 1), (first, 2))
        )
    for (name, beside), (_, single), (_, repeated) in zip(together, alone, again, strict=False):
        for b, s, r in zip(beside, single, repeated, strict=False):
            if len(b) != 2 * len(s) or not torch.equal(s, r):
                continue
            tolerance = 1e-3 if b.dtype in (torch.float32, torch.float64) else 5e-2
            if not torch.allclose(b[: len(s)], s, rtol=tolerance, atol=tolerance / 10, equal_nan=True):
                raise ConfigError(
                    f"model: the module {name or '(root)'} ({type(module.get_submodule(name)).__name__}) mixes the "
                    "records of a batch: its output for a record depends on the others; make it treat each alone."
                )


def _outputs(module: nn.Module, step: Callable, batch: Any, seed: int) -> list[tuple[str, list[Tensor]]]:
    """Every module's output tensors in the order in which the modules finish."""
    outputs: list[tuple[str, list[Tensor]]] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensors = [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            outputs.append((name, [t for t in tensors if t.dim() and t.is_floating_point()]))

        return hook

    handles = [child.register_forward_hook(keep(name)) for name, child in module.named_modules()]
    try:
        torch.manual_seed(seed)
        step(batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


@contextmanager
def _undisturbed(module: nn.Module) -> Iterator[None]:
    """Dropout layers off meanwhile; afterwards buffers, modes and random numbers are as they were."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    dropouts = [
        layer for layer in module.modules() if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training
    ]
    for layer in dropouts:
        layer.training = False
    try:
        with torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        for layer in dropouts:
            layer.training = True
        for name, buffer in module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])


def _learns_statistics(layer: nn.Module) -> bool:
    return layer.training or getattr(layer, "running_mean", None) is None
