"""The data sets and their standard file formats, on small files made here."""

import gzip
import hashlib
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from dpexp.errors import ConfigError
from dpexp.training.data import Cifar10, Digits, Mnist, Shakespeare, Synthetic
from dpexp.training.data.datasets import (
    CHARACTERS,
    COLUMNS,
    read_adult,
    read_idx,
    standard_file,
    synthetic_users,
    text_by_speaker,
    windows,
)  # fmt: skip
from dpexp.training.language import IGNORED


def idx(values):
    header = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}i", *values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes())


def test_digits_are_the_real_ones_split_once_and_for_all():
    data, again = Digits(), Digits()
    x, y = data.train.tensors
    assert x.shape == (1437, 1, 8, 8) and len(data.test) == 360
    assert x.min() == -1 and x.max() == 1 and set(y.tolist()) == set(range(10))
    assert torch.equal(x, again.train.tensors[0])
    assert len(x.flatten(1).unique(dim=0)) > 1400, "real images, not one repeated"


def test_synthetic_data_is_reproducible_and_learnable():
    data, again = (Synthetic(n=200, shape=[2, 3], classes=4, separation=3.0) for _ in range(2))
    (x, y), (test_x, test_y) = data.train.tensors, data.test.tensors
    assert x.shape == (200, 2, 3) and len(data.test) == 50 and torch.equal(x, again.train.tensors[0])
    means = torch.stack([x[y == c].mean(0) for c in range(4)])
    nearest = (test_x[:, None] - means).flatten(2).norm(dim=2).argmin(1)
    assert (nearest == test_y).float().mean() > 0.9


def test_mnist_is_scaled_by_constants(tmp_path, monkeypatch):
    images = np.zeros((5, 28, 28))
    images[:2, 0, 0] = 255, 51
    content = {name: idx(images if "images" in name else np.arange(5)) for name in Mnist.md5}
    for name, some in content.items():
        (tmp_path / name).write_bytes(some)
    monkeypatch.setattr(Mnist, "md5", {name: hashlib.md5(some).hexdigest() for name, some in content.items()})
    x, y = Mnist(str(tmp_path)).train.tensors
    assert x.shape == (5, 1, 28, 28) and y.tolist() == [0, 1, 2, 3, 4]
    assert x[:3, 0, 0, 0].tolist() == pytest.approx([1.0, -0.6, -1.0])
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"\x00\x00\x0d\x01rest"))
    with pytest.raises(ValueError, match="not an idx file"):
        read_idx(tmp_path / "b.gz")


def test_cifar10s_archive_is_checked_unpacked_and_read(tmp_path, monkeypatch):
    folder = tmp_path / "made" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        image = np.repeat([0, 51, 255], 1024).astype(np.uint8).tobytes()
        (folder / f"{name}.bin").write_bytes(bytes([i]) + image)
    archive = shutil.make_archive(str(tmp_path / "cifar-10-binary"), "gztar", folder.parent, folder.name)
    monkeypatch.setattr(Cifar10, "md5", hashlib.md5(Path(archive).read_bytes()).hexdigest())
    data = Cifar10(str(tmp_path))
    x, y = data.train.tensors
    assert x.shape == (5, 3, 32, 32) and y.tolist() == [0, 1, 2, 3, 4] and data.test.tensors[1].tolist() == [5]
    assert x[0, :, 3, 7].tolist() == pytest.approx([-1, -0.6, 1])


def test_a_file_with_another_checksum_is_not_taken(tmp_path, monkeypatch):
    """It is fetched anew; where that fails, the message says what belongs where."""
    (tmp_path / "x.gz").write_bytes(b"not what it should be")
    with pytest.raises(ConfigError, match=r"lacks x\.gz \(md5 0123\).*put the file into that folder"):
        standard_file(str(tmp_path), "http://127.0.0.1:9/x.gz", "0123")


@pytest.mark.parametrize("count, users", [(1000, 100), (5, 100), (7, 7)])
def test_records_are_dealt_out_among_users_who_all_have_some(count, users):
    users_of = synthetic_users(count, users)
    assert len(users_of) == count and set(users_of.tolist()) == {*range(min(users, count))}
    assert torch.equal(users_of, synthetic_users(count, users))


def test_adults_records_are_numbers_and_names(tmp_path):
    (tmp_path / "adult.test").write_text(
        "|1x3 Cross validator\n"
        "25, Private, 226802, 11th, 7, Never-married, Sales, Own-child, Black, Male, 0, 0, 40, Cuba, <=50K.\n"
        "50, ?, 100000, HS-grad, 16, Divorced, ?, Wife, White, Female, 99999, 0, 10, ?, >50K\n\n"
    )
    x, y = read_adult(tmp_path / "adult.test")
    assert x.shape == (2, 105) and y.tolist() == [0, 1]
    names = [(c, value) for c, values in COLUMNS.items() for value in (values if isinstance(values, tuple) else [""])]
    first, second = ({names[k]: float(row[k]) for k in row.nonzero().flatten().tolist()} for row in x)
    assert first[("age", "")] == 0.25 and first[("education-num", "")] == 7 / 16
    assert {("workclass", "Private"), ("native-country", "Cuba"), ("sex", "Male")} <= {*first} and len(first) == 12
    assert not dict(second).keys() & {"workclass", "occupation", "native-country"}, "missing"


TEXT = """First Citizen:
Speak.

All:
Speak, speak.

GHOST:

First Citizen:
You are
all resolved."""


def read(x, y):
    """What the windows of one speaker say: the first character, and those that follow."""
    return CHARACTERS[x[0, 0]] + "".join(CHARACTERS[c] for c in y.flatten() if c != IGNORED)


def test_speeches_are_gathered_by_speaker():
    assert text_by_speaker(TEXT) == {
        "First Citizen": "Speak.\nYou are\nall resolved.\n", "All": "Speak, speak.\n", "GHOST": "\n",
    }  # fmt: skip


@pytest.mark.parametrize("length", [4, 80])
def test_windows_hold_all_that_is_said_and_each_next_character(length):
    spoken = list(text_by_speaker(TEXT).values())
    x, y, users = windows(spoken, length)
    assert x.shape == y.shape == (len(users), length) and set(users.tolist()) == {0, 1}, "one says nothing"
    for user in (0, 1):
        assert read(x[users == user], y[users == user]) == spoken[user]
    flat_x, flat_y = x[users == 0].flatten(), y[users == 0].flatten()
    assert torch.equal(flat_x[1:][flat_y[1:] != IGNORED], flat_y[:-1][flat_y[1:] != IGNORED])


def test_every_tenth_speaker_is_held_out(tmp_path, monkeypatch):
    spoken = {f"S{k}": "ab\n" * (k + 1) for k in range(20)}
    (tmp_path / "input.txt").write_text("\n\n".join(f"{name}:\n{said.strip()}" for name, said in spoken.items()))
    monkeypatch.setattr("dpexp.training.data.datasets.standard_file", lambda root, *_: tmp_path / "input.txt")
    data = Shakespeare(str(tmp_path), length=4)
    assert set(data.train.user_of) == set(range(18)) and set(data.test.user_of) == {1}, "S0 fills no window"
    assert len(data.train.user_of) == len(data.train) and (data.test.tensors[1] != IGNORED).all()
