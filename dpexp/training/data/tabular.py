"""Adult, and synthetic Gaussian clusters for quick trials and tests."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dpexp.training.data.base import TensorData, standard_file

_MIRROR = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
_MD5 = {"adult.data": "5d7c39d7b8804f071cdd1f2a7c460872", "adult.test": "35238206dfdf7f1fe215bbb874adecdc"}

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
FEATURES = sum(len(values) if isinstance(values, tuple) else 1 for values in COLUMNS.values())


class Adult(TensorData):
    """32 561 training and 16 281 test records [105], labelled by whether they earn above 50 000 dollars.

    A numeric column is one feature, divided by a constant. A categorical one is encoded one-hot, and all zeros where
    the value is missing.
    """

    def __init__(self, root: str, batch_size: int = 512, num_workers: int = 0) -> None:
        train, test = (read_adult(standard_file(root, _MIRROR + name, md5)) for name, md5 in _MD5.items())
        super().__init__(train, test, batch_size, num_workers)


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
    """Each class is a unit-variance Gaussian around its own random mean.

    Args:
        n: number of training records; the test set has a quarter as many.
        shape: of one record.
        classes: number of classes.
        separation: standard deviation of the means' coordinates.
    """

    def __init__(
        self,
        n: int,
        shape: Sequence[int],
        classes: int,
        separation: float = 0.5,
        seed: int = 0,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        means = separation * torch.randn(classes, math.prod(shape), generator=generator)
        total = n + n // 4
        y = torch.randint(classes, (total,), generator=generator)
        x = (means[y] + torch.randn(total, math.prod(shape), generator=generator)).reshape(total, *shape)
        super().__init__((x[:n], y[:n]), (x[n:], y[n:]), batch_size, num_workers)
