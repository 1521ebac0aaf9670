"""Digits, MNIST, Fashion-MNIST and CIFAR-10, from their standard files."""

import gzip
import tarfile
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from dpexp.training.data.base import TensorData, standard_file, synthetic_users

_SPLIT_SEED = 0
_TEST_IMAGES = 360


class Digits(TensorData):
    """scikit-learn's digits: 1 437 training and 360 test images [1, 8, 8] in [-1, 1], split by a fixed permutation.

    Args:
        users: number of synthetic users, since the writers are not known; `train.user_of` has the user of each image.
    """

    def __init__(self, batch_size: int = 256, num_workers: int = 0, users: int = 200) -> None:
        images, labels = load_digits(return_X_y=True)
        x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        y = torch.as_tensor(labels, dtype=torch.long)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        train, test = order[:-_TEST_IMAGES], order[-_TEST_IMAGES:]
        super().__init__((x[train], y[train]), (x[test], y[test]), batch_size, num_workers)
        self.train.user_of = synthetic_users(len(train), users)  # type: ignore[attr-defined]


class _IdxImages(TensorData):
    """60 000 training and 10 000 test images [1, 28, 28] in [-1, 1].

    Args:
        root: folder of the standard files, which are downloaded if they are missing.
        users: number of synthetic users; `train.user_of` has the user of each training image.
    """

    mirror: str
    md5: ClassVar[dict[str, str]]

    def __init__(self, root: str, batch_size: int = 512, num_workers: int = 0, users: int = 1000) -> None:
        super().__init__(self._read(root, "train"), self._read(root, "t10k"), batch_size, num_workers)
        self.train.user_of = synthetic_users(len(self.train), users)  # type: ignore[attr-defined]

    def _read(self, root: str, part: str) -> tuple[Tensor, Tensor]:
        images, labels = (
            read_idx(standard_file(root, self.mirror + name, self.md5[name]))
            for name in (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        )
        return images.unsqueeze(1).float() / 127.5 - 1, labels.long()


class Mnist(_IdxImages):
    __doc__ = _IdxImages.__doc__
    mirror = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    md5: ClassVar = {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    }


class FashionMnist(_IdxImages):
    __doc__ = _IdxImages.__doc__
    mirror = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    md5: ClassVar = {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }


def read_idx(path: Path) -> Tensor:
    """Reads an idx file of unsigned bytes.

    It holds two zero bytes, the type 0x08, the number of dimensions, each size as a big-endian 32-bit integer, and the
    values.
    """
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return torch.from_numpy(values.copy())


_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_FOLDER = "cifar-10-batches-bin"
_RECORD = 1 + 3 * 32 * 32


class Cifar10(TensorData):
    """50 000 training and 10 000 test images [3, 32, 32] in [-1, 1].

    Args:
        root: folder with `cifar-10-batches-bin/`; if that is missing, the standard archive is unpacked there.
    """

    def __init__(self, root: str, batch_size: int = 512, num_workers: int = 0) -> None:
        folder = Path(root).expanduser() / _FOLDER
        if not folder.is_dir():
            with tarfile.open(standard_file(root, _URL, _MD5)) as archive:
                archive.extractall(folder.parent, filter="data")
        train = [read_binary(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
        x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
        super().__init__((x, y), read_binary(folder / "test_batch.bin"), batch_size, num_workers)


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one binary batch: per record a label byte and 3 072 bytes of red, green and blue planes."""
    content = torch.from_numpy(np.fromfile(path, np.uint8).reshape(-1, _RECORD))
    return content[:, 1:].reshape(-1, 3, 32, 32).float() / 127.5 - 1, content[:, 0].long()
