"""Digests of tensors, weights and other values, by which changes are noticed, and what is said of a step's state."""

import hashlib
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpexp.errors import ConfigError

KEEPS_STATE = (
    "model: {what}, so training_step keeps state of a record that may affect other records or what is saved; compute a "
    "record's loss from that record, the weights and torch's random numbers alone. Put counters into a hook such as "
    "on_train_batch_end, averages of weights into callbacks=ema, and statistics of data into private metrics."
)

BUFFER = "the buffer "  # before the name of one that a step sets


def refuse_kept(kept: Sequence[str], is_read: bool) -> None:
    """Raises ConfigError for buffers that a step sets, and for attributes if it reads them again.

    Args:
        kept: the names of what it sets on its copies; that of a buffer begins with `BUFFER`.
        is_read: with them, it computes something else.
    """
    buffers = [name for name in kept if name.startswith(BUFFER)]
    if buffers or (kept and is_read):
        what = f"training_step sets {', '.join(buffers or kept)}, which it may read for the next record"
        raise ConfigError(KEEPS_STATE.format(what=what))


def digest_of_weights(module: nn.Module) -> int:
    """A digest of all parameters and buffers."""
    return digest_as_integer(b"".join(digests(module).values()))


def digest_as_integer(content: bytes) -> int:
    """A digest of 56 bits, which processes compare."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")


def digests(module: nn.Module) -> dict[str, bytes]:
    """A digest of each parameter and buffer."""
    return {name: digest(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def bits_of(value: Any) -> bytes:
    """Equal for bit-equal values; of a value that cannot be pickled, only the type's name."""
    if isinstance(value, Tensor) and not value.is_quantized and not value.is_nested:
        return digest(value)
    if type(value) in (list, tuple):
        return repr(type(value)).encode() + b" ".join(map(bits_of, value))
    if type(value) is dict:
        return b"dict" + b" ".join(repr(key).encode() + bits_of(one) for key, one in value.items())
    try:
        return pickle.dumps(value)
    except Exception:
        return type(value).__name__.encode()


def digest(tensor: Tensor) -> bytes:
    """A digest of shape, dtype and bits, those of NaN included."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    content = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    sha = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha.update(content.numpy().data)
    return sha.digest()


def differ(some: Sequence[Tensor], other: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    """Whether tensors differ in any bit; on a GPU, by more than rounding, since its kernels add in varying order.

    Args:
        again: `some`, computed a second time from the same random state.
    """
    if len(some) != len(other):
        return True
    changed = [(a, b, c) for a, b, c in zip(some, other, again, strict=False) if digest(a) != digest(b)]
    if all(a.device.type == "cpu" for a, *_ in changed):
        return bool(changed)
    total = math.sqrt(sum(float(a.double().square().sum()) for a in some))
    return not all(is_rounding(a, b, c, total) for a, b, c in changed)


_ROUNDING, _MAX_ROUNDING = 1e-5, 1e-2  # relative; the latter in half precision


def is_rounding(some: Tensor, other: Tensor, again: Tensor, total: float) -> bool:
    """Whether ‖some - other‖ is at most 10 ‖some - again‖ plus 1e-5 `total`.

    Args:
        again: `some`, computed a second time.
        total: the norm of all tensors together. The first term counts up to 1e-2 of it.
    """
    shown = min(10 * _distance(some, again), _MAX_ROUNDING * total)
    return _distance(some, other) <= shown + _ROUNDING * total < math.inf


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())
