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
from zoo import B, of, plain, sequences, written

from dpexp.errors import ConfigError
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.plan import clipping, groups


class FrozenAndUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        self.net[1].weight.requires_grad_(False)
        self.unused, self.none = nn.Linear(8, 8), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.net(x) + self.none.sum()


def drawing():
    """Its graph draws random numbers, of which nothing is left."""
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 3))


def exported(name, decomposed):
    module, (x, _) = case(name)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("B")},))
    return (program.run_decompositions() if decomposed else program).module()


MODELS = written.MODELS | sequences.MODELS | {
    "drawing": plain(written.without(drawing), written.rows),
    "frozen and unused": plain(of(FrozenAndUnused), written.rows),
    "exported": plain(lambda _: exported("attention pooling", False), sequences.sequences),
    "exported, decomposed": plain(lambda _: exported("U-Net", True), written.pixels),
}  # fmt: skip
MODELS["convolutions"] = MODELS["channels last"]
NORM = clipping.DimensionClipNorm(0.3)
MECHANISMS = {
    "separate": {"mechanism": clipping.Separate(), "clip_norm": NORM}, "joint": {"mechanism": clipping.Joint(NORM)},
}  # fmt: skip
KINDS = [("separate", "flat"), ("joint", "per_layer"), ("separate", "per_layer"), ("joint", "flat")]


def of_kind(mechanism, grouping):
    return MECHANISMS[mechanism] | {"group": getattr(groups, grouping)()}


def case(name, dtype=torch.float64):
    torch.manual_seed(0)
    model = MODELS[name]
    (x, y), module = model.batch(), model.build(False).to(dtype)
    return module, (x.to(dtype) if x.is_floating_point() else x, y)


CASES = [(name, *kind) for name, kind in zip([*MODELS][-5:-1], KINDS, strict=True)]


@pytest.mark.parametrize("name, mechanism, grouping", [*CASES, ("tied language model", "joint", "per_layer")])
def test_float64_equals_one_record_at_a_time(name, mechanism, grouping):
    """As those of test_models.py."""
    module, batch = case(name)
    engine = engine_of(module, **of_kind(mechanism, grouping))
    assert error_of(engine, cross_entropy, batch) < 1e-9
    assert engine.step.mode == TRACED, engine.step.reason


def error_of(engine, loss_of, batch):
    """The relative error of clipped sums, of all records at once and in smaller chunks."""
    sums, expected = sums_of(engine, loss_of, batch), sums_apart(engine, loss_of, batch)
    norms = [(o[f"norm/{g.name}"], g.S) for o in engine.observations for g in engine.plan.groups
             if f"norm/{g.name}" in o]  # fmt: skip
    assert any((norm > S).any() for norm, S in norms), "the test must clip something to mean anything"
    return max(relative_error(one, expected) for one in (sums, sums_of(engine, loss_of, batch, chunk=4)))


@pytest.mark.parametrize("name", ["convolutions", "attention with its weights"])
def test_bf16_autocast_keeps_sums_and_norms_in_float32(name):
    module, batch = case(name, torch.float32)
    engine = engine_of(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums, expected = sums_of(engine, cross_entropy, batch), sums_apart(engine, cross_entropy, batch)
    assert all(total.dtype == torch.float32 for total in sums.values())
    assert relative_error(sums, expected) < 3e-2 and norm_of(sums) <= B * 0.1 * (1 + 1e-6)


BAD = {"nan": math.nan, "inf": math.inf, "large": 1e30}  # else an index or a label out of range
ODD_RECORDS = [
    *((name, bad) for name in ("MLP, two losses", "drawing") for bad in (*BAD, "label")),
    ("early exits", "inf"), ("convolutions", "nan"), ("attention with its weights", "large"),
    ("tied language model", "index"),
]  # fmt: skip


@pytest.mark.parametrize("name, bad", ODD_RECORDS)
def test_an_odd_record_contributes_nothing_and_moves_no_other(name, bad):
    """Nor the next chunk. A graph that draws random numbers sets its gradients to zero; others run again without it. A
    large one is a record like any other."""
    module, (x, y) = case(name, torch.float32)
    engine = engine_of(module)
    before = sums_of(engine, cross_entropy, (x, y))
    odd = x.clone(), y.clone()
    odd[bad == "label"][2].view(-1)[0] = BAD.get(bad, 99)
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
    assert engine.step.mode == (LOOP if name == "early exits" else TRACED)
    assert relative_error(sums_of(engine, cross_entropy, (x, y)), before) < 1e-6


def test_a_batch_that_cannot_be_split_is_refused():
    module, (x, y) = case("MLP, two losses")
    engine = engine_of(module)
    engine.begin()
    with pytest.raises(ConfigError, match=r"shape \(8, 6\).*first dimension"):
        engine.add_chunk(cross_entropy, (x.T, y), B)


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


ODD = {  # what a record of a kind is asked for beside, and kinds
    "two out of range, at the ends": (lambda kind, table: F.embedding(kind, table).sum(), [[99], *[[0]] * 20, [99]]),
    "PyTorch refuses one": (
        lambda kind, table: table.sum() + torch.linalg.cholesky(torch.eye(2) * (0.5 - kind.max())).sum(),
        [[1], *[[0]] * 20],
    ),
    "one returns fewer": (lambda kind, table: torch.unique(kind).float().sum() * table.sum(), [[1, 1], *[[0, 1]] * 20]),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_moves_no_norm(what):
    """Be it in their chunk or in an earlier one: else they would move by some tenths of S each."""
    more, kinds = ODD[what]
    torch.manual_seed(0)
    x, g = (torch.randn(1, 1, 256).expand(len(kinds), 2, 256).clone() for _ in range(2))
    g[:, 1] = -0.99 * g[:, 0]
    batch, S = (x, g, torch.tensor(kinds)), 0.01

    def sum_of(*chunks):
        engine = engine_of(Cancelling(more), S)
        engine.begin()
        with nothing_shown():
            for some in chunks:
                engine.add_chunk(nn.Module.__call__, rows_of(batch, some), len(x[some]))
        return {"weight": engine._sums["weight"]}

    others = sum_of(slice(1, None))
    for found in (sum_of(slice(None)), sum_of(slice(0, 1), slice(1, None))):
        assert norm_of(found, others) <= S * (1 + 1e-4)


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
