"""The mechanism of one group: algorithm 1 of McMahan, Andrew et al. (arXiv 1812.06210, section 2).

For a group with vectors v_1…v_k, scales α_j, clipping norm S and noise σ̃, over the records i of a round's sample:

    x_i = (Σ_j ‖v_j^i‖²/α_j²)^½,   c_i = w_i min(rule(x_i), S/x_i),   v̂_j = (1/qn) (Σ_i c_i v_j^i + α_j N(0, σ̃² I)).

rule(x) is what the clip rule of the plan returns for the scaled norm x (`dpexp.privacy.plan.clipping`); c_i is what the
vectors are multiplied by. The weight w_i of a gradient is what `training_step` passes to `dpexp.weigh`, clamped to
[0, 1]; by default it is 1. It multiplies c_i after clipping, so that it never makes a record count for more than S.

| Case | What the record adds |
|---|---|
| zero vector: x = 0 | c = w rule(0), at most 2^30 in float32; zero is added |
| S larger than every norm x | `Abadi`: the vectors as they are, but for rounding where a norm is next to S |
| x infinite or NaN | c = 0, and its row is set to zero or replaced (`dpexp.privacy.gradients.graphs`) |
| the rule returns more than S/x, or infinity | c = w S/x |
| the rule returns a number below 0, or NaN | c = 0 |
| c below 2^-100 in float32, 2^-900 in float64 | c = 0 |
| weight w of 0 or NaN | c = 0 |
| a record with an index or a label out of range | c = 0, since its row is not counted |
| a record without a loss | it does not get here (`dpexp.privacy.round`) |
| the step does not use any of a group's parameters | no norm, and no sum; noise is added to zeros |
| empty sample | noise is added to zeros |

Read next: `dpexp.privacy.round` (who calls this), `dpexp.privacy.gradients.norms` (why norms are never too small).

Formal guarantees:

*Sensitivity.* Each record adds at most S to the group's sum, in the group's scaled norm, whatever its data and the clip
rule. Adding or removing a record, or replacing it by one that contributes nothing, moves the sum by at most S;
replacing it by another record moves it by at most 2 S (SENSITIVITY of `dpexp.accounting.coverage`). The accountant
divides σ̃ by as much. Noise with bands is correlated over rounds: `dpexp.privacy.noise.correlated` says what that
costs.

*Floating point.* The bound holds as computed: norms are float64 and never below the true norm of what is added in
float32 (proof: `dpexp.privacy.gradients.norms`), and S is reduced by the rounding of the multiplication by c
(`MARGIN`). Not bounded: each addition rounds the sum itself by up to one unit in its last place; a record is added in
as many steps as its gradient has terms.

*Assumptions.* A record's vectors depend only on that record, the weights and fresh randomness: the step is traced for
one record (`dpexp.privacy.gradients.one_record`), and its lifting over records is proved
(`dpexp.privacy.gradients.graph`); records that are not traced have a copy of the module each. The noise is
Gaussian in float64 from a secret key stream, and is added once a round, after the sum query event is in the ledger.
Sampling is the one that the accountant assumes.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.norms import LARGEST, squared_norms
from dpexp.privacy.gradients.products import UNIT
from dpexp.privacy.noise.continuous import CorrelatedNoise, Noisy
from dpexp.privacy.plan.clipping import ClipRule, unbounded_clip_factors
from dpexp.privacy.plan.plan import Group

# What is taken from S for rounding, relative to it: c, c·g and c·g·x are each rounded by one unit, S and c by one of
# float64. The thousandths are for the products of these errors (*The margin of S* in `norms.py`).
MARGIN = {dtype: 3.001 * unit + 2.001 * 2.0**-53 for dtype, unit in UNIT.items()}
_MIN_FACTOR = {torch.float32: 2.0**-100, torch.float64: 2.0**-900}
_MAX_FACTOR = {torch.float32: 2.0**30, torch.float64: 2.0**100}
_MAX_SMALL_SIZE, _MIN_SMALL_COUNT = 2**10, 4  # gradients up to this size are concatenated if there are so many


@dataclass
class Part:
    """Gradients of one parameter, or of many small ones, concatenated.

    Attributes:
        vector: index of the vector in the group; of several, the first one's.
        alpha: the vector's scale; of several, that of all of them. A tensor: it adapts.
        gradient: per record.
        names: of the parameters.
    """

    vector: int
    alpha: float | Tensor
    gradient: LayerGradient
    names: list[str]


@dataclass
class ScaledNorms:
    """Norms of a chunk's B records in one group.

    Attributes:
        squares: [parts, B] in float64: scaled squared norms of the parts, never too small.
        norms: [B] in float64: scaled norms of the group, never too small.
        weights: [B] in [0, 1], which `ClippedSums` sets for groups of gradients; None: all are 1.
    """

    parts: list[Part]
    squares: Tensor
    norms: Tensor
    weights: Tensor | None = None

    def by_vector(self, vectors: int) -> Tensor:
        """[vectors, B]: ‖v_j‖/α_j."""
        index = torch.tensor([part.vector for part in self.parts], device=self.squares.device)
        return self.squares.new_zeros(vectors, self.squares.shape[1]).index_add(0, index, self.squares).sqrt()


@dataclass
class GroupMechanism:
    """Clips and sums one group's vectors."""

    group: Group

    def norms(
        self, gradients: dict[str, LayerGradient], alphas: Sequence[float | Tensor] | None = None
    ) -> ScaledNorms | None:
        """Scaled norms of a chunk's records. Takes the group's gradients out of `gradients`; None if it has none."""
        parts = list(_parts(self.group, alphas or self.group.alphas, gradients))
        if not parts:
            return None
        # A part's squared norm is made of those of its vectors, such as g and x of a product. They are
        # computed in one call for all parts, since on a GPU each operator costs a launch; then each part takes its own.
        vectors = [part.gradient.vectors() for part in parts]
        squared = iter(squared_norms([vector for some in vectors for vector in some]))
        each = [part.gradient.squares(*islice(squared, len(some))) for part, some in zip(parts, vectors, strict=True)]
        squares = torch.stack([_over_square(one, part.alpha) for one, part in zip(each, parts, strict=True)])
        rounding = 1 + (len(parts) + 4) * 2.0**-53  # of the sum, its root and the division by α
        return ScaledNorms(parts, squares, squares.sum(0).sqrt() * rounding)

    def sums(
        self, found: ScaledNorms, S: Tensor, like: Mapping[str, Tensor], counted: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Σ_i c_i v^i of a chunk for each parameter that was used; drops the gradients.

        Args:
            found: its norms must be finite.
            like: tensors of the sums' shapes and types.
            counted: [B] bool; other rows add exactly 0. None: all rows are counted.
        """
        factors: dict[torch.dtype, Tensor] = {}
        sums: dict[str, Tensor] = {}
        while found.parts:
            part = found.parts.pop()
            dtype = like[part.names[0]].dtype
            if dtype not in factors:
                c = clip_factors(self.group.clip_rule, found.norms, S, dtype, found.weights)
                factors[dtype] = c if counted is None else torch.where(counted, c, 0)
            total = part.gradient.weighted_sum(factors[dtype])
            sizes = [like[name].numel() for name in part.names]
            each = [total] if len(sizes) == 1 else total.split(sizes)
            sums |= {name: one.reshape(like[name].shape) for name, one in zip(part.names, each, strict=True)}
        return sums


def clip_factors(rule: ClipRule, norms: Tensor, S: Tensor, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
    """c_i [B] of dtype: w_i min(rule(x_i), S/x_i), with the scaled norms x_i in `norms`; 0 where one is not finite.

    - S is reduced by the rounding of the multiplication by c. So ‖c_i v^i‖ <= S as computed, for any rule, if the
      norms [B] are at least the true ones.
    - A weight in [0, 1] makes no factor larger as computed.
    - c_i may exceed 1. It is clamped such that neither c·g nor c·x overflows for g and x up to LARGEST, nor does a sum
      of many records.
    """
    bound = S.clamp(max=LARGEST[dtype]) * (1 - MARGIN[dtype])
    c = torch.minimum(unbounded_clip_factors(rule, norms, S), bound / norms).clamp(max=_MAX_FACTOR[dtype])
    c = c if weights is None else c * weights
    return torch.where(c > _MIN_FACTOR[dtype], c, 0).to(dtype)


def add_noise(groups: Iterable[Group], sums: Mapping[str, Tensor], noise: CorrelatedNoise, denominator: float) -> None:
    """Adds α_j σ̃ y_t to each sum, for independent or banded normal noise y_t, and divides by qn, in place."""
    noisy = [Noisy(name, sums[name], alpha * group.sigma, group.bands) for group, alpha, name in by_parameter(groups)]
    noise.add_to(noisy, divisor=denominator)


def by_parameter(groups: Iterable[Group]) -> Iterator[tuple[Group, float, str]]:
    """(group, α, name) of each parameter and metric of the groups."""
    for group in groups:
        for vector, alpha in zip(group.vectors, group.alphas, strict=True):
            for name in vector.parameters:
                yield group, alpha, name


def _parts(group: Group, alphas: Sequence[float | Tensor], gradients: dict[str, LayerGradient]) -> Iterator[Part]:
    """The group's gradients; many small ones of equal scale, such as biases, are concatenated for speed.

    A scale that adapts needs the norm of its vector alone, so there only gradients of one vector are concatenated.
    """
    small: dict[Hashable, list[tuple[int, str, DenseGradient]]] = {}
    for k, vector in enumerate(group.vectors):
        for name in vector.parameters:
            gradient = gradients.pop(name, None)
            if isinstance(gradient, DenseGradient) and gradient.flat().shape[1] <= _MAX_SMALL_SIZE:
                adapts = isinstance(alphas[k], Tensor)
                kind = adapts, k if adapts else alphas[k], gradient.flat().dtype
                small.setdefault(kind, []).append((k, name, gradient))
            elif gradient is not None:
                yield Part(k, alphas[k], gradient, [name])
    for some in small.values():
        if len(some) < _MIN_SMALL_COUNT:
            yield from (Part(k, alphas[k], gradient, [name]) for k, name, gradient in some)
        else:
            joined = torch.cat([gradient.flat() for *_, gradient in some], 1)
            k = some[0][0]
            yield Part(k, alphas[k], DenseGradient(joined), [name for _, name, _ in some])


def _over_square(x: Tensor, alpha: float | Tensor) -> Tensor:
    """x/α², without an operator if α is 1."""
    return x if isinstance(alpha, float) and alpha == 1 else x / alpha**2
