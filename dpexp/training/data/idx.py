"""MNIST and Fashion-MNIST, from their standard idx files."""

import gzip
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dpexp.training.data.files import standard_file
from dpexp.training.data.tensors import TensorData, dealt_out


class _IdxImages(TensorData):
    """60 000 training and 10 000 test images [1, 28, 28] in [-1, 1].

    Args:
        users: among how many synthetic users the training images are dealt out; `train.user_of` has the user of each.
    """

    mirror: str
    md5: ClassVar[dict[str, str]]

    def __init__(self, root: str, batch_size: int = 512, workers: int = 0, users: int = 1000) -> None:
        super().__init__(self._read(root, "train"), self._read(root, "t10k"), batch_size, workers)
        self.train.user_of = dealt_out(len(self.train), users)  # type: ignore[attr-defined]

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
    """An idx file of unsigned bytes: two zero bytes, the type 0x08, the number of dimensions, each size as a
    big-endian 32-bit integer, and the values."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return torch.from_numpy(values.copy())
