"""A trained model's numbers in a file, without code in it."""

import errno
import os
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
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
            f"({', '.join(head)}) may; tuning.head names another one."
        )
    if anew:
        warnings.warn(f"model.weights: the head ({', '.join(anew)}) is another one in {path}, and begins anew.")
    module.load_state_dict({name: given[name] for name in own if name not in anew}, strict=False)
