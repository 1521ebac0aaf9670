"""Clips and sums the vectors of a chunk by the `GroupMechanism` of each group, and counts for adaptive clip norms."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpexp.privacy.gradients.compiled import computed_once
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.per_example import ChunkGradients
from dpexp.privacy.mechanism import GroupMechanism, ScaledNorms, by_parameter
from dpexp.privacy.plan.adaptive_clipping import indicator
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import AdaptiveTargets, Group
from dpexp.privacy.private_metrics import UNCLIPPED, WEIGHT, Values


class ClippedSums:
    """Clips and sums the vectors of a chunk.

    Args:
        groups: of the plan; groups of values come after groups of gradients.
        adaptive: the clipping norms that adapt, for whose counts norms are compared with them.
        parameters: those of the groups, by name.
        values: the released values of the groups.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        adaptive: AdaptiveTargets | None,
        parameters: Mapping[str, Tensor],
        values: Values,
    ) -> None:
        self._mechanisms = [GroupMechanism(group) for group in groups]
        members = adaptive.members if adaptive else ()
        self._with_adapting_S = {member.group for member in members if member.vector is None}
        self._with_adapting_alphas = {member.group for member in members if member.vector is not None}
        self._dtype = values.dtype
        self._like: dict[str, Tensor] = {}  # a tensor without memory like the sum of each parameter and value
        self._devices: dict[str, torch.device] = {}
        for _, _, name in by_parameter(groups):
            source = parameters.get(name, values)
            shape = source.shape if isinstance(source, Tensor) else (source.sizes[name],)
            dtype = torch.promote_types(torch.float32, source.dtype)
            self._like[name] = torch.empty(shape, dtype=dtype, device="meta")
            self._devices[name] = source.device

    def zeros(self) -> dict[str, Tensor]:
        """A sum of zeros, of at least float32, for each parameter and value."""
        return {name: torch.zeros_like(one, device=self._devices[name]) for name, one in self._like.items()}

    @property
    def entries(self) -> int:
        """Numbers in all sums."""
        return sum(one.numel() for one in self._like.values())

    def bounds(self, now: Sequence[Group], device: torch.device) -> Tensor:
        """S of each group in this round, and then the scales α of vectors that adapt, in float64.

        They are one tensor, since it is an input of the traced graph: what changes from round to round must not be a
        constant there. Groups that are not released in this round have the plan's, since their sums are dropped.
        """
        present = {group.name: group for group in now}
        groups = [present.get(m.group.name, m.group) for m in self._mechanisms]
        bounds = [group.S for group in groups]
        bounds += [alpha for group in groups if group.name in self._with_adapting_alphas for alpha in group.alphas]
        return torch.tensor(bounds, dtype=torch.float64, device=device)

    def clipped_sums(
        self, gradients: ChunkGradients, bounds: Tensor, counted: Tensor, zeroing: bool
    ) -> dict[str, Tensor]:
        """The sums of the clipped gradients of a chunk.

        A row with a norm that is not finite is left out if `zeroing`; else the sums must not be used.

        Args:
            gradients: those of the chunk's rows.
            bounds: see `bounds`.
            counted: [B], which rows are records.
            zeroing: whether rows with a norm that is not finite are left out.

        Returns:
            `sum:name` for each parameter and value that was used; `loss` and `in_range` [B]; `norm:group` [B] for each
            group; `finite` [B], whether all of them are.
        """
        S, _ = self._split(bounds)
        counted = counted & gradients.in_range
        for gradient in gradients.by_name.values():
            gradient.map_factors(computed_once)
        found, outputs = self._norms(gradients, bounds)
        outputs["finite"] = computed_once(outputs["finite"])
        if zeroing:
            counted = counted & outputs["finite"]
            for part in (part for norms in found if norms is not None for part in norms.parts):
                part.gradient.mask_out(~outputs["finite"])
        sums: dict[str, Tensor] = {}
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=True):
            if norms is not None:
                sums |= mechanism.sums(norms, S_g, self._like, counted)
        outputs |= {"loss": gradients.losses, "in_range": gradients.in_range}
        return {f"sum:{name}": sums[name] for name in self._like if name in sums} | outputs

    def _norms(self, gradients: ChunkGradients, bounds: Tensor) -> tuple[list[ScaledNorms | None], dict[str, Tensor]]:
        """The norms of each group, and the outputs `norm:group` and `finite`."""
        S, alphas = self._split(bounds)
        weights = record_weights(gradients)
        found: list[ScaledNorms | None] = []
        for mechanism, scales in zip(self._mechanisms, alphas, strict=True):
            if mechanism.group.name == UNCLIPPED:
                # Its values are counts of the norms of the groups before it, so that groups are gone through in order.
                gradients.by_name[value_key(UNCLIPPED)] = self._counts(found, S, gradients)
            found.append(own := mechanism.norms(gradients.by_name, scales))
            if own is not None and not mechanism.group.is_metric:
                own.weights = weights
        outputs = {
            f"norm:{m.group.name}": f.norms for m, f in zip(self._mechanisms, found, strict=True) if f is not None
        }
        no_norms = [torch.zeros_like(gradients.losses, dtype=torch.float64)]
        first, *others = [*outputs.values()] or no_norms
        # A norm is at least 0, infinite or NaN: the sum is below infinity exactly if each norm is finite.
        return found, outputs | {"finite": sum(others, first) < torch.inf}

    def _split(self, bounds: Tensor) -> tuple[Sequence[Tensor], list[Sequence[Tensor] | None]]:
        """S of each group, and the scales of its vectors; None: those of the plan."""
        each = bounds.unbind(0)
        scales = iter(each[len(self._mechanisms) :])
        groups = [mechanism.group for mechanism in self._mechanisms]
        return each[: len(groups)], [
            [next(scales) for _ in group.alphas] if group.name in self._with_adapting_alphas else None
            for group in groups
        ]

    def _counts(
        self, found: Sequence[ScaledNorms | None], S: Sequence[Tensor], gradients: ChunkGradients
    ) -> LayerGradient:
        """±1/2 for each record and norm, by whether it is within S (`dpexp.privacy.plan.adaptive_clipping`)."""
        losses = gradients.losses
        within: list[Tensor] = []
        # `found` has only the groups before the counts, which are all that can adapt.
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=False):
            group = mechanism.group
            if group.name not in self._with_adapting_S | self._with_adapting_alphas:
                continue
            by_vector = group.name in self._with_adapting_alphas
            k = len(group.vectors) if by_vector else 1
            if norms is None:  # the step does not use the group: its norms are 0
                within.append(losses.new_ones(k, len(losses), dtype=torch.float64))
            else:
                within.append(indicator(norms.by_vector(k) if by_vector else norms.norms[None] / S_g))
        return DenseGradient(torch.cat(within).T.to(self._dtype) - 0.5)


def record_weights(gradients: ChunkGradients) -> Tensor | None:
    """[B] in float64: the records' weights, clamped to [0, 1], NaN as 0; None: records have no weights."""
    weights = gradients.by_name.pop(WEIGHT, None)
    return None if weights is None else weights.materialize()[:, 0].double().nan_to_num(0.0).clamp(0, 1)
