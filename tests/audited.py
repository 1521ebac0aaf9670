"""Small audits: trainings of a few rounds with canaries, by the real code or by sabotaged code."""

import itertools
import warnings
from dataclasses import dataclass, replace

import torch
from plans import plan_of, trainer
from torch import nn

import dpexp
from dpexp.accounting.auditing import audit, level_of_checks, releases
from dpexp.accounting.ledger import LedgerWriter, read_ledger
from dpexp.accounting.sampling import RandomAllocation, Shuffle, cyclic_poisson, poisson
from dpexp.privacy import mechanism
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import adaptive_clipping, allocation, clipping, groups
from dpexp.privacy.plan.clipping import unbounded_clip_factors
from dpexp.privacy.plan.options import Banded
from dpexp.privacy.sampling import loader
from dpexp.training.classifier import Classifier
from dpexp.training.data import Synthetic

DELTAS = (1e-5, 1e-2, 1e-1)
CONFIDENCE = 0.999
LEVEL = level_of_checks(CONFIDENCE, 9)
SAMPLINGS = {
    "all": {"sampling": "full_batch"},
    "poisson": {"sampling": "poisson", "q": 0.5},
    "poisson, replaced": {"sampling": "poisson", "q": 0.5, "adjacency": "replace_one"},
    "truncated_poisson": {"sampling": "truncated_poisson", "q": 0.5, "max_batch_size": 525},
    "fixed_size": {"sampling": "fixed_size", "q": 0.5},
    "shuffle": {"sampling": "shuffle", "q": 0.5},
    "random_allocation": {"sampling": "random_allocation", "q": 0.25},
    "cyclic_poisson": {"sampling": "cyclic_poisson", "q": 0.25, "noise": Banded(2, "sqrt")},
}
MECHANISMS = {
    "separate": {"clip_norm": clipping.FixedClipNorm(0.5)},
    "joint": {"mechanism": clipping.Joint(clipping.FixedClipNorm(3.0)), "clip_norm": clipping.FixedClipNorm(0.7)},
    "joint by size": {"mechanism": clipping.Joint(clipping.DimensionClipNorm(1.0))},
}
METRICS = {
    "train_loss": {"clip_norm": 0.5, "budget_share": 0.3},
    "train_accuracy": {"clip_norm": 1, "budget_share": 0.1, "every_n_rounds": 2},
}
ALLOCATIONS = {
    "proportional": allocation.Proportional(),
    "dimension_adjusted": allocation.DimensionAdjusted(),
    "min_variance": allocation.MinVariance(),
    "weighted": allocation.Weighted({"model.0": 0.3, "model.1": 0.7}),
}
FULL_CYCLES = {
    "sampling": "cyclic_poisson", "q": 0.25, "noise": Banded(4, "sqrt"), "steps": 16, "noise_multiplier": 2.0,
    "adjacency": "replace_one",
    "clip_norm": adaptive_clipping.AdaptiveClipNorm(initial=0.1, learning_rate=1.0, budget_share=0.2),
}  # fmt: skip
VECTORS = ("layer", "parameter")
N = 1000  # published number of records


def attacked(folder, **choices):
    """Audits both trainings; choices as of `trained`."""
    return judged(*noisy(folder, **choices), shown(folder, **choices))


def noisy(folder, **choices):
    """The training without sampling: what its canaries show, and its ledger."""
    return trained(folder, variant=unsampled, **choices), read_ledger(folder / "ledger.jsonl")


def judged(canaries, ledger, checks=()):
    """The audit of a training without sampling, with checks of another."""
    attack = canaries.reader
    checks = [*attack.checks(LEVEL), releases(canaries.releases, ledger), *checks]
    return audit(
        attack.scores(canaries.count), canaries.included, ledger, DELTAS, LEVEL, checks, confidence=CONFIDENCE,
        middle=canaries.middle,
    )  # fmt: skip


def shown(folder, canaries=N, seed=0, **choices):
    """The checks of what a training with next to no noise shows."""
    contributions = Contributions()
    extra = trained(
        folder, canaries, seed=seed + 1000, variant=lambda plan: nearly_noiseless(plan, canaries, LEVEL),
        reader=contributions, coins=False, ledger="samples.jsonl", **choices,
    )  # fmt: skip
    return [*contributions.checks(LEVEL), releases(extra.releases, read_ledger(folder / "samples.jsonl"))]


def check(checks, name):
    """A check by name."""
    return next(one for one in checks if one.name == name)


def trained(
    folder, canaries=N, records=50, seed=0, module=None, data=None, precision=None, variant=lambda plan: plan,
    reader=None, coins=True, ledger="ledger.jsonl", **choices,
):  # fmt: skip
    """The canaries of a training; by default of two linear layers, each a group, four rounds and full batches.

    Args:
        records: in addition to canaries; where sampling needs an exact n, canaries replace some of n.
        module, data: factories.
    """
    plan = {"n": N, "steps": 4, "noise_multiplier": 1.0, "group": groups.per_layer(), **SAMPLINGS["all"]}
    torch.manual_seed(0)
    module = module() if module else linear(4, 5, 3)
    planned = variant(plan_of(module, **plan | choices))
    data = data() if data else Synthetic(N if planned.sampling.needs_exact_n else records, [4], 3)
    stream = KeyStream.known(seed, "canaries", 0) if coins else None
    extra = Canaries(module, planned, canaries, stream, reader or Attack())
    extra.put_into(data)
    privacy = dpexp.PrivacyCallback(extra.plan, folder / ledger, noise_seed=seed, max_physical_batch_size=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(privacy, extra, precision=precision).fit(module, data)
    return extra


def linear(*sizes):
    """Linear layers, trained as a classifier."""
    net = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    return Classifier(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))


# Sabotage


def wrapped(patch, owner, name, around):
    """Puts around(original, …) in a function's place."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: around(original, *arguments, **named))


def a_forgotten_column_norm(patch):
    """The ledger has ‖c‖ = 1, and the noise c_0 = 1."""

    def longer(add_to, self, sums, divisor=1.0):
        add_to(self, [one._replace(bands=tuple(c / one.bands[0] for c in one.bands)) for one in sums], divisor)

    wrapped(patch, CorrelatedNoise, "add_to", longer)


def less_noise(patch, factor=0.95):
    wrapped(
        patch, GaussianNoise, "add_to",
        lambda add_to, self, sums, *rest: add_to(self, [(total, factor * sigma) for total, sigma in sums], *rest),
    )  # fmt: skip


def half_the_noise(patch):
    less_noise(patch, 0.5)


def half_the_noise_of_large_tensors(patch):
    def quieter(add, self, total, sigma, divisor):
        add(self, total, sigma / 2 if sigma != 1.0 else sigma, divisor)  # small tensors are drawn with 1.0

    wrapped(patch, GaussianNoise, "_add", quieter)


def the_same_noise_each_round(patch):
    def again(add_to, self, *rest):
        self.stream._numbers = itertools.count()
        add_to(self, *rest)

    wrapped(patch, GaussianNoise, "add_to", again)


def the_same_noise_for_each_group(patch):
    def again(add_to, self, sums, *rest):
        beginning = next(self.stream._numbers)
        for one in sums:
            self.stream._numbers = itertools.count(beginning)
            add_to(self, [one], *rest)

    wrapped(patch, GaussianNoise, "add_to", again)


def a_larger_bound(patch, larger):
    """Clips to larger(name)·S and noises for S."""

    def enlarged(clip_norms, self, now, device):
        return clip_norms(self, [replace(group, S=group.S * larger(group.name)) for group in now], device)

    wrapped(patch, ClippedSums, "bounds", enlarged)


def a_group_unclipped(patch):
    a_larger_bound(patch, lambda name: 1e6 if name == "model.0" else 1)


def a_metric_unclipped(patch):
    a_larger_bound(patch, lambda name: 1e6 if name == "train_loss" else 1)


def twice_the_bound(patch):
    a_larger_bound(patch, lambda name: 2)


@dataclass(frozen=True)
class Unbounded:
    """A clip rule that does not clip."""

    name: str = "unbounded"

    def __call__(self, x, S):
        return torch.ones_like(x)


def a_rule_that_is_trusted(patch):
    def by_rule_alone(rule, norms, S, dtype, weights=None):
        return unbounded_clip_factors(rule, norms, S).to(dtype)

    patch.setattr(mechanism, "clip_factors", by_rule_alone)


def each_vector_clipped_alone(patch):
    def apart(begin, self, groups, *rest):
        pairs = [(group, pair) for group in groups for pair in zip(group.vectors, group.alphas, strict=True)]
        begin(self, [replace(group, vectors=(v,), alphas=(alpha,)) for group, (v, alpha) in pairs], *rest)

    wrapped(patch, ClippedSums, "__init__", apart)


def alpha_forgotten_in_the_noise(patch):
    wrapped(
        patch, mechanism, "by_parameter",
        lambda by_parameter, of: [(group, 1.0, name) for group, _, name in by_parameter(of)],
    )  # fmt: skip


def a_larger_rate(patch, factor=1.1):
    for module in (poisson, cyclic_poisson):
        wrapped(patch, module, "each_with_rate", lambda drawn, q, *rest: drawn(min(1.0, factor * q), *rest))


def some_records_twice(patch):
    """One record of each sample, where samples are not checked."""

    def twice(drawn, *arguments):
        found = drawn(*arguments)
        return found + found[-1:]

    for module in (poisson, cyclic_poisson):
        wrapped(patch, module, "each_with_rate", twice)
    patch.setattr(loader, "_checked", lambda samples, policy, size: samples)


def samples_of_an_epoch_that_overlap(patch):
    """Each is as large as it should be, and drawn by itself."""
    for policy in (Shuffle, RandomAllocation):
        wrapped(
            patch, policy, "draw",
            lambda draw, self, *rest: [draw(self, *rest)[t] for t in range(self.rounds_per_epoch)],
        )  # fmt: skip


def records_that_draw_once_more(patch):
    def more(draw, self, *rest):
        k = self.num_selected
        return draw(replace(self, sampling_rate=self.q / k * (k + 1), num_selected=k + 1), *rest)

    wrapped(patch, RandomAllocation, "draw", more)


def some_records_that_draw_twice(patch, share=0.002):
    """And as many that do not, so that the rate is as planned."""

    def unequal(draw, self, size, stream):
        samples, few = draw(self, size, stream), max(1, round(share * size))
        also, not_at_all = stream.permutation(size)[: 2 * few].view(2, few).tolist()
        kept = [[record for record in sample if record not in not_at_all] for sample in samples]
        for record in also:
            own = next(t for t, sample in enumerate(samples) if record in sample)
            kept[(own + 1) % len(kept)].append(record)
        return kept

    wrapped(patch, RandomAllocation, "draw", unequal)


def a_tenth_of_the_rounds_not_in_the_ledger(patch):
    rounds = itertools.count(1)
    wrapped(patch, LedgerWriter, "commit", lambda commit, self: commit(self) if next(rounds) % 10 else None)
