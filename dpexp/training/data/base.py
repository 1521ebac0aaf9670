"""A data module over tensors in memory."""

from pathlib import Path

import pooch
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dpexp.errors import ConfigError


def standard_file(root: str, url: str, md5: str) -> Path:
    """The path of a data set's file under `root`, downloaded from `url` if it is not there.

    Raises:
        ConfigError: the file, with this checksum, is not there and cannot be downloaded.
    """
    name = url.rpartition("/")[2]
    try:
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=Path(root).expanduser()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.root={root} lacks {name} (md5 {md5}) and it could not be downloaded from {url}; "
            f"put the file into that folder, or set data.root to the folder that has it."
        ) from error


class TensorData(pl.LightningDataModule):
    """Training and test sets of (x, y) tensors.

    Args:
        train: (x [N, ...], y [N]).
        test: the same.
        batch_size: of the training loader, for non-private training. Private training draws its own samples.
        num_workers: processes of the training loader.
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
        """The test set, which is taken as public."""
        return self.test_dataloader()

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.test, 1000)


def synthetic_users(count: int, users: int) -> Tensor:
    """A user for each of `count` records [count], for data sets without users: random, from a fixed seed.

    Each user has at least one record; of fewer records than users, each record has a user of its own.
    """
    users = min(users, count)
    others = torch.randint(users, (count - users,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.arange(users), others])
