"""What cannot be trained privately, refused by name before training."""

from torch import nn

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


def _learns_statistics(layer: nn.Module) -> bool:
    return layer.training or getattr(layer, "running_mean", None) is None
