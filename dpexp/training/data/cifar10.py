"""CIFAR-10, from its standard binary files."""

import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dpexp.training.data.files import standard_file
from dpexp.training.data.tensors import TensorData

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_FOLDER = "cifar-10-batches-bin"
_RECORD = 1 + 3 * 32 * 32


class Cifar10(TensorData):
    """50 000 training and 10 000 test images [3, 32, 32] in [-1, 1].

    Reads `cifar-10-batches-bin/` under `root` if it is there; otherwise unpacks the standard archive there.
    """

    def __init__(self, root: str, batch_size: int = 512, workers: int = 0) -> None:
        folder = Path(root).expanduser() / _FOLDER
        if not folder.is_dir():
            with tarfile.open(standard_file(root, _URL, _MD5)) as archive:
                archive.extractall(folder.parent, filter="data")
        train = [read_binary(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
        x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
        super().__init__((x, y), read_binary(folder / "test_batch.bin"), batch_size, workers)


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """One binary batch: per record a label byte and 3 072 bytes of red, green and blue planes."""
    content = torch.from_numpy(np.fromfile(path, np.uint8).reshape(-1, _RECORD))
    return content[:, 1:].reshape(-1, 3, 32, 32).float() / 127.5 - 1, content[:, 0].long()
