"""Tests the training step before the first round, without any release, and chooses its execution mode."""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dpexp._torch_compat import tree_unflatten
from dpexp.errors import ConfigError, RecordError
from dpexp.privacy.gradients.branches import explain
from dpexp.privacy.gradients.chunk import NO_LOSS, Chunk, NoLoss, SyntheticRecords, copied
from dpexp.privacy.gradients.compiled import seconds
from dpexp.privacy.gradients.per_example import ONE_LOSS, python_random_states
from dpexp.privacy.gradients.step import TRACED, Settings, Step
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream, own_randomness
from dpexp.privacy.private_metrics import WEIGHT
from dpexp.privacy.sampling.batches import FailedRecord
from dpexp.privacy.sampling.loader import RoundLoader


def dry_run(
    step: Step, rounds: RoundLoader, training_step: TrainingStep, last_round: Settings, same_epoch: Settings
) -> None:
    """Raises ConfigError for mistakes of a step, and chooses its execution mode, on synthetic or public records.

    Of the training set only shapes, dtypes and structure are used, of the first record that can be fetched.
    `last_round` and `same_epoch` imitate other rounds (`Step.decide`).
    """
    module = training_step.module
    rounds.memory.refuse([*module.named_parameters(), *module.named_buffers()])
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    failure = ConfigError("data: the training set has no records.")
    of_shape = {(one := Chunk.of(training_step, some.to(device).batch, 1)).key: one for some in rounds.shapes()}
    for example in rounds.examples():
        if isinstance(example, FailedRecord):
            failure = failure if isinstance(failure, NoLoss) else _not_fetched(example.reason)
            continue
        chunk = Chunk.of(training_step, example.to(device).batch, 1)
        others = [one for key, one in of_shape.items() if key != chunk.key]
        try:
            step.decide(chunk, last_round, same_epoch, others)
        except NoLoss as error:
            failure = failure if isinstance(failure, NoLoss) else error
            pairs = _of_pairs([SyntheticRecords()], chunk, device)
            if str(error) == NO_LOSS and rounds.of_examples and any(pairs):
                raise ConfigError(_NONE_ALONE) from None
        else:
            break
    else:
        raise failure
    if rounds.of_examples:
        _check_loss_of_a_batch(step, chunk, module, device)
    if step.mode == TRACED:
        _measure_duration(step, chunk, module, device)
    if constants := step.constants:
        warnings.warn(
            f"the step holds tensors that are neither parameters nor buffers, {', '.join(constants[:4])}; they must be "
            "public, since values computed from records before training are not protected."
        )


def _as_batch(chunk: Chunk) -> Any:
    """A batch of these records as collation makes it, in memory of its own; None: records have no first dimension."""
    if any(leaf.dim() < 2 or leaf.shape[1] != 1 for leaf in chunk.tensors):
        return None
    leaves = [leaf.flatten(0, 1) if isinstance(leaf, Tensor) else leaf for leaf in chunk.leaves]
    return tree_unflatten([*map(copied, leaves)], chunk.structure)


def _measure_duration(step: Step, chunk: Chunk, module: nn.Module, device: torch.device) -> None:
    """Measures the seconds of a round, and says how long the job takes.

    A plain step is measured with the records of a chunk, if a sample has more: it would not fit into memory.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    sums = [(torch.zeros_like(p, memory_format=torch.contiguous_format, dtype=torch.float32), 0.0) for p in trained]
    sample_size = max(2, round(step.compiling.sample_size))
    records = step.synthetic.records(chunk, min(sample_size, step.usual), 0)
    key = KeyStream.known(0, "duration", 0)
    private = step.seconds_of_round + seconds(lambda: GaussianNoise(key).add_to(sums), device)
    step.seconds_of_round = private
    compared = ""
    if chunk.step.by_user:
        with suppress(Exception), own_randomness(device, key), chunk.step.stand_in() as own:  # it may refuse a batch
            batch = _as_batch(records)
            plain = seconds(lambda: torch.autograd.grad(own.loss(batch), trained, allow_unused=True), device)
            plain *= sample_size / records.size
            compared = f", {private / plain:.1f} times the gradients of a plain step"
    warnings.warn(
        f"the clipped gradients and noise of a round take about {1e3 * private:.3g} ms{compared}; for this job's "
        f"{step.rounds} rounds, about {timedelta(seconds=round(private * step.rounds))} (h:mm:ss)."
    )


def _not_fetched(reason: Exception) -> ConfigError:
    """The error, unless it is a ConfigError, wrapped in one."""
    if isinstance(reason, ConfigError):
        return reason
    failed = ConfigError(
        f"data: none of the records tried, spread over the training set, can be fetched: {str(reason).rstrip('.')}."
    )
    failed.__cause__ = reason  # may quote a record
    return failed


_NONE_ALONE = (
    "model: the loss of a single record has no gradient, as with contrastive losses, which compare the records of a "
    "batch; here each record is processed by itself. Let a record contain all that its loss compares, such as a pair."
)
_OF_A_BATCH = (
    "training_step's loss of several records {why}; here each record has the loss of a batch of one, and its gradient "
    "is clipped, which undoes weights in the loss{unused}. For class weights, set data.class_weights, or call "
    "dpexp.weigh(w[y].mean() / w.max()) in training_step; write other losses for one record: Dice over its places, "
    "statistics as public constants."
)


class ClassWeights(TorchFunctionMode):
    """Notes in `weighed` the last loss function that got class weights while this was active; None: none did."""

    weighed: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        position, keyword = _WEIGHTS.get(func, (len(args), ""))
        if kwargs.get(keyword, args[position] if position < len(args) else None) is not None:
            self.weighed = func.__name__
        return func(*args, **kwargs)


_WEIGHTS = {  # the argument's position and keyword
    F.cross_entropy: (2, "weight"), F.nll_loss: (2, "weight"), F.multi_margin_loss: (4, "weight"),
    F.binary_cross_entropy_with_logits: (6, "pos_weight"),
}  # fmt: skip


def _check_loss_of_a_batch(step: Step, chunk: Chunk, module: nn.Module, device: torch.device) -> None:
    """Warns if the loss of a batch is no sum of its records' losses, or has class weights; raises if a single record
    has no gradient.

    If it is a sum, L(a, b) - L(a', b) - L(a, b') + L(a', b') = 0 for any records.
    """
    others = replace(step.synthetic, floats="normal", public=None)  # with different labels
    with ClassWeights() as seen:
        mixes = _mixes([step.synthetic, others], chunk, module, device, bool(step.kept))
    weighed = seen.weighed
    if not (mixes or weighed):
        return
    try:
        with own_randomness(device, KeyStream.known(0, "pairs", 0)):
            alone = step.alone.gradients_of(step.synthetic.records(chunk, 1, 0), 0).by_name
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:
        if not mixes:
            return
        raise ConfigError(f"model: training_step fails for a record by itself ({explain(error)})") from None
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    unused = [name for name in names if name not in alone or not bool(alone[name].materialize().any())]
    if len(unused) == len(names) and mixes:
        raise ConfigError(_NONE_ALONE)
    if WEIGHT not in alone:
        why = f"is given class weights ({weighed})" if weighed else "is no sum or mean of their losses"
        no_gradient = f"; {', '.join(unused[:4])} has no gradient then" if unused else ""
        warnings.warn(_OF_A_BATCH.format(why=why, unused=no_gradient))


_ROUNDING, _HALF_PRECISION_ROUNDING = 1e-5, 1e-2  # of the losses
_MIN_CHANGE = 1e-3  # of the change by one record
_BATCH = 3  # one record stays, since otherwise the classes of the other two would be equally frequent
_TRIES = 2
_RANDOM_TRIES = 12  # since random mixing may leave two records as they are


def _mixes(
    ways: Sequence[SyntheticRecords], chunk: Chunk, module: nn.Module, device: torch.device, keeps: bool
) -> bool:
    """Whether the loss of a batch is no sum of its records' losses; for the arguments see `_of_pairs`."""
    full_precision = not torch.is_autocast_enabled(device.type) and all(
        p.dtype.itemsize >= 4 for p in module.parameters()
    )
    for losses in _of_pairs(ways, chunk, device, keeps):
        moved, most = max(abs(loss - losses[0]) for loss in losses), max(map(abs, losses))
        tolerance = max(_MIN_CHANGE * moved, _ROUNDING * most) if full_precision else _HALF_PRECISION_ROUNDING * most
        if abs(losses[0] - losses[1] - losses[2] + losses[3]) > tolerance:
            return True
    return False


def _of_pairs(
    ways: Sequence[SyntheticRecords], chunk: Chunk, device: torch.device, keeps: bool = True
) -> Iterator[list[float]]:
    """L(a, b), L(a', b), L(a, b') and L(a', b') of a few batches, each from one random state, if they are finite.

    Args:
        ways: how records are drawn, in turn.
        keeps: the step keeps something on its copies, so that each pass needs copies of its own.
    """
    with ExitStack() as copies:
        own = copies.enter_context(chunk.step.stand_in())
        for seed in range(_RANDOM_TRIES):
            some, others = (ways[seed % len(ways)].records(chunk, _BATCH, k) for k in (2 * seed, 2 * seed + 1))
            losses, is_random = [], False
            for replaced in ([], [0], [1], [0, 1]):
                together = [leaf.detach().clone() for leaf in some.tensors]
                for leaf, other in zip(together, others.tensors, strict=True):
                    leaf[replaced] = other.detach()[replaced]
                batch = _as_batch(some.with_tensors(together))
                if batch is None:
                    return
                if keeps:
                    copies.close()
                    own = copies.enter_context(chunk.step.stand_in())
                stream = KeyStream.known(seed, "pairs", 0)
                with own_randomness(device, stream), torch.no_grad():
                    before = torch.get_rng_state(), python_random_states()
                    try:
                        loss = own.loss(batch)
                        if loss.numel() > 1:
                            raise ConfigError(f"model: {ONE_LOSS}")
                        losses.append(float(loss))
                    except ConfigError:
                        raise
                    except Exception:
                        return
                    is_random |= not torch.equal(before[0], torch.get_rng_state())
                    is_random |= before[1] != python_random_states()
            if all(map(math.isfinite, losses)):
                yield losses
            if not is_random and seed + 1 >= _TRIES:
                return
