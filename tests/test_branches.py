"""Branches on data: records that answer alike are processed together."""

import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    """Leaves a layer out at random, unless a record decides that itself."""

    def forward(self, x):
        y = self.mix(x)
        stays = (torch.rand(()) < 0.5) | (x[..., 0].max() > 2)
        return self.head((y if stays else self.left(y)).mean(1))


class DroppingBefore(Model):
    """Asks for what random numbers cannot have reached, after they were drawn, as BERT does."""

    def forward(self, x):
        y = F.dropout(self.mix(x), 0.1)
        mask = x[..., :1].clone().add_(0.5) > -0.5
        mask[:, 0] = True
        if not mask.all():
            y = y * mask
        return self.head(y.mean(1))


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
    assert 0 < whole.sum() < B and len(passes) == 4, "one that finds that something is asked, and those below"
    sums_of(engine, counted, batch, B, B)
    assert len(passes) == 7, "one that finds the records to differ, and one for each answer"


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


def test_where_many_answers_differ_the_records_are_processed_in_as_many_parts(monkeypatch):
    module, batch = made(Each)
    engine, plan = engine_of(module)
    said = []
    monkeypatch.setattr(warnings, "warn", lambda message, *more: said.append(message))
    sums = sums_of(engine, of(module), batch, B, B)
    assert len(said) == 1 and "in many parts" in said[0] and "depends on a record's data" in said[0]
    assert way(engine) == (False, set())
    assert relative_error(sums, clipped_sums(plan, module, of(module), batch, B)) < 1e-9


class Kinds(nn.Module):
    """Asks each record for its kind; the gradient of what it then computes all but cancels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, record):
        x, g, kind = record
        int(kind)
        return (F.linear(x, self.weight) * g).sum()


def test_one_record_of_many_kinds_does_not_change_the_norms_of_the_others():
    """They are bounded from above, by far if terms cancel; were they bounded otherwise for one kind more, all records
    would move."""
    torch.manual_seed(0)
    module, n, S = Kinds(), 33, 0.01
    x, g = torch.randn(1, 1, 256).expand(n, 2, 256).clone(), torch.randn(1, 1, 256).expand(n, 2, 256).clone()
    g[:, 1] = -0.99 * g[:, 0]
    kind = torch.arange(n) % 16
    kind[-1] = 99
    sums = []
    for size in (n, n - 1):
        engine, _ = engine_of(module, S)
        engine.start()
        batch = tuple(t[:size] for t in (x, g, kind))
        engine.accumulate(module, batch, size)
        sums.append(engine._sums["weight"].double())
    assert (sums[0] - sums[1]).norm() <= S


def test_what_random_numbers_cannot_have_reached_is_asked_after_they_were_drawn(monkeypatch):
    module, batch = made(DroppingBefore)
    engine, _ = engine_of(module)
    monkeypatch.setattr(warnings, "warn", lambda message, *more: pytest.fail(str(message)))
    sums_of(engine, of(module), batch, B, B)
    assert way(engine) == (False, set())


class Passing(torch.autograd.Function):
    """Draws where no function mode sees it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * torch.rand_like(x)

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g


class Bringing(torch.autograd.Function):
    """Brings random numbers from elsewhere."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, held):
        return x + held[0]

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, g):
        return g, None


def written(x):
    y = x.clone()
    shown = y.view(-1)
    y[0, 0] = torch.rand(())
    return shown


def forked(x):
    with torch.random.fork_rng([]):
        return x + torch.rand_like(x)


def drawn_twice(x):
    start = torch.get_rng_state()
    y = x + torch.rand_like(x)
    torch.set_rng_state(start)
    return y


def checkpointed(x):
    drawn = torch.rand(())
    return checkpoint(lambda y: y + drawn, x, use_reentrant=False)


def hooked(x):
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t * 2), t)[1], lambda t: t):
        F.dropout(x.detach().requires_grad_(True), 0.5).square()
    return held[-1]


GENERATOR = torch.Generator().manual_seed(3)
REACHED = {
    "drawn": torch.rand_like,
    "dropout": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: x.clone().bernoulli_(0.5),
    "added": lambda x: x + torch.rand(()),
    "chosen": lambda x: torch.where(torch.rand(()) < 0.5, x, -x),
    "written to what is shown": written,
    "by a generator of its own": lambda x: x + torch.rand(x.shape, generator=GENERATOR),
    "by NumPy": lambda x: x + np.random.rand(),
    "by Python": lambda x: x + random.random(),
    "and the generator set back": forked,
    "and the generator set": drawn_twice,
    "inside a function of one's own": lambda x: Passing.apply(x),
    "through a function of one's own": lambda x: Bringing.apply(x, [torch.rand_like(x)]),
    "through checkpointing": checkpointed,
    "through attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "through a hook": hooked,
    "through a layer": lambda x: F.rrelu(-x.abs(), training=True),
}


@pytest.mark.parametrize("how", REACHED)
def test_what_random_numbers_may_have_reached_is_asked_of_each_record_alone(how, monkeypatch):
    """To ask again, after other random numbers, would prefer what records agree on."""

    class Deciding(Model):
        def forward(self, x):
            torch.rand(1)
            y = REACHED[how](x)
            return self.head(self.mix(x).mean(1)) if y.sum() > 1e6 else self.head(x.mean(1))

    module, batch = made(Deciding)
    engine, _ = engine_of(module)
    said = []
    monkeypatch.setattr(warnings, "warn", lambda message, *more: said.append(message))
    sums_of(engine, of(module), batch, B, B)
    assert way(engine) == (True, set()) and "one at a time" in said[0]


@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_a_record_draws_does_not_depend_on_its_company(others):
    """The others always stay; the first one does half of the time."""
    module, (x, y) = made(Dropping)
    x = torch.cat([x[:1].clamp(max=1), x[1 : 1 + others] + 10])
    runs, went = 1000, 0
    for seed in range(runs):
        torch.manual_seed(seed)
        engine, _ = engine_of(module)
        went += bool(sums_of(engine, of(module), (x, y[: 1 + others]), len(x), len(x))["left.weight"].any())
    assert abs(went - runs / 2) < 4 * math.sqrt(runs / 4)


SHAPED = {
    "rows": lambda y, x: y[x[..., 0] > 0],
    "numbers": lambda y, x: y[x > 0],
    "columns": lambda y, x: y[..., x[0, 0] > 0],
    "with a number": lambda y, x: y[x[..., 0] > 0, 2],
    "two masks": lambda y, x: y[x[:, 0, 0] > -9, x[0, :, 0] > 0],
    "nonzero": lambda y, x: y[0, (x[0, :, 0] > 0).nonzero()[:, 0]],
    "nonzero, one for each dimension": lambda y, x: y[(x[..., 0] > 0).nonzero(as_tuple=True)],
    "argwhere": lambda y, x: y[0, torch.argwhere(x[0, :, 0] > 0)[:, 0]],
    "where": lambda y, x: y[torch.where(x[..., 0] > 0)],
    "masked_select": lambda y, x: y.masked_select(x[..., :1] > 0),
    "written": lambda y, x: put(y, x > 0, 0.5),
    "rows written": lambda y, x: put(y, x[..., 0] > 0, 2 * y[x[..., 0] > 0]),
    "one for all written": lambda y, x: put(y, x[..., 0] > 0, torch.arange(6.0).to(y)),
}


def put(y, mask, value):
    y = y.clone()
    y[mask] = value
    return y


@pytest.mark.parametrize("chunk", [1, B])
@pytest.mark.parametrize("how", SHAPED)
def test_records_of_equal_shapes_are_processed_together(how, chunk, monkeypatch):
    class Shaped(Model):
        def forward(self, x):
            return self.head(x.mean(1)) + SHAPED[how](self.mix(x), x).square().sum()

    module, batch = made(Shaped)
    engine, plan = engine_of(module)
    monkeypatch.setattr(warnings, "warn", lambda message, *more: pytest.fail(str(message)))
    sums = sums_of(engine, lambda one: cross_entropy(module(one[0]).sin(), one[1]), batch, B, chunk)
    reference = clipped_sums(plan, module, lambda one: cross_entropy(module(one[0]).sin(), one[1]), batch, B)
    assert relative_error(sums, reference) < 1e-9
    assert way(engine) == (False, set())
