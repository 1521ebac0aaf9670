"""The clipped sums of a chunk, for all groups of a plan: the mechanisms of `dpexp.privacy.mechanism`, and the counts
that adaptive clip norms follow."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpexp.privacy.gradients.compiled import computed_once
from dpexp.privacy.gradients.layer_gradients import DenseGradient, LayerGradient
from dpexp.privacy.gradients.per_example import Gradients
from dpexp.privacy.mechanism import GroupMechanism, ScaledNorms
from dpexp.privacy.plan.adaptive_clipping import indicator
from dpexp.privacy.plan.groups import value_key
from dpexp.privacy.plan.plan import Group
from dpexp.privacy.private_metrics import UNCLIPPED, WEIGHT


class ClippedSums:
    """Clips and sums the vectors of a chunk.

    Args:
        groups: of the plan, of which those with values are after those with gradients.
        joint: whether each vector's own norm is counted, for adaptive joint clipping; else each group's.
        dtype: of counts.
    """

    def __init__(self, groups: Sequence[Group], joint: bool, dtype: torch.dtype) -> None:
        self._mechanisms = [GroupMechanism(group) for group in groups]
        self._joint = joint
        self._dtype = dtype

    def clip_norms(self, now: Sequence[Group], device: torch.device) -> Tensor:
        """The numbers of a round: S of each group, then the scales of its vectors; of a group that is not released in
        this round those of the plan, since its sums are dropped."""
        present = {group.name: group for group in now}
        groups = [present.get(m.group.name, m.group) for m in self._mechanisms]
        clip_norms = [group.S for group in groups]
        clip_norms += [alpha for group in groups for alpha in group.alphas] if self._joint else []
        return torch.tensor(clip_norms, dtype=torch.float64, device=device)

    def __call__(
        self,
        gradients: Gradients,
        clip_norms: Tensor,
        sums: Mapping[str, Tensor],
        counted: Tensor,
        rows: tuple[Tensor, Tensor] | None = None,
        zeroing: bool = False,
    ) -> dict[str, Tensor]:
        """Adds the clipped gradients of a chunk to `sums`, in place.

        A row whose norm is doubtful (`ScaledNorms.doubtful`) adds nothing, unless it is asked for. One of which a norm
        is not finite adds nothing if `zeroing`, and else makes the sums useless.

        Args:
            numbers: see `numbers`; counted: [B], which rows are records.
            rows: of doubtful ones, by number [K], and which of those count [K]: they alone are added, from gradients
                in float64.

        Returns:
            `norm:group` [B] for each group, `finite` [B], whether all of them are; `doubtful` [B] if any can be.
        """
        S, _ = self._split(clip_norms)
        for use in gradients.of.values():
            use.change(computed_once)
        found, outputs = self._norms(gradients, clip_norms)
        for name in ("finite", "doubtful"):  # in this order in every process
            if name in outputs:
                outputs[name] = computed_once(outputs[name])
        if zeroing:
            counted = counted & outputs["finite"]
            _zero(found, ~outputs["finite"])
        doubtful = outputs.get("doubtful")
        if rows is not None:
            exact = self._exact(found, S, gradients, rows[0])
            finite = torch.stack([one.norms for one in exact if one is not None]).sum(0) < torch.inf
            _zero(exact, ~finite)
            self._add(exact, S, sums, rows[1] & finite)
        elif doubtful is None:
            self._add(found, S, sums, counted)
        else:
            outputs["doubtful"] = doubtful & counted
            self._add(found, S, sums, counted & ~doubtful)
        return outputs

    def add(self, gradients: Gradients, clip_norms: Tensor, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same outside of a graph, for all rows, the doubtful ones included."""
        S, _ = self._split(clip_norms)
        found, outputs = self._norms(gradients, clip_norms)
        counted = gradients.in_range & outputs["finite"]
        if not bool(outputs["finite"].all()):
            _zero(found, ~outputs["finite"])
        doubtful = outputs.pop("doubtful", None)
        if doubtful is not None and bool((doubtful := doubtful & counted).any()):
            self._add(self._exact(found, S, gradients, doubtful.nonzero()[:, 0]), S, sums, None)
            counted = counted & ~doubtful
        self._add(found, S, sums, counted)
        return outputs

    def _norms(self, gradients: Gradients, clip_norms: Tensor) -> tuple[list[ScaledNorms | None], dict[str, Tensor]]:
        S, alphas = self._split(clip_norms)
        weights = record_weights(gradients)
        found: list[ScaledNorms | None] = []
        for mechanism, S_g, scales in zip(self._mechanisms, S, alphas, strict=True):
            if mechanism.group.name == UNCLIPPED:
                gradients.of[value_key(UNCLIPPED)] = self._counts(found, S, gradients, None)
            found.append(own := mechanism.norms(gradients.of, S_g, scales))
            if own is not None and not mechanism.group.is_metric:
                own.weights = weights
        outputs = {
            f"norm:{m.group.name}": f.norms for m, f in zip(self._mechanisms, found, strict=True) if f is not None
        }
        together = torch.zeros_like(gradients.losses, dtype=torch.float64)
        for norms in outputs.values():
            together = together + norms
        shares = [one.doubtful.amax(0) for one in found if one is not None and one.doubtful is not None]
        if shares:
            outputs["doubtful"] = torch.stack(shares).amax(0) > 0
        return found, outputs | {"finite": together < torch.inf}

    def _exact(
        self, found: Sequence[ScaledNorms | None], S: Sequence[Tensor], gradients: Gradients, rows: Tensor
    ) -> list[ScaledNorms | None]:
        exact: list[ScaledNorms | None] = []
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=True):
            if mechanism.group.name == UNCLIPPED:
                counts = {value_key(UNCLIPPED): self._counts(exact, S, gradients, rows)}
                exact.append(mechanism.norms(counts, S_g))
            else:
                exact.append(norms and mechanism.exact_norms(norms, rows))
        return exact

    def _add(
        self,
        found: Sequence[ScaledNorms | None],
        S: Sequence[Tensor],
        sums: Mapping[str, Tensor],
        counted: Tensor | None,
    ) -> None:
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=True):
            if norms is not None:
                mechanism.add(norms, S_g, sums, counted)

    def _split(self, clip_norms: Tensor) -> tuple[Sequence[Tensor], list[Sequence[Tensor] | None]]:
        """S of each group, and its scales where they are not those of the plan."""
        each = clip_norms.unbind(0)
        k = len(self._mechanisms)
        alphas: list[Sequence[Tensor] | None] = [None] * k
        if self._joint:
            at = k
            for g, mechanism in enumerate(self._mechanisms):
                alphas[g] = each[at : at + len(mechanism.group.alphas)]
                at += len(mechanism.group.alphas)
        return each[:k], alphas

    def _counts(
        self, found: Sequence[ScaledNorms | None], S: Sequence[Tensor], gradients: Gradients, rows: Tensor | None
    ) -> LayerGradient:
        """Of each record ±1/2 for each norm that is counted (`dpexp.privacy.plan.adaptive_clipping`)."""
        losses = gradients.losses if rows is None else gradients.losses[rows]
        counted = []
        for mechanism, S_g, norms in zip(self._mechanisms, S, found, strict=False):
            group = mechanism.group
            if group.is_metric:
                continue
            parts = None
            if norms is not None:
                parts = norms.by_vector(len(group.vectors)) if self._joint else norms.norms[None] / S_g
            k = len(group.vectors) if self._joint else 1
            counted.append(
                indicator(parts) if parts is not None else losses.new_ones(k, len(losses), dtype=torch.float64)
            )
        return DenseGradient(torch.cat(counted).T.to(self._dtype) - 0.5)


def record_weights(gradients: Gradients) -> Tensor | None:
    """[B] in float64: the records' weights, each brought into [0, 1], and NaN to 0; None: they have none."""
    given = gradients.of.pop(WEIGHT, None)
    return None if given is None else given.materialize()[:, 0].double().nan_to_num(0.0).clamp(0, 1)


def _zero(found: Sequence[ScaledNorms | None], rows: Tensor) -> None:
    for one in found:
        for part in one.parts if one is not None else ():
            part.gradient.mask_out(rows)
