"""What is found out before the first round, with nothing released: how records are processed, and whether the step is
the same in every round."""

import contextlib
import itertools
import math
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
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_unflatten
from torch.utils.data import Dataset

from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.batches import Failed
from dpexp.privacy.batchnorm import spectral_norms_fixed
from dpexp.privacy.delivery import Rounds
from dpexp.privacy.engine.chunk import NO_LOSS, Chunk, LossOf, MadeUp, NoLoss, copied
from dpexp.privacy.engine.passes import python_randomness
from dpexp.privacy.engine.questions import why
from dpexp.privacy.engine.step import Step
from dpexp.privacy.engine.torch_functions import leaves_of
from dpexp.privacy.engine.traced import memory_of, refuse_data
from dpexp.privacy.keystream import KeyStream, own_randomness
from dpexp.privacy.values import WEIGHT

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
    wrong = ConfigError("data: the training set gives no record.")
    for example in rounds.examples():  # of which the first may be an odd one
        if isinstance(example, Failed):
            wrong = wrong if isinstance(wrong, NoLoss) else _not_fetched(example.reason)
            continue
        chunk = Chunk.of(loss_of, example.to(device).batch, 1)
        try:
            with _DataUnread(data) as seen, _nothing_fetched(rounds.dataset):
                step.decide(chunk, later)
        except NoLoss as error:
            wrong = wrong if isinstance(wrong, NoLoss) else error
            if str(error) == NO_LOSS and rounds.of_examples and any(_of_pairs(MadeUp(), chunk, module, device, False)):
                raise ConfigError(_NONE_ALONE) from None
        else:
            break
    else:
        raise wrong
    if rounds.of_examples:
        _check_loss_of_a_batch(step, chunk, module, device, seen.weighed)
        if (collate := rounds.mixing()) is not None:
            warnings.warn(
                f"data: {collate} makes of a record another one among others, as MixUp, CutMix and statistics of a "
                "batch do; here each record is collated by itself, and trained on as it then is. Change a record by "
                "itself, as augment does (dpexp.views), and give statistics as public constants."
            )
    if step.held:
        warnings.warn(
            f"the step holds tensors that are neither parameters nor buffers, {', '.join(step.held[:4])}; they must be "
            "public, since nothing protects what was computed from records beforehand."
        )


def _not_fetched(reason: Exception) -> ConfigError:
    """Why there is no record, or no more than one's own sentence of it."""
    if isinstance(reason, ConfigError):
        return reason
    failed = ConfigError(f"data: none of the records that were tried, all over the training set, can be had: {reason}.")
    failed.__cause__ = reason  # which may quote a record
    return failed


class _DataUnread(TorchFunctionMode):
    """While active, a function that is given a part of the training data is refused.

    Attributes:
        weighed: the last function that was given weights of classes, if any was.
    """

    def __init__(self, data: list[tuple[int, int]]) -> None:
        super().__init__()
        self._data = data
        self.weighed: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is Tensor.__deepcopy__:  # of what a batch holds besides tensors
            return func(*args, **(kwargs or {}))
        kinds = (Tensor, nn.Parameter, np.ndarray, np.memmap)
        given = [leaf for leaf in leaves_of((args, kwargs or {})) if type(leaf) in kinds]
        plain = [one for one in given if isinstance(one, np.ndarray) or not is_functorch_wrapped_tensor(one)]
        refuse_data([("an argument of " + getattr(func, "__name__", "a function"), one) for one in plain], self._data)
        place = _WEIGHTS.get(func)
        if (
            place is not None
            and (kwargs or {}).get(place[1], args[place[0]] if place[0] < len(args) else None) is not None
        ):
            self.weighed = func.__name__
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


# Where losses take weights of classes: place, name.
_WEIGHTS = {
    F.cross_entropy: (2, "weight"), F.nll_loss: (2, "weight"), F.multi_margin_loss: (4, "weight"),
    F.binary_cross_entropy_with_logits: (6, "pos_weight"),
}  # fmt: skip
_NONE_ALONE = (
    "model: training_step gives a record by itself no gradient, as contrastive losses do, which compare the records of "
    "a batch; here each record is seen by itself. Let a record hold all that its loss compares, such as a pair."
)
_WEIGH = (
    "Here each record gets the loss of a batch of one, and its gradient is clipped, so that of weights in the loss "
    "little or nothing is left. Set data.class_weights, or call dpexp.weigh(w[y].mean() / w.max()) in training_step, "
    "which weighs the clipped gradient."
)


def _check_loss_of_a_batch(
    step: Step, chunk: Chunk, module: nn.Module, device: torch.device, weighed: str | None
) -> None:
    """Warns where the loss of a batch is not made of losses of its records: of two made-up ones a and b, which become
    a' and b', L(a, b) - L(a', b) - L(a, b') + L(a', b') is 0 if each has a loss of its own. At first labels stay.
    `weighed`: a function that was given weights of classes. Raises ConfigError: a record by itself has no gradient.
    """
    if step.made_up is None:
        return
    mixed, by_label = (_mixes(step.made_up, chunk, module, device, labels) for labels in (False, True))
    if not (mixed or by_label or weighed):
        return
    try:
        with own_randomness(device, KeyStream.known(0, "pairs", 0)):
            alone = step.of_one(step.made_up.records(chunk, 1, 0), 0).of
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        if not (mixed or by_label):
            return
        raise ConfigError(f"model: training_step fails for a record by itself ({why(error)})") from None
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    unreached = [name for name in names if name not in alone or not bool(alone[name].dense().any())]
    if len(unreached) == len(names) and (mixed or by_label):
        raise ConfigError(_NONE_ALONE)
    said = weighed is not None or WEIGHT in alone
    if weighed is not None and WEIGHT not in alone:
        warnings.warn(f"training_step gives {weighed} weights of classes. {_WEIGH}")
    if mixed and (not said or any(leaf.is_floating_point() for leaf in chunk.tensors)):
        left_out = f", which gives {', '.join(unreached[:4])} no gradient" if unreached else ""
        warnings.warn(
            "the loss that training_step gives several records together is no sum or mean of theirs, as with mixup, "
            "Dice, statistics of a batch or a mean over all its words; here each record gets the loss of a batch of one"
            f"{left_out}. Write it for one record: Dice over a record's places, statistics as public constants."
        )
    elif by_label and not said:
        warnings.warn(
            "the loss that training_step gives several records together depends on all of their labels, as with "
            f"weights of classes, or how frequent these are in a batch. {_WEIGH}"
        )


_ROUNDING, _PART, _COARSE = 1e-5, 1e-3, 1e-2  # of the losses; of what a record moves; of losses in half precision
_TOGETHER = 4
_TRIES = 6  # since what mixes at random may leave two records as they are


def _mixes(made_up: MadeUp, chunk: Chunk, module: nn.Module, device: torch.device, labels: bool) -> bool:
    """Whether the loss of two records is another than those of each, where labels are replaced, too, or are not."""
    full = not torch.is_autocast_enabled(device.type) and all(p.dtype.itemsize >= 4 for p in module.parameters())
    for losses in _of_pairs(made_up, chunk, module, device, labels):
        moved, most = max(abs(loss - losses[0]) for loss in losses), max(map(abs, losses))
        least = max(_PART * moved, _ROUNDING * most) if full else _COARSE * most
        if abs(losses[0] - losses[1] - losses[2] + losses[3]) > least:
            return True
    return False


def _of_pairs(
    made_up: MadeUp, chunk: Chunk, module: nn.Module, device: torch.device, labels: bool
) -> Iterator[list[float]]:
    """L(a, b), L(a', b), L(a, b') and L(a', b') from one random state, of a few pairs whose losses are numbers; with
    others that stay, since classes of two records are as frequent as one another."""
    for seed in range(_TRIES):
        some, others = (made_up.records(chunk, _TOGETHER, k) for k in (2 * seed, 2 * seed + 1))
        only = [labels or leaf.is_floating_point() for leaf in some.tensors]
        losses, is_random = [], False
        for replaced in ([], [0], [1], [0, 1]):
            together = [leaf.detach().clone() for leaf in some.tensors]
            for leaf, other, floating in zip(together, others.tensors, only, strict=True):
                if floating or not any(only):
                    leaf[replaced] = other.detach()[replaced]
            if any(leaf.dim() < 2 or leaf.shape[1] != 1 for leaf in together):
                return
            batch = some.having([leaf.flatten(0, 1) for leaf in together])
            stream = KeyStream.known(seed, "pairs", 0)
            with own_randomness(device, stream), torch.no_grad(), spectral_norms_fixed(module):
                before = torch.get_rng_state(), python_randomness()
                try:
                    losses.append(float(chunk.loss_of(tree_unflatten([*map(copied, batch.leaves)], chunk.structure))))
                except ConfigError:
                    raise
                except Exception:
                    return
                is_random |= not torch.equal(before[0], torch.get_rng_state()) or before[1] != python_randomness()
        if all(map(math.isfinite, losses)):
            yield losses
        if not is_random and seed > 1:
            return


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
