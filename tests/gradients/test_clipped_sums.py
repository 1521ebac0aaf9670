"""The engine against the reference that takes one record at a time: kinds of modules, types, odd records, refusals."""

import math
import warnings

import numpy as np
import pytest
import torch
from reference import (
    cross_entropy,
    engine_of,
    norm_of,
    nothing_shown,
    relative_error,
    rows_of,
    stacked,
    sums_apart,
    sums_of,
)
from torch import nn
from torch.nn import functional as F
from zoo.sequences import MODELS as MODELS_OF_ZOO

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.plan import clipping, groups

B = 6


class FrozenAndUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.half_frozen = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.half_frozen.weight.requires_grad_(False)
        self.unused, self.head, self.none = nn.Linear(8, 8), nn.Linear(8, 3), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.head(torch.relu(self.half_frozen(self.frozen(x)))) + self.none.sum()


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        return self.left(x) if x.sum() > 0 else self.right(x)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", dilation=2), nn.Tanh(), nn.Conv2d(4, 6, (3, 2), stride=2, groups=2),
        nn.ReLU(inplace=True), nn.Conv2d(6, 4, 2, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def pooled():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip


def mlp(*layers):
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), *layers, nn.Linear(6, 3))


def words(**options):
    return nn.Sequential(nn.Embedding(11, 4, **options), nn.Flatten(), nn.Linear(20, 11 * 5), nn.Unflatten(1, (5, 11)))


def exported(build, data, decomposed):
    batch, _ = data()
    batch = batch.double() if batch.is_floating_point() else batch
    program = torch.export.export(build().double(), (batch,), dynamic_shapes=({0: torch.export.Dim("B")},))
    return (program.run_decompositions() if decomposed else program).module()


def images():
    return torch.randn(B, 2, 8, 8), torch.randint(3, (B,))


def rows():
    return torch.randn(B, 8), torch.randint(3, (B,))


def tokens():
    return torch.randint(11, (B, 5)), torch.randint(11, (B, 5))


MODELS = {
    "mlp": (mlp, rows), "drawing": (lambda: mlp(nn.Dropout(0.0)), rows), "convolutions": (convolutions, images),
    "pooled": (pooled, images), "frozen and unused": (FrozenAndUnused, rows), "branching": (Branching, rows),
    "words": (words, tokens), "sparse": (lambda: words(sparse=True), tokens),
    "exported": (lambda: exported(lambda: words(padding_idx=0), tokens, False), tokens),
    "exported, decomposed": (lambda: exported(pooled, images, True), images),
    **{name: (lambda name=name: MODELS_OF_ZOO[name].build(False), MODELS_OF_ZOO[name].batch)
       for name in ("tied language model", "attention with its weights")},
}  # fmt: skip
NORM = clipping.DimensionClipNorm(0.3)
MECHANISMS = {
    "separate": {"mechanism": clipping.Separate(), "clip_norm": NORM}, "joint": {"mechanism": clipping.Joint(NORM)},
}  # fmt: skip
KINDS = [("separate", "flat"), ("joint", "per_layer"), ("separate", "per_layer"), ("joint", "flat")]


def of_kind(mechanism, grouping):
    return MECHANISMS[mechanism] | {"group": getattr(groups, grouping)()}


def case(name, dtype=torch.float64):
    torch.manual_seed(0)
    build, data = MODELS[name]
    (x, y), module = data(), build().to(dtype)
    return module, (x.to(dtype) if x.is_floating_point() else x, y)


@pytest.mark.parametrize(
    ("name", "mechanism", "grouping"),
    [
        *((name, *KINDS[i % 4]) for i, name in enumerate(MODELS) if name != "tied language model"),
        *(("tied language model", *kind) for kind in KINDS),
    ],
)
def test_float64_equals_one_record_at_a_time(name, mechanism, grouping):
    """Also in smaller chunks."""
    module, batch = case(name)
    engine = engine_of(module, **of_kind(mechanism, grouping))
    sums, expected = sums_of(engine, cross_entropy, batch), sums_apart(engine, cross_entropy, batch)
    norms = [(o[f"norm/{g.name}"], g.S) for o in engine.observations for g in engine.plan.groups
             if f"norm/{g.name}" in o]  # fmt: skip
    assert any((norm > S).any() for norm, S in norms), "the test must clip something to mean anything"
    assert relative_error(sums, expected) < 1e-9
    assert relative_error(sums_of(engine, cross_entropy, batch, chunk=4), expected) < 1e-9
    assert engine.step.mode == (LOOP if name == "branching" else TRACED), engine.step.reason


@pytest.mark.parametrize("name", ["pooled", "tied language model", "attention with its weights"])
def test_float32_equals_one_record_at_a_time(name):
    module, batch = case(name, torch.float32)
    engine = engine_of(module)
    assert relative_error(sums_of(engine, cross_entropy, batch), sums_apart(engine, cross_entropy, batch)) < 1e-5


@pytest.mark.parametrize("name", ["convolutions", "tied language model"])
def test_bf16_autocast_keeps_sums_and_norms_in_float32(name):
    module, batch = case(name, torch.float32)
    engine = engine_of(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, expected = sums_of(engine, cross_entropy, batch), sums_apart(engine, cross_entropy, batch)
    assert all(total.dtype == torch.float32 for total in sums.values())
    assert relative_error(sums, expected) < 3e-2 and norm_of(sums) <= B * 0.1 * (1 + 1e-6)


BAD = {"nan": math.nan, "inf": math.inf, "large": 1e30}
ODD_RECORDS = [
    *((name, bad) for name in ("mlp", "drawing") for bad in (*BAD, "label")),
    ("branching", "inf"), ("pooled", "nan"), ("attention with its weights", "large"), ("words", "index"),
]  # fmt: skip


@pytest.mark.parametrize("name, bad", ODD_RECORDS)
def test_an_odd_record_contributes_nothing_and_moves_no_other(name, bad):
    """Nor the next chunk. A graph that draws random numbers sets its gradients to zero; others run again without it. A
    large one is a record like any other."""
    module, (x, y) = case(name, torch.float32)
    engine = engine_of(module)
    before = sums_of(engine, cross_entropy, (x, y))
    odd = x.clone(), y.clone()
    odd[bad == "label"][2].view(-1)[0] = BAD.get(bad, 11)
    others = rows_of((x, y), torch.arange(B) != 2)
    expected = sums_apart(engine, cross_entropy, others)
    found = sums_of(engine, cross_entropy, odd)
    if bad == "large":
        assert norm_of(found, expected) <= 0.1 * (1 + 1e-5)
    else:
        assert relative_error(found, expected) < 1e-5
    if bad in ("label", "index"):
        engine._warned.clear()
        with pytest.warns(UserWarning, match="they contribute nothing"):
            engine.add_chunk(cross_entropy, stacked(odd), B)
    assert engine.step.mode == (LOOP if name == "branching" else TRACED)
    assert relative_error(sums_of(engine, cross_entropy, (x, y)), before) < 1e-6


class Changing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.head, self.change = nn.Linear(8, 3), change

    def forward(self, x):
        self.change(self.head.weight, x)
        return self.head(x)


CHANGES = {
    "in place": lambda weight, x: weight.detach().clamp_(-0.1, 0.1),
    "through data": lambda weight, x: weight.data.clamp_(-0.1, 0.1),
    "by what a record holds": lambda weight, x: weight.data.mul_(x.abs().max().item()),
}


@pytest.mark.parametrize("way", CHANGES)
def test_a_parameter_that_is_changed_inside_training_step_is_refused_by_name(way):
    engine = engine_of(nn.Sequential(nn.Identity(), Changing(CHANGES[way])))
    with pytest.raises(ConfigError, match=r"1\.head\.weight is changed inside training_step"):
        sums_of(engine, cross_entropy, rows())


def test_a_batch_that_cannot_be_split_is_refused():
    module, (x, y) = case("mlp")
    engine = engine_of(module)
    engine.begin()
    with pytest.raises(ConfigError, match=r"shape \(8, 6\).*first dimension"):
        engine.add_chunk(cross_entropy, (x.T, y), B)


def test_what_is_no_tensor_is_the_same_for_all_records():
    def loss_of(module, one):
        return cross_entropy(lambda x: one[2] * module(x), one)

    module, batch = case("mlp")
    engine = engine_of(module)
    engine.begin()
    with pytest.warns(UserWarning, match="a batch holds a float besides tensors"):
        engine.add_chunk(loss_of, stacked((*batch, 2.0)), B)
    assert engine.step.mode == LOOP
    assert relative_error(engine._sums, sums_apart(engine, loss_of, (*batch, 2.0))) < 1e-9


class Cancelling(nn.Module):
    """Two positions whose gradients cancel but for a hundredth, so that norms from Gram matrices are larger than
    others; of some kinds of records a little more is asked."""

    def __init__(self, more):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.zeros(256, 256)), nn.Parameter(torch.ones(10, 1))
        self.more = more

    def forward(self, record):
        x, g, kind = record
        return (F.linear(x, self.weight) * g).sum() + 1e-6 * self.more(kind, self.table)


def caught(kind, table):
    if kind.any():
        try:
            torch.linalg.cholesky(-torch.eye(2) * kind.abs().sum())
        except RuntimeError:
            return table.sum()
    return table.sum()


ODD = {
    "two out of range, at the ends": (lambda kind, table: F.embedding(kind, table).sum(), [[99], *[[0]] * 20, [99]]),
    "PyTorch refuses one": (
        lambda kind, table: table.sum() + torch.linalg.cholesky(torch.eye(2) * (0.5 - kind.max())).sum(),
        [[1], *[[0]] * 20],
    ),
    "one catches an error": (caught, [[1], *[[0]] * 20]),
    "one has a backward pass": (
        lambda kind, t: (torch.autograd.grad(t.square().sum(), t)[0] if kind.any() else t).sum(),
        [[1], *[[0]] * 20],
    ),
    "one returns fewer": (lambda kind, table: torch.unique(kind).float().sum() * table.sum(), [[1, 1], *[[0, 1]] * 20]),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_moves_no_norm(what):
    """Be it in their chunk or in an earlier one: else they would move by some tenths of S each."""
    more, kinds = ODD[what]
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(1, 1, 256, generator=generator).expand(len(kinds), 2, 256).clone() for _ in range(2))
    g[:, 1] = -0.99 * g[:, 0]
    whole, S, found = (x, g, torch.tensor(kinds)), 0.01, []
    for chunks in ([slice(None)], [slice(1, None)], [slice(0, 1), slice(1, None)]):
        engine = engine_of(Cancelling(more), S)
        engine.begin()
        with nothing_shown():
            for some in chunks:
                engine.add_chunk(nn.Module.__call__, rows_of(whole, some), len(x[some]))
        found.append({"weight": engine._sums["weight"]})
    assert all(norm_of(one, found[1]) <= S * (1 + 1e-4) for one in found)


class Numberless:
    """Has no attributes, and says so in its own way, as pydantic's placeholders do."""

    __slots__ = ()

    def __getattr__(self, name):
        raise ValueError(name)


HELD = {
    "a masked array": lambda: np.ma.array([1, 2], mask=[0, 1]),
    "a conjugate": lambda: torch.ones(2, dtype=torch.cfloat).conj(),
    "a lazy module, unregistered": lambda: [nn.LazyLinear(2)],
    "what refuses": Numberless,
    "a class that holds it": lambda: type("Holder", (), {"held": Numberless()})(),
}


@pytest.mark.parametrize("what", HELD)
def test_what_a_model_holds_ends_no_job(what):
    module = nn.Linear(3, 1)
    with nothing_shown():
        module.held = HELD[what]()
    engine, step = engine_of(module), TrainingStep.of(lambda module, x: module(x).sum(), module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(2):
            engine.begin(t)
            engine.add_chunk(step, torch.randn(4, 3), 4)
            engine.step.trace_again(step, epoch_begins=True)
    assert engine._sums["weight"].any()
