"""Which parameters are trained: all, or few, so that less noise is added to a model that is good already."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from dpexp.errors import ConfigError


def head_of(model: nn.Module, name: str | None = None) -> list[str]:
    """The names of the parameters of a model's head: of the module of that name, or of the last one that has parameters
    of its own.

    Raises:
        ConfigError: there is no such module, or it has no parameters.
    """
    owners = [owner for owner, layer in model.named_modules() if any(True for _ in layer.parameters(recurse=False))]
    if not owners:
        raise ConfigError("tuning: the model has no parameters.")
    head = owners[-1] if name is None else name
    found = [parameter for parameter, _ in model.named_parameters() if parameter.startswith(f"{head}." if head else "")]
    if not found:
        raise ConfigError(
            f"tuning.head={head} names no module with parameters; the last that has some is {owners[-1]}."
        )
    return found


@dataclass(frozen=True)
class All:
    """Every parameter that the model's maker left trainable.

    Args:
        head: the name of the head, which alone may differ from weights to begin from; None: the last layer.
    """

    head: str | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        return model


@dataclass(frozen=True)
class Head:
    """The head alone.

    Args:
        head: its name; None: the last layer.
    """

    head: str | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        return _trained(model, set(head_of(model, self.head)).__contains__)


@dataclass(frozen=True)
class Bias:
    """Every bias, and the head (Bu et al. 2022, "Differentially private bias-term fine-tuning of foundation models",
    arXiv 2210.00036)."""

    head: str | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        head = set(head_of(model, self.head))
        return _trained(model, lambda name: name in head or name.rpartition(".")[2] == "bias")


@dataclass(frozen=True)
class Lora:
    """Low-rank changes of weights, and the head, by peft (Hu et al. 2021, arXiv 2106.09685; Yu et al. 2022, arXiv
    2110.06500, with privacy).

    Args:
        rank: of a change.
        alpha: changes are scaled by alpha/rank.
        layers: the names of layers, or how they end; None: all linear ones but the head.

    Raises (when called):
        ConfigError: peft is not there, or no layer is called that.
    """

    rank: int = 8
    alpha: int = 16
    layers: Sequence[str] | None = None
    head: str | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("tuning=lora needs peft: pip install peft.") from error
        head = set(head_of(model, self.head))
        changed = [
            name for name, layer in model.named_modules()
            if f"{name}.weight" not in head and self._changes(name, layer)
        ]  # fmt: skip
        if not changed:
            asked = "has no linear layer but its head" if self.layers is None else f"has no layers {[*self.layers]}"
            raise ConfigError(f"tuning=lora: the model {asked}; name some in tuning.layers, or choose another tuning.")
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules="|".join(map(re.escape, changed)),
            fan_in_fan_out=any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in changed),
        )  # fmt: skip
        inject_adapter_in_model(config, model)
        return _trained(model, lambda name: name in head or ".lora_" in name)

    def _changes(self, name: str, layer: nn.Module) -> bool:
        if self.layers is None:
            return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"  # of transformers
        return any(name == wanted or name.endswith(f".{wanted}") for wanted in self.layers)


def _trained(model: nn.Module, chosen: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(chosen(name))
    return model
