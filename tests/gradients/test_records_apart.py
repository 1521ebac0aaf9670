"""What a record contributes depends on no other, nor on a known generator: what is refused, and what is given."""

import functools
import warnings

import numpy as np
import pytest
import torch
from plans import plan_of
from reference import engine_of, norm_of, nothing_shown, sums_of
from test_steps import Model, asking, records
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import dpexp
from dpexp.errors import ConfigError
from dpexp.privacy.state_checks import is_rounding

# What is refused


def closure():
    count = 0

    def more():
        nonlocal count
        count += 1
        return count

    return more


def kept(make, use):
    def place():
        state = make()
        return lambda: use(state)

    return place


PLACES = {
    "a closure": closure,
    "a tensor": kept(lambda: torch.zeros(()), lambda total: total.data.add_(1)),
    "a cache": kept(lambda: functools.lru_cache(lambda n: n), lambda known: known(known.cache_info().currsize) + 1),
    "a generator of torch": kept(torch.Generator, lambda generator: torch.rand((), generator=generator)),
    "a generator of NumPy": kept(lambda: np.random.default_rng(0), lambda generator: generator.random()),
}


@pytest.mark.parametrize("place, untraced", [*((place, False) for place in PLACES), ("a closure", True)])
def test_a_step_that_keeps_something_anywhere_is_refused(place, untraced):
    """A record's loss is scaled by what the step comes to; for what its module keeps see test_contract.py."""
    state = PLACES[place]()
    module = Model(lambda m, x: m.linear(x).tanh().sum() * state() * (1 + (untraced and asking(x))))
    with pytest.raises(ConfigError, match="keeps state of a record"):
        sums_of(engine_of(module), nn.Module.__call__, records())


def seeded_and_set_back():
    with torch.random.fork_rng([]):
        torch.manual_seed(7)


SEEDS = {
    "at first": lambda: torch.manual_seed(7), "set back": seeded_and_set_back,
    "by the generator": lambda: torch.default_generator.manual_seed(7),
}  # fmt: skip


@pytest.mark.parametrize("kind", SEEDS)
def test_a_step_does_not_seed(kind):
    def seeding(m, x):
        SEEDS[kind]()
        return (m.linear(x) * (torch.rand(6) - 0.5)).sum()

    with torch.random.fork_rng([]), pytest.raises(ConfigError, match="seeded inside training_step"):
        sums_of(engine_of(Model(seeding)), nn.Module.__call__, records())
    torch.manual_seed(0)  # elsewhere one may


@pytest.mark.parametrize("untraced", [False, True])
def test_a_parameter_that_no_group_releases_is_not_trained(untraced):
    stranger = nn.Linear(6, 6).double()
    module = Model(lambda m, x: (m.linear(x) + stranger(x)).sum() * (1 + (untraced and asking(x))))
    with pytest.raises(ConfigError, match="that no group releases"):
        sums_of(engine_of(module), nn.Module.__call__, records())


# What only records by themselves are given


def totals_of(step, batches, **options):
    """The sums of several sets of records, each by an engine of its own."""
    found = []
    for batch in batches:
        engine = engine_of(Model(step), **options)
        engine.begin()
        with nothing_shown():
            engine.add_chunk(lambda m, one: m.step(m, one), batch, len(tree_leaves(batch)[0]))
        found.append({"weight": engine._sums["linear.weight"]})
    return found


def assert_adds_up(whole, others, first):
    assert norm_of(whole, {"weight": others["weight"] + first["weight"]}) < 1e-12


def test_arrays_in_a_batch_are_each_records_own():
    def written(m, batch):
        x, array = batch
        if asking(x):
            array[0] = -1
        return m.linear(x).sum() * float(array[0])

    x, array = records(), np.ones(1)
    assert_adds_up(*totals_of(written, [(some, array) for some in (x, x[1:], x[:1])]))
    assert array[0] == 1


def test_the_graph_of_a_record_leads_to_no_other():
    def looking(m, x):
        asking(x)
        for following, _ in getattr(x.grad_fn or x, "next_functions", ()):
            if following is not None and hasattr(following, "variable"):
                return m.linear(x).sum() * following.variable.detach().sum()
        return m.linear(x).sum()

    x = records()
    assert_adds_up(*totals_of(looking, [some.clone().requires_grad_() for some in (x, x[1:], x[:1])]))


def forked(m, x):
    with torch.random.fork_rng():
        return torch.rand(()) * m.linear(x).sum()


def set_back(m, x):
    state = torch.get_rng_state()
    drawn = torch.rand(())
    torch.set_rng_state(state)
    return drawn * m.linear(x).sum()


@pytest.mark.parametrize("step", [forked, set_back])
def test_random_numbers_come_again_only_if_the_step_says_so(step):
    torch.manual_seed(0)
    engine = engine_of(Model(step), 1e9)
    drawn = [norm_of(sums_of(engine, nn.Module.__call__, torch.ones(1, 4, 6).double())) for _ in range(4)]
    assert len({round(number, 6) for number in drawn}) == 4


def test_the_price_of_a_traced_step_is_told_before_the_first_round(tmp_path):
    module = nn.Linear(4, 4)
    plan = plan_of(module, n=100, q=0.3, steps=4, noise_multiplier=1.0)
    private = dpexp.Private(module, torch.optim.SGD(module.parameters(), 0.1), plan, tmp_path / "ledger.jsonl")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for sample in private.rounds(TensorDataset(torch.randn(100, 4))):
            assert bool(private.rounds_done) == any("this job's 4 rounds" in str(w.message) for w in told)
            private.step(lambda model, record: model(record[0]).square().sum(), sample)
    (said,) = [str(w.message) for w in told if "this job's 4 rounds" in str(w.message)]
    assert "times the gradients of a plain step; for" in said


# What counts as the rounding of a GPU's kernels

ONES, INFINITE = torch.ones(4), torch.full((4,), torch.inf)
ROUNDINGS = {
    "float32": (ONES + 1e-6, ONES, True), "more than that": (ONES + 1e-4, ONES, False),
    "as in two equal runs": (ONES + 4e-3, ONES - 1e-3, True), "never more": (ONES + 0.1, ONES - 0.1, False),
    "infinite": (INFINITE, INFINITE, False), "not a number": (ONES * torch.nan, ONES, False),
}  # fmt: skip


@pytest.mark.parametrize("other, again, is_rounded", ROUNDINGS.values(), ids=ROUNDINGS)
def test_rounding_is_what_two_equal_runs_show(other, again, is_rounded):
    assert is_rounding(ONES, other, again, float(ONES.norm())) == is_rounded
    assert not is_rounding(ONES, other, again, float("inf"))
