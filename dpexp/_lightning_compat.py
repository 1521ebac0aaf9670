"""The Lightning that a job uses, and the private names of it that dpexp uses, wrapped in functions.

Lightning is published as two packages of the same code, `pytorch_lightning` and `lightning`, whose classes do not mix.
dpexp uses `lightning` if it is imported before dpexp's classes are.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "lightning.pytorch" not in sys.modules:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl

from dpexp.errors import ConfigError

MisconfigurationException = pl.utilities.exceptions.MisconfigurationException
NoOptimizer = pl.core.optimizer._MockOptimizer  # where configure_optimizers returns none
TrainerFn = pl.trainer.states.TrainerFn
is_overridden = pl.utilities.model_helpers.is_overridden

__all__ = ["MisconfigurationException", "NoOptimizer", "TrainerFn", "is_overridden", "pl"]


def environment(name: str) -> Any:
    """A class that says how processes were started."""
    return getattr(import_module(f"{pl.__name__}.plugins.environments"), name)


def refuse_mixed(what: str, value: Any) -> None:
    """Refuses a Trainer, module or data module of the other of Lightning's two packages."""
    packages = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    other = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}[pl.__name__.partition(".")[0]]
    if other in packages:
        raise ConfigError(
            f"{what}: {type(value).__name__} is of the package {other}, and dpexp uses {pl.__name__}, since "
            f"lightning was{' not' * (other == 'lightning')} imported before dpexp; import one of the two, before it."
        )


def training_loader(trainer: pl.Trainer) -> Any:
    """The training loader, whether given to fit, by the module or by a data module."""
    return trainer.fit_loop._data_source.dataloader()


def replace_training_loader(trainer: pl.Trainer, loader: Any) -> None:
    """Replaces the training loader; must be called no later than on_fit_start."""
    source = trainer.fit_loop._data_source
    source.instance, source.name = loader, ""


def validation_loader(trainer: pl.Trainer) -> Any:
    """The validation loader, or None."""
    source = trainer.fit_loop.epoch_loop.val_loop._data_source
    return source.dataloader() if source.is_defined() else None


def checkpoint_of(trainer: pl.Trainer) -> dict[str, Any]:
    """The checkpoint that save_checkpoint would write."""
    return trainer._checkpoint_connector.dump_checkpoint()


def start_method(strategy: pl.strategies.DDPStrategy) -> str:
    return strategy._start_method


def syncs_batch_norm(strategy: pl.strategies.DDPStrategy) -> bool:
    return strategy._layer_sync is not None


def has_comm_hook(strategy: pl.strategies.DDPStrategy) -> bool:
    return strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None
