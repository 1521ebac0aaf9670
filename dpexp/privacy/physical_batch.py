"""The physical batch size `auto`: fixed on a CPU, and on a GPU the largest power of two that fits into memory.

It is found before the first round's sample is processed, with copies of one record of the validation set, which is
public.
"""

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpexp._lightning_compat import pl, validation_loader
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.round import Performance, RoundEngine
from dpexp.privacy.sampling.batches import RecordBatch, flattened

CPU_BATCH = 640
FIRST_ON_GPU = 16  # also the result where no other size can be tried
_LARGEST_SAMPLE = 1.25  # times q·n; a larger chunk is of no use
_MAX_MEMORY = 0.8  # of a GPU's, since records vary and optimizers allocate their state later


def largest_fitting_batch(plan: PrivacyPlan, step: TrainingStep, trainer: pl.Trainer, low_memory: bool = False) -> int:
    """The largest power of two of records, up to a sample's size, whose pass fits into memory."""
    record = public_record(trainer)
    if record is None:
        return FIRST_ON_GPU
    leaves, structure = flattened(record)
    module: Any = step.module
    limit = math.ceil(_LARGEST_SAMPLE * plan.sampling.q * plan.n)

    def attempt(size: int) -> None:
        performance = Performance(compile=False, low_memory=low_memory)
        engine = RoundEngine(plan, module, GaussianNoise(None), performance=performance)  # type: ignore[arg-type]
        engine.begin()
        copies = [leaf.expand(size, *leaf.shape).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        records = RecordBatch(size, structure.unflatten(copies)).to(module.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.add_chunk(step, records.batch, size)
        if torch.cuda.max_memory_allocated(module.device) > _MAX_MEMORY * torch.cuda.mem_get_info(module.device)[1]:
            raise torch.OutOfMemoryError

    try:
        return double_while_fitting(attempt, limit)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def double_while_fitting(attempt: Callable[[int], None], limit: int) -> int:
    """The last size of 16, 32, …, until `limit` is reached, for which `attempt` does not run out of memory; 16 if an
    attempt fails for another reason."""
    size = FIRST_ON_GPU
    try:
        attempt(size)
        while size < limit:
            attempt(2 * size)
            size *= 2
    except torch.OutOfMemoryError:
        return size
    except Exception:  # the validation set's records are not those of training_step
        return FIRST_ON_GPU
    return size


def public_record(trainer: pl.Trainer) -> Any:
    """The first record of the validation set, as a batch of one; None: there is none."""
    try:
        loader = validation_loader(trainer)
        if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.collate_fn is None:
            return None
        return loader.collate_fn([loader.dataset[0]])
    except Exception:  # the set is empty, or a batch of one cannot be collated
        return None
