"""The largest or smallest number of a whole tensor: vmap gives one of several equals the whole gradient, which PyTorch
divides among them."""

from typing import Any

import torch
from torch import Tensor


class Extreme(torch.autograd.Function):
    """amax or amin over all dimensions, with the gradient that `x.max()` has."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, of_all: Any) -> Tensor:
        return of_all(x, [*range(x.dim())])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        x, extreme = ctx.saved_tensors
        equal = (x == extreme) | (x.isnan() & extreme.isnan())
        return g / equal.sum() * equal, None


EXTREMES = {torch.max: torch.amax, Tensor.max: torch.amax, torch.min: torch.amin, Tensor.min: torch.amin}
