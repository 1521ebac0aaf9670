"""Refuses models, trainers and optimizers that cannot be trained privately, before the first release."""

import dis
import warnings
from collections.abc import Sequence

import torch
from torch import nn

from dpexp._lightning_compat import NoOptimizer, is_overridden, pl
from dpexp._torch_compat import (
    BatchNorm,
    InstanceNorm,
    SpectralNorm,
    forward_pre_hooks,
    has_backward_hooks,
    has_gradient_hooks,
    is_compiled,
)
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.plan.groups import parameters
from dpexp.privacy.plan.plan import PrivacyPlan

NO_POSITION = (
    "the checkpoint {checkpoint} was saved without a PrivacyCallback, so ledger={ledger} may be another run's; begin a "
    "new run, and account for both."
)

ONE_OPTIMIZER = (
    "a round releases one gradient, for one step: let configure_optimizers give one optimizer, with a parameter group "
    "for each learning rate, and use automatic optimization; networks that take turns, as in a GAN, need a loop of "
    "your own, with a dpexp.Private for each that learns from records (docs/own_loop.md)."
)


def refuse_low_memory(device: torch.device) -> None:
    """Refuses two runs of a step where they may differ: clip factors of one run would not bound what the other adds."""
    if device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
        raise ConfigError(
            "trainer.memory=low needs torch.use_deterministic_algorithms(True) on a GPU, where two runs may differ."
        )


def refuse_mixing_layers(module: nn.Module) -> None:
    """Refuses layers that mix the records of a batch or store statistics of them."""
    for name, layer in module.named_modules():
        where = f"model: the layer {name or '(root)'} ({type(layer).__name__})"
        learns = layer.training or getattr(layer, "running_mean", None) is None
        if isinstance(layer, BatchNorm) and learns:
            raise ConfigError(
                f"{where} mixes the records of a batch, so that clipping single records bounds nothing; choose "
                "batchnorm=groupnorm, batchnorm=private or batchnorm=freeze (in Python, "
                "dpexp.GroupNormalization()(model)), or use GroupNorm, LayerNorm or eval()."
            )
        if isinstance(layer, InstanceNorm) and learns and layer.track_running_stats:
            raise ConfigError(f"{where} stores statistics of the data without noise; set track_running_stats=False.")
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin) and layer.has_uninitialized_params():  # type: ignore[misc]
            raise ConfigError(f"{where} has no sizes yet; run the model once on an example before training.")
        is_old = any(type(hook).__name__ == "SpectralNorm" for hook in forward_pre_hooks(layer))
        if is_old or (isinstance(layer, SpectralNorm) and layer.training):
            raise ConfigError(
                f"{where} is a spectral norm, which sets buffers in each step; use "
                "torch.nn.utils.parametrizations.weight_norm, or eval() of it."
            )


def refuse_not_finite(module: nn.Module) -> None:
    """Refuses initial weights that are NaN, or infinite where they are trained."""
    for name, parameter in module.named_parameters():
        if bool((~parameter.isfinite() if parameter.requires_grad else parameter.isnan()).any()):
            raise ConfigError(f"model: its initial weights {name} are not finite; correct them, or model.weights.")


def refuse_hooks(module: nn.Module) -> None:
    """Refuses gradient and backward hooks, since no gradient of a batch is ever computed."""
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise ConfigError(
                f"model: the parameter {name} has a gradient hook, which would not be called, since gradients are "
                "per record; change p.grad in on_before_optimizer_step, where it is the noisy average."
            )
    for name, layer in module.named_modules():
        where = f"model: the module {name or '(root)'}"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(f"{where} is a TorchScript module, which may keep state; use the original module.")
        if has_backward_hooks(layer):
            raise ConfigError(f"{where} has a backward hook, which would not be called; remove it.")


def refuse_settings(trainer: pl.Trainer, pl_module: pl.LightningModule, rounds: int) -> None:
    """Refuses settings of the module and the Trainer that private training cannot honour."""
    if not pl_module.automatic_optimization:
        raise ConfigError(f"model: {type(pl_module).__name__} has automatic_optimization=False, but {ONE_OPTIMIZER}")
    for owner in (pl_module, getattr(trainer, "datamodule", None)):
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
            if owner is not None and is_overridden(hook, owner):
                raise ConfigError(
                    f"data: {type(owner).__name__}.{hook} gets whole batches and may mix their records; move it "
                    "into the data set or training_step, which get one record."
                )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches} must be 1; "
            "trainer.max_physical_batch_size splits samples."
        )
    if trainer.precision == "16-mixed":
        raise ConfigError("trainer.precision=16-mixed scales gradients by the data; use bf16-mixed or 32-true.")
    if (trainer.min_steps or 0) > rounds:
        raise ConfigError(
            f"trainer.min_steps={trainer.min_steps} is more than the plan's {rounds} rounds; leave it out, since "
            "sampling.steps or sampling.epochs sets the length of training."
        )
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if not isinstance(profiler, pl.profilers.PassThroughProfiler):
        raise ConfigError(
            f"trainer.profiler={type(profiler).__name__}: its counts and times reveal the size of each sample, which "
            "is private; profile a training without the PrivacyCallback."
        )
    limit = trainer.limit_train_batches
    unlimited = limit is None or (isinstance(limit, float) and limit == 1.0)
    if not unlimited or trainer.overfit_batches or trainer.fast_dev_run:  # type: ignore[attr-defined]
        raise ConfigError(
            "limit_train_batches, overfit_batches and fast_dev_run truncate samples; set sampling.steps instead."
        )


def rounds_to_train(trainer: pl.Trainer, plan: PrivacyPlan) -> int:
    """The number of the plan's rounds that a Trainer does until it ends, from the plan's first."""
    ends, epochs = [plan.rounds], trainer.max_epochs
    if trainer.max_steps > -1:
        ends.append(trainer.max_steps)
    if epochs is not None and epochs > -1:
        ends.append(plan.at_round(0).sampling.rounds(epochs) if epochs else 0)
    return min(ends)


def refuse_monitors(trainer: pl.Trainer, module: pl.LightningModule, logged: set[str], validated: set[str]) -> None:
    """Refuses schedulers and callbacks that monitor private values, or values that are certainly never logged.

    Args:
        logged: names logged by training_step, whose values are dropped.
        validated: names logged by the validation before training.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    monitors = [
        (one, getattr(one, "monitor", None), isinstance(one, pl.callbacks.EarlyStopping) and one.strict)
        for one in callbacks
    ] + [(c.scheduler, c.monitor, c.strict) for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
    hooks = (getattr(getattr(type(module), hook, None), "__code__", None) for hook in _VALIDATING)
    logs_later = any("sanity_checking" in code.co_names for code in hooks if code)
    custom = any(not type(one).__module__.startswith(OURS) for one in callbacks)
    all_known = not (custom or logs_later or (trainer.enable_validation and not validated))
    private = {f"{name}{end}" for name in logged for end in ("", "_step", "_epoch")}
    for one, name, strict in monitors:
        reader = type(one).__name__
        if name in private:
            raise ConfigError(
                f"model: {reader} reads {name}, which training_step logs: it is computed from records without noise, "
                "and is dropped; read a value of the validation set, or release it by private_metrics.release and read "
                f"private/{name}_moving_average."
            )
        known = validated | {"epsilon"}
        if strict and all_known and name not in known and not str(name).startswith(("private/", "unsafe/")):
            raise ConfigError(
                f"model: {reader} monitors {name}, which neither training_step nor the validation logs; known: "
                f"{', '.join(sorted(known))}."
            )


OURS = ("pytorch_lightning.", "lightning.", "dpexp.")


def refuse_other_sizes(module: nn.Module, plan: PrivacyPlan) -> None:
    """Refuses a module whose parameters have the plan's names but other sizes."""
    sizes = {name: parameter.numel() for name, parameter in parameters(module).items()}
    for vector in (vector for group in plan.groups for vector in group.vectors if not vector.is_value):
        d = sum(sizes.get(name, 0) for name in vector.parameters)
        if d != vector.d and sizes.keys() >= {*vector.parameters}:
            raise ConfigError(
                f"the plan was made for another model, whose {vector.name} has {vector.d} parameters, and this one's "
                f"has {d}; make the plan for the module that is trained."
            )


def warn_of_compiled(module: nn.Module) -> None:
    """Warns if a layer was compiled by torch.compile."""
    if any(map(is_compiled, module.modules())):
        warnings.warn(
            "model: torch.compile is not used in private rounds, which run a graph of the whole step; "
            "trainer.compile (compile=True) compiles that graph."
        )


def warn_of_noise(plan: PrivacyPlan) -> None:
    """Warns if the noise of each weight exceeds the sum of all clipped gradients of a sample of the expected size."""
    if plan.rounds and plan.noise_multiplier > plan.sampling.q * plan.n:
        warnings.warn(
            f"z = {plan.noise_multiplier:.4g} is so much noise that little can be learnt: in each round, that of every "
            "weight is larger than all clipped gradients together can be. Give a larger privacy.epsilon, or a smaller "
            "privacy.noise_multiplier, or more records."
        )


def warn_of_lost_rounds(plan: PrivacyPlan, lost: int, done: int) -> None:
    """Warns of rounds that random allocation cannot do after a crash, as `PrivacyPlan.resumed_at` counts them."""
    if lost > 0:
        left = plan.rounds - done
        then = f"a new epoch begins, and {left} rounds are left" if left else "no epoch is left; training ends"
        warnings.warn(
            f"sampling={plan.sampling.name}: the interrupted epoch's samples cannot be drawn again, and ε counts the "
            f"whole epoch, so {lost} rounds are lost; {then}."
        )


def warn_of_no_rounds(plan: PrivacyPlan, done: int) -> None:
    """Warns if all of a plan's rounds are done before a fit."""
    if done >= plan.rounds:
        warnings.warn(
            f"the plan's {plan.rounds} rounds are done, so that nothing more is trained: one loop over private.rounds, "
            "or one fit, trains all of them. More rounds need a plan of more."
        )


def refuse_callbacks(trainer: pl.Trainer) -> None:
    """Refuses callbacks that train on raw batches, reveal the sample's size, or change what is trained."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kinds, why in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kinds):
                raise ConfigError(f"{type(callback).__name__} {why}.")


_REFUSED_CALLBACKS = {
    (pl.callbacks.DeviceStatsMonitor, pl.callbacks.ThroughputMonitor):
        "logs what the device did in each round, which reveals the size of the sample; leave it out",
    (pl.callbacks.LearningRateFinder, pl.callbacks.BatchSizeFinder):
        "trains on records without noise and without a ledger; choose learning rates on public data, or by a sweep, "
        "whose parent run accounts for all its runs",
    (pl.callbacks.ModelPruning, pl.callbacks.BaseFinetuning):
        "changes the parameters, or which of them are trained, during training, and the plan's rounds release those "
        "that it was made for; prune or freeze before make_plan, or prune after training, which costs no privacy; "
        "train others in a second job, from the first one's weights",
}  # fmt: skip


def refuse_optimizers(trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
    """Refuses optimizers that need several releases a round or train parameters of no group."""
    if isinstance(trainer.optimizers[0], NoOptimizer):
        raise ConfigError(
            "optimizer: configure_optimizers returns None, so that nothing would be learnt from the releases; let it "
            "return an optimizer of self.parameters()."
        )
    for optimizer in trainer.optimizers:
        refuse_optimizer(optimizer, pl_module)


def refuse_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuses an optimizer that needs several releases a round or trains parameters of no group."""
    known = {id(parameter) for parameter in module.parameters()}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            "optimizer: one of its parameters is not among the module's own, so no group releases it; "
            "register the layer that owns it as an attribute of the module."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError("optimizer: SparseAdam takes no dense gradients, and noise is dense; choose Adam.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer: LBFGS computes several losses a step, each a release; choose SGD or Adam.")


def refuse_read_by_hooks(
    step: TrainingStep, readers: Sequence[tuple[object, Sequence[str]]], kept: Sequence[str]
) -> None:
    """Refuses attributes that a step sets, on copies of its module and owner, and that a method reads of these
    themselves.

    Args:
        readers: objects, and the names of methods of theirs.
    """
    layers = [name for name, _ in step.module.named_modules() if name]
    for owner, method in ((owner, method) for owner, methods in readers for method in methods):
        kinds = [kind for kind in type(owner).__mro__ if not kind.__module__.startswith((*OURS, "transformers."))]
        read = {name for kind in kinds for name in _attributes_read(vars(kind).get(method))}
        for name in kept:
            layer = max((f"{one}." for one in layers if name.startswith(f"{one}.")), key=len, default="")
            if name.removeprefix(layer).partition(".")[0] in read:
                reader = method if owner in (step.module, step.owner) else f"{type(owner).__name__}.{method}"
                raise ConfigError(_KEPT.format(where=name, hook=reader))
    if kept:
        warnings.warn(
            f"training_step sets {', '.join(f'self.{name}' for name in kept)}: it runs on copies, and nothing is kept "
            "in what was copied."
        )


def _attributes_read(function: object) -> set[str]:
    """The names of the attributes that a function's own code reads."""
    code = getattr(function, "__code__", None)
    return {one.argval for one in dis.get_instructions(code) if one.opname in _LOADS} if code else set()


_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_KEPT = (
    "model: training_step keeps values of records in self.{where}, and {hook} reads it, but they are private: remove "
    "that, or release them by private_metrics.release."
)
HOOKS = (
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_before_optimizer_step", "on_before_zero_grad", "on_validation_start", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_end", "on_save_checkpoint",
)  # fmt: skip
_VALIDATING = ("validation_step", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end")
