"""What is found out before the first round, with nothing released: how records are processed, and whether the step is
the same in every round."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from dpexp.errors import ConfigError
from dpexp.privacy.company import refuse_company
from dpexp.privacy.delivery import Rounds
from dpexp.privacy.engine.chunk import Chunk
from dpexp.privacy.engine.questions import Unreadable
from dpexp.privacy.engine.step import TRACED, Step
from dpexp.privacy.engine.traced import refuse_data


def dry_run(step: Step, rounds: Rounds, trainer: pl.Trainer, module: pl.LightningModule, loss_of: Any) -> None:
    """Finds mistakes of a step, and decides how records are processed, on made-up or public records. Of the training
    set shapes, types and structure are used; if no record of it can be fetched, the first one that can be decides.

    Raises:
        ConfigError: a mistake, in one sentence.
    """
    example = rounds.example()
    if example is None:
        return
    refuse_data(dict([*module.named_parameters(), *module.named_buffers()]), tensors_of(rounds.dataset))
    example, kept = example.to(module.device), kept_numbers(module)
    if rounds.of_examples:
        refuse_company(module, loss_of, example.batch, module.device)
    step.public = public_record(trainer)
    step.decide(Chunk.of(loss_of, example.batch, 1), later_round(trainer))
    refuse_kept_losses(module, kept, step.mode != TRACED)
    if step.held:
        warnings.warn(
            f"the step holds tensors that are neither parameters nor buffers, {', '.join(step.held[:4])}; they must be "
            "public, since nothing protects what was computed from records beforehand."
        )


def public_record(trainer: pl.Trainer) -> Any:
    """The first record of the validation set, as a batch of one; None: there is none to be had."""
    data = getattr(trainer, "datamodule", None)
    if data is None or not is_overridden("val_dataloader", data, pl.LightningDataModule):
        loader = getattr(trainer.fit_loop.epoch_loop.val_loop, "_data_source", None)
        loader = getattr(loader, "instance", None)
    else:
        loader = data.val_dataloader()
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.collate_fn is None:
        return None
    try:
        return loader.collate_fn([loader.dataset[0]])
    except Exception:  # of an empty set, or one whose records cannot be collated alone
        return None


def later_round(trainer: pl.Trainer) -> Callable[[], AbstractContextManager]:
    """Makes the Trainer say meanwhile that a later round is under way."""

    @contextmanager
    def later() -> Iterator[None]:
        loop = trainer.fit_loop
        steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        counts: list[tuple[Any, str, int]] = [
            (count, name, more)
            for count, more in (
                (loop.epoch_progress.current, 3),
                (steps, 7),
                (loop.epoch_loop.batch_progress.current, 5),
            )
            for name in ("ready", "started", "processed", "completed")
            if hasattr(count, name)
        ]
        for count, name, more in counts:
            setattr(count, name, getattr(count, name) + more)
        try:
            yield
        finally:
            for count, name, more in counts:
                setattr(count, name, getattr(count, name) - more)

    return later


def refuse_kept_losses(module: nn.Module, before: dict[str, Any], as_written: bool) -> None:
    """Refuses a step that keeps what it computes of records for a hook: there is nothing of theirs to be had outside.

    Args:
        before: see `kept_numbers`, before the step ran; as_written: it is not traced, so that numbers may be records'.

    Raises:
        ConfigError: names the attribute.
    """
    used = [h for h in _READING if isinstance(module, pl.LightningModule) and is_overridden(h, module)]
    if not used:
        return
    for where, value in _attributes(module):
        if as_written and isinstance(value, float) and before.get(where, value) != value:
            raise ConfigError(_KEPT.format(where=where, hook=used[0]))
        if not isinstance(value, _COLLECTIONS):
            continue
        values = tree_leaves([*value] if isinstance(value, set) else value)
        kept = any(isinstance(v, Unreadable) or (isinstance(v, Tensor) and _is_wrapped(v)) for v in values)
        if isinstance(value, list) and not kept:  # of a step that runs as written
            added = value[before.get(where, 0) :]
            kept = any(isinstance(v, int | float | Tensor) for v in tree_leaves(added))
        if kept:
            raise ConfigError(_KEPT.format(where=where, hook=used[0]))


_KEPT = (
    "model: training_step keeps numbers of records in self.{where}, and {hook} may read them; records' losses are "
    "private, so that there is nothing to average: leave that out, or release them with private metrics "
    "(metrics.release)."
)
_READING = (
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_end",
    "on_before_optimizer_step", "on_before_zero_grad", "on_validation_start", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_end", "on_save_checkpoint",
)  # fmt: skip
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


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def tensors_of(dataset: Any) -> list[Tensor]:
    """The tensors that a data set holds directly, or as NumPy arrays, or that those it wraps hold."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [dataset]
    while todo and len(seen) < _LOOKED_AT:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, np.ndarray) and one.dtype != object:
            with contextlib.suppress(TypeError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of arrays that may not be written to
                found.append(torch.from_numpy(one))
        elif isinstance(one, Dataset):
            todo += vars(one).values()
        elif isinstance(one, list | tuple):
            todo += itertools.islice(one, _FEW)  # an index of its own may be anything
        elif isinstance(one, dict):
            todo += [*one.values()][:_FEW]
    return found


_LOOKED_AT, _FEW = 10_000, 16
