"""Rows of tensors that keep their places, whether or not they can be used."""

from typing import Any

from torch import Tensor
from torch.utils.data import TensorDataset

from dpexp.errors import RecordError


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


PLAIN = (TensorDataset, PlacedRows)  # data sets without code of the user's
