"""What is found out before the first round, with nothing released: how records are processed, and whether the step is
the same in every round."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from dpexp._torch_compat import tree_unflatten
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.branches import why
from dpexp.privacy.gradients.chunk import NO_LOSS, Chunk, LossOf, NoLoss, SyntheticRecords, copied
from dpexp.privacy.gradients.per_example import python_randomness
from dpexp.privacy.gradients.step import Step
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.normalization import spectral_norms_fixed
from dpexp.privacy.private_metrics import WEIGHT
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader
from dpexp.privacy.sampling.training_data import DataUnread

Later = Callable[[], AbstractContextManager]


def dry_run(step: Step, rounds: RoundLoader, loss_of: LossOf, module: nn.Module, later: Later) -> None:
    """Finds mistakes of a step, and decides how records are processed, on made-up or public records. Of the training
    set shapes, types and structure are used; if no record of it can be fetched, the first one that can be decides.

    Args:
        later: under which the step must be the same, as another round's.

    Raises:
        ConfigError: a mistake, in one sentence.
    """
    data = rounds.training_data
    data.memory.refuse([*module.named_parameters(), *module.named_buffers()])
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    wrong = ConfigError("data: the training set gives no record.")
    for example in rounds.examples():  # of which the first may be an odd one
        if isinstance(example, FailedRecord):
            wrong = wrong if isinstance(wrong, NoLoss) else _not_fetched(example.reason)
            continue
        chunk = Chunk.of(loss_of, example.to(device).batch, 1)
        try:
            with DataUnread(data) as seen:
                step.decide(chunk, later)
        except NoLoss as error:
            wrong = wrong if isinstance(wrong, NoLoss) else error
            pairs = _of_pairs(SyntheticRecords(), chunk, module, device, False)
            if str(error) == NO_LOSS and rounds.of_examples and any(pairs):
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
    if step.constant_shapes:
        warnings.warn(
            "the step holds tensors that are neither parameters nor buffers, "
            f"{', '.join(step.constant_shapes[:4])}; they must be public, since nothing protects what was computed "
            "from records beforehand."
        )


def _not_fetched(reason: Exception) -> ConfigError:
    """Why there is no record, or no more than one's own sentence of it."""
    if isinstance(reason, ConfigError):
        return reason
    failed = ConfigError(f"data: none of the records that were tried, all over the training set, can be had: {reason}.")
    failed.__cause__ = reason  # which may quote a record
    return failed


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
    if step.synthetic is None:
        return
    others = replace(step.synthetic, floats="normal", public=None)  # whose labels differ, as those of one record do not
    mixed, by_label = (
        any(_mixes(one, chunk, module, device, labels) for one in (step.synthetic, others)) for labels in (False, True)
    )
    if not (mixed or by_label or weighed):
        return
    try:
        with own_randomness(device, KeyStream.known(0, "pairs", 0)):
            alone = step.gradients_of_record(step.synthetic.records(chunk, 1, 0), 0).of
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        if not (mixed or by_label):
            return
        raise ConfigError(f"model: training_step fails for a record by itself ({why(error)})") from None
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    unreached = [name for name in names if name not in alone or not bool(alone[name].materialize().any())]
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


def _mixes(synthetic: SyntheticRecords, chunk: Chunk, module: nn.Module, device: torch.device, labels: bool) -> bool:
    """Whether the loss of two records is another than those of each, where labels are replaced, too, or are not."""
    full = not torch.is_autocast_enabled(device.type) and all(p.dtype.itemsize >= 4 for p in module.parameters())
    for losses in _of_pairs(synthetic, chunk, module, device, labels):
        moved, most = max(abs(loss - losses[0]) for loss in losses), max(map(abs, losses))
        least = max(_PART * moved, _ROUNDING * most) if full else _COARSE * most
        if abs(losses[0] - losses[1] - losses[2] + losses[3]) > least:
            return True
    return False


def _of_pairs(
    synthetic: SyntheticRecords, chunk: Chunk, module: nn.Module, device: torch.device, labels: bool
) -> Iterator[list[float]]:
    """L(a, b), L(a', b), L(a, b') and L(a', b') from one random state, of a few pairs whose losses are numbers; with
    others that stay, since classes of two records are as frequent as one another."""
    for seed in range(_TRIES):
        some, others = (synthetic.records(chunk, _TOGETHER, k) for k in (2 * seed, 2 * seed + 1))
        only = [labels or leaf.is_floating_point() for leaf in some.tensors]
        losses, is_random = [], False
        for replaced in ([], [0], [1], [0, 1]):
            together = [leaf.detach().clone() for leaf in some.tensors]
            for leaf, other, floating in zip(together, others.tensors, only, strict=True):
                if floating or not any(only):
                    leaf[replaced] = other.detach()[replaced]
            if any(leaf.dim() < 2 or leaf.shape[1] != 1 for leaf in together):
                return
            batch = some.with_tensors([leaf.flatten(0, 1) for leaf in together])
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
