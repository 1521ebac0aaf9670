"""The mechanisms one record at a time, directly from the paper's algorithm, and the engine beside them."""

import math
import warnings
from contextlib import contextmanager

import torch
from plans import plan_of
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from dpexp.privacy.mechanism import MARGIN
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.clipping import Abadi, Automatic, FixedClipNorm, Global, Psac
from dpexp.privacy.round import Performance, RoundEngine


def record(batch, i):
    """A batch of record i only."""
    return rows_of(batch, slice(i, i + 1))


def rows_of(batch, index):
    """Copies of some records."""
    return tree_map(lambda t: t[index].clone() if isinstance(t, torch.Tensor) else t, batch)


def stacked(batch):
    """A batch as `RoundEngine.add_chunk` takes it: each record as a batch of one."""
    return tree_map(lambda t: t.unsqueeze(1) if isinstance(t, torch.Tensor) else t, batch)


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


def trained_in(module):
    """Parameters by their names in a plan."""
    named = ((name.replace("_orig_mod.", ""), p) for name, p in module.named_parameters())
    return {name: p for name, p in named if p.requires_grad and p.numel()}


def clipped_sums(plan, module, loss_of, batch, size):
    """Σ_i c_i v^i of each parameter, by name."""
    parameters = trained_in(module)
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
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


# The engine; a loss is a function of the module, or a copy of it, and of a batch of one record


def engine_of(
    module, S=0.1, n=20, q=0.3, rounds=9, memory=None, compiled=None, max_records=None, low_memory=False, **choices
):
    """A `RoundEngine` that keeps norms and losses."""
    choices = {"n": n, "q": q, "steps": rounds, "noise_multiplier": 1.0, "clip_norm": FixedClipNorm(S)} | choices
    return RoundEngine(
        plan_of(module, **choices), module, GaussianNoise(), observe=True, data_memory=memory,
        performance=Performance(max_records, compiled, low_memory),
    )  # fmt: skip


@contextmanager
def nothing_shown():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sums_of(engine, loss_of, batch, chunk=None, t=0):
    """What records [B, ...] add in a round, in chunks of some size."""
    engine.begin(t)
    size = len(tree_leaves(batch)[0])
    with nothing_shown():
        for start in range(0, size, chunk or size):
            some = rows_of(batch, slice(start, start + (chunk or size)))
            engine.add_chunk(loss_of, stacked(some), len(tree_leaves(some)[0]))
    engine.raise_if_none_contributed()
    sums = engine._clip.zeros() | engine._sums
    return {name: sums[name].clone() for name in trained_in(engine._module)}


def sums_apart(engine, loss_of, batch):
    """The same by the reference."""
    module = engine._module
    size = len(tree_leaves(batch)[0])
    return clipped_sums(engine.plan, module, lambda one: loss_of(module, one), batch, size)


def relative_error(sums, reference):
    distance = math.sqrt(sum((sums[n].double() - reference[n].double()).square().sum().item() for n in reference))
    return distance / math.sqrt(sum(r.double().square().sum().item() for r in reference.values()))


def norm_of(sums, without=None):
    """Of all sums, or of their difference from others."""
    parts = [t.double() - (without[n].double() if without else 0) for n, t in sums.items()]
    return math.sqrt(math.fsum(float(part.square().sum()) for part in parts))


def cross_entropy(module, one):
    scores = module(one[0])
    return F.cross_entropy(scores.flatten(0, -2), one[1].flatten())
