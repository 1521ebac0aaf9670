"""Padding by a user's collate_fn, for one record and a longer copy of it."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from dpexp.privacy.sampling.padding import PaddedCollation


def padded(side="right", **options):
    def collate(items):
        x = nn.utils.rnn.pad_sequence([torch.as_tensor(x) for x, _ in items], padding_side=side, **options)
        return x, torch.stack([torch.as_tensor(y) for _, y in items])

    return collate


def with_mask(items):
    lengths = torch.tensor([len(item["ids"]) for item in items])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(item["ids"]) for item in items], batch_first=True)
    return {"ids": ids, "mask": torch.arange(ids.shape[1]) < lengths[:, None], "y": [item["y"] for item in items][:1]}


def sorting(items):
    items = sorted(items, key=lambda item: len(item[0]), reverse=True)
    return padded(batch_first=True)(items)[0], torch.ones(len(items))


def shifting(items):
    for x, _ in items:
        x += 1  # in place
    return padded(batch_first=True)(items)


def by_the_longest(items):
    x, y = padded(batch_first=True)(items)
    return x / x.shape[1], y


ROW, RIGHT = torch.tensor([3, 4, 5]), padded(batch_first=True)


@pytest.mark.parametrize(
    ("collate", "x", "expected"),
    [
        (RIGHT, ROW, [[3, 4, 5, 0]]),
        (padded("left", batch_first=True), ROW, [[0, 3, 4, 5]]),
        (padded(), ROW, [[3], [4], [5], [0]]),
        (RIGHT, np.array([3, 4, 5]), [[3, 4, 5, 0]]),
        (RIGHT, [3, 4, 5], [[3, 4, 5, 0]]),
        (RIGHT, torch.arange(4), [[0, 1, 2, 3]]),  # has a length of the list
        (RIGHT, torch.arange(9), [[*range(9)]]),  # longer than all
        (padded(), torch.tensor([3]), [[3]]),  # which dimension has the records is not known
        (sorting, ROW, [[3, 4, 5]]),  # would return the copy
        (shifting, ROW, [[4, 5, 6]]),  # a second call would give other values
        (by_the_longest, ROW, [[1, 4 / 3, 5 / 3]]),  # its values depend on the padding
    ],
)
def test_a_record_is_padded_or_left_as_it_is(collate, x, expected):
    lengths = (4, 8) if len(x) != 1 else (2,)
    found, _ = PaddedCollation(collate, lengths)([(copy.deepcopy(x), torch.tensor(1))])
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64))


def test_masks_are_those_of_the_record():
    found = PaddedCollation(with_mask, (4,))([{"ids": [5, 6, 7], "y": 1}])
    assert found["ids"].tolist() == [[5, 6, 7, 0]] and found["mask"].tolist() == [[True, True, True, False]]
