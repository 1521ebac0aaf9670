"""Branches on data: records that answer alike are processed together."""

import math
import warnings

import pytest
import torch
from torch import nn

from dpexp.privacy import bounds
from dpexp.privacy.engine.engine import Engine
from dpexp.privacy.noise import GaussianNoise
from dpexp.privacy.plan import make_plan
from tests.test_engine import clipped_sums, cross_entropy, relative_error, sums_of, way

B = 24


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.left, self.right, self.head = (nn.Linear(6, 6) for _ in range(4))


class Masked(Model):
    """As language models do: a mask is only used where it hides something."""

    def forward(self, x):
        mask = x[..., :1] > -1
        y = self.mix(x)
        if not mask.all():
            y = y * mask
        return self.head(y.mean(1))


class Tree(Model):
    """Branches within branches, which say truth, a number and a list."""

    def forward(self, x):
        y = self.left(x) if x.sum() > 0 else self.right(x)
        if bool((x[:, 0].max() > 1).any()):
            y = self.mix(y)
        if int((x[:, 0, 0] > 0).sum()) == 1:
            y = y.tanh()
        return self.head(y.mean(1)) * (2 if (x[0, :1, 1] > 1.5).tolist()[0] else 1)


class Sliced(Model):
    """A length, of which there are few."""

    def forward(self, x):
        length = 1 + (x[0, :, 0] > 0).sum().item()
        return self.head(self.mix(x[:, :length]).mean(1))


class Trying(Model):
    """Catches whatever comes of asking."""

    def forward(self, x):
        try:
            y = self.left(x) if x.sum() > 0 else self.right(x)
        except Exception:
            y = self.mix(x)
        return self.head(y.mean(1))


class Each(Model):
    """Asks for a number that is another one for each record."""

    def forward(self, x):
        return self.head(self.mix(x).mean(1)) * x.mean().item()


class Dropping(Model):
    """Leaves a layer out at random."""

    def forward(self, x):
        y = self.mix(x)
        return self.head((self.left(y) if torch.rand(()) < 0.3 else y).mean(1))


def engine_of(module, S=0.3):
    plan = make_plan(module, n=100, q=0.3, steps=1, noise_multiplier=1.0, bound=bounds.Fixed(S))
    return Engine(plan, module, GaussianNoise()), plan


def made(build, seed=0):
    torch.manual_seed(seed)
    return build().double(), (torch.randn(B, 4, 6).double(), torch.randint(6, (B,)))


def of(module):
    return lambda one: cross_entropy(module(one[0]), one[1])


@pytest.mark.parametrize("chunk", [1, 3, B])
@pytest.mark.parametrize("build", [Masked, Tree, Sliced, Trying])
def test_records_that_answer_alike_are_processed_together(build, chunk, monkeypatch):
    module, batch = made(build)
    engine, plan = engine_of(module)
    monkeypatch.setattr(warnings, "warn", lambda message, *more: pytest.fail(str(message)))
    sums = sums_of(engine, of(module), batch, B, chunk)
    reference = clipped_sums(plan, module, of(module), batch, B)
    assert relative_error(sums, reference) < 1e-9
    assert way(engine) == (False, set())


def test_a_chunk_costs_as_many_passes_as_it_has_answers():
    module, batch = made(Masked)
    engine, _ = engine_of(module)
    passes = []

    def counted(one):
        passes.append(1)
        return of(module)(one)

    sums_of(engine, counted, batch, B, B)
    whole = (batch[0][..., :1] > -1).flatten(1).all(1)
    assert 0 < whole.sum() < B and len(passes) == 3, "one that finds the records to differ, and one for each answer"


@pytest.mark.parametrize("build", [Masked, Tree, Sliced, Trying, Each])
def test_one_record_less_moves_the_sums_by_at_most_the_bound(build):
    module, batch = made(build, seed=1)
    S, sums = 0.01, []
    for data in (batch, tuple(t[1:] for t in batch), tuple(t[:-1] for t in batch)):
        engine, _ = engine_of(module, S)
        sums.append(sums_of(engine, of(module), data, len(data[0]), 7))
    for fewer in sums[1:]:
        moved = math.sqrt(sum((sums[0][name] - fewer[name]).square().sum().item() for name in fewer))
        assert 0.9 * S < moved <= S * (1 + 1e-9)


@pytest.mark.parametrize("build", [Each, Dropping])
def test_where_many_answers_differ_or_are_random_the_records_are_processed_one_at_a_time(build, monkeypatch):
    """To ask again, after other random numbers, would prefer what records agree on."""
    module, batch = made(build)
    engine, plan = engine_of(module)
    said = []
    monkeypatch.setattr(warnings, "warn", lambda message, *more: said.append(message))
    sums = sums_of(engine, of(module), batch, B, B)
    assert len(said) == 1 and "one at a time" in said[0] and "depends on a record's data" in said[0]
    assert way(engine) == (True, set())
    if build is Each:
        reference = clipped_sums(plan, module, of(module), batch, B)
        assert relative_error(sums, reference) < 1e-9
