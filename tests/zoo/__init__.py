"""Tiny, randomly initialized models of common architectures, each with a batch and a loss."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

try:
    import torchvision
except ModuleNotFoundError:
    pass
except RuntimeError:
    # torchvision's compiled operators do not load beside a torch built for another device, and it cannot be imported
    # without the names of these two, which no model here calls.
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

B, T, WORDS, CLASSES = 6, 8, 50, 3
PAD = 0


def own_loss(module: nn.Module, batch: dict) -> torch.Tensor:
    """The loss that a model returns if its batch has labels."""
    return module(**batch).loss


def cross_entropy(module: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    scores = module(x)
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        build: takes whether to use dropout, returns the module.
        batch: returns a batch of B records.
    """

    build: Callable[[bool], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor] = own_loss


def lengths() -> torch.Tensor:
    """[B] lengths of sequences, two of them equal."""
    return torch.tensor([T, T - 3, T - 3, T - 1, T - 2, T - 4])


def mask() -> torch.Tensor:
    """[B, T]: 1 for words, 0 for padding."""
    return (torch.arange(T) < lengths()[:, None]).long()


def words() -> torch.Tensor:
    """[B, T] word indices, padded."""
    return torch.randint(3, WORDS, (B, T)) * mask() + PAD * (1 - mask())


def classes() -> torch.Tensor:
    return torch.randint(CLASSES, (B,))


def images(side: int = 16) -> torch.Tensor:
    return torch.randn(B, 3, side, side)


def of(make, *arguments, **options):
    """A builder for a class, whose argument `rate` is the dropout rate if there is one."""

    def build(dropout: bool) -> nn.Module:
        rate = {"rate": 0.1 * dropout} if "rate" in make.__init__.__annotations__ else {}
        return make(*arguments, **options, **rate)

    return build


def plain(build, batch, loss=cross_entropy) -> Model:
    return Model(build, batch, loss)
