"""Small audits: trainings of a few rounds with canaries, by the real code or by sabotaged code."""

import itertools
import warnings
from dataclasses import dataclass, replace

import torch
from plans import plan_of, trainer
from torch import nn

import dpexp
from dpexp.accounting.auditing import audit, level_of_checks
from dpexp.accounting.ledger import LedgerWriter, read_ledger
from dpexp.privacy import mechanism, round
from dpexp.privacy.audit_canaries import Attack, Canaries, Contributions, nearly_noiseless, unsampled
from dpexp.privacy.gradients.clipped_sums import ClippedSums
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import adaptive_clipping, allocation, clipping, groups
from dpexp.privacy.plan.clipping import Abadi, Automatic, Global, Psac, unbounded_clip_factors
from dpexp.privacy.plan.options import Noise
from dpexp.privacy.sampling import loader, policies
from dpexp.training.classifier import Classifier
from dpexp.training.data import Synthetic

DELTAS = (1e-5, 1e-2, 1e-1)
CONFIDENCE = 0.999
SAMPLINGS = {
    "all": {"sampling": "full_batch", "q": 1.0},
    "poisson": {"sampling": "poisson", "q": 0.5},
    "poisson, replaced": {"sampling": "poisson", "q": 0.5, "adjacency": "replace_one"},
    "truncated_poisson": {"sampling": "truncated_poisson", "q": 0.5, "max_batch_size": 1050},
    "fixed_size": {"sampling": "fixed_size", "q": 0.5},
    "shuffle": {"sampling": "shuffle", "q": 0.5},
    "cyclic_poisson": {"sampling": "cyclic_poisson", "q": 0.25, "noise": Noise("banded", 2, "sqrt")},
}
MECHANISMS = {
    "separate": {"clip_norm": clipping.FixedClipNorm(0.5)},
    "joint": {"mechanism": clipping.Joint(alpha=3.0, clip_norm=0.7)},
    "joint by size": {"mechanism": clipping.Joint(), "clip_norm": clipping.DimensionClipNorm(1.0)},
}
RELEASED = {
    "metrics": {
        "private_metrics": {
            "train_loss": {"clip_norm": 0.5, "budget_share": 0.3},
            "train_accuracy": {"clip_norm": 1, "budget_share": 0.1, "every_n_rounds": 2},
        }
    },
    "adaptive": {"clip_norm": adaptive_clipping.AdaptiveClipNorm(initial=0.1, learning_rate=1.0, budget_share=0.2)},
}
ALLOCATIONS = {
    "proportional": allocation.Proportional(),
    "dimension_adjusted": allocation.DimensionAdjusted(),
    "min_variance": allocation.MinVariance(),
    "weighted": allocation.Weighted({"model.0": 0.3, "model.2": 0.7}),
}
FULL_CYCLES = {
    "sampling": "cyclic_poisson", "q": 0.25, "noise": Noise("banded", 4, "sqrt"), "steps": 16,
    "noise_multiplier": 2.0,
}  # fmt: skip
VECTORS = ("layer", "parameter")
CLIPS = {"abadi": Abadi(), "automatic": Automatic(), "psac": Psac(), "global": Global(4.0)}
N = 2000  # published number of records


def attacked(folder, *arguments, canaries=N, seed=0, **choices):
    """Audits two trainings; arguments as of `trained`."""
    attack, contributions = Attack(), Contributions()
    level = level_of_checks(CONFIDENCE, 9)
    found = trained(folder, *arguments, variant=unsampled, reader=attack, canaries=canaries, seed=seed, **choices)
    trained(
        folder, *arguments, variant=lambda plan: nearly_noiseless(plan, found.count, level), reader=contributions,
        canaries=canaries, seed=seed + 1000, coins=False, ledger="samples.jsonl", **choices,
    )  # fmt: skip
    checks = [*attack.checks(level), *contributions.checks(level)]
    ledger, scores = read_ledger(folder / "ledger.jsonl"), attack.scores(found.count)
    return audit(scores, found.included, ledger, DELTAS, level, checks, confidence=CONFIDENCE, middle=found.middle)


def check(found, name):
    """An audit's check by name."""
    return next(one for one in found.checks if one.name == name)


def trained(
    folder, canaries=N, records=50, seed=0, module=None, data=None, precision=None, variant=lambda plan: plan,
    reader=None, coins=True, ledger="ledger.jsonl", **choices,
):  # fmt: skip
    """The canaries of a training; by default of two groups, four rounds and full batches.

    Args:
        records: in addition to canaries; where sampling needs an exact n, canaries replace some of n.
        module, data: factories.
    """
    plan = {"n": N, "steps": 4, "noise_multiplier": 2.0, "group": groups.per_layer(), **SAMPLINGS["all"]}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module = module() if module else Classifier(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
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


# Sabotage


def a_forgotten_column_norm(patch):
    """The ledger has ‖c‖ = 1, and the noise c_0 = 1."""
    add_to = CorrelatedNoise.add_to

    def longer(self, sums, divisor=1.0):
        add_to(self, [one._replace(bands=tuple(c / one.bands[0] for c in one.bands)) for one in sums], divisor)

    patch.setattr(CorrelatedNoise, "add_to", longer)


def less_noise(patch, factor=0.95):
    add_to = GaussianNoise.add_to

    def quieter(self, sums, divisor=1.0):
        add_to(self, [(total, factor * sigma) for total, sigma in sums], divisor)

    patch.setattr(GaussianNoise, "add_to", quieter)


def half_the_noise(patch):
    less_noise(patch, 0.5)


def some_noise_twice(patch):
    """Every third round repeats the noise of the round before."""
    add_to = GaussianNoise.add_to

    def again(self, sums, divisor=1.0):
        self.turn = getattr(self, "turn", -1) + 1
        if self.turn % 3 == 2:
            self.stream._numbers = itertools.count(self.before)
        self.before = next(self.stream._numbers)
        self.stream._numbers = itertools.count(self.before)
        add_to(self, sums, divisor)

    patch.setattr(GaussianNoise, "add_to", again)


def half_the_noise_of_large_tensors(patch):
    add = GaussianNoise._add

    def quieter(self, total, sigma, divisor):
        add(self, total, sigma / 2 if sigma != 1.0 else sigma, divisor)  # small tensors are drawn with 1.0

    patch.setattr(GaussianNoise, "_add", quieter)


def the_same_noise_each_round(patch):
    add_to = GaussianNoise.add_to

    def again(self, sums, divisor=1.0):
        self.stream._numbers = itertools.count()
        add_to(self, sums, divisor)

    patch.setattr(GaussianNoise, "add_to", again)


def the_same_noise_for_each_group(patch):
    add_to = GaussianNoise.add_to

    def again(self, sums, divisor=1.0):
        beginning = next(self.stream._numbers)
        for one in sums:
            self.stream._numbers = itertools.count(beginning)
            add_to(self, [one], divisor)

    patch.setattr(GaussianNoise, "add_to", again)


def a_larger_bound(patch, larger):
    """Clips to larger(name)·S and noises for S."""
    clip_norms = ClippedSums.clip_norms

    def enlarged(self, now, device):
        return clip_norms(self, [replace(group, S=group.S * larger(group.name)) for group in now], device)

    patch.setattr(ClippedSums, "clip_norms", enlarged)


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
    begin = ClippedSums.__init__

    def apart(self, groups, *rest):
        pairs = [(group, pair) for group in groups for pair in zip(group.vectors, group.alphas, strict=True)]
        begin(self, [replace(group, vectors=(v,), alphas=(alpha,)) for group, (v, alpha) in pairs], *rest)

    patch.setattr(ClippedSums, "__init__", apart)


def alpha_forgotten_in_the_noise(patch):
    by_parameter = mechanism.by_parameter
    patch.setattr(mechanism, "by_parameter", lambda of: [(group, 1.0, name) for group, _, name in by_parameter(of)])


def a_larger_rate(patch, factor=1.1):
    independent = policies._independent
    patch.setattr(policies, "_independent", lambda q, *rest: independent(min(1.0, factor * q), *rest))


def twice_the_rate(patch):
    a_larger_rate(patch, 2.0)


def some_records_twice(patch):
    """One record of each sample, where samples are not checked."""
    independent = policies._independent

    def drawn(q, size, stream):
        found = independent(q, size, stream)
        return found + found[-1:]

    patch.setattr(policies, "_independent", drawn)
    patch.setattr(loader, "_checked", lambda samples, policy, size: samples)


def a_round_missing_in_the_ledger(patch):
    """Every second round."""
    for name in ("sample", "query", "commit"):
        original = getattr(LedgerWriter, name)

        def write(self, *args, original=original, last=name == "commit"):
            self.round = getattr(self, "round", 0)
            if self.round % 2 == 0:
                original(self, *args)
            self.round += last

        patch.setattr(LedgerWriter, name, write)


def the_true_size_as_divisor(patch):
    add_chunk, add_to, begin = round.PrivateRound.add_chunk, GaussianNoise.add_to, round.PrivateRound.begin

    def counting(self, loss_of, batch, size):
        self._correlated._gaussian.size += size
        add_chunk(self, loss_of, batch, size)

    def from_zero(self, t=0):
        self._correlated._gaussian.size = 0
        begin(self, t)

    patch.setattr(round.PrivateRound, "add_chunk", counting)
    patch.setattr(round.PrivateRound, "begin", from_zero)
    patch.setattr(
        GaussianNoise,
        "add_to",
        lambda self, sums, divisor=1.0: add_to(self, sums, max(1, getattr(self, "size", divisor))),
    )


def no_noise_for_an_empty_sample(patch):
    add_to = GaussianNoise.add_to

    def skipping(self, sums, divisor=1.0):
        sums = list(sums)
        if any(total.any() for total, _ in sums):
            add_to(self, sums, divisor)

    patch.setattr(GaussianNoise, "add_to", skipping)
