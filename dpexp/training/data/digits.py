"""scikit-learn's handwritten digits: 1 797 real 8×8 images that need no download."""

import torch
from sklearn.datasets import load_digits

from dpexp.training.data.tensors import TensorData, dealt_out

_SPLIT_SEED = 0
_TEST = 360


class Digits(TensorData):
    """1 437 training and 360 test images [1, 8, 8] in [-1, 1], split once and for all by a fixed permutation.

    Args:
        users: among whom the training images are dealt out at random, once and for all: synthetic ones, since who wrote
            a digit is not known. Each has one image at least; `train.user_of` has the user of each.
    """

    def __init__(self, batch_size: int = 256, workers: int = 0, users: int = 200) -> None:
        images, labels = load_digits(return_X_y=True)
        x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        y = torch.as_tensor(labels, dtype=torch.long)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        train, test = order[:-_TEST], order[-_TEST:]
        super().__init__((x[train], y[train]), (x[test], y[test]), batch_size, workers)
        self.train.user_of = dealt_out(len(train), users)  # type: ignore[attr-defined]
