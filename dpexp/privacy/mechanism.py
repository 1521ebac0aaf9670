"""The mechanism of one group: algorithm 1 of McMahan, Andrew et al. (arXiv 1812.06210, section 2).

For a group with vectors v_1 ... v_k, scales alpha, clip norm S and noise sigma, of the records i of a round's sample:

    norm_i = (sum_j ||v_j^i||^2 / alpha_j^2)^(1/2),   c_i = w_i min(rule(norm_i), S / norm_i),
    v_j = (sum_i c_i v_j^i + alpha_j N(0, sigma^2 I)) / (q n),

where w_i is 1, or of a gradient what `training_step` gives `dpexp.weigh` for the record, brought into [0, 1].

Formal guarantees:

*What is bounded.* Each record adds at most S to the group's sum, in its scaled norm, whatever its data and the clip
rule say. Adding or removing a record, or replacing it by one that contributes nothing, moves the sum by at most S;
replacing it by another by at most 2 S: `GroupMechanism.sensitivity`, by which the accountant divides sigma.

*In which arithmetic.* As computed: norms are in float64 and never smaller than the true norm of what is added in
float32 (`dpexp.privacy.gradients.norms` has the proof), and S is reduced by what the multiplication by c rounds
(`MARGIN`). The sum over records is itself rounded at each addition by up to one unit in the last place of what it has
come to; that is not bounded by one record.

*Under which assumption.* A record's vectors depend on that record, the weights and fresh randomness alone. That is
what a traced pass proves (`dpexp.privacy.gradients.traced`) and what `dpexp.privacy.checks` looks for in a job that
runs as written. The noise is Gaussian in float64 from a secret key stream, added once a round after the sum query event
is in the ledger, and sampling is the one accounted.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpexp.accounting.coverage import SENSITIVITY
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.norms import LARGEST, LOOSE, UNIT
from dpexp.privacy.noise.continuous import CorrelatedNoise, Noisy
from dpexp.privacy.plan.clipping import ClipRule, clip_rule_factors
from dpexp.privacy.plan.plan import Group

MARGIN = {dtype: 3.001 * unit + 2.001 * 2.0**-53 for dtype, unit in UNIT.items()}  # rounding S, c, c·g, c·g·x adds
_SMALLEST, _LARGEST = ({torch.float32: a, torch.float64: b} for a, b in ((2.0**-100, 2.0**-900), (2.0**30, 2.0**100)))
_SMALL, _MANY = 2**10, 4  # entries of a gradient, and such gradients, to be laid side by side


@dataclass
class Part:
    """Gradients of one vector: of one parameter, or of many small ones side by side."""

    vector: int  # its number in the group
    alpha: float | Tensor
    gradient: LayerGradient
    names: list[str]  # of the parameters


@dataclass
class ScaledNorms:
    """What a group needs to know of a chunk's B records before it adds them up.

    Attributes:
        squares: [parts, B] of each part, scaled; norms: [B] of the group. Both float64, never too small.
        doubtful: [parts, B] in [0, 1]: how far a norm must be the one computed from factors in float64, since what it
            is enlarged by for rounding would change the clip factor (`rounding`, 6); None: none can be.
    """

    parts: list[Part]
    squares: Tensor
    norms: Tensor
    doubtful: Tensor | None
    in_float64: bool = False  # the gradients
    weights: Tensor | None = None  # [B], in [0, 1]; None: all are 1

    def by_vector(self, vectors: int) -> Tensor:
        """[vectors, B]: ||v_j|| / alpha_j."""
        index = torch.tensor([part.vector for part in self.parts], device=self.squares.device)
        return self.squares.new_zeros(vectors, self.squares.shape[1]).index_add(0, index, self.squares).sqrt()


@dataclass
class GroupMechanism:
    """Clips, sums and noises one group's vectors."""

    group: Group

    def sensitivity(self, adjacency: str) -> float:
        """How far one record moves the sum, in the group's scaled norm."""
        return self.group.S * SENSITIVITY[adjacency]

    def norms(
        self, gradients: dict[str, LayerGradient], S: Tensor, alphas: Sequence[float | Tensor] | None = None
    ) -> ScaledNorms | None:
        """The scaled norms of a chunk; takes the group's gradients out of `gradients`. None: no parameter was used."""
        parts = list(_parts(self.group, alphas or self.group.alphas, gradients))
        if not parts:
            return None
        squares = torch.stack([_over(part.gradient.squared_norms(), part.alpha, 2) for part in parts])
        norms = squares.sum(0).sqrt()
        return ScaledNorms(parts, squares, norms, self._doubtful(parts, squares, norms, S))

    def exact_norms(self, found: ScaledNorms, rows: Tensor) -> ScaledNorms:
        """Those of some rows [K], whose gradients are then in float64."""
        parts = [Part(part.vector, part.alpha, part.gradient.in_float64(rows), part.names) for part in found.parts]
        squares = found.squares[:, rows]
        if found.doubtful is not None:
            enlarged, share = squares.sqrt(), found.doubtful[:, rows]
            exact = torch.stack([_over(part.gradient.squared_norms().sqrt(), part.alpha, 1) for part in parts])
            squares = torch.where(share > 0, enlarged + share * (exact - enlarged), enlarged).square()
        weights = None if found.weights is None else found.weights[rows]
        return ScaledNorms(parts, squares, squares.sum(0).sqrt(), None, True, weights)

    def add(self, found: ScaledNorms, S: Tensor, sums: Mapping[str, Tensor], counted: Tensor | None = None) -> None:
        """Adds the chunk's sum of c_i v^i to each parameter's sum, in place, and drops the gradients.

        Args:
            found: norms that are all finite; counted: [B], which rows are records; None: all. Others add exactly 0.
        """
        factors: dict[torch.dtype, Tensor] = {}
        while found.parts:
            part = found.parts.pop()
            totals = [sums[name] for name in part.names]
            dtype = totals[0].dtype
            if dtype not in factors:
                c = clip_factors(self.group.clip_rule, found.norms, S, dtype, found.weights)
                factors[dtype] = c if counted is None else torch.where(counted, c, 0)
            c = factors[dtype].double() if found.in_float64 else factors[dtype]
            if len(totals) == 1 and not found.in_float64:
                part.gradient.add_weighted_sum(c, totals[0])
                continue
            shape = totals[0].shape if len(totals) == 1 else (sum(total.numel() for total in totals),)
            together = totals[0].new_zeros(shape, dtype=c.dtype)
            part.gradient.add_weighted_sum(c, together)
            for total, share in zip(totals, together.view(-1).split([t.numel() for t in totals]), strict=True):
                total.view(-1).add_(share)

    def _doubtful(self, parts: list[Part], squares: Tensor, norms: Tensor, S: Tensor) -> Tensor | None:
        given = [(part.gradient.rounding_allowance, part.alpha) for part in parts]
        allowed = {i: _over(own, alpha, 1) for i, (own, alpha) in enumerate(given) if own is not None}
        if not allowed:
            return None
        allowances = torch.stack([*allowed.values()])
        share = torch.where(norms.isfinite(), _loose(allowances / norms).nan_to_num(0), 0)
        index = torch.tensor([*allowed], device=norms.device)
        least = squares.index_copy(0, index, (squares[index].sqrt() - allowances).clamp(min=0).square())
        moved = clip_rule_factors(self.group.clip_rule, norms, S) - clip_rule_factors(
            self.group.clip_rule, least.sum(0).sqrt(), S
        )
        share = share * _loose(moved.abs() * norms / S).nan_to_num(1)
        return torch.zeros_like(squares).index_copy(0, index, share)


def add_noise(groups: Iterable[Group], sums: Mapping[str, Tensor], noise: CorrelatedNoise, denominator: float) -> None:
    """Adds alpha_j N(0, sigma^2) to each sum and divides by qn, in place, once the event is in the ledger."""
    noisy = [Noisy(name, sums[name], alpha * group.sigma, group.bands) for group, alpha, name in by_parameter(groups)]
    noise.add_to(noisy, divisor=denominator)


def clip_factors(clip: ClipRule, norms: Tensor, S: Tensor, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """c_i [B] for vectors of a type: what the rule says, but at most S/‖v^i‖, with S less what applying c rounds, times
    the weight in [0, 1], which as computed makes it no larger; 0 where the norm is not finite.

    So ‖c_i v^i‖ ≤ S, as computed, whatever the rule says, if the norms [B] are at least the true ones. Since c_i may be
    above 1, it is kept so small that neither c·g nor c·x, for g and x up to LARGEST, nor a sum of many records
    overflows.
    """
    bound = S.clamp(max=LARGEST[dtype]) * (1 - MARGIN[dtype])
    c = torch.minimum(clip_rule_factors(clip, norms, S), bound / norms).clamp(max=_LARGEST[dtype])
    c = c if weights is None else c * weights
    return torch.where(c > _SMALLEST[dtype], c, 0).to(dtype)


def by_parameter(groups: Iterable[Group]) -> Iterator[tuple[Group, float, str]]:
    """(group, alpha, name) of each parameter, or value, of the groups."""
    for group in groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            for name in vector.parameters:
                yield group, alpha, name


def _parts(group: Group, alphas: Sequence[float | Tensor], gradients: dict[str, LayerGradient]) -> Iterator[Part]:
    """Many small gradients of a vector, as of biases, are laid side by side, which takes fewer calls of functions."""
    small: dict[tuple[int, torch.dtype], list[tuple[str, DenseGradient]]] = {}
    for k, vector in enumerate(group.vectors):
        for name in vector.parameters:
            gradient = gradients.pop(name, None)
            if isinstance(gradient, DenseGradient) and (flat := gradient.flat()).shape[1] <= _SMALL:
                small.setdefault((k, flat.dtype), []).append((name, gradient))
            elif gradient is not None:
                yield Part(k, alphas[k], gradient, [name])
    for (k, _), some in small.items():
        if len(some) < _MANY:
            yield from (Part(k, alphas[k], gradient, [name]) for name, gradient in some)
        else:
            joined = torch.cat([gradient.flat() for _, gradient in some], 1)
            yield Part(k, alphas[k], DenseGradient(joined), [name for name, _ in some])


def _over(x: Tensor, alpha: float | Tensor, power: int) -> Tensor:
    return x if isinstance(alpha, float) and alpha == 1 else x / alpha**power


def _loose(x: Tensor) -> Tensor:
    """0 up to LOOSE, 1 from twice that on."""
    return (x / LOOSE - 1).clamp(0, 1)
