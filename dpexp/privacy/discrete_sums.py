"""Clipped sums of vectors rounded to integers, and discrete Gaussian noise for them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dpexp.privacy.gradients.clipped_sums import ClippedSums, record_weights
from dpexp.privacy.gradients.layer_gradients import DenseGradient
from dpexp.privacy.gradients.norms import norms
from dpexp.privacy.gradients.per_example import ChunkGradients
from dpexp.privacy.mechanism import by_parameter
from dpexp.privacy.noise.discrete_gaussian import SIGMA2, DiscreteGaussian
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.clipping import unbounded_clip_factors
from dpexp.privacy.plan.plan import Group, PrivacyPlan


class IntegerSums(ClippedSums):
    """Clips vectors and sums them as integer multiples of each group's quantization step, in int64 on the CPU."""

    def clip_norms(self, now: Sequence[Group], device: torch.device) -> Tensor:
        self._released = now
        return super().clip_norms(now, device)

    def add(self, gradients: ChunkGradients, clip_norms: Tensor, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs, weights = {"finite": gradients.in_range}, record_weights(gradients)
        for group in self._released:
            members = [
                (alpha, name, gradients.by_name.pop(name))
                for _, alpha, name in by_parameter([group])
                if name in gradients.by_name
            ]
            if not members:
                continue
            vectors = torch.cat(
                [DenseGradient(gradient.materialize()).flat().cpu().double() / alpha for alpha, _, gradient in members],
                1,
            )
            found = outputs[f"norm:{group.name}"] = norms(vectors)
            c = unbounded_clip_factors(group.clip_rule, found, torch.tensor(group.S).double())
            c = c if weights is None or group.is_metric else c * weights.cpu()
            integers = group.lattice.rounded(vectors, found, c)
            sizes = [sums[name].numel() for _, name, _ in members]
            for (_, name, _), part in zip(members, integers.split(sizes, 1), strict=True):
                sums[name].view(-1).add_(part.sum(0))
        return outputs


class IntegerNoise:
    """Discrete Gaussian noise for all of a round's sums."""

    def __init__(self, stream: KeyStream) -> None:
        self._gaussian = DiscreteGaussian(SIGMA2, stream)

    def add_noise_and_average(self, plan: PrivacyPlan, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """v̂ = α γ (Σ_i u^i + N) / qn by parameter, in float64, with integer vectors u and quantization step γ."""
        drawn = self._gaussian.draw(sum(total.numel() for total in sums.values()))
        noise = dict(zip(sums, drawn.split([total.numel() for total in sums.values()]), strict=True))
        return {
            name: (sums[name] + noise[name].view_as(sums[name])).double()
            * (alpha * group.lattice.grid / (plan.sampling.q * plan.n))
            for group, alpha, name in by_parameter(plan.groups)
        }
