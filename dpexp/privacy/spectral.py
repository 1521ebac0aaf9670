"""Spectral normalization, whose power iterations are state that a step would leave behind."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils.parametrizations import _SpectralNorm


def _of(module: torch.nn.Module) -> Iterator[tuple[_SpectralNorm, torch.Tensor]]:
    for layer in module.modules():
        for original in getattr(layer, "parametrizations", {}).values():
            for parametrization in original:
                if isinstance(parametrization, _SpectralNorm):
                    yield parametrization, original.original


def refresh_spectral_norms(module: torch.nn.Module) -> None:
    """One power iteration a round, from the weights alone; within a step there are none."""
    for parametrization, weight in _of(module):
        if parametrization.training:
            with torch.no_grad():
                parametrization(weight)


@contextmanager
def spectral_norms_fixed(module: torch.nn.Module) -> Iterator[None]:
    """Meanwhile no power iteration is made."""
    training = [parametrization for parametrization, _ in _of(module) if parametrization.training]
    for parametrization in training:
        parametrization.training = False
    try:
        yield
    finally:
        for parametrization in training:
            parametrization.training = True
