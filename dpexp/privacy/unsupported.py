"""What cannot be trained privately, refused by name before training."""

import dis
import inspect
import math
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from dpexp._lightning_compat import NoOptimizer
from dpexp._torch_compat import (
    BatchNorm,
    InstanceNorm,
    forward_pre_hooks,
    has_backward_hooks,
    has_gradient_hooks,
    is_wrapped,
    tree_leaves,
)
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.branches import Unreadable

if TYPE_CHECKING:
    from dpexp.privacy.plan.plan import PrivacyPlan

NO_POSITION = (
    "the checkpoint {checkpoint} does not say what its run's ledger held, as none made by an older dpexp or without a "
    "PrivacyCallback does, so ledger={ledger} may be another run's; begin a new run, and account for both."
)


def refuse_mixing_layers(module: nn.Module) -> None:
    """Refuses layers that combine the records of a batch, or store statistics of them."""
    for name, layer in module.named_modules():
        where = f"model: the layer {name or '(root)'} ({type(layer).__name__})"
        learns = layer.training or getattr(layer, "running_mean", None) is None
        if isinstance(layer, BatchNorm) and learns:
            raise ConfigError(
                f"{where} mixes the records of a batch, which no clipping of single records can bound; choose "
                "batchnorm=groupnorm, batchnorm=private or batchnorm=freeze, or use GroupNorm, LayerNorm or eval()."
            )
        if isinstance(layer, InstanceNorm) and learns and layer.track_running_stats:
            raise ConfigError(f"{where} stores statistics of the data without noise; set track_running_stats=False.")
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ConfigError(f"{where} has no sizes yet; run the model once on an example before training.")
        if any(type(hook).__name__ == "SpectralNorm" for hook in forward_pre_hooks(layer)):
            raise ConfigError(f"{where} has the old spectral_norm; use torch.nn.utils.parametrizations.spectral_norm.")


def refuse_hooks(module: nn.Module) -> None:
    """Refuses backward hooks: a gradient of the whole batch, which they are for, never exists."""
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise ConfigError(
                f"model: the parameter {name} has a gradient hook, which would not be called, since records' gradients "
                "are clipped; change p.grad in on_before_optimizer_step, where it is the noisy average."
            )
    for name, layer in module.named_modules():
        where = f"model: the module {name or '(root)'}"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(f"{where} is one of TorchScript, which may keep what it sees; use what it was made from.")
        if has_backward_hooks(layer):
            raise ConfigError(
                f"{where} has a backward hook, which would not be called, as records are clipped; drop it."
            )


def refuse_settings(trainer: pl.Trainer, pl_module: pl.LightningModule, rounds: int) -> None:
    """Refuses what the callback could not honour in T rounds."""
    refuse_mixing_layers(pl_module)
    if not pl_module.automatic_optimization:
        raise ConfigError(
            f"model: {type(pl_module).__name__} optimizes by hand (automatic_optimization=False), so that a sample is "
            "not tied to one release; use automatic optimization."
        )
    for owner in (pl_module, getattr(trainer, "datamodule", None)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
            if owner is not None and is_overridden(hook, owner):
                raise ConfigError(
                    f"data: {type(owner).__name__}.{hook} sees whole batches, and may mix their records; do what it "
                    "does in the data set or in training_step, which see one record."
                )
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise ConfigError("model: training_step takes a dataloader_iter; let it take a batch.")
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1; "
            f"trainer.max_physical_batch_size "
            "takes samples apart."
        )
    if trainer.precision == "16-mixed":
        raise ConfigError("trainer.precision=16-mixed scales gradients by the data; use bf16-mixed or 32-true.")
    if (trainer.min_steps or 0) > rounds:
        raise ConfigError(
            f"trainer.min_steps={trainer.min_steps} asks for more than the plan's {rounds} rounds; leave it out, since "
            "sampling.steps or sampling.epochs says when training ends."
        )
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if not isinstance(profiler, PassThroughProfiler):
        raise ConfigError(
            f"trainer.profiler={type(profiler).__name__}: what it counts and times follows the size of each sample, "
            "which is private; profile a training without the PrivacyCallback."
        )
    limit = trainer.limit_train_batches
    whole = limit is None or (isinstance(limit, float) and limit == 1.0)
    if not whole or trainer.overfit_batches or trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigError(
            "limit_train_batches, overfit_batches or fast_dev_run cut samples short; give sampling.steps."
        )


def check_length(trainer: pl.Trainer, plan: "PrivacyPlan") -> int:
    """The number of rounds that the Trainer will train; compares what it is told with the plan.

    Raises:
        ConfigError: max_epochs ends before them.
    """
    rounds, epochs = plan.rounds, math.ceil(plan.rounds / plan.sampling.rounds_per_epoch - 1e-9)
    if trainer.max_epochs is not None and -1 < trainer.max_epochs < epochs and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigError(
            f"trainer.max_epochs={trainer.max_epochs} ends before the plan's {rounds} rounds, which take "
            f"{epochs} epoch{'s' * (epochs != 1)} of 1/q rounds; leave it out, or plan fewer rounds, whose noise would "
            "be less."
        )
    if -1 < trainer.max_steps < rounds:
        warnings.warn(
            f"trainer.max_steps={trainer.max_steps} ends before the plan's {rounds} rounds, for all of which the noise "
            "was chosen; plan fewer rounds, unless the training is to be resumed."
        )
    return rounds if trainer.max_steps == -1 else min(rounds, trainer.max_steps)


def refuse_monitors(
    trainer: pl.Trainer, module: pl.LightningModule, logged: set[str], validated: set[str]
) -> None:  # fmt: skip
    """Refuses what waits for values that training_step logs, of which nothing is kept, or for what nobody logs.

    Args:
        logged: the names of those.
        validated: of what the validation before training logged.
    """
    names = {f"{name}{end}" for name in logged for end in ("", "_step", "_epoch")}
    waiting: list[tuple[str, Any]] = [
        (type(one).__name__, getattr(one, "monitor", None))
        for one in trainer.callbacks  # type: ignore[attr-defined]
    ]
    waiting += [(type(c.scheduler).__name__, c.monitor) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
    for hook in _READING:
        code = getattr(getattr(type(module), hook, None), "__code__", None)
        steps = [*dis.get_instructions(code)] if code is not None else []
        if not any(step.opname == "CONTAINS_OP" for step in steps):  # else it looks first whether a value is there
            read = [b.argval for a, b in pairwise(steps) if a.argval in _METRICS and b.opname == "LOAD_CONST"]
            waiting += [(f"{type(module).__name__}.{hook}", name) for name in read]
    _refuse_unlogged(trainer, module, names, validated)
    for who, name in waiting:
        if name in names:
            raise ConfigError(
                f"model: {who} reads {name}, which training_step logs: it is computed from records without noise, so "
                "that nothing is kept of it; read a value of the validation set, or release it with private metrics "
                f"(private_metrics.release) and read private/{name}_moving_average."
            )


def _refuse_unlogged(
    trainer: pl.Trainer, module: pl.LightningModule, private: set[str], validated: set[str]
) -> None:  # fmt: skip
    """Refuses what would end the training when it looks for its value, if it is known that there will be none."""
    hooks = (getattr(getattr(type(module), hook, None), "__code__", None) for hook in _VALIDATING)
    unlike = any("sanity_checking" in code.co_names for code in hooks if code)  # later validations may log more
    others = any(not type(one).__module__.startswith(_OURS) for one in trainer.callbacks)  # type: ignore[attr-defined]
    if others or unlike or (trainer.enable_validation and not validated):
        return
    waiting = [
        ("ReduceLROnPlateau", c.monitor) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.strict
    ]
    waiting += [
        (type(one).__name__, one.monitor)
        for one in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(one, pl.callbacks.EarlyStopping) and one.strict
    ]
    for who, name in waiting:
        if name not in validated | private | {"epsilon"} and not str(name).startswith(("private/", "unsafe/")):
            known = ", ".join(sorted(validated | {"epsilon"}))
            raise ConfigError(
                f"model: {who} waits for {name}, which neither training_step nor the validation logs; known: {known}."
            )


_OURS = ("pytorch_lightning.", "dpexp.")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def refuse_other_sizes(pl_module: pl.LightningModule, plan: "PrivacyPlan") -> None:
    """Refuses a module whose parameters have the names of those that the plan was made for, and other sizes."""
    sizes = {name: parameter.numel() for name, parameter in pl_module.named_parameters()}
    for vector in (vector for group in plan.groups for vector in group.vectors if not vector.is_value):
        d = sum(sizes.get(name, 0) for name in vector.parameters)
        if d != vector.d and sizes.keys() >= {*vector.parameters}:
            raise ConfigError(
                f"the plan was made for another model, whose {vector.name} has {vector.d} parameters, and this one's "
                f"has {d}; make the plan for the module that is trained."
            )


def refuse_callbacks(trainer: pl.Trainer) -> None:
    """Refuses callbacks that train on raw batches before training begins, or tell loggers how large samples were."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, pl.callbacks.DeviceStatsMonitor | pl.callbacks.ThroughputMonitor):
            raise ConfigError(
                f"{type(callback).__name__} logs what the device did in each round, which follows the size of its "
                "sample, and that is private; leave it out."
            )
        if isinstance(callback, pl.callbacks.LearningRateFinder | pl.callbacks.BatchSizeFinder):
            raise ConfigError(
                f"{type(callback).__name__} trains on records without noise, and no ledger would tell; try out "
                "learning rates on public data, or by a sweep, whose parent run says what it cost."
            )


def refuse_optimizers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuses optimizers that would need another release, or that train what none releases."""
    if isinstance(trainer.optimizers[0], NoOptimizer):
        raise ConfigError(
            "optimizer: configure_optimizers returns None, so that rounds would be released and nothing learnt from "
            "them; let it return an optimizer of self.parameters()."
        )
    known = {id(parameter) for parameter in pl_module.parameters()}
    for optimizer in trainer.optimizers:
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                "optimizer: it holds a parameter that is not among the module's own, so no group releases it; "
                "register the layer that owns it as an attribute of the module."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise ConfigError("optimizer: SparseAdam takes no dense gradients, and noise is dense; choose Adam.")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("optimizer: LBFGS takes several losses a step, each another release; choose SGD or Adam.")


def refuse_kept_losses(module: nn.Module, before: dict[str, Any], as_written: bool) -> None:
    """Refuses a step that keeps what it computes of records for a hook: there is nothing of theirs to be had outside.
    `before`: the `kept_numbers` before it ran; `as_written`: it is not traced, so that numbers may be records'."""
    used = [h for h in _READING if isinstance(module, pl.LightningModule) and is_overridden(h, module)]
    if not used:
        return
    for where, value in _attributes(module):
        if as_written and isinstance(value, float) and before.get(where, value) != value:
            raise ConfigError(_KEPT.format(where=where, hook=used[0]))
        if not isinstance(value, _COLLECTIONS):
            continue
        values = tree_leaves([*value] if isinstance(value, set) else value)
        kept = any(isinstance(v, Unreadable) or (isinstance(v, Tensor) and is_wrapped(v)) for v in values)
        if isinstance(value, list) and not kept:  # of a step that runs as written
            added = value[before.get(where, 0) :]
            kept = any(isinstance(v, int | float | Tensor) for v in tree_leaves(added))
        if kept:
            raise ConfigError(_KEPT.format(where=where, hook=used[0]))


_KEPT = (
    "model: training_step keeps numbers of records in self.{where}, and {hook} may read them; records' losses are "
    "private, so that there is nothing to average: leave that out, or release them with private metrics "
    "(private_metrics.release)."
)
_READING = (
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_before_optimizer_step", "on_before_zero_grad", "on_validation_start", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_end", "on_save_checkpoint",
)  # fmt: skip
_VALIDATING = ("validation_step", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end")
_COLLECTIONS = (list, tuple, dict, set)


def kept_numbers(module: nn.Module) -> dict[str, Any]:
    """Numbers that a module's parts hold as attributes, and the lengths of lists."""
    return {
        where: len(value) if isinstance(value, list) else value
        for where, value in _attributes(module)
        if isinstance(value, list | float)
    }


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in module.named_modules():
        for key, value in vars(layer).items():
            if not key.startswith("_"):
                yield f"{name}.{key}" if name else key, value
