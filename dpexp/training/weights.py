"""A trained model's numbers in a file, without code in it."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dpexp.errors import ConfigError


def save_weights(module: nn.Module, path: Path, about: Mapping[str, str]) -> None:
    """Writes parameters and buffers, shared ones once.

    Args:
        about: is kept in the file's head.
    """
    save_model(module, str(path), dict(about))


def load_weights(module: nn.Module, path: Path) -> None:
    """Raises:
    ConfigError: the file is of another model, or no such file.
    """
    try:
        load_model(module, path)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{path} does not fit the model: {' '.join(str(error).split())[:300]}") from error
