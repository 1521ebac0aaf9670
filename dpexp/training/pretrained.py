"""Which parameters are trained: all, or few, so that less noise is added to a model that is good already."""

import errno
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dpexp.errors import ConfigError


def no_tensors(module: nn.Module) -> list[str]:
    """Names of what a module's state holds beside tensors (`get_extra_state`), which a file of weights cannot."""
    return [name for name, value in module.state_dict().items() if not isinstance(value, Tensor)]


def save_weights(module: nn.Module, path: Path, about: Mapping[str, str]) -> None:
    """Writes parameters and buffers.

    Args:
        about: is kept in the file's head.
    """
    # Copies: a tensor may be part of a larger one, of which the rest is nobody's business.
    tensors = {
        n: t.detach().cpu().clone().contiguous() for n, t in module.state_dict().items() if isinstance(t, Tensor)
    }
    save_file(tensors, str(path), dict(about))


@contextmanager
def room_for(module: nn.Module, path: Path) -> Iterator[None]:
    """Takes the room on the disk that a module's weights and a few small files need, by a file that is to be deleted
    before they are written, and is if an error ends what comes between.

    Raises:
        OSError: there is none.
    """
    held = [t for t in module.state_dict().values() if isinstance(t, Tensor)]
    try:
        with path.open("wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, sum(t.numel() * t.element_size() for t in held) + _SMALL_FILES)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # not of this file system
                    raise OSError(error.errno, error.strerror, str(path)) from None
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def save_elsewhere(module: nn.Module, about: Mapping[str, str]) -> Path:
    """Writes the weights into $TMPDIR, for their owner's eyes alone.

    Raises:
        OSError: there is no room either.
    """
    number, name = tempfile.mkstemp(prefix="dpexp-", suffix=".safetensors")
    os.close(number)
    save_weights(module, Path(name), about)
    os.chmod(name, 0o600)
    return Path(name)


_SMALL_FILES = 2**20


def load_weights(module: nn.Module, path: Path) -> None:
    """Raises:
    ConfigError: the file is of another model, or no such file.
    """
    try:
        found = module.load_state_dict(load_file(path), strict=False)
        missing = [name for name in found.missing_keys if not name.endswith("_extra_state")]
        if missing or found.unexpected_keys:
            raise RuntimeError(f"it lacks {missing}, and has {found.unexpected_keys} beside")
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{path} does not fit the model: {' '.join(str(error).split())[:300]}") from error


def about(path: Path) -> dict[str, str]:
    """What a file's head says about it.

    Raises:
        ConfigError: no such file.
    """
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights {path} cannot be read: {' '.join(str(error).split())[:300]}") from error


def begin_from(module: nn.Module, path: Path, head: Collection[str]) -> None:
    """Takes over what a file holds, by name. The head begins anew where the file has none, or one of another shape.

    Args:
        head: names of its parameters.

    Raises:
        ConfigError: the file is of another model, or no such file.
    """
    try:
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.weights={path} cannot be read: {' '.join(str(error).split())[:300]}") from error
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    parts = {name.rpartition(".")[0] for name in head}
    anew = [name for name in own if name in head and (name not in given or given[name].shape != own[name].shape)]
    odd = [name for name in own if name not in anew and (name not in given or given[name].shape != own[name].shape)]
    odd += [name for name in given if name not in own and name.rpartition(".")[0] not in parts]
    if odd:
        raise ConfigError(
            f"model.weights={path} is of another model: they differ in {', '.join(sorted(odd)[:5])}, and only the head "
            f"({', '.join(head)}) may; fine_tuning.head names another one."
        )
    if anew:
        warnings.warn(f"model.weights: the head ({', '.join(anew)}) is another one in {path}, and begins anew.")
    module.load_state_dict({name: given[name] for name in own if name not in anew}, strict=False)


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
            f"fine_tuning.head={head} names no module with parameters; the last that has some is {owners[-1]}."
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
            raise ConfigError("fine_tuning=lora needs peft: pip install peft.") from error
        head = set(head_of(model, self.head))
        changed = [
            name for name, layer in model.named_modules()
            if f"{name}.weight" not in head and self._changes(name, layer)
        ]  # fmt: skip
        if not changed:
            asked = "has no linear layer but its head" if self.layers is None else f"has no layers {[*self.layers]}"
            raise ConfigError(
                f"fine_tuning=lora: the model {asked}; name some in fine_tuning.layers, or choose another fine_tuning."
            )
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
