"""How many records are processed at once, where nobody says: on a CPU a usual number, on a GPU as many as fit.

What fits is tried in the first round, before its sample is processed, on copies of one record of the validation set,
which is taken as public. The number follows from that record, the model and the device, and so from nothing private;
what the tries add up is thrown away.
"""

import gc
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dpexp._lightning_compat import validation_loader
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.batches import RecordBatch, flattened

CPU_BATCH = 640
FIRST_ON_GPU = 16  # on a GPU, and all that is risked where nothing can be tried
_LARGEST_SAMPLE = 1.25  # of q·n, of which a larger chunk is of no use
_ROOM = 0.8  # of a GPU's memory that tries may take, since samples vary and optimizers allocate theirs later


def first_batch(device: torch.device) -> int:
    return FIRST_ON_GPU if device.type == "cuda" else CPU_BATCH


def largest_fitting_batch(
    plan: PrivacyPlan, module: pl.LightningModule, loss_of: Callable[[Any], Tensor], trainer: pl.Trainer
) -> int:
    """The largest power of two of records, up to a whole sample, that a pass takes without running out of memory."""
    one = public_record(trainer)
    if one is None:
        return FIRST_ON_GPU
    leaves, structure = flattened(one)
    most = math.ceil(_LARGEST_SAMPLE * plan.sampling.q * plan.n)

    def attempt(size: int) -> None:
        engine = PrivateRound(plan, module, GaussianNoise(None), compiled=False)  # type: ignore[arg-type]
        engine.begin()
        copies = [leaf.expand(size, *leaf.shape).clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        records = RecordBatch(size, structure.unflatten(copies)).to(module.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.add_chunk(loss_of, records.batch, size)
        if torch.cuda.max_memory_allocated(module.device) > _ROOM * torch.cuda.mem_get_info(module.device)[1]:
            raise torch.OutOfMemoryError

    try:
        return double_while_fitting(attempt, most)
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def double_while_fitting(attempt: Callable[[int], None], most: int) -> int:
    """The last of FIRST_ON_GPU, 2·FIRST_ON_GPU, …, until `most` is reached, that is attempted without running out of memory; FIRST_ON_GPU
    if even that is not, or if it fails for another reason."""
    size = FIRST_ON_GPU
    try:
        attempt(size)
        while size < most:
            attempt(2 * size)
            size *= 2
    except torch.OutOfMemoryError:
        return size
    except Exception:  # of a validation record that is none for training_step
        return FIRST_ON_GPU
    return size


def public_record(trainer: pl.Trainer) -> Any:
    """The first record of the validation set, as a batch of one; None: there is none to be had."""
    try:
        loader = validation_loader(trainer)
        if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.collate_fn is None:
            return None
        return loader.collate_fn([loader.dataset[0]])
    except Exception:  # of an empty set, or one whose records cannot be collated alone
        return None
