"""Digests of tensors, weights and other values, by which changes are noticed, and what is said of a step's state."""

import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEEPS_STATE = (
    "model: {what}, so training_step keeps state of a record that may affect other records or what is saved; compute a "
    "record's loss from that record, the weights and torch's random numbers alone. Put counters into a hook such as "
    "on_train_batch_end, averages of weights into callbacks=ema, and statistics of data into private metrics."
)


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


_ROUNDING = 5e-3  # relative, that a GPU's kernels are allowed in half precision; what a record adds is far more


def differ(some: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether any bit differs; on a GPU, whose kernels add up in another order each time, more than by rounding."""
    if len(some) != len(other):
        return True
    pairs = [(a, b) for a, b in zip(some, other, strict=True) if digest(a) != digest(b)]
    if all(t.device.type == "cpu" for pair in pairs for t in pair):
        return bool(pairs)
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return not error <= _ROUNDING**2 * sum(float(a.double().square().sum()) for a in some)
