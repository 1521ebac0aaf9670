"""The vectors that a model releases, and their groups (arXiv 1812.06210, section 2).

A vector is the gradient of one layer, weight and bias together, as in arXiv 1812.06210; with `vectors="parameter"` it
is the gradient of one tensor. A layer is the module that owns a parameter directly. A tied parameter belongs to the
layer that names it first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dpexp.errors import ConfigError

VECTORS = ("layer", "parameter")


@dataclass(frozen=True)
class Vector:
    """Parameters whose gradients, concatenated, are one vector in R^d; or a value of records, as its `value_key`."""

    name: str
    parameters: tuple[str, ...]
    d: int

    @property
    def is_value(self) -> bool:
        return self.parameters[0].startswith(_VALUE)


_VALUE = ".value "  # no parameter's name begins with a dot


def value_key(name: str) -> str:
    """The name, among those of parameters, of a value of records."""
    return _VALUE + name


@dataclass(frozen=True)
class Match:
    """The parameters of a group: by name, by the type of the owning layer, or the rest.

    Args:
        parameters: globs over `named_parameters()`, such as `*.embed.*`, which matches a top-level `embed` too.
        layers: class names of the owning module or of one of its bases, such as `Linear` or `LayerNorm`.
        rest: all parameters that no other group matches; there may be none.
    """

    parameters: Sequence[str] = field(default_factory=tuple)
    layers: Sequence[str] = field(default_factory=tuple)
    rest: bool = False

    def matches(self, name: str, layer: nn.Module) -> bool:
        types = {base.__name__ for base in type(layer).__mro__}
        named = any(fnmatchcase(name, glob) or fnmatchcase(f".{name}", glob) for glob in self.parameters)
        return named or not types.isdisjoint(self.layers)


# A module's trainable parameters: group name -> parameter names.
Grouping = Callable[[nn.Module], dict[str, list[str]]]


_A_MATCH = "{parameters: [globs], layers: [class names], rest: true}, with at least one of these"


def _match(name: str, spec: Any) -> Match:
    known = {field.name for field in fields(Match)}
    match = Match(**spec) if isinstance(spec, Mapping) and spec and spec.keys() <= known else spec
    if not isinstance(match, Match) or isinstance(match.parameters, str) or isinstance(match.layers, str):
        raise ConfigError(f"group.groups.{name}={spec} must be {_A_MATCH}.")
    return match


@dataclass(frozen=True)
class Groups:
    """Groups by name: each trainable parameter must fall in exactly one, and each group must have one.

    Examples:
        >>> from dpexp import Groups
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
        >>> Groups({"first": {"parameters": ["0.*"]}, "others": {"rest": True}})(model)
        {'first': ['0.weight', '0.bias'], 'others': ['2.weight', '2.bias']}
    """

    groups: Mapping[str, Match]

    def __call__(self, module: nn.Module) -> dict[str, list[str]]:
        if not isinstance(self.groups, Mapping):
            raise ConfigError(f"group.groups={self.groups} must be {{name: {_A_MATCH}}}.")
        matches = {name: _match(name, match) for name, match in self.groups.items()}
        rest = [name for name, match in matches.items() if match.rest]
        if len(rest) > 1:
            raise ConfigError(f"group: {' and '.join(rest)} both claim the rest; only one group may.")
        layers = owners(module)
        members: dict[str, list[str]] = {name: [] for name in matches}
        for parameter, layer in layers.items():
            found = [name for name, match in matches.items() if match.matches(parameter, layer)] or rest
            if len(found) > 1:
                raise ConfigError(f"group: parameter {parameter} falls in both {' and '.join(found)}.")
            if not found:
                raise ConfigError(f"group: parameter {parameter} falls in no group; match it or add rest: true.")
            members[found[0]].append(parameter)
        for name, parameters in members.items():
            if not parameters and name not in rest:
                raise ConfigError(
                    f"group: {name} ({matches[name]}) matches none of the parameters {', '.join(layers)}."
                )
        return {name: parameters for name, parameters in members.items() if parameters}


def flat() -> Groups:
    """One group of all parameters.

    Examples:
        >>> from dpexp import flat
        >>> from torch import nn
        >>> flat()(nn.Linear(3, 1))
        {'all': ['weight', 'bias']}
    """
    return Groups({"all": Match(parameters=("*",))})


def per_layer() -> Grouping:
    """One group for each layer, named after it.

    Examples:
        >>> from dpexp import per_layer
        >>> from torch import nn
        >>> per_layer()(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        {'0': ['0.weight', '0.bias'], '1': ['1.weight', '1.bias']}
    """

    return lambda module: {v.name: list(v.parameters) for v in vectors(module, list(owners(module)))}


def conv_fc() -> Groups:
    """Convolutional layers, fully connected layers, and the rest (arXiv 1812.06210, section 1).

    Examples:
        >>> from dpexp import conv_fc
        >>> from torch import nn
        >>> conv_fc()(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)))
        {'conv': ['0.weight', '0.bias'], 'fc': ['2.weight', '2.bias']}
    """
    return Groups({"conv": Match(layers=("_ConvNd",)), "fc": Match(layers=("Linear",)), "rest": Match(rest=True)})


def owners(module: nn.Module) -> dict[str, nn.Module]:
    """The layer that owns each trainable parameter, by the parameter's name (once, if tied)."""
    modules = {uncompiled(name): part for name, part in module.named_modules() if not hasattr(part, "_orig_mod")}
    return {name: modules[name.rpartition(".")[0]] for name in trainable(module)}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes: those that require gradients, and have elements."""
    return {name: p for name, p in parameters(module).items() if p.requires_grad and p.numel()}


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters, by the names that they have before torch.compile wraps a part of the module."""
    return {uncompiled(name): p for name, p in module.named_parameters()}


def uncompiled(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def vectors(module: nn.Module, members: Sequence[str], by: str = "layer") -> tuple[Vector, ...]:
    """The vectors of a group's parameters, in the model's order; `by`: one of `VECTORS`."""
    sizes = {name: parameter.numel() for name, parameter in parameters(module).items()}
    parts: dict[str, list[str]] = {}
    for name in members:
        parts.setdefault((name.rpartition(".")[0] or "(root)") if by == "layer" else name, []).append(name)
    return tuple(
        Vector(name, tuple(parameters), sum(sizes[parameter] for parameter in parameters))
        for name, parameters in parts.items()
    )
