"""Small audits: a training of a few rounds with canaries, honest or sabotaged."""

import itertools
import warnings
from dataclasses import dataclass, replace

import pytorch_lightning as pl
import torch
from plans import plan_of
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
from dpexp.privacy.plan.clipping import Abadi, Automatic, Global, Psac, clip_rule_factors
from dpexp.privacy.plan.options import Noise
from dpexp.privacy.sampling import policies
from dpexp.privacy.sampling.policies import CyclicPoisson
from dpexp.training.classifier import Classifier
from dpexp.training.data.tabular import Synthetic

DELTAS = (1e-5, 1e-2, 1e-1)
CONFIDENCE = 0.999
SAMPLINGS = {
    "all": {"sampling": "full_batch", "q": 1.0},
    "poisson": {"sampling": "poisson", "q": 0.5},
    "poisson, replaced": {"sampling": "poisson", "q": 0.5, "adjacency": "replace_one"},
    "truncated_poisson": {"sampling": "truncated_poisson", "q": 0.5, "maximum": 1050},
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
    "adaptive, joint": {
        "clip_norm": adaptive_clipping.AdaptiveClipNorm(learning_rate=1.0, budget_share=0.2),
        "mechanism": clipping.Joint(),
    },
}
ALLOCATIONS = {
    "proportional": allocation.Proportional(),
    "dimension_adjusted": allocation.DimensionAdjusted(),
    "min_variance": allocation.MinVariance(),
    "weighted": allocation.Weighted({"model.0": 0.3, "model.2": 0.7}),
}
WHOLE = {
    "sampling": "cyclic_poisson",
    "q": 0.25,
    "noise": Noise("banded", 4, "sqrt"),
    "steps": 16,
    "noise_multiplier": 2.0,
}
VECTORS = ("layer", "parameter")
CLIPS = {"abadi": Abadi(), "automatic": Automatic(), "psac": Psac(), "global": Global(4.0)}
N = 2000  # published, and true but for the canaries where the policy takes any number


def attacked(folder, *arguments, canaries=N, seed=0, **choices):
    """An audit; arguments as of `trained`."""
    attack, contributions = Attack(), Contributions()
    level = level_of_checks(CONFIDENCE, 8)
    found = trained(folder, *arguments, variant=unsampled, reader=attack, canaries=canaries, seed=seed, **choices)
    trained(
        folder, *arguments, variant=lambda plan: nearly_noiseless(plan, found.count, level), reader=contributions,
        canaries=canaries, seed=seed + 1000, coins=False, ledger="samples.jsonl", **choices,
    )  # fmt: skip
    checks = [*attack.checks(level), *contributions.checks(level)]
    ledger, scores = read_ledger(folder / "ledger.jsonl"), attack.scores(found.count)
    return audit(scores, found.included, ledger, DELTAS, confidence=CONFIDENCE, middle=found.middle, checks=checks)


def check(found, name):
    """What an audit found of one number."""
    return next(one for one in found.checks if one.name == name)


def trained(
    folder, canaries=N, records=50, seed=0, module=None, data=None, trainer=None, variant=lambda plan: plan,
    reader=None, coins=True, ledger="ledger.jsonl", **choices,
):  # fmt: skip
    """Canaries that a training met, of two groups and four rounds, or of what `choices` say.

    Args:
        records: that train besides; where sampling relies on n, the canaries take the places of some of n.
        module, data: functions that make them.
    """
    plan = {
        "n": N,
        "steps": 4,
        "noise_multiplier": 2.0,
        "group": groups.per_layer(),
        "sampling": "full_batch",
        "q": 1.0,
    }
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    module = module() if module else Classifier(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    planned = variant(plan_of(module, **plan | choices))
    data = data() if data else Synthetic(N if planned.sampling.relies_on_n else records, [4], 3)
    stream = KeyStream.known(seed, "canaries", 0) if coins else None
    extra = Canaries(module, planned, canaries, stream, reader or Attack())
    extra.put_into(data)
    privacy = dpexp.PrivacyCallback(extra.plan, folder / ledger, noise_seed=seed, max_physical_batch_size=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[privacy, extra], **trainer or {},
        ).fit(module, data)  # fmt: skip
    return extra


# Sabotage of the real code


def a_forgotten_column_norm(patch):
    """The ledger tells of ‖c‖ = 1, and the noise has c_0 = 1."""
    add_to = CorrelatedNoise.add_to

    def longer(self, sums, divisor=1.0):
        bands = [one.bands for one in sums]
        add_to(
            self,
            [one._replace(bands=tuple(c / b[0] for c in b)) for one, b in zip(sums, bands, strict=True)],
            divisor,
        )

    patch.setattr(CorrelatedNoise, "add_to", longer)


def less_noise(patch, factor=0.95):
    add_to = GaussianNoise.add_to

    def quieter(self, sums, divisor=1.0):
        add_to(self, [(total, factor * sigma) for total, sigma in sums], divisor)

    patch.setattr(GaussianNoise, "add_to", quieter)


def half_the_noise(patch):
    less_noise(patch, 0.5)


def some_noise_twice(patch):
    """Of every third round that of the round before."""
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
        add(self, total, sigma / 2 if sigma != 1.0 else sigma, divisor)  # 1.0: small ones, which are drawn together

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
    """In the sums alone: the noise fits S. `larger` tells by how much, for a group's name."""
    numbers = ClippedSums.numbers

    def enlarged(self, now, device):
        return numbers(self, [replace(group, S=group.S * larger(group.name)) for group in now], device)

    patch.setattr(ClippedSums, "numbers", enlarged)


def a_group_unclipped(patch):
    a_larger_bound(patch, lambda name: 1e6 if name == "model.0" else 1)


def a_metric_unclipped(patch):
    a_larger_bound(patch, lambda name: 1e6 if name == "train_loss" else 1)


def twice_the_counts(patch):
    a_larger_bound(patch, lambda name: 2 if name == "unclipped" else 1)


def twice_the_bound(patch):
    a_larger_bound(patch, lambda name: 2)


@dataclass(frozen=True)
class Forgetful:
    """A clip rule without a bound."""

    name: str = "forgetful"

    def __call__(self, x, S):
        return torch.ones_like(x)


def a_rule_that_is_believed(patch):
    patch.setattr(
        mechanism,
        "clip_factors",
        lambda clip, norms, S, dtype, weights=None: clip_rule_factors(clip, norms, S).to(dtype),
    )


def each_vector_clipped_alone(patch):
    begin = ClippedSums.__init__

    def apart(self, groups, *rest):
        begin(
            self,
            [
                replace(group, vectors=(vector,), alphas=(alpha,))
                for group in groups
                for vector, alpha in zip(group.vectors, group.alphas, strict=True)
            ],
            *rest,
        )

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
    """One of a sample, in every round."""
    independent = policies._independent

    def drawn(q, size, stream):
        found = independent(q, size, stream)
        return found + found[-1:]

    patch.setattr(policies, "_independent", drawn)


def all_records_in_each_part(patch):
    patch.setattr(CyclicPoisson, "parted", lambda self, size, stream: [range(size)] * self.parts)


def a_parts_rounds_in_a_row(patch):
    parted = CyclicPoisson.partition

    class InARow(list):
        def __getitem__(self, k):
            self.clip_rule_factors = getattr(self, "asked", -1) + 1
            return super().__getitem__(self.clip_rule_factors // len(self) % len(self))

    patch.setattr(CyclicPoisson, "parted", lambda self, size, stream: InARow(parted(self, size, stream)))


def a_round_that_no_ledger_tells_of(patch):
    """Every second one."""
    for name in ("sample", "query", "commit"):
        told = getattr(LedgerWriter, name)

        def silent(self, *args, told=told, last=name == "commit"):
            turn = self.__dict__.setdefault("turn", itertools.count())
            self.now = getattr(self, "now", 0)
            if self.now % 2 == 0:
                told(self, *args)
            self.now += last
            return turn

        patch.setattr(LedgerWriter, name, silent)


def the_true_size_as_divisor(patch):
    accumulate, add_to, start = round.PrivateRound.add_chunk, GaussianNoise.add_to, round.PrivateRound.begin

    def counting(self, loss_of, batch, size):
        self._correlated._gaussian.size += size
        accumulate(self, loss_of, batch, size)

    def from_zero(self, t=0):
        self._correlated._gaussian.size = 0
        start(self, t)

    patch.setattr(round.PrivateRound, "accumulate", counting)
    patch.setattr(round.PrivateRound, "start", from_zero)
    patch.setattr(GaussianNoise, "add_to", lambda self, sums, divisor=1.0: add_to(self, sums, max(1, self.size)))


def no_noise_for_an_empty_sample(patch):
    add_to = GaussianNoise.add_to

    def skipping(self, sums, divisor=1.0):
        sums = list(sums)
        if any(total.any() for total, _ in sums):
            add_to(self, sums, divisor)

    patch.setattr(GaussianNoise, "add_to", skipping)
