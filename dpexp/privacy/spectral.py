"""Spectral normalization, whose power iterations are state that a step would leave behind."""

import torch
from torch.nn.utils.parametrizations import _SpectralNorm


def refresh_spectral_norms(module: torch.nn.Module) -> None:
    """One power iteration a round, from the weights alone: those of training_step are set back."""
    for layer in module.modules():
        for original in getattr(layer, "parametrizations", {}).values():
            for parametrization in original:
                if isinstance(parametrization, _SpectralNorm) and parametrization.training:
                    with torch.no_grad():
                        parametrization(original.original)
