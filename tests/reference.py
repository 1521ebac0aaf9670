"""The mechanisms one record at a time, directly from the paper's algorithm."""

import math

import torch
from torch.utils._pytree import tree_map

from dpexp.privacy.mechanism import MARGIN
from dpexp.privacy.plan.clipping import Abadi, Automatic, Global, Psac


def record(batch, i):
    """A batch of record i only."""
    if isinstance(batch, dict):
        return {key: record(value, i) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(record(value, i) for value in batch)
    return batch[i : i + 1]


def stacked(batch):
    """A batch as `PrivateRound.add_chunk` takes it: each record as a batch of one."""
    return tree_map(lambda t: t.unsqueeze(1), batch)


def factor(clip, x, S):
    """The clip factor c of the scaled norm x, by the papers' formulas."""
    match clip:
        case Abadi():
            return min(1.0, S / x) if x else 1.0
        case Automatic():
            return S / (x + clip.gamma)
        case Psac():
            return S / (x + clip.r / (x + clip.r))
        case Global():
            return min(1.0, max(0.0, 100 * (1 - x / (clip.threshold * S)))) / clip.threshold  # S/Z, and a ramp to 0
    raise TypeError(clip)


def clipped_sums(plan, module, loss_of, batch, size):
    """Σ_i c_i v^i of each parameter, by name."""
    parameters = dict(module.named_parameters())
    sums = {name: torch.zeros_like(p) for name, p in parameters.items() if p.requires_grad}
    for i in range(size):
        module.zero_grad()
        loss_of(record(batch, i)).backward()
        gradients = {name: parameters[name].grad for name in sums}
        for group in plan.groups:
            square = 0.0
            for vector, alpha in zip(group.vectors, group.alphas, strict=True):
                for name in vector.parameters:
                    if gradients[name] is not None:
                        square += gradients[name].double().square().sum().item() / alpha**2
            norm = math.sqrt(square)
            bound = group.S * (1 - MARGIN[torch.promote_types(next(iter(sums.values())).dtype, torch.float32)])
            c = min(factor(group.clip_rule, norm, group.S), bound / norm) if norm else 0.0
            for vector in group.vectors:
                for name in vector.parameters:
                    if gradients[name] is not None:
                        sums[name] += c * gradients[name]
    module.zero_grad()
    return sums
