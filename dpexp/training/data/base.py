"""A data module over tensors in memory."""

from pathlib import Path

import pooch
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dpexp.errors import ConfigError


def standard_file(root: str, url: str, md5: str) -> Path:
    """The path of a data set's standard file under `root`, fetched from `url` if it is not there.

    Raises:
        ConfigError: the file is neither there nor to be had; says where to put it.
    """
    name = url.rpartition("/")[2]
    try:
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=Path(root).expanduser()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.root={root} lacks {name} (md5 {md5}) and it could not be fetched from {url}; "
            f"put the file into that folder, or name with data.root the folder that has it."
        ) from error


class TensorData(pl.LightningDataModule):
    """Training and test sets of (x, y) tensors.

    Args:
        train: (x [N, ...], y [N]); test: likewise.
        batch_size: of the loaders. Private training draws its own samples from the training loader's data set.
        num_workers: loader processes.
    """

    def __init__(
        self,
        train: tuple[Tensor, Tensor],
        test: tuple[Tensor, Tensor],
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.train = TensorDataset(*train)
        self.test = TensorDataset(*test)
        self.batch_size = batch_size
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        """The test set: it is taken as public, so it may be looked at during training."""
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 1000)


def dealt_out(count: int, users: int) -> Tensor:
    """The user of each of so many records [count], dealt out at random, once and for all: synthetic users, for data
    sets that know of none. Each has one record at least, as long as there are as many."""
    users = min(users, count)
    dealt = torch.randint(users, (count - users,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.arange(users), dealt])
