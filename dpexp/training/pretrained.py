"""Weight files, initial weights, and which parameters are trained: all, the head, some modules, biases, or low-rank
adapters."""

import copy
import errno
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpexp.errors import ConfigError, Count, checks_arguments, in_one_line

_SMALL_FILES = 2**20  # bytes for what a job writes besides weights


@contextmanager
def _refused(message: str) -> Iterator[None]:
    """Turns an unusable file into a ConfigError."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{message}: {in_one_line(error)[:300]}.") from error


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def non_tensor_state(module: nn.Module) -> list[str]:
    """Names in a module's state that hold no tensor (`get_extra_state`), which a file of weights cannot store."""
    return [name for name, value in module.state_dict().items() if not isinstance(value, Tensor)]


def save_weights(module: nn.Module, path: Path, metadata: Mapping[str, str]) -> None:
    """Writes parameters and buffers, with `metadata` in the header of the file."""
    # Copies: a tensor may be a view of a larger one, whose other entries must not be written.
    tensors = {name: t.detach().cpu().clone().contiguous() for name, t in _tensors(module).items()}
    save_file(tensors, str(path), dict(metadata))


@contextmanager
def reserve_disk_space(module: nn.Module, path: Path) -> Iterator[None]:
    """Reserves disk space for a module's weights and a few small files, by a file at `path`, which the caller deletes
    before it writes the weights. Raises OSError if the disk is full."""
    size = sum(t.numel() * t.element_size() for t in _tensors(module).values()) + _SMALL_FILES
    try:
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # the file system cannot reserve space
                    raise OSError(error.errno, error.strerror, str(path)) from None
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads what `save_weights` wrote."""
    with _refused(f"{path} does not fit the model"):
        found = module.load_state_dict(load_file(path), strict=False)
        missing = [name for name in found.missing_keys if not name.endswith("_extra_state")]
        if missing or found.unexpected_keys:
            raise RuntimeError(f"missing {missing}, unexpected {found.unexpected_keys}")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in the header of a file of weights."""
    with _refused(f"the weights {path} cannot be read"), safe_open(path, "pt") as file:
        return file.metadata() or {}


def load_initial_weights(module: nn.Module, path: Path, head: Collection[str]) -> None:
    """Loads initial weights by name. What is missing or of another shape in the layers of the `head` stays random."""
    with _refused(f"model.weights={path} cannot be read"):
        loaded = load_file(path)
    own = _tensors(module)
    layers = {name.rpartition(".")[0] for name in head}
    differ = [name for name in own if name not in loaded or loaded[name].shape != own[name].shape]
    mismatched = [name for name in (*differ, *(loaded.keys() - own)) if name.rpartition(".")[0] not in layers]
    if mismatched:
        raise ConfigError(
            f"model.weights={path} is of another model: they differ in {', '.join(sorted(mismatched)[:5])}, and only "
            f"{', '.join(head)} may differ; fine_tuning.head, or the names of fine_tuning=modules, name other layers."
        )
    if differ:
        warnings.warn(
            f"model.weights: {path} has no {', '.join(differ)} of this shape, which start from random weights."
        )
    module.load_state_dict({name: loaded[name] for name in own if name not in differ}, strict=False)


def head_parameters(model: nn.Module, head: str | Sequence[str] | None = None) -> list[str]:
    """Names of the parameters of the head: a module, several, or the last with parameters of its own."""
    modules, found = dict(model.named_modules()), []
    for name in [head] if isinstance(head, str) else head or [_last_layer(model)]:
        own = {id(parameter) for parameter in modules[name].parameters()} if name in modules else set()
        inner = [parameter for parameter, value in model.named_parameters() if id(value) in own]  # tied ones, too
        if not inner:
            known = [module for module, layer in model.named_modules() if module and [*layer.parameters()]]
            raise ConfigError(f"fine_tuning: {name} is no module with parameters; those are {', '.join(known)}.")
        found += inner
    return found


def _last_layer(model: nn.Module) -> str:
    """The name of the last module with parameters of its own."""
    owners = [owner for owner, layer in model.named_modules() if any(True for _ in layer.parameters(recurse=False))]
    if not owners:
        raise ConfigError("fine_tuning: the model has no parameters.")
    return owners[-1]


@dataclass(frozen=True)
class All:
    """Trains every parameter that requires gradients.

    `head` names what may differ from the initial weights: a module, or several; None: the last layer.
    """

    head: str | Sequence[str] | None = None

    def __call__(self, model: nn.Module) -> nn.Module:
        return model


class Head(All):
    """Trains only the head."""

    def __call__(self, model: nn.Module) -> nn.Module:
        return _train_only(model, set(head_parameters(model, self.head)).__contains__)


class Modules(Head):
    """Trains only the named modules, such as new first and last layers around a public network (Abadi et al. 2016).

    Each of them may differ from that of the initial weights.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not isinstance(names, Sequence) or not names:
            raise ConfigError(f"fine_tuning.names={names} must be a list of modules, such as [0,9].")
        super().__init__([str(name) for name in names])


class Bias(All):
    """Trains every bias, and the head (Bu et al. 2022, arXiv 2210.00036)."""

    def __call__(self, model: nn.Module) -> nn.Module:
        head = set(head_parameters(model, self.head))
        return _train_only(model, lambda name: name in head or name.rpartition(".")[2] == "bias")


@checks_arguments
@dataclass(frozen=True)
class Lora:
    """Trains low-rank adapters (LoRA) and the head, by peft (Hu et al. 2021, arXiv 2106.09685; with privacy: Yu et al.
    2022, arXiv 2110.06500).

    Args:
        rank: rank of an adapter.
        alpha: adapters are scaled by alpha/rank.
        layers: names of layers, or their last parts; None: all linear layers but the head.
        head: its name; None: the last layer; False: the last layer, which is not trained.
    """

    rank: Count = 8
    alpha: Count = 16
    layers: Sequence[str] | None = None
    head: str | Literal[False] | None = None  # type: ignore[assignment]

    def __call__(self, model: nn.Module) -> nn.Module:
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("fine_tuning=lora needs peft: pip install peft.") from error
        last = self.head or _last_layer(model)
        head = set() if self.head is False else set(head_parameters(model, last))
        adapted = [
            name for name, layer in model.named_modules()
            if not f"{name}.".startswith(f"{last}.") and self._adapts(name, layer)
        ]  # fmt: skip
        if not adapted:
            lacks = "has no linear layer but its head" if self.layers is None else f"has no layers {[*self.layers]}"
            raise ConfigError(
                f"fine_tuning=lora: the model {lacks}; name some in fine_tuning.layers, or choose another fine_tuning."
            )
        config = LoraConfig(
            r=self.rank, lora_alpha=self.alpha, target_modules="|".join(map(re.escape, adapted)),
            fan_in_fan_out=any(type(model.get_submodule(name)).__name__ == "Conv1D" for name in adapted),
        )  # fmt: skip
        inject_adapter_in_model(config, model)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:  # peft gives them the dtype of the weights, and bfloat16 loses small steps
                parameter.data = parameter.data.float()
        return _train_only(model, lambda name: name in head or ".lora_" in name)

    def _adapts(self, name: str, layer: nn.Module) -> bool:
        if self.layers is None:
            return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"  # of transformers
        return any(name == wanted or name.endswith(f".{wanted}") for wanted in self.layers)


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Writes the adapters that `Lora` made, and the trained head, for `peft.PeftModel.from_pretrained`."""
    configs: Any = model.peft_config
    config = copy.copy(configs["default"])
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in trained if ".lora_" not in name}) or None
    config.base_model_name_or_path, config.inference_mode = getattr(model, "name_or_path", None), True
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{name.replace('.default.', '.')}": values for name, values in trained.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def _train_only(model: nn.Module, is_trained: Callable[[str], bool]) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
    return model
