"""Bounds what each record contributes to a group's sum."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dpexp.privacy.clips import Clip, asked
from dpexp.privacy.engine.rounding import LARGEST, LOOSE, UNIT
from dpexp.privacy.engine.uses import Dense, Exact, Use
from dpexp.privacy.plan import Group

# What rounding S and c in float64, and then c, c·g and c·g·x, can add (see rounding).
MARGIN = {dtype: 3.001 * unit + 2.001 * 2.0**-53 for dtype, unit in UNIT.items()}
_SMALLEST = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}  # of c
_LARGEST = {torch.float32: 2.0**30, torch.float64: 2.0**100}
_SMALL, _MANY = 2**10, 4  # numbers of a gradient, and such gradients, to be done together


def add_clipped(
    group: Group, uses: dict[str, Use], sums: dict[str, Tensor], of_vectors: bool = False
) -> tuple[Tensor, Tensor] | None:
    """Adds Σ_i c_i v^i to the sum of each of a group's parameters that was used, and drops its uses.

    Returns:
        ‖v^i‖ in the group's own scale, (Σ_k ‖v_k^i‖²/α_k²)^½ [B] in float64, and if `of_vectors`, each ‖v_k^i‖/α_k,
        [k, B], else [0, B]; None if no parameter was used.
    """
    members = [
        (k if of_vectors else 0, alpha, uses.pop(name), sums[name])
        for k, (vector, alpha) in enumerate(zip(group.vectors, group.alphas, strict=True))
        for name in vector.parameters
        if name in uses
    ]
    parts = list(_parts(members))
    if not parts:
        return None
    squares = torch.stack([use.squared_norms() / alpha**2 for _, alpha, use, _ in parts])
    norms = squares.sum(0).sqrt()
    if _made_exact(parts, squares, norms, group):
        norms = squares.sum(0).sqrt()
    own = squares.new_zeros(len(group.vectors) if of_vectors else 0, len(norms))
    if of_vectors:
        own = own.index_add_(0, torch.tensor([k for k, *_ in parts], device=own.device), squares).sqrt()
    finite = torch.isfinite(norms)
    to_zero = norms.is_cuda or not finite.all()  # on a GPU, asking would wait for it
    types = {totals[0].dtype for *_, totals in parts}
    c = {dtype: clip_factors(group.clip, norms, group.S, dtype) for dtype in types}
    while parts:
        *_, use, totals = parts.pop()
        if to_zero:
            use.zero(~finite)
        together = totals[0] if len(totals) == 1 else totals[0].new_zeros(sum(total.numel() for total in totals))
        use.add_weighted_sum(c[together.dtype], together)
        if len(totals) > 1:
            shares = together.split([total.numel() for total in totals])
            torch._foreach_add_([total.view(-1) for total in totals], shares)
    return norms, own


def _parts(members: Iterable[tuple[int, float, Use, Tensor]]) -> Iterator[tuple[int, float, Use, list[Tensor]]]:
    """Uses and the totals they add to, with the number of what they are part of and its scale. Many small gradients, as
    of biases, are laid side by side: most of the time they would take is that of calling functions."""
    small: dict[tuple[int, float, torch.dtype], list[tuple[Dense, Tensor]]] = {}
    for k, alpha, use, total in members:
        if isinstance(use, Dense) and total.numel() <= _SMALL:
            small.setdefault((k, alpha, total.dtype), []).append((use, total))
        else:
            yield k, alpha, use, [total]
    for (k, alpha, _), some in small.items():
        if len(some) < _MANY:
            yield from ((k, alpha, use, [total]) for use, total in some)
        else:
            side_by_side = torch.cat([use.flat() for use, _ in some], 1)
            yield k, alpha, Dense(side_by_side), [total for _, total in some]


def _made_exact(
    parts: list[tuple[int, float, Use, list[Tensor]]], squares: Tensor, norms: Tensor, group: Group
) -> bool:
    """Whether some norms were largely what is allowed for rounding, so that other factors were asked for, and have now
    in part what is computed in float64 (6 in `rounding`)."""
    allowed = {i: use.allowance / alpha for i, (_, alpha, use, _) in enumerate(parts) if use.allowance is not None}
    if not allowed:
        return False
    allowances = torch.stack([*allowed.values()])
    share = torch.where(norms.isfinite(), _loose(allowances / norms).nan_to_num(0), 0)
    if not share.any():
        return False
    least = squares.clone()
    least[[*allowed]] = (squares[[*allowed]].sqrt() - allowances).clamp(min=0).square()
    moved = asked(group.clip, norms, group.S) - asked(group.clip, least.sum(0).sqrt(), group.S)
    share = share * _loose(moved.abs() * norms / group.S).nan_to_num(1)
    some = share.any(1).tolist()
    for i, of_exact, of_some in zip(allowed, share, some, strict=True):
        if of_some:
            k, alpha, use, totals = parts[i]
            parts[i] = k, alpha, (exact := Exact(use, of_exact > 0)), totals
            enlarged = squares[i].sqrt()
            found = torch.where(of_exact > 0, exact.squared_norms().sqrt() / alpha, enlarged)
            squares[i] = (enlarged + of_exact * (found - enlarged)).square()
    return any(some)


def _loose(x: Tensor) -> Tensor:
    """0 up to LOOSE, 1 from twice that on."""
    return (x / LOOSE - 1).clamp(0, 1)


def clip_factors(clip: Clip, norms: Tensor, S: float, dtype: torch.dtype) -> Tensor:
    """c_i [B] for vectors of a type: what the rule says, but at most S/‖v^i‖, with S less what applying c rounds; 0
    where the norm is not finite.

    So ‖c_i v^i‖ ≤ S, as computed, whatever the rule says, if the norms [B] are at least the true ones. Since c_i may be
    above 1, it is kept so small that neither c·g nor c·x, for g and x up to LARGEST, nor a sum of many records
    overflows.
    """
    bound = min(S, LARGEST[dtype]) * (1 - MARGIN[dtype])
    c = torch.minimum(asked(clip, norms, S), bound / norms).clamp(max=_LARGEST[dtype])
    return torch.where(c > _SMALLEST[dtype], c, 0).to(dtype)


def by_parameter(groups: Iterable[Group]) -> Iterator[tuple[Group, float, str]]:
    for group in groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            for name in vector.parameters:
                yield group, alpha, name
