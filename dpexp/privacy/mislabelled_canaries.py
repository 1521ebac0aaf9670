"""Mislabelled canaries: test records with a wrong label, whose membership is easy to detect.

They are test records because the test set is public (docs/guarantee.md): the audit's results reveal more about
canaries than the models do, but no more about any other record.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from dpexp._lightning_compat import pl
from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.fetching import sampled_dataset

MIN_CANARIES = 100
_WHO = "audit.canary_type=mislabelled"


class Canary(NamedTuple):
    """A record (x, y) with a wrong label and with the right one."""

    wrong: Any
    right: Any


def mislabelled(data: pl.LightningDataModule, count: int, seed: int, classes: int | None = None) -> list[Canary]:
    """Up to `count` records of the test set, each relabelled at random as another class that occurs.

    Args:
        seed: determines records and labels, which are public.
        classes: the configured number of classes; None: unknown.

    Raises:
        ConfigError: there are too few labelled records, or a label is not in [0, classes).
    """
    rng = np.random.default_rng(seed)
    try:
        dataset = _test_set(data)
        items = [dataset[int(k)] for k in rng.permutation(len(dataset))[:count]]  # type: ignore[arg-type]
    except ConfigError:
        raise
    except Exception as error:  # may quote a record, which is public
        message = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{_WHO}: data.module's test set cannot be read: {type(error).__name__}: {message}"
        ) from error
    if len(items) < MIN_CANARIES:
        raise ConfigError(
            f"{_WHO} takes at least {MIN_CANARIES} records of the test set; data.module's has {len(items)}."
        )
    labels = [_label(item) for item in items]
    found = sorted(set(labels))
    if classes is not None and not 0 <= found[0] <= found[-1] < classes:
        raise ConfigError(f"data.classes={classes}: the test set has the labels {found[0]} to {found[-1]}.")
    if len(found) < 2:
        raise ConfigError(f"{_WHO} needs records of several classes; all that were chosen have the label {labels[0]}.")
    return [
        Canary(_relabelled(item, int(rng.choice([other for other in found if other != label]))), item)
        for item, label in zip(items, labels, strict=True)
    ]


def put_into(
    data: pl.LightningDataModule, canaries: Sequence[Canary], included: Sequence[bool], plan: PrivacyPlan | None
) -> None:  # fmt: skip
    """Adds the included canaries to a data module's training loader.

    Where sampling needs an exact n, canaries replace the last records; those not included have their right labels.
    """
    replacing = plan is not None and plan.sampling.needs_exact_n

    def with_canaries(dataset: Any) -> Dataset:
        size = len(dataset)
        if replacing and size < len(canaries):
            raise ConfigError(
                f"audit.num_canaries={len(canaries)} canaries replace records of a training set of {size}; set fewer."
            )
        kept = size - len(canaries) if replacing else size
        pairs = zip(canaries, included, strict=True)
        added = [canary.wrong if is_in else canary.right for canary, is_in in pairs if is_in or replacing]
        return ConcatDataset([Subset(dataset, range(kept)), added])  # type: ignore[list-item]

    replace_records(data, with_canaries)


def replace_records(
    data: pl.LightningDataModule, records: Callable[[Any], Dataset], collation: Callable[[Any], Any] | None = None
) -> None:
    """Maps the data set of a data module's training loader by `records`, and its collate function by `collation`."""
    original = data.train_dataloader

    def train_dataloader() -> DataLoader:
        loader = original()
        return DataLoader(
            records(sampled_dataset(loader)),
            batch_size=loader.batch_size,
            shuffle=True,
            drop_last=loader.drop_last,
            num_workers=loader.num_workers,
            collate_fn=collation(loader.collate_fn) if collation else loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )

    data.train_dataloader = train_dataloader  # type: ignore[method-assign]


def one_by_one(data: pl.LightningDataModule, canaries: Sequence[Canary]) -> DataLoader:
    """The canaries as in training: each one a batch of one."""
    return DataLoader([canary.wrong for canary in canaries], 1, collate_fn=data.train_dataloader().collate_fn)  # type: ignore[arg-type]


def _test_set(data: pl.LightningDataModule) -> Dataset:
    data.prepare_data()
    data.setup("test")
    loader = data.test_dataloader()
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{_WHO} takes records of the test set, for which data.module's test_dataloader must give one DataLoader "
            f"over a data set that can be indexed; it gives a {type(loader).__name__}."
        )
    return loader.dataset


def _label(item: Any) -> int:
    y: Any = item[1] if type(item) in (tuple, list) and len(item) == 2 else None
    is_integer = isinstance(y, int | np.integer) and not isinstance(y, bool)
    if is_integer or (isinstance(y, Tensor) and y.dim() == 0 and y.dtype in _INTEGERS):
        return int(y)
    found = type(y).__name__ if y is not None else f"{type(item).__name__} without such a pair"
    raise ConfigError(
        f"{_WHO} needs records (x, y) with an integer y, and data.module's test set has a {found}; audit=dirac "
        "takes any."
    )


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _relabelled(item: Any, label: int) -> Any:
    x, y = item
    return type(item)((x, torch.full_like(y, label) if isinstance(y, Tensor) else type(y)(label)))
