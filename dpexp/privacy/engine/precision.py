"""Norms, sums and noise are never computed in the autocast type, nor in TF32 or bfloat16 behind float32's back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), _no_shortcuts():
        yield


@contextmanager
def _no_shortcuts() -> Iterator[None]:
    """PyTorch has two ways to set what products in float32 are computed in, and one refuses once the other was used."""
    try:
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:
        backends: list[Any] = [
            torch.backends.cuda.matmul,
            *(getattr(torch.backends.cudnn, kind) for kind in ("conv", "rnn")),
            *(getattr(torch.backends.mkldnn, kind) for kind in ("matmul", "conv", "rnn")),
        ]
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
        return
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn
