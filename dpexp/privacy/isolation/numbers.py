"""A round leaves parameters, and what else a step must not change, as they are to the last bit.

`State` looks at versions after each chunk of records, at hardly any cost. PyTorch can write to a tensor without a new
version (`.data`, behind its function modes; `_unsafe_preserve_version_counter`): of that nothing passes the round.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.kept import identical
from dpexp.privacy.isolation.state import CHANGED
from dpexp.privacy.isolation.surroundings import Surroundings


@contextmanager
def numbers_stay(module: nn.Module, around: Surroundings) -> Iterator[None]:
    """Compares with a copy.

    Raises:
        ConfigError: numbers changed, whatever else happened; what changed is set to zero, lest it be saved on the way
            out.
    """
    fixed = [*((f"the parameter {name}", parameter) for name, parameter in module.named_parameters()), *around.tensors]
    plain = [(name, t) for name, t in fixed if t.layout == torch.strided and not (t.is_meta or t.is_quantized)]
    copies = [tensor.detach().clone() for _, tensor in plain]
    try:
        yield
    finally:
        changed = [
            (name, tensor)
            for (name, tensor), copy in zip(plain, copies, strict=True)
            if tensor.shape != copy.shape or not identical(tensor, copy)
        ]
        if changed:
            with torch.no_grad():
                for _, tensor in changed:
                    tensor.zero_()
            raise ConfigError(CHANGED.format(name=" and ".join(name for name, _ in changed[:3])))
