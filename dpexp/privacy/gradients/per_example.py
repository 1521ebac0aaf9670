"""A record's loss, and its gradient by ordinary autograd."""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.layer_gradients import LayerGradient
from dpexp.privacy.gradients.norms import full_precision
from dpexp.privacy.gradients.training_step import StandIn
from dpexp.privacy.private_metrics import Values

NO_GRADIENT = (
    "model: training_step's loss depends on none of the trainable parameters; remove .detach(), torch.no_grad() and "
    ".item() between them and the loss."
)
ONE_LOSS = "training_step must return one number for a record: its loss."


@dataclass
class ChunkGradients:
    """Per-example gradients and losses of a chunk of B records.

    Attributes:
        by_name: gradients of each parameter that was used, and the values marked for release.
        losses: [B].
        in_range: [B], whether all indices and labels of a record were in range.
    """

    by_name: dict[str, LayerGradient]
    losses: Tensor
    in_range: Tensor


def gradients_of_one_record(
    own: StandIn, one: Any, parameters: dict[str, Tensor], values: Values
) -> tuple[dict[str, Tensor], Tensor]:
    """One record's gradients and released values by name, and its loss, by ordinary autograd.

    Raises:
        RecordError: the record has no scalar loss.
    """
    for parameter in parameters.values():
        parameter.grad = None
    try:
        with values.marked() as given, no_seeds(), CtcTargetsChecked():
            loss = own.loss(one)
            if loss.dim():
                raise RecordError(ONE_LOSS)
            released = {key: value.clone() for key, value in given().items()}
            refuse_other_parameters(loss, parameters)
            backward(loss)
        gradients = {n: _dense(p.grad) for n, p in parameters.items() if p.grad is not None}
    finally:
        for parameter in parameters.values():
            parameter.grad = None
    return gradients | released, loss.detach()


def refuse_other_parameters(loss: Tensor, parameters: dict[str, Tensor]) -> None:
    """Refuses a loss that would give gradients, unclipped, to a parameter that no group releases."""
    known, seen, nodes = {id(parameter) for parameter in parameters.values()}, set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf.numel() and id(leaf) not in known:
            raise ConfigError(
                f"model: the loss trains a parameter {[*leaf.shape]} that no group releases: it is not the model's, "
                "became trainable during training, or is used otherwise than as an attribute of a module; register its "
                "layer in the model before the plan is made."
            )
        nodes += [following for following, _ in node.next_functions]


def backward(loss: Tensor) -> None:
    """Runs the backward pass in full precision, if the loss depends on anything that is trained."""
    if loss.requires_grad:
        with torch.no_grad(), full_precision(loss.device):
            loss.backward()


def python_random_states() -> tuple:
    """The states of Python's and NumPy's global generators, by which a draw is noticed."""
    _, key, *rest = np.random.get_state()  # type: ignore[misc]
    return random.getstate(), key.tobytes(), *rest  # type: ignore[attr-defined]


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


@contextmanager
def no_seeds() -> Iterator[None]:
    """Raises ConfigError if torch's generator is seeded in the block: a graph would draw other numbers each time.

    A state may be restored, as by checkpointing.
    """
    seed = torch.default_generator.initial_seed()
    with patch.object(torch, "manual_seed", _refuse_seed), patch.object(torch.random, "manual_seed", _refuse_seed):
        yield
    if torch.default_generator.initial_seed() != seed:
        _refuse_seed()


def _refuse_seed(*_: Any) -> NoReturn:
    raise ConfigError(
        "model: a random number generator is seeded inside training_step, which makes its random numbers known; leave "
        "seeding to dpexp, whose generators are secret."
    )


_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
_AGAIN = 0.5  # seconds


def undisturbed(run: Callable[[], object]) -> None:
    """Runs what replaces a module's tensors and its classes' data meanwhile, and can be run again.

    A signal first ends it, by KeyboardInterrupt, and what was replaced is put back; then the signal's handler is
    called, which may save a checkpoint, or raise, which ends the job. If it returns, all runs again, with signals of
    this number deferred.
    """
    handled, before = set[int](), -1
    while len(handled) > before:
        before = len(handled)
        with signals_deferred(handled):
            run()


@contextmanager
def signals_deferred(handled: set[int] | None = None) -> Iterator[None]:
    """Defers signal handlers to the end of the block, which runs the training step on one record.

    A handler may save a checkpoint, while the module's parameters are replaced by those of one user. A second Ctrl-C is
    not deferred and ends the step.

    Args:
        handled: signals of other numbers end the block, whose exceptions are dropped then; they are added. None: no
            signal does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: dict[int, bool] = {}  # numbers, in order, and whether they end the block
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    deferred = {number: handler for number, handler in handlers.items() if callable(handler)}

    def defer(number: int, frame: FrameType | None) -> None:
        second = number == signal.SIGINT and number in received
        received[number] = ends = handled is not None and number not in handled
        if (ends and not _within_enter_or_exit(frame)) or (second and handled is None):
            raise KeyboardInterrupt

    def raise_again() -> None:
        """Python drops what is raised while it collects garbage, and so may a user's code."""
        while not ended.wait(_AGAIN):
            for number in [number for number, ends in [*received.items()] if ends]:
                signal.raise_signal(number)

    ended, again = threading.Event(), threading.Thread(target=raise_again)
    for number in deferred:
        signal.signal(number, defer)
    try:
        if handled is not None:
            again.start()
        yield
    except BaseException:
        if not any(received.values()):
            raise
    finally:
        ended.set()
        if handled is not None:
            again.join()
        for number, handler in deferred.items():
            signal.signal(number, handler)
        for number in received:
            deferred[number](number, None)  # type: ignore[operator]
        if handled is not None:
            handled.update(received)


def _within_enter_or_exit(frame: FrameType | None) -> bool:
    """Whether a context is being entered or left, where an exception could leave half of it replaced."""
    while frame is not None and frame.f_code is not undisturbed.__code__:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


class CtcTargetsChecked(TorchFunctionMode):
    """While active, checks the targets of CTC losses: PyTorch would read memory at targets out of range."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (F.ctc_loss, torch.ctc_loss):
            _check_targets(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _check_targets(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *_: Any, **__: Any
) -> None:
    """Padded targets [N, S] are read up to their lengths; concatenated ones up to the sum of the lengths."""
    lengths = torch.as_tensor(target_lengths, device=targets.device)
    lengths = lengths[:, None] if targets.dim() == 2 else lengths.sum()
    used = torch.arange(targets.shape[-1], device=targets.device) < lengths
    if bool((used & ((targets < 0) | (targets >= log_probs.shape[-1]))).any()):
        raise IndexError("ctc_loss was called with a target out of range.")
