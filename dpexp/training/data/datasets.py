"""Images, tables, a text and synthetic records. Normalisation constants are published, never computed from data."""

import gzip
import math
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pooch
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import TensorDataset

from dpexp.errors import ConfigError
from dpexp.training.data.inputs import scaled
from dpexp.training.data.raw import InMemory
from dpexp.training.language import IGNORED


def standard_file(root: str, url: str, md5: str) -> Path:
    """The path of a data set's file under `root`, downloaded from `url` if it is not there."""
    name = url.rpartition("/")[2]
    try:
        return Path(pooch.retrieve(url, known_hash=f"md5:{md5}", fname=name, path=Path(root).expanduser()))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.root={root} lacks {name} (md5 {md5}) and it could not be downloaded from {url}; "
            "put the file into that folder, or set data.root to the folder that has it."
        ) from error


class TensorData(InMemory):
    """Training and test sets of (x [N, ...], y [N]).

    Attributes:
        raw_max: the largest of the values, from 0 on, of which x in [-1, 1] is made; None: x is as it was.
    """

    raw_max: ClassVar[int | None] = None

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.train, self.test = TensorDataset(*train), TensorDataset(*test)


def synthetic_users(count: int, users: int) -> Tensor:
    """A random user for each of `count` records [count], from a fixed seed. Each user has at least one record; with
    fewer records than users, each record has its own."""
    users = min(users, count)
    others = torch.randint(users, (count - users,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.arange(users), others])


class Digits(TensorData):
    """scikit-learn's digits: 1 437 training and 360 test images [1, 8, 8] in [-1, 1], split by a fixed permutation.

    `train.user_of` has the user of each image, of synthetic `users`.
    """

    raw_max: ClassVar = 16

    def __init__(self, users: int = 200) -> None:
        images, labels = load_digits(return_X_y=True)
        x = scaled(torch.as_tensor(images).reshape(-1, 1, 8, 8), self.raw_max)
        y = torch.as_tensor(labels, dtype=torch.long)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        train, test = order[:-360], order[-360:]
        super().__init__((x[train], y[train]), (x[test], y[test]))
        self.train.user_of = synthetic_users(len(train), users)


class _IdxImages(TensorData):
    """60 000 training and 10 000 test images [1, 28, 28] in [-1, 1].

    `root` is the folder of the standard files, which are downloaded if they are missing. `train.user_of` has the user
    of each training image, of synthetic `users`.
    """

    mirror: str
    md5: ClassVar[dict[str, str]]
    raw_max: ClassVar = 255

    def __init__(self, root: str, users: int = 1000) -> None:
        super().__init__(self._read(root, "train"), self._read(root, "t10k"))
        self.train.user_of = synthetic_users(len(self.train), users)

    def _read(self, root: str, part: str) -> tuple[Tensor, Tensor]:
        images, labels = (
            read_idx(standard_file(root, self.mirror + name, self.md5[name]))
            for name in (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
        )
        return scaled(images.unsqueeze(1), self.raw_max), labels.long()


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
    class_names = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
    mirror = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    md5: ClassVar = {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    }


def read_idx(path: Path) -> Tensor:
    """Reads an idx file of unsigned bytes: two zero bytes, the type 0x08, the number of dimensions, each size as a
    big-endian 32-bit integer, and the values."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes.")
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    return torch.from_numpy(values.copy())


class Cifar10(TensorData):
    """50 000 training and 10 000 test images [3, 32, 32] in [-1, 1].

    If `root` has no folder `cifar-10-batches-bin`, the standard archive is unpacked there.
    """

    class_names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    url = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    md5 = "c32a1d4ab5d03f1284b67883e8d87530"
    raw_max: ClassVar = 255

    def __init__(self, root: str) -> None:
        folder = Path(root).expanduser() / "cifar-10-batches-bin"
        if not folder.is_dir():
            with tarfile.open(standard_file(root, self.url, self.md5)) as archive:
                archive.extractall(folder.parent, filter="data")
        train = [read_binary(folder / f"data_batch_{i}.bin") for i in range(1, 6)]
        x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
        super().__init__((x, y), read_binary(folder / "test_batch.bin"))


def read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """Reads one binary batch: per record a label byte and 3 072 bytes of red, green and blue planes."""
    content = torch.from_numpy(np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32))
    return scaled(content[:, 1:].reshape(-1, 3, 32, 32), Cifar10.raw_max), content[:, 0].long()


_ADULT = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_ADULT_MD5 = {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"}

# The values of each categorical column, as adult.names lists them, and the divisor of each numeric one.
COLUMNS: dict[str, float | tuple[str, ...]] = {
    "age": 100.0,
    "workclass": (
        "Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay",
        "Never-worked",
    ),
    "fnlwgt": 1e6,
    "education": (
        "Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th",
        "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool",
    ),
    "education-num": 16.0,
    "marital-status": (
        "Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent",
        "Married-AF-spouse",
    ),
    "occupation": (
        "Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
        "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
        "Priv-house-serv", "Protective-serv", "Armed-Forces",
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": 1e5,
    "capital-loss": 5e3,
    "hours-per-week": 100.0,
    "native-country": (
        "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
        "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
        "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
        "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
        "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands",
    ),
}  # fmt: skip


class Adult(TensorData):
    """32 561 training and 16 281 test records [105], labelled by whether they earn above 50 000 dollars.

    Numeric columns are divided by constants. Categorical ones are encoded one-hot, as zeros where the value is missing.
    """

    class_names = ("<=50K", ">50K")

    def __init__(self, root: str) -> None:
        train, test = (read_adult(standard_file(root, _ADULT + name, md5)) for name, md5 in _ADULT_MD5.items())
        super().__init__(train, test)


def read_adult(path: Path) -> tuple[Tensor, Tensor]:
    """x [N, 105] and y [N] of a file with one record per line."""
    lines = [line.rstrip(".").split(", ") for line in path.read_text().splitlines()]
    records = [fields for fields in lines if len(fields) == len(COLUMNS) + 1]
    x = torch.tensor([_features(fields[:-1]) for fields in records])
    return x, torch.tensor([int(fields[-1] == ">50K") for fields in records])


def _features(fields: list[str]) -> list[float]:
    features: list[float] = []
    for field, values in zip(fields, COLUMNS.values(), strict=True):
        features += [float(field == v) for v in values] if isinstance(values, tuple) else [float(field) / values]
    return features


class Synthetic(TensorData):
    """`n` training and n/4 test records. Each class is a unit-variance Gaussian around its own random mean, whose
    coordinates have the standard deviation `separation`."""

    def __init__(
        self, n: int, shape: Sequence[int], classes: int, separation: float = 0.5, seed: int = 0
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        means = separation * torch.randn(classes, math.prod(shape), generator=generator)
        total = n + n // 4
        y = torch.randint(classes, (total,), generator=generator)
        x = (means[y] + torch.randn(total, math.prod(shape), generator=generator)).reshape(total, *shape)
        super().__init__((x[:n], y[:n]), (x[n:], y[n:]))


CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TEST_SPEAKERS = 10  # every tenth


class Shakespeare(TensorData):
    """Tiny Shakespeare (Karpathy 2015): windows of each speaker's characters x and next characters y [N, length] in
    [0, 65).

    A speaker's last window is padded with newlines in x and -100 in y. Every tenth speaker, by first appearance, is in
    the test set, which keeps only full windows. `user_of` of both sets has the speaker of each window, from 0.
    """

    url = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    md5 = "6fb458f1232090904fb40fe944165e91"

    def __init__(self, root: str, length: int = 80) -> None:
        text = standard_file(root, self.url, self.md5).read_text()
        by_speaker = list(text_by_speaker(text).values())
        train = [lines for k, lines in enumerate(by_speaker) if k % _TEST_SPEAKERS]
        test = by_speaker[::_TEST_SPEAKERS]
        (x, y, users), (test_x, test_y, test_users) = windows(train, length), windows(test, length)
        full = (test_y != IGNORED).all(1)
        super().__init__((x, y), (test_x[full], test_y[full]))
        self.train.user_of, self.test.user_of = users.tolist(), test_users[full].tolist()


def text_by_speaker(text: str) -> dict[str, str]:
    """All that each speaker says, in the order of first appearance. A speech is a line with a name and a colon, and the
    lines up to the next empty line, if any."""
    found: dict[str, str] = {}
    for speech in re.split(r"\n\n+", text.strip()):
        name, _, lines = speech.partition("\n")
        found[name.rstrip(":")] = found.get(name.rstrip(":"), "") + lines + "\n"
    return found


def windows(texts: list[str], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, length], y [N, length] and the speaker [N] of all windows of all speakers' texts, in order."""
    code = {character: k for k, character in enumerate(CHARACTERS)}
    xs, ys, users = [], [], []
    for user, text in enumerate(texts):
        codes = torch.tensor([code[character] for character in text])
        count = -(-(len(codes) - 1) // length)
        x, y = torch.full((count * length,), code["\n"]), torch.full((count * length,), IGNORED)
        x[: len(codes) - 1], y[: len(codes) - 1] = codes[:-1], codes[1:]
        xs.append(x.view(count, length))
        ys.append(y.view(count, length))
        users += [user] * count
    return torch.cat(xs), torch.cat(ys), torch.tensor(users)
