"""Natural canaries: records of the test set with a wrong label, which are easy to find among the data.

They come from the test set because that is public (docs/guarantee.md): what an attacker gets tells of canaries more
than the models do, and of all other records no more.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from dpexp.errors import ConfigError
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.sampling.fetching import sampled_dataset

FEWEST = 100  # that show anything
_WHO = "audit.canary_type=mislabelled"


class Canary(NamedTuple):
    """A record (x, y) with a wrong y, and with the right one."""

    wrong: Any
    right: Any


def mislabelled(data: pl.LightningDataModule, count: int, seed: int, classes: int | None = None) -> list[Canary]:
    """At most so many records of the test set, each with another label than its own, of those that the others have.
    Which records, and which labels, follows from the seed: both are public. `classes`: how many there are said to be.

    Raises:
        ConfigError: there are no records with labels, or too few, or a label is of no class.
    """
    choice = np.random.default_rng(seed)
    try:
        dataset = _public(data)
        items = [dataset[int(k)] for k in choice.permutation(len(dataset))[:count]]  # type: ignore[arg-type]
    except ConfigError:
        raise
    except Exception as error:  # of somebody else's code, on public data
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"{_WHO}: data.module's test set cannot be read: {type(error).__name__}: {said}") from error
    if len(items) < FEWEST:
        raise ConfigError(f"{_WHO} takes at least {FEWEST} records of the test set; data.module's has {len(items)}.")
    labels = [_label(item) for item in items]
    found = sorted(set(labels))
    if classes is not None and not 0 <= found[0] <= found[-1] < classes:
        raise ConfigError(f"data.classes={classes}: the test set has the labels {found[0]} to {found[-1]}.")
    if len(found) < 2:
        raise ConfigError(f"{_WHO} needs records of several classes; all that were chosen have the label {labels[0]}.")
    return [
        Canary(_relabelled(item, int(choice.choice([other for other in found if other != label]))), item)
        for item, label in zip(items, labels, strict=True)
    ]


def put_into(
    data: pl.LightningDataModule, canaries: Sequence[Canary], included: Sequence[bool], plan: PrivacyPlan | None
) -> None:  # fmt: skip
    """Lets a data module's training loader give the included canaries too, on top of the records. Where sampling relies
    on n, they take the places of records, and a canary that is not included stands there with its right label."""
    replacing = plan is not None and plan.sampling.needs_exact_n

    def with_canaries(dataset: Any) -> Dataset:
        size = len(dataset)
        if replacing and size < len(canaries):
            told = f"audit.num_canaries={len(canaries)} canaries do not fit into a training set of {size} records"
            raise ConfigError(f"{told}, whose places they take; ask for fewer.")
        kept = size - len(canaries) if replacing else size
        pairs = zip(canaries, included, strict=True)
        more = [canary.wrong if is_in else canary.right for canary, is_in in pairs if is_in or replacing]
        return ConcatDataset([Subset(dataset, range(kept)), more])  # type: ignore[list-item]

    replace_records(data, with_canaries)


def replace_records(
    data: pl.LightningDataModule, records: Callable[[Any], Dataset], collation: Callable[[Any], Any] | None = None
) -> None:
    """Lets a data module's training loader give what `records` makes of its data set, and `collation` of its own."""
    given = data.train_dataloader

    def train_dataloader() -> DataLoader:
        loader = given()
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
    """The canaries as training would meet them: each a batch of one."""
    return DataLoader([canary.wrong for canary in canaries], 1, collate_fn=data.train_dataloader().collate_fn)  # type: ignore[arg-type]


def _public(data: pl.LightningDataModule) -> Dataset:
    """The test set."""
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
    whole = isinstance(y, int | np.integer) and not isinstance(y, bool)
    if whole or (isinstance(y, Tensor) and y.dim() == 0 and y.dtype in _WHOLE):
        return int(y)
    found = type(y).__name__ if y is not None else f"{type(item).__name__} without such a pair"
    raise ConfigError(
        f"{_WHO} needs records (x, y) with a whole number y, and data.module's test set has a {found}; audit=dirac "
        "takes any."
    )


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _relabelled(item: Any, label: int) -> Any:
    x, y = item
    return type(item)((x, torch.full_like(y, label) if isinstance(y, Tensor) else type(y)(label)))
