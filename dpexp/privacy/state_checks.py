"""Tests whether a step that runs as written keeps state of records, in the dry run and in the rounds.

From one random state, synthetic records must have the same loss and gradients, to the last bit, before and after other
records are processed, and nothing that a checkpoint saves may change in between. State that is found is not undone: the
job is refused, or stops before the round's release.
"""

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError

ROUNDS_ALWAYS_CHECKED = 8  # the first ones

KEEPS_STATE = (
    "model: {what}, so training_step keeps state of a record that may affect other records or what is saved; compute a "
    "record's loss from that record, the weights and torch's random numbers alone. Put counters into a hook such as "
    "on_train_batch_end, averages of weights into callbacks=ema, and statistics of data into private metrics."
)

STEP_CHANGED = (
    "model: training_step has changed since it was last traced ({what}), by something other than an attribute of a "
    "module or a global variable, so records of a new shape would be processed by another step than the others; keep "
    "what hooks change in attributes of the module."
)


class StateFound(ConfigError):
    """A step or a data set keeps state of a record; `last_clean_round` is the last round, counted from 1, whose check
    found nothing; 0: none."""

    def __init__(self, message: str, last_clean_round: int = 0) -> None:
        super().__init__(message)
        self.last_clean_round = last_clean_round


class StateCheck:
    """Compares a step's results and a module's state before and after other records are processed. `probe` computes
    losses and gradients of fixed synthetic records from a fixed random state."""

    def __init__(self, module: nn.Module, probe: Callable[[], list[Tensor]]) -> None:
        self._module, self._probe = module, probe
        self._last_clean_round = 0
        self._expected: list[bytes] | None = None
        self._saved: dict[str, bytes] = {}

    def before(self, probing: bool = True) -> None:
        """Notes what a checkpoint saves and, if `probing`, the probe's results."""
        self._saved, self._expected = digests(self._module) | digests_of_training(self._module), None
        if probing:
            self._expected = [*map(digest, self._probe())]

    def after(self, done: int = 0) -> None:
        """Raises StateFound if something has changed; `done` rounds were completed before this one."""
        now = digests(self._module) | digests_of_training(self._module)
        changed = [name for name, was in self._saved.items() if now.get(name) != was]
        if changed:
            raise StateFound(
                KEEPS_STATE.format(what=f"{changed[0]} is changed inside training_step"), self._last_clean_round
            )
        for _ in range(2 if self._expected is not None else 0):  # the step may change every second call
            try:
                again = [*map(digest, self._probe())]
            except ConfigError:
                raise
            except Exception as error:
                what = "training_step fails after other records"
                raise StateFound(KEEPS_STATE.format(what=what), self._last_clean_round) from error
            if again != self._expected:
                what = "a record's loss or gradient differs after other records"
                raise StateFound(KEEPS_STATE.format(what=what), self._last_clean_round)
        self._last_clean_round = done + 1 if self._expected is not None else self._last_clean_round
        self._saved, self._expected = {}, None


def digest_of_weights(module: nn.Module) -> int:
    """A digest of all parameters and buffers."""
    return digest_as_integer(b"".join(digests(module).values()))


def digest_as_integer(content: bytes) -> int:
    """A digest of 56 bits, which processes compare."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def digests(module: nn.Module) -> dict[str, bytes]:
    """A digest of each parameter and buffer."""
    return {name: digest(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def digests_of_training(module: nn.Module) -> dict[str, bytes]:
    """Digests of what else a checkpoint saves or steers the Trainer: hyperparameters, extra state, optimizers."""
    trainer = getattr(module, "_trainer", None)
    data = getattr(trainer, "datamodule", None)
    values: dict[str, Any] = {"self.hparams": _plain(module), "the data module's hparams": _plain(data)}
    for name, layer in module.named_modules():
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            values[f"the extra state of {name or 'the module'}"] = layer.get_extra_state()
    if trainer is not None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for key in {key for group in groups for key in group} - {"params"}:
            values[f"the optimizer's {key}"] = [group.get(key) for group in groups]
        values["the optimizer's list of parameters"] = [[id(p) for p in group["params"]] for group in groups]
        values["a scheduler's state"] = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
        values["the optimizer's state"] = [[*optimizer.state.values()] for optimizer in trainer.optimizers]
        values |= {f"trainer.{key}": getattr(trainer, key, None) for key in _SETTINGS}
    return {name: bits_of(value) for name, value in values.items()}


def _plain(owner: Any) -> dict[str, Any]:
    """Hyperparameters of plain types; objects are left out, since they may fill caches."""
    kinds = (Tensor, str, int, float, bool, list, tuple, dict)
    return {key: value for key, value in dict(getattr(owner, "hparams", {})).items() if isinstance(value, kinds)}


_SETTINGS = (
    "max_epochs", "max_steps", "limit_train_batches", "limit_val_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "check_val_every_n_epoch",
)  # fmt: skip


def bits_of(value: Any) -> bytes:
    """Equal for bit-equal values; of a value that cannot be pickled, only the type's name."""
    if isinstance(value, Tensor) and not value.is_quantized and not value.is_nested:
        return digest(value)
    if type(value) in (list, tuple):
        return repr(type(value)).encode() + b" ".join(map(bits_of, value))
    if type(value) is dict:
        return b"dict" + b" ".join(repr(key).encode() + bits_of(one) for key, one in value.items())
    try:
        return pickle.dumps(value)
    except Exception:
        return type(value).__name__.encode()


def digest(tensor: Tensor) -> bytes:
    """A digest of shape, dtype and bits, those of NaN included."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    content = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    sha = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha.update(content.numpy().data)
    return sha.digest()
