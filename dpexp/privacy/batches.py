"""A batch's tensors, and the rest of it."""

from collections import UserDict
from functools import partial
from typing import Any

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
