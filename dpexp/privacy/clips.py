"""How much of a record is added to a group's sum: clip rules, functions of its norm.

A rule is asked for the factor c of a vector with norm x in the group's own scale, x = (Σ_j ‖v_j‖²/α_j²)^½, and the
bound S. Its sensitivity is S: c(x)·x ≤ S for every x. Since x is never less than the true norm (see
`dpexp.privacy.engine.rounding`), ‖c(x)·v‖ ≤ c(x)·x ≤ S whatever shape c has: a rule need not fall with the norm, and
one that drops long records may drop one that is a trifle shorter than it says.

What is added is min(c, S/x) (`dpexp.privacy.engine.clipping.clip_factors`), which for these rules is c but for
rounding; and a rule sees one norm at a time. So neither the bound, nor that a record's factor depends on no other
record, rests on a rule's promise, be it one of yours: the noise fits whatever it answers. But a rule must not jump: the
last digits of a norm may vary with how many records are processed together.

A rule is a frozen dataclass with a `name`; its other fields are shown with the plan.
"""

import copy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpexp.errors import ConfigError
from dpexp.privacy.bounds import positive


class Clip(Protocol):
    @property
    def name(self) -> str: ...

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        """c for one norm x and the bound S, scalars in float64; x may be 0, infinite or NaN."""


@dataclass(frozen=True)
class Abadi:
    """c = min(1, S/x) (Abadi et al. 2016, algorithm 1): long vectors are shortened to S, short ones stay."""

    name: str = field(default="abadi", init=False)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return (S / x).clamp(max=1)


@dataclass(frozen=True)
class Automatic:
    """c = S/(x + γ) (Bu et al. 2022, arXiv 2206.07136, Auto-S): every vector gets a length of about S, which thereby is
    but a factor of the learning rate; γ, a length in the group's own scale, lets the shortest stay shorter."""

    gamma: float = 0.01
    name: str = field(default="automatic", init=False)

    def __post_init__(self) -> None:
        positive("clip.gamma", self.gamma)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.gamma)


@dataclass(frozen=True)
class Psac:
    """c = S/(x + r/(x + r)) (Xia et al. 2023, arXiv 2212.00328, DP-PSAC). At x = 0 it is S, and for r < 1 it is largest
    at x = √r - r: the shortest vectors, whose directions say least, are not blown up as they are by `Automatic`."""

    r: float = 0.1
    name: str = field(default="psac", init=False)

    def __post_init__(self) -> None:
        positive("clip.r", self.r)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return S / (x + self.r / (x + self.r))


RAMP = 0.01


@dataclass(frozen=True)
class Global:
    """c = (S/Z)·1[x ≤ Z] (Bu et al. 2021, arXiv 2106.07830, global clipping): all records that are kept are scaled
    alike, so that the sum has the direction of theirs; the others are dropped. The step is a ramp over the last
    hundredth before Z: at a jump, the last digits of a norm, which vary with how many records are processed together,
    would decide over a whole record.

    Args:
        Z: in units of S, so that it goes with S wherever that goes: from group to group, with `schedule.S`, with
            adaptive bounds.
    """

    Z: float
    name: str = field(default="global", init=False)

    def __post_init__(self) -> None:
        positive("clip.Z", self.Z)

    def __call__(self, x: Tensor, S: Tensor) -> Tensor:
        return ((1 - x / (self.Z * S)) / RAMP).clamp(0, 1) / self.Z


def asked(clip: Clip, norms: Tensor, S: Tensor) -> Tensor:
    """c [B] for norms [B] in float64, each by itself. A copy of the rule answers, so that it remembers none of them."""
    rule = copy.deepcopy(clip)
    return torch.func.vmap(lambda x: rule(x, S))(norms.clone())


def check_clip(clip: Any) -> None:
    """Raises ConfigError: it is no rule, or could not be shown with the plan."""
    made = is_dataclass(clip) and not isinstance(clip, type)
    try:
        hash(clip)
    except TypeError:
        made = False
    if not (made and callable(clip) and isinstance(getattr(clip, "name", None), str)):
        raise ConfigError(
            f"clip={clip} is no clip rule; give a frozen dataclass with a name, which answers c for a norm and S as "
            "those of dpexp.privacy.clips do."
        )
    norms = torch.tensor([0.0, 1.0, 1e30], dtype=torch.float64)
    try:
        answered = asked(clip, norms, torch.ones((), dtype=torch.float64))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"clip={clip} cannot answer for a norm, a tensor under torch.func.vmap: {reason}") from error
    if answered.shape != norms.shape or not answered.is_floating_point():
        raise ConfigError(f"clip={clip} must answer one real number for a norm.")


def in_words(clip: Clip) -> str:
    """Its name and numbers."""
    numbers = [f"{f.name} = {getattr(clip, f.name)}" for f in fields(clip) if f.name != "name"]  # type: ignore[arg-type]
    return f"{clip.name} ({', '.join(numbers)})" if numbers else clip.name
