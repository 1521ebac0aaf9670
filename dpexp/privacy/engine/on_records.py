"""Functions on the whole chunk at once, of which vmap shows one record."""

from typing import Any

import torch


class OnRecords(torch.autograd.Function):
    """A function that only exists under vmap."""

    @staticmethod
    def forward(*args: Any) -> Any:
        raise RuntimeError("a captured operation ran outside vmap over records.")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...
