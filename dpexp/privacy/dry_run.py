"""What is found out before the first round, with nothing released: how records are processed, and whether the step is
the same in every round."""

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten
from torch.utils.data import Dataset

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.batchnorm import spectral_norms_fixed
from dpexp.privacy.delivery import Rounds
from dpexp.privacy.engine.chunk import Chunk, LossOf, MadeUp, NoLoss, copied
from dpexp.privacy.engine.passes import python_randomness
from dpexp.privacy.engine.questions import why
from dpexp.privacy.engine.step import Step
from dpexp.privacy.engine.torch_functions import leaves_of
from dpexp.privacy.engine.traced import memory_of, refuse_data
from dpexp.privacy.keystream import KeyStream, own_randomness

Later = Callable[[], AbstractContextManager]


def dry_run(step: Step, rounds: Rounds, loss_of: LossOf, module: nn.Module, later: Later) -> None:
    """Finds mistakes of a step, and decides how records are processed, on made-up or public records. Of the training
    set shapes, types and structure are used; if no record of it can be fetched, the first one that can be decides.

    Args:
        later: under which the step must be the same, as another round's.

    Raises:
        ConfigError: a mistake, in one sentence.
    """
    data = memory_of(tensors_of(rounds.dataset))
    refuse_data([*module.named_parameters(), *module.named_buffers()], data)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    wrong: ConfigError = ConfigError(_NOTHING_FETCHED)
    for example in rounds.examples():  # of which the first may be an odd one
        chunk = Chunk.of(loss_of, example.to(device).batch, 1)
        try:
            with _DataUnread(data), _nothing_fetched(rounds.dataset):
                step.decide(chunk, later)
        except NoLoss as error:
            wrong = wrong if isinstance(wrong, NoLoss) else error
        else:
            break
    else:
        raise wrong
    if rounds.of_examples:
        _check_loss_of_a_batch(step, chunk, module, device)
    if step.held:
        warnings.warn(
            f"the step holds tensors that are neither parameters nor buffers, {', '.join(step.held[:4])}; they must be "
            "public, since nothing protects what was computed from records beforehand."
        )


_NOTHING_FETCHED = "data: no record could be fetched of those that were tried, spread over the training set; mend it."


class _DataUnread(TorchFunctionMode):
    """While active, a function that is given a part of the training data is refused."""

    def __init__(self, data: list[tuple[int, int]]) -> None:
        super().__init__()
        self._data = data

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [
            torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiu" else leaf
            for leaf in leaves_of((args, kwargs or {}))
        ]
        plain = [t for t in given if type(t) in (Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(t)]
        refuse_data([("an argument of " + getattr(func, "__name__", "a function"), t) for t in plain], self._data)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _nothing_fetched(dataset: Any) -> Iterator[None]:
    """Meanwhile the training set, and those that it wraps, give no records.

    Raises:
        ConfigError: one was asked for.
    """
    held = [one for one in _held_by(dataset) if not isinstance(one, Tensor)]
    sets = [one for one in held if isinstance(one, Dataset) or (one is dataset and hasattr(one, "__dict__"))]
    gives = itertools.product({type(one) for one in sets}, ("__getitem__", "__getitems__", "__iter__"))
    with contextlib.ExitStack() as stack:
        for kind, name in gives:
            get = getattr(kind, name, None)
            if get is None:
                continue

            def refuse(self: Any, *key: Any, get: Any = get) -> Any:
                if any(self is one for one in sets):
                    raise ConfigError(
                        f"model: training_step fetches records of the training set ({type(self).__name__}), so that a "
                        "record would reach all others; let it use its batch alone."
                    )
                return get(self, *key)

            stack.enter_context(patch.object(kind, name, refuse))
        yield


def _check_loss_of_a_batch(step: Step, chunk: Chunk, module: nn.Module, device: torch.device) -> None:
    """Warns where the loss of a batch is not made of losses of its records: of two made-up ones a and b, which become
    a' and b', L(a, b) - L(a', b) - L(a, b') + L(a', b') is 0 if each has a loss of its own.
    """
    if step.made_up is None or any(leaf.dim() < 2 or leaf.shape[1] != 1 for leaf in chunk.tensors):
        return
    for seed in range(_TRIES):
        stream = KeyStream.known(seed, "pairs", 0)
        losses, is_random = _losses_of_pairs(step.made_up, chunk, module, device, stream.key, seed)
        if not losses or (met := losses[0] - losses[1] - losses[2] + losses[3]) != met:
            return
        if abs(met) > _ROUNDING * max(map(abs, losses)):
            break
        if not is_random and seed:
            return
    else:
        return
    with own_randomness(device, stream):
        try:
            alone = step.of_one(step.made_up.records(chunk, 1, 0), 0)
        except RecordError as error:
            raise ConfigError(str(error)) from None
        except Exception as error:
            raise ConfigError(f"model: training_step fails for a record by itself ({why(error)})") from None
    reached = {name for name, use in alone.of.items() if bool(use.dense().any())}
    if not reached:
        raise ConfigError(
            "model: training_step gives a record by itself no gradient, as contrastive losses do, which compare the "
            "records of a batch; here each record is seen by itself."
        )
    unreached = [name for name, p in module.named_parameters() if p.requires_grad and name not in reached]
    warnings.warn(
        "the loss that training_step gives two records together is no sum or mean of theirs, as with mixup or a mean "
        "over all words of a batch; here each record gets the loss of a batch of one"
        + (f", which gives {', '.join(unreached[:4])} no gradient." if unreached else ".")
    )


_ROUNDING = 1e-2  # of the losses, that it may make of them
_TRIES = 6  # since what mixes at random may leave two records as they are


def _losses_of_pairs(
    made_up: MadeUp, chunk: Chunk, module: nn.Module, device: torch.device, key: bytes, seed: int
) -> tuple[list[float], bool]:
    """L(a, b), L(a', b), L(a, b') and L(a', b') from one random state, and whether random numbers were drawn; no losses
    if two records have none."""
    some, others = (made_up.records(chunk, 2, k) for k in (2 * seed, 2 * seed + 1))
    only = [leaf.is_floating_point() for leaf in some.tensors]  # not labels, of which weights may be
    losses, is_random = [], False
    for replaced in ([], [0], [1], [0, 1]):
        together = [leaf.detach().clone() for leaf in some.tensors]
        for leaf, other, floating in zip(together, others.tensors, only, strict=True):
            if floating or not any(only):
                leaf[replaced] = other.detach()[replaced]
        batch = some.having([leaf.flatten(0, 1) for leaf in together])
        with own_randomness(device, KeyStream(key)), torch.no_grad(), spectral_norms_fixed(module):
            before = torch.get_rng_state(), python_randomness()
            try:
                losses.append(float(chunk.loss_of(tree_unflatten([*map(copied, batch.leaves)], chunk.structure))))
            except ConfigError:
                raise
            except Exception:
                return [], False
            is_random |= not torch.equal(before[0], torch.get_rng_state()) or before[1] != python_randomness()
    return losses, is_random


def tensors_of(dataset: Any) -> list[Tensor]:
    """The tensors that a data set holds, or as NumPy arrays, or that those and other objects which it holds do."""
    found: list[Tensor] = []
    for one in _held_by(dataset):
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, np.ndarray) and one.dtype != object:
            with contextlib.suppress(TypeError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of arrays that may not be written to
                found.append(torch.from_numpy(one))
    return found


def _held_by(dataset: Any) -> Iterator[Any]:
    """A data set and what it holds, also in containers and objects of the user's own."""
    seen: dict[int, Any] = {}
    todo = [dataset]
    while todo and len(seen) < _LOOKED_AT:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        yield one
        if isinstance(one, list | tuple | deque):
            todo += itertools.islice(one, _FEW)  # an index of its own may be anything
        elif isinstance(one, dict):
            todo += [*one.values()][:_FEW]
        elif not isinstance(one, nn.Module | type | Tensor):
            todo += getattr(one, "__dict__", {}).values()


_LOOKED_AT, _FEW = 10_000, 16
