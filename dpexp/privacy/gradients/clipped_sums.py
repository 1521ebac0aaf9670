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
        parameters, values: those of the groups.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        adaptive: AdaptiveTargets | None,
        parameters: Mapping[str, Tensor],
        values: Values,
    ) -> None:
        self._mechanisms = [GroupMechanism(group) for group in groups]
        self._adapting = {m.group: m.vector is not None for m in adaptive.members} if adaptive else {}  # whether α does
        self._dtype = values.dtype
        self._like: dict[str, Tensor] = {}  # a tensor without memory like the sum of each parameter and value
        self._devices: dict[str, torch.device] = {}
        for _, _, name in by_parameter(groups):
            of = parameters.get(name, values)
            shape = of.shape if isinstance(of, Tensor) else (of.sizes[name],)
            dtype = torch.promote_types(torch.float32, of.dtype)
            self._like[name] = torch.empty(shape, dtype=dtype, device="meta")
            self._devices[name] = of.device

    def zeros(self) -> dict[str, Tensor]:
        """A sum of zeros, of at least float32, for each parameter and value."""
        return {name: torch.zeros_like(one, device=self._devices[name]) for name, one in self._like.items()}

    @property
    def entries(self) -> int:
        """Numbers in all sums."""
        return sum(one.numel() for one in self._like.values())

    def clip_norms(self, now: Sequence[Group], device: torch.device) -> Tensor:
        """S of each group in this round, and then the scales of vectors that adapt, in float64.

        Groups that are not released in this round have the plan's, since their sums are dropped.
        """
        present = {group.name: group for group in now}
        groups = [present.get(m.group.name, m.group) for m in self._mechanisms]
        clip_norms = [group.S for group in groups]
        clip_norms += [alpha for group in groups if self._adapting.get(group.name) for alpha in group.alphas]
        return torch.tensor(clip_norms, dtype=torch.float64, device=device)

    def of(self, gradients: ChunkGradients, clip_norms: Tensor, counted: Tensor, zeroing: bool) -> dict[str, Tensor]:
        """The sums of the clipped gradients of a chunk.

        A row with a norm that is not finite is left out if `zeroing`; else the sums must not be used.

        Args:
            clip_norms: see `clip_norms`.
            counted: [B], which rows are records.

        Returns:
            `sum:name` for each parameter and value that was used; `loss` and `in_range` [B]; `norm:group` [B] for each
            group; `finite` [B], whether all of them are.
        """
        S, _ = self._split(clip_norms)
        counted = counted & gradients.in_range
        for gradient in gradients.by_name.values():
            gradient.map_factors(computed_once)
        found, outputs = self._norms(gradients, clip_norms)
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

    def _norms(
        self, gradients: ChunkGradients, clip_norms: Tensor
    ) -> tuple[list[ScaledNorms | None], dict[str, Tensor]]:
        S, alphas = self._split(clip_norms)
        weights = record_weights(gradients)
        found: list[ScaledNorms | None] = []
        for mechanism, scales in zip(self._mechanisms, alphas, strict=True):
            if mechanism.group.name == UNCLIPPED:
                gradients.by_name[value_key(UNCLIPPED)] = self._counts(found, S, gradients)
            found.append(own := mechanism.norms(gradients.by_name, scales))
            if own is not None and not mechanism.group.is_metric:
                own.weights = weights
        outputs = {
            f"norm:{m.group.name}": f.norms for m, f in zip(self._mechanisms, found, strict=True) if f is not None
        }
        no_norms = [torch.zeros_like(gradients.losses, dtype=torch.float64)]
        first, *others = [*outputs.values()] or no_norms
        return found, outputs | {"finite": sum(others, first) < torch.inf}

    def _split(self, clip_norms: Tensor) -> tuple[Sequence[Tensor], list[Sequence[Tensor] | None]]:
        """S of each group, and the scales of its vectors; None: those of the plan."""
        each = clip_norms.unbind(0)
        scales = iter(each[len(self._mechanisms) :])
        groups = [mechanism.group for mechanism in self._mechanisms]
        return each[: len(groups)], [
            [next(scales) for _ in group.alphas] if self._adapting.get(group.name) else None for group in groups
        ]

    def _counts(
        self, found: Sequence[ScaledNorms | None], S: Sequence[Tensor], gradients: ChunkGradients
    ) -> LayerGradient:
        """±1/2 for each record and norm, by whether it is within S (`dpexp.privacy.plan.adaptive_clipping`)."""
        losses, counted = gradients.losses, []
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=False):
            group = mechanism.group
            if group.name not in self._adapting:
                continue
            by_vector = self._adapting[group.name]
            k = len(group.vectors) if by_vector else 1
            if norms is None:
                counted.append(losses.new_ones(k, len(losses), dtype=torch.float64))
            else:
                counted.append(indicator(norms.by_vector(k) if by_vector else norms.norms[None] / S_g))
        return DenseGradient(torch.cat(counted).T.to(self._dtype) - 0.5)


def record_weights(gradients: ChunkGradients) -> Tensor | None:
    """[B] in float64: the records' weights, clamped to [0, 1], NaN as 0; None: records have no weights."""
    weights = gradients.by_name.pop(WEIGHT, None)
    return None if weights is None else weights.materialize()[:, 0].double().nan_to_num(0.0).clamp(0, 1)
