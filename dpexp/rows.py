"""Rows of tensors and arrays: those that keep their places whether or not they can be used, and a loop's own."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpexp.errors import ConfigError, RecordError


class PlacedRows(TensorDataset):
    """A TensorDataset of which some rows cannot be used. Such a row is a record that contributes nothing: were it left
    out, those after it would get other places, and so other units, and the number of records would tell of it.

    Args:
        usable: bool [N], of each row.
        reason: why others cannot be used, a sentence.
    """

    def __init__(self, *tensors: Tensor, usable: Tensor, reason: str) -> None:
        super().__init__(*tensors)
        self.usable, self.reason = usable, reason

    def __getitem__(self, i: Any) -> tuple[Tensor, ...]:
        if not self.usable[i].all():
            raise RecordError(self.reason)
        return super().__getitem__(i)


def as_dataset(data: Any, dtype: torch.dtype) -> Any:
    """What gives record i as data[i]: `data` itself; or the rows of a tuple of arrays or tensors, such as (X, y).

    Args:
        dtype: of floating-point numbers of such a tuple, which NumPy and pandas keep as float64.

    Raises:
        ConfigError: `data` has no record i.
    """
    is_tuple = isinstance(data, tuple) and bool(data) and all(getattr(part, "ndim", 0) for part in data)
    if is_tuple and len({*map(len, data)}) == 1:
        given = [part if isinstance(part, Tensor) else np.asarray(part) for part in data]
        tensors = [torch.as_tensor(np.array(part)) if isinstance(part, np.ndarray) else part for part in given]
        rows = TensorDataset(*(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors))
        vars(rows)["given"] = given  # of which the tensors may be copies; a step must read neither
        return rows
    got = f"parts of {[*map(len, data)]} rows" if is_tuple else f"a {type(data).__name__}"
    has_no_place = hasattr(data, "keys") or not hasattr(data, "__getitem__")
    if is_tuple or (has_no_place and not isinstance(data, Dataset)):
        raise ConfigError(
            "private.rounds draws records by itself, from a data set whose record i is data[i] (of a DataLoader: "
            "loader.dataset), or from a tuple of arrays or tensors of equally many rows, (X, y); it got "
            f"{got}."
        )
    return data


PLAIN = (TensorDataset, PlacedRows)  # data sets without code of the user's
