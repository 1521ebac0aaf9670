"""Augmentation multiplicity: a record's loss is the mean over K random views of it (De et al. 2022, "Unlocking
high-accuracy differentially private image classification through scale", arXiv 2204.13650, section 3.2).

The views are drawn and averaged where the loss is computed. A record's gradient is then the mean of its views'
gradients, and is clipped once: to the mechanism it is one record as any other, at the cost of K examples' forward and
backward passes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dpexp.errors import ConfigError, RecordError

Augment = Callable[[Tensor], Tensor]


def views(batch: Any, augment: Augment, multiplicity: int = 1) -> Any:
    """A batch (x, y, …) of B records as one of B·K rows: K views of each x, drawn independently, and whatever goes with
    it K times. The mean loss over them is that of the records.

    Args:
        augment: one example's x -> a view of it, of the same shape whatever is drawn. To be computed for many records
            at once it must draw by torch (`torch.rand`, `torch.randint`) and not branch on what it draws
            (`torch.where`, `gather`); it is right, and slow, otherwise.
        multiplicity: K.

    Raises:
        RecordError: the batch is no tuple that begins with a tensor.
    """
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or not isinstance(batch[0], Tensor):
        raise RecordError(
            f"augment: views are made of x in batches (x, y, …), and a batch of the data is a {type(batch).__name__}; "
            "set augment=none."
        )
    x, *others = batch
    several = torch.stack([augment(one) for one in x for _ in range(multiplicity)])
    return several, *(_repeated(other, multiplicity) for other in others)


class FlipCrop:
    """Horizontal flips with probability 1/2 and shifts by up to some pixels, for images [C, H, W]: De et al.'s.

    Args:
        pixels: an image is shifted by -pixels, …, pixels in each direction, which is a random crop of the image with so
            many pixels more on every side.
        padding: what is on them: "reflect", the image in a mirror, as in the paper; or "zeros".
        flip: False for images that mean something else in a mirror, such as digits.

    Raises:
        ConfigError: another padding, or pixels that are none.
    """

    def __init__(self, pixels: int = 4, padding: str = "reflect", flip: bool = True) -> None:
        if padding not in ("reflect", "zeros"):
            raise ConfigError(f"augment.padding={padding} is unknown; choose reflect or zeros.")
        if pixels < 0:
            raise ConfigError(f"augment.pixels={pixels} must be at least 0.")
        self.pixels, self.padding, self.flip = pixels, padding, flip

    def __call__(self, x: Tensor) -> Tensor:
        """[C, H, W] -> [C, H, W]: one lookup by drawn indices, so that many records' views are one operation.

        Raises:
            RecordError: x is no image, or too small for what it is shifted by.
        """
        if x.dim() != 3 or min(x.shape[1:]) <= self.pixels:
            raise RecordError(
                f"augment.pixels={self.pixels}: flip_crop takes images [C, H, W] of more pixels than that, and the "
                f"data's x has the shape {list(x.shape)}."
            )
        _, height, width = x.shape
        shift = torch.randint(-self.pixels, self.pixels + 1, (2,), device=x.device)
        rows = torch.arange(height, device=x.device) + shift[0]
        columns = torch.arange(width, device=x.device) + shift[1]
        if self.flip:
            columns = torch.where(torch.rand((), device=x.device) < 0.5, width - 1 - columns, columns)
        at = (_mirrored(rows, height)[:, None] * width + _mirrored(columns, width)).flatten()
        seen = x.flatten(1).gather(1, at.expand(len(x), -1)).reshape(x.shape)
        if self.padding == "reflect":
            return seen
        return torch.where(_inside(rows, height)[:, None] & _inside(columns, width), seen, 0)


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Beyond its edges an image begins to go back, as in torch's padding "reflect"."""
    return size - 1 - (size - 1 - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)


def _repeated(other: Any, multiplicity: int) -> Any:
    return other.repeat_interleave(multiplicity, 0) if isinstance(other, Tensor) else other
