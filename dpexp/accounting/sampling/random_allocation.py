"""Random allocation: samples in which each record draws its own rounds of an epoch.

*Formula.* Of the t = k/q rounds of an epoch each record is in k, a uniformly random subset that it draws for itself. An
epoch counts as k - r times one random round of m = ⌊t/k⌋, and r = t - km times one of m + 1.

| Case | What happens |
|---|---|
| k/q is not a whole number | t is the nearest one, and q = k/t |
| k = t, so that a record is in every round | sampling does not amplify |
| a ledger has only some of an epoch's rounds | they count as the whole epoch |
| a job is resumed within an epoch | it begins the next epoch that is not charged yet (`PrivacyPlan.resumed_at`) |
| a ledger has more than t rounds of an epoch, or they differ in k or t | the ledger is refused |
| a subclass | refused: its samples might depend on one another |

Read next: `dpexp.accounting.random_allocation` (the dominating pair); `shuffle`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dpexp.accounting.sampling.policy import RandomNumbers, RatedPolicy, Release, Released
from dpexp.errors import ConfigError, Count, checks_arguments


@checks_arguments
@dataclass(frozen=True, kw_only=True)
class RandomAllocation(RatedPolicy):
    """In each epoch of t = k/q rounds, each record draws for itself the k in which it is (arXiv 2502.08202).

    q is rounded such that t is a whole number. Sizes vary: a permutation would make records depend on one another.

    Examples:
        >>> from dpexp import RandomAllocation
        >>> policy, rounds = RandomAllocation(expected_batch_size=50, epochs=3).resolve(n=1000)
        >>> policy.rounds_per_epoch, rounds
        (20, 60)

    Args:
        num_selected: k.
        steps: rounds T; or `epochs` E, for T = ⌈E k/q⌉.
    """

    num_selected: Count = 1

    name = "random_allocation"
    covers: ClassVar = {"add_remove": ("pld",)}
    why = "its dominating pair is stated for adding or removing a record"
    written: ClassVar = {"num_selected": "num_selected", "rounds_per_epoch": "num_steps"}
    drawn_with = "epoch"
    needs_exact_n = False
    has_schedules = False

    def __init_subclass__(cls) -> None:
        raise ConfigError(
            f"sampling: {cls.__name__} cannot be a subclass of RandomAllocation, where each record draws its rounds by "
            "itself; derive it from Policy, with releases of its own."
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling_rate is not None:
            k = self.num_selected
            object.__setattr__(self, "sampling_rate", k / round(k / self.sampling_rate))

    @property
    def rounds_per_epoch(self) -> int:
        return round(self.num_selected / self.q)

    def draw(self, size: int, stream: RandomNumbers) -> list[list[int]]:
        """An epoch's samples. Each record's rounds are a uniform k-subset by Floyd's algorithm (Bentley & Floyd 1987):
        the i-th is uniform up to t - k + i, or t - k + i itself if it has that one already."""
        t, k = self.rounds_per_epoch, self.num_selected
        chosen = stream.words(size * k).reshape(size, k)
        for i, last in enumerate(range(t - k, t)):
            drawn = chosen[:, i].remainder_(last + 1)
            drawn[chosen[:, :i].eq(drawn[:, None]).any(1)] = last
        rounds = chosen.flatten()
        records = rounds.argsort(stable=True).div(k, rounding_mode="floor")
        return [sample.tolist() for sample in records.split(rounds.bincount(minlength=t).tolist())]

    @classmethod
    def releases(cls, rounds: Sequence[Released], adjacency: str) -> Iterator[tuple[Release, int]]:
        """The whole epoch counts, however many of its t rounds the ledger has, at the smallest z of these.

        With m = ⌊t/k⌋ and r = t - km, an epoch costs no more than k - r times one random round of m, and r times one of
        m + 1 ([random allocation](../mathematics.md#random-allocation)).

        *Proof.* The k rounds are one random round of each block of a random partition into k blocks of these sizes.
        Divergences are jointly convex, so at most those given the worst partition. Given it and the others' samples,
        the likelihood ratio is Π_B (1/|B|) Σ_{i ∈ B} exp(⟨v_i, W_i⟩/σ̃ - ‖v_i‖²/(2σ̃²)) over the blocks B, with W_i
        round i's noise. A shorter v_i tells no more than one of length S. Without the record, each ⟨v_i, W_i⟩/S is
        standard normal given all before, so the ratio is distributed as that of the k pairs. ∎
        """
        allocations = {(facts["num_selected"], facts["num_steps"]) for facts in (one.event.facts() for one in rounds)}
        count, (k, t) = sum(one.times for one in rounds), min(allocations)
        if count > t or len(allocations) > 1:
            raise ConfigError(
                f"the ledger has {count} rounds of epoch {rounds[0].event.first} in which each record is in "
                f"{' and '.join(sorted(f'{k} of {t}' for k, t in allocations))}, so they cannot have been drawn "
                "together."
            )
        z, longer = min(one.z for one in rounds), t % k
        for steps, times in ((t // k, k - longer), (t // k + 1, longer)):
            if times:
                yield Release(z) if steps == 1 else Release(z, policy=cls.name, steps=steps), times
