"""A trained model's numbers in a file, without code in it."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
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
