"""A batch's tensors, and the rest of it."""

import pickle
from collections import UserDict
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten


def flattened(batch: Any) -> tuple[list[Any], TreeSpec]:
    """Its leaves and structure. Dictionaries that torch does not know for such, as transformers' BatchEncoding, are."""
    leaves, structure = tree_flatten(batch)
    unknown = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    if not unknown:
        return leaves, structure
    for kind in unknown:
        register_pytree_node(kind, lambda named: ([*named.values()], [*named]), partial(_named, kind))
    return flattened(batch)


def _named(kind: type, values: Any, names: Any) -> Any:
    return kind(dict(zip(names, values, strict=True)))


def bits_of(leaf: Any) -> bytes:
    """Equal for leaves of one type that are the same, bit for bit; of what cannot be pickled, the type's name alone."""
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_quantized:
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return repr((leaf.dtype, leaf.shape)).encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    try:
        return pickle.dumps(leaf)
    except Exception:
        return type(leaf).__name__.encode()
