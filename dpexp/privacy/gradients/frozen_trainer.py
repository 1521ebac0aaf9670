"""What a traced step sees of a Trainer: numbers, as they were when the copy of its module was made."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError

_COUNTERS = ("current_epoch", "global_step", "training", "validating", "testing", "sanity_checking", "should_stop")
_PLAIN = (int, float, str, type(None), torch.dtype, torch.device, Tensor, Path)
_PACKAGES = {"pytorch_lightning", "lightning", "lightning_fabric"}


class FrozenTrainer:
    """A view of a Trainer, or of a part of it, from which numbers and parts of Lightning may be read.

    Counters are read when the view is made, other numbers at their first use. What is set is set on the view alone.
    Loggers do nothing, optimizers have the settings of their groups and no parameters.

    Args:
        copied: returns the copy of a module.

    Raises:
        ConfigError: data, a method or an object of another kind is read.
    """

    _seen: Any

    def __init__(self, seen: Any, copied: Callable[[Any], Any], name: str = "trainer") -> None:
        vars(self).update(_seen=seen, _copied=copied, _name=name, _read={})
        for counter in _COUNTERS if name == "trainer" else ():
            getattr(self, counter)

    __class__ = property(lambda self: type(self._seen))  # type: ignore[assignment]  # for isinstance

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._read:
            self._read[name] = self._frozen(getattr(self._seen, name), f"{self._name}.{name}")
        return self._read[name]

    def _frozen(self, value: Any, name: str) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, dict):
            return {key: self._frozen(one, f"{name}[{key!r}]") for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._frozen(one, f"{name}[{k}]") for k, one in enumerate(value)]
        if isinstance(value, nn.Module):
            return self._copied(value)
        if isinstance(value, pl.loggers.Logger):
            return pl.loggers.logger.DummyLogger()
        if hasattr(value, "param_groups"):
            return _settings(value)
        if hasattr(value, "get_last_lr"):
            rates = [*value.get_last_lr()]
            return SimpleNamespace(get_last_lr=lambda: rates)
        packages = {one.__module__.partition(".")[0] for one in type(value).__mro__}
        if packages & _PACKAGES and not isinstance(value, pl.LightningDataModule):
            return FrozenTrainer(value, self._copied, name)
        raise ConfigError(
            f"training_step reads {name}, a {type(value).__name__}, but it is traced for one record and may read only "
            "numbers of the Trainer; keep what it needs in an attribute or a buffer of the module, set before training."
        )


def _settings(optimizer: Any) -> torch.optim.Optimizer:
    """An optimizer that only has the settings of another's groups."""
    made = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
    groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
    vars(made).update(param_groups=[group | {"params": []} for group in groups], state={}, defaults={})
    return made
