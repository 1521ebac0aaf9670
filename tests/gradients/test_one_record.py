"""The traced pass: graphs do what the step does, keep records apart, and refuse what they cannot prove."""

import os
import subprocess
import sys
import warnings
from collections import OrderedDict
from unittest import mock

import numpy as np
import pytest
import torch
from plans import plan_of
from reference import clipped_sums, stacked
from test_clipped_sums import relative_error
from torch import nn
from torch.nn import functional as F

from dpexp.errors import ConfigError
from dpexp.privacy.gradients import interception
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.step import LOOP
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.training_data import Memory
from dpexp.privacy.state_checks import StateFound

N, S = 12, 0.1


def engine_of(module, clip_norm=S, n=4 * N, q=0.25, **options):
    plan = plan_of(module, n=n, q=q, steps=9, noise_multiplier=1.0, clip_norm=FixedClipNorm(clip_norm), **options)
    return PrivateRound(plan, module, GaussianNoise(), observe=True)


def sums_of(engine, loss_of, batch, size=N, t=0):
    engine.begin(t)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.add_chunk(lambda _, one: loss_of(one), batch, size)
    return {name: total.clone() for name, total in engine._sums.items()}


def traced_engine(module, loss_of, **options):
    """After a first sample."""
    engine = engine_of(module, **options)
    sums_of(engine, loss_of, rows())
    assert engine.mode == "traced", engine.reason
    return engine


def classifier(*layers):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *layers, nn.Linear(16, 3))
    return module, lambda one: F.cross_entropy(module(one[0]), one[1])


def rows(count=N):
    generator = torch.Generator().manual_seed(1)
    return stacked((torch.randn(count, 8, generator=generator), torch.randint(3, (count,), generator=generator)))


def test_a_graph_does_what_the_step_does_to_the_last_bit():
    """With dropout, which draws the same numbers from the same state."""
    module, loss_of = classifier(nn.Dropout(0.5))
    engine, batch = traced_engine(module, loss_of), rows()
    state = torch.get_rng_state()
    traced = sums_of(engine, loss_of, batch)
    torch.set_rng_state(state)
    engine.step.mode = "vmap"
    written = sums_of(engine, loss_of, batch)
    assert all(torch.equal(traced[name], written[name]) for name in traced)
    assert any(not torch.equal(traced[name], total) for name, total in sums_of(engine, loss_of, batch).items())


def whole_numbers(*shape):
    """Whose products float32 holds as they are."""
    return torch.randint(-8, 8, (1, *shape)).float()


LAYERS = {
    "linear": (lambda: nn.Linear(256, 256, bias=False), lambda: whole_numbers(1, 256).expand(1, 2, 256)),
    "embedding": (lambda: nn.Embedding(5000, 256), lambda: torch.full((1, 2), 7)),
    "convolution": (lambda: nn.Conv2d(256, 256, 1, bias=False), lambda: whole_numbers(256, 1, 1).expand(1, 256, 1, 2)),
}


def cancelling(layer):
    """A module, and records whose gradients at two positions cancel but for 2^-18."""
    torch.manual_seed(0)
    make, of_one = LAYERS[layer]
    module, x = make(), of_one()
    x = x.repeat(N, *[1] * (x.dim() - 1))
    signs = 1024 * torch.tensor([1.0, -1 + 2**-18])
    g = whole_numbers(256)[0]
    g = g[:, None] * signs if "convolution" in layer else signs[:, None] * g
    g = g.reshape(1, *module(x[:1]).shape[1:]).repeat(N, *[1] * (x.dim() - 1 + (layer == "embedding")))
    return module, lambda one: (module(one[0]) * one[1]).sum(), (x[:, None], g)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_that_almost_cancel_are_clipped_as_in_float64(layer):
    """Such rows go through a graph of exact norms."""
    module, loss_of, batch = cancelling(layer)
    found = []
    for mode in (None, LOOP):
        engine = engine_of(module)
        engine.step.mode = mode
        found.append(sums_of(engine, loss_of, batch)["weight"].double())
        assert engine.mode == (mode or "traced"), engine.reason
    assert found[0].norm() <= N * S * (1 + 1e-6) and found[1].norm() > 0.999 * N * S
    assert (found[0] - found[1]).norm() < 1e-4 * N * S


@pytest.mark.parametrize("replaced", [0, N - 1])
def test_a_doubtful_row_leaves_the_norms_of_others_as_they_are(replaced):
    module, _, (x, g) = cancelling("linear")
    plain = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    dropped = nn.Dropout(0.5)

    def loss_of(one):
        return (dropped(module(one[0])) * one[1]).sum()

    engine = engine_of(module)
    sums_of(engine, loss_of, (plain, g))
    assert engine.mode == "traced", engine.reason
    state, norms = torch.get_rng_state(), []
    for odd in (plain[replaced], x[replaced]):
        some = plain.clone()
        some[replaced] = odd
        torch.set_rng_state(state)
        sums_of(engine, loss_of, (some, g))
        norms.append(engine.observations[0]["norm/all"])
        after = torch.get_rng_state()
    others = torch.arange(N) != replaced
    assert torch.equal(norms[0][others], norms[1][others]) and not torch.equal(norms[0], norms[1])
    torch.set_rng_state(state)
    sums_of(engine, loss_of, (plain, g))
    assert torch.equal(torch.get_rng_state(), after)  # whether or not a row went through the exact graph


@pytest.mark.parametrize("bad", ["nan", "inf", "large", "label"])
def test_an_odd_row_contributes_nothing_and_moves_no_other(bad):
    module, loss_of = classifier()
    engine, (x, y) = traced_engine(module, loss_of), rows()
    x, y = x.clone(), y.clone()
    if bad == "label":
        y[5] = 7
    else:
        x[5] = {"nan": torch.nan, "inf": torch.inf, "large": 1e30}[bad]
    found = sums_of(engine, loss_of, (x, y))
    keep = torch.arange(N) != 5
    expected = clipped_sums(engine.plan, module, loss_of, (x[keep, 0], y[keep, 0]), N - 1)
    if bad == "large":  # a finite record, clipped to S
        assert sum(float((found[n] - expected[n]).norm()) ** 2 for n in found) ** 0.5 <= S * (1 + 1e-5)
    else:
        assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("size", [1, 3 * N])
def test_padding_adds_nothing(size):
    module, loss_of = classifier()
    engine, batch = engine_of(module, n=400, q=0.1), rows(size)
    found = sums_of(engine, loss_of, batch, size)
    assert engine.mode == "traced", engine.reason
    expected = clipped_sums(engine.plan, module, loss_of, tuple(part[:, 0] for part in batch), size)
    assert relative_error(found, expected) < 1e-5


class Mixing(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(0), 0


_count = [0.0]


@torch.library.custom_op("dpexp_tests::counting", mutates_args=())
def counting(x: torch.Tensor) -> torch.Tensor:
    _count[0] += 1
    return x + _count[0]


counting.register_autograd(lambda ctx, g: g)
HELD = torch.zeros(4)


def kept_in_a_view(y):
    HELD[1:].view(3)[0].add_(1)
    return y + HELD[1]


def kept_through_data(y):
    HELD.data.add_(1)
    return y + HELD[0]


def quantised(y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t / t.abs().max(), lambda t: t):
        return y.exp()


def own_generator(y):
    return y + torch.randn(y.shape, generator=_generator)


_generator = torch.Generator()


@pytest.mark.parametrize("odd", [Mixing.apply, counting, kept_in_a_view, kept_through_data, quantised, own_generator])
def test_operations_that_could_mix_records_are_not_traced(odd):
    """It is refused, or runs as written, one record at a time, with the right sums."""
    module, _ = classifier()
    engine, batch = engine_of(module), rows()

    def loss_of(one):
        return F.cross_entropy(odd(module(one[0])), one[1])

    try:
        found = sums_of(engine, loss_of, batch)
    except StateFound:
        return
    assert engine.mode != "traced"
    expected = clipped_sums(engine.plan, module, loss_of, tuple(part[:, 0] for part in batch), N)
    assert relative_error(found, expected) < 1e-5


def test_the_training_data_is_no_constant_of_a_graph():
    module, _ = classifier()
    x, y = rows()
    plan = plan_of(module, n=4 * N, q=0.25, steps=1, noise_multiplier=1.0)
    engine = PrivateRound(plan, module, GaussianNoise(), data_memory=Memory([x]))
    with pytest.raises(ConfigError, match="reads the training data itself"):
        sums_of(engine, lambda one: F.cross_entropy(module(one[0] - x[3:].mean(0)), one[1]), (x, y))


def test_products_of_low_precision_make_no_norm_too_small():
    module, loss_of = classifier()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        engine = engine_of(module, clip_norm=1e-3)
        for i in range(N):
            x, y = rows()
            found = sums_of(engine, loss_of, (x[i : i + 1], y[i : i + 1]), 1)
            assert sum(float(total.double().square().sum()) for total in found.values()) ** 0.5 <= 1e-3
    finally:
        torch.set_float32_matmul_precision(before)


def test_norms_of_a_step_under_autocast_are_in_full_precision():
    """Positions whose gradients all but cancel: norms by products in bfloat16 let a record add 1.28 times S."""
    torch.manual_seed(7)
    x, weights = torch.randn(1, 1, 1, 64) + 0.06 * torch.randn(1, 1, 4, 64), torch.randn(1, 1, 64)
    module = nn.Linear(64, 64, bias=False)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    engine = engine_of(module, clip_norm=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = sums_of(engine, lambda one: (10 * module(one[0]).float() * one[1] * sign).sum(), (x, weights), 1)
    assert engine.mode == "traced", engine.reason
    assert 0.99 < float(found["weight"].norm()) <= 1.0


def test_a_graph_made_for_another_size_gives_what_records_give():
    """Also where a layer is as wide as a sample is large."""
    module, loss_of = classifier(nn.Linear(16, N), nn.LayerNorm(N), nn.Linear(N, 16))
    module.double()
    engine, sizes = engine_of(module), (N, 1, 2, 5, N + 1, 2 * N + 1)
    x, y = torch.randn(3 * N, 1, 8).double(), torch.randint(0, 3, (3 * N, 1))
    for size in sizes:
        found = sums_of(engine, loss_of, (x[:size], y[:size]), size)
        expected = clipped_sums(engine.plan, module, loss_of, (x[:size, 0], y[:size, 0]), size)
        assert relative_error(found, expected) < 1e-12
    assert engine.mode == "traced" and len(engine.step.graphs._graphs) == len(sizes)


def test_chunks_of_another_size_run_no_code_of_the_steps():
    """Where a counter, or a generator, of its own could decide what it does."""
    module, _ = classifier(nn.Dropout(0.5))
    module.extra = nn.Linear(8, 3)
    is_next = [False]

    def loss_of(one):
        loss = F.cross_entropy(nn.Sequential.forward(module[:-1], one[0]), one[1]) + 0 * module.extra.bias.sum()
        if is_next[0]:
            is_next[0] = False
            loss = loss + F.cross_entropy(module.extra(one[0]), one[1])
        return loss

    engine, batch = traced_engine(module, loss_of), rows()
    is_next[0] = True
    found = sums_of(engine, loss_of, tuple(part[:5] for part in batch), 5)
    assert is_next[0] and found["0.weight"].any() and not found["extra.weight"].any()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_record_that_is_not_finite_needs_no_trace(dropout):
    """Though the step is another one by now, it adds nothing, and the others what they add without it."""
    module, _ = classifier(nn.Dropout(dropout))
    factor = [1.0]

    def loss_of(one):
        return F.cross_entropy(nn.Sequential.forward(module, one[0]), one[1]) * factor[0]

    engine, (x, y) = traced_engine(module, loss_of), rows()
    state = torch.get_rng_state()
    whole = sums_of(engine, loss_of, (x, y))
    factor[0] = 0.5
    torch.set_rng_state(state)
    found = sums_of(engine, loss_of, (torch.cat([x[:1] * torch.nan, x[1:]]), y))
    moved = sum(float((whole[name] - found[name]).square().sum()) for name in whole) ** 0.5
    assert 0 < moved <= S * (1 + 1e-6)


def longer(count=2):
    return torch.ones(count, 1, 2, 8), torch.zeros(count, 1, 2, dtype=torch.long)


def flat_loss(module, one):
    return F.cross_entropy(nn.Sequential.forward(module, one[0]).flatten(0, -2), one[1].flatten())


def test_a_new_shape_ends_a_job_whose_step_has_changed_unseen():
    """Its records would be processed by another step if the shape had been met before."""
    module, _ = classifier()

    def loss_of(one):
        return flat_loss(module, one) * float(os.environ["FACTOR"])

    engine = engine_of(module)
    with mock.patch.dict(os.environ, FACTOR="1"):
        sums_of(engine, loss_of, rows())
        assert engine.mode == "traced", engine.reason
        engine.step.trace_again(loss_of, 5, epoch_begins=True)
        os.environ["FACTOR"] = "0.5"
        with pytest.raises(StateFound, match="has changed since it was last traced") as raised:
            sums_of(engine, loss_of, longer(), 2)
    assert raised.value.last_clean_round == 5


FACTOR = 1.0


class Settings:
    factor = 1.0


def around():
    factor = [1.0]
    return lambda: factor[0], lambda value: factor.__setitem__(0, value)


@pytest.mark.parametrize(
    ("read", "write"),
    [
        (lambda: FACTOR, lambda value: globals().update(FACTOR=value)),
        (lambda: Settings.factor, lambda value: setattr(Settings, "factor", value)),
        around(),
    ],
    ids=["global", "attribute of a class", "list in a closure"],
)
def test_a_variable_outside_the_modules_that_a_hook_changes_is_read_again(read, write):
    module, _ = classifier()
    engine, batch = engine_of(module, clip_norm=100.0), rows()

    def loss_of(one):
        return flat_loss(module, one) * read()

    before = sums_of(engine, loss_of, batch)
    engine.step.trace_again(loss_of, 1)
    sums_of(engine, loss_of, longer(), 2)
    write(0.5)
    try:
        engine.step.trace_again(loss_of, 2)
        found, more = sums_of(engine, loss_of, batch), sums_of(engine, loss_of, longer(), 2)
        anew = sums_of(engine_of(module, clip_norm=100.0), loss_of, longer(), 2)
    finally:
        write(1.0)
    assert engine.mode == "traced"
    assert relative_error({name: 2 * total for name, total in found.items()}, before) < 1e-6
    assert relative_error(more, anew) < 1e-6


@pytest.mark.parametrize("begins", [False, True])
def test_a_count_of_the_steps_own_must_change_nothing(begins):
    """Whenever it does: how often a step is traced depends on the shapes of private records."""
    module, _ = classifier()
    module.calls = 0

    def loss_of(one):
        module.calls += 1
        return F.cross_entropy(nn.Sequential.forward(module, one[0]), one[1]) * (
            2.0 if begins and module.calls > 100 else 1.0
        )

    engine = engine_of(module)
    sums_of(engine, loss_of, rows())
    assert (engine.mode == "traced") == (not begins) and module.calls < 100
    assert not begins or "the step is not the same each time it runs" in engine.reason


LENGTHS = {"longest": 1}


class Longest:
    length = 1


def kept_in_buffer(module, length):
    module.scale = torch.ones(max(length, len(module.scale)))
    return module.scale.sum()


LONGEST = {
    "attribute": lambda m, length: setattr(m, "longest", max(m.longest, length)) or m.longest,
    "class": lambda m, length: setattr(Longest, "length", max(Longest.length, length)) or Longest.length,
    "buffer": kept_in_buffer,
    "list": lambda m, length: m.lengths.append(length) or max(m.lengths),
    "ordered": lambda m, length: 1 + m.order.setdefault(length, len(m.order)),
    "array": lambda m, length: m.array.put(0, max(m.array[0], length)) or m.array[0],
    "global": lambda m, length: LENGTHS.update(longest=max(LENGTHS["longest"], length)) or LENGTHS["longest"],
}


@pytest.mark.parametrize("kept", LONGEST)
def test_the_trace_of_a_new_shape_leaves_nothing_behind(kept):
    """The others' step would else depend on which shapes there are."""
    module, _ = classifier()
    module.longest, module.lengths, module.order, module.array = 1, [1], OrderedDict({1: 0}), np.ones(1)
    module.register_buffer("scale", torch.ones(1))

    def loss_of(one):
        return flat_loss(module, one) / LONGEST[kept](module, one[0].shape[-2])

    engine, batch = engine_of(module, clip_norm=100.0), rows()
    before = sums_of(engine, loss_of, batch)
    assert engine.mode == "traced", engine.reason
    longer_ones = sums_of(engine, loss_of, longer(), 2)
    engine.step.trace_again(loss_of, 1, epoch_begins=True)
    after = sums_of(engine, loss_of, batch)
    assert longer_ones["0.weight"].any() and all(torch.equal(after[name], before[name]) for name in before)
    assert LENGTHS == {"longest": 1} and Longest.length == 1


@pytest.mark.parametrize("into", ["buffer", "parameter", "data", "global", "out"])
def test_a_new_shape_writes_to_nothing(into):
    """Neither to what others read nor to what is saved: what a trace cannot undo ends the job before the release."""
    module, _ = classifier()
    module.register_buffer("count", torch.zeros(1))
    own = torch.zeros(1)
    held = module.held = {"tensor": own}

    def loss_of(one):
        if one[0].dim() > 2:
            if into == "parameter":
                with torch.no_grad():
                    module[0].weight.clamp_(-0.01, 0.01)
            elif into == "out":
                torch.add(module.count, 1, out=module.count)
            elif into == "data":
                module.count.data, held["tensor"].data = module.count + 1, held["tensor"] + 1
            else:
                (own if into == "global" else module.count).add_(1)
        return flat_loss(module, one) / (1 + module.count + own).sum()

    engine = engine_of(module)
    usual = sums_of(engine, loss_of, rows())
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    if into != "data":
        with pytest.raises(StateFound, match="keeps state"):
            sums_of(engine, loss_of, longer(), 2)
        return
    sums_of(engine, loss_of, longer(), 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items()) and not own
    engine.step.trace_again(loss_of, 1, epoch_begins=True)
    assert all(torch.equal(total, usual[name]) for name, total in sums_of(engine, loss_of, rows()).items())


@pytest.mark.parametrize("modes", [("traced", "vmap"), ("vmap", "one at a time"), ("traced", "one at a time")])
def test_a_record_contributes_the_same_whichever_shape_decides_the_mode(modes):
    module, _ = classifier()
    invert = lambda x: torch.linalg.inv(torch.eye(x.shape[-2]) + x @ x.mT).sum()  # noqa: E731  # vmap's, not traced
    branch = lambda x: float(x.sum()) * x.sum()  # noqa: E731
    odd = {"traced": torch.sum, "vmap": invert, "one at a time": branch}
    usual, other = (odd[mode] for mode in modes)

    def loss_of(one):
        return flat_loss(module, one) * (other if one[0].dim() > 2 else usual)(one[0])

    sums = {}
    for mode, chunks in zip(modes, ((rows(), longer()), (longer(), rows())), strict=True):
        engine = engine_of(module)
        engine.begin(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for chunk in chunks:
                engine.add_chunk(lambda _, one: loss_of(one), chunk, len(chunk[1]))
        sums[mode] = dict(engine._sums)
        assert engine.mode == mode
        engine.end()
    assert relative_error(*sums.values()) < 1e-6


@pytest.mark.parametrize("dropping", [nn.Identity(), nn.Dropout(0.5)])
def test_records_that_are_not_finite_by_chance_add_nothing(dropping):
    """They draw a mask of which nothing is left, whatever they hold; the others draw what they draw as written."""
    module, loss = classifier(dropping)

    def loss_of(one):
        mask = (torch.rand(3) < 0.4).float()
        return loss(one) * mask.sum() / mask.sum()

    engine, batch = traced_engine(module, loss_of), rows()
    for _ in range(4):
        state = torch.get_rng_state()
        found = sums_of(engine, loss_of, batch)
        assert 0 < int(engine.observations[0]["loss"].isfinite().sum()) < N
        torch.set_rng_state(state)
        engine.step.mode = "vmap"
        written = sums_of(engine, loss_of, batch)
        engine.step.mode = "traced"
        assert all(torch.equal(found[name], written[name]) and written[name].any() for name in found)


@pytest.mark.parametrize("fill", [torch.index_fill, torch.ops.aten.index_fill.int_Scalar])
def test_an_index_below_zero_fills_no_other_record(fill):
    """PyTorch's vmap lays the records side by side, and counts from there."""
    module, loss_of = classifier()
    x, y = rows()
    index = torch.full((N, 1, 1), 2)
    found = []
    for place in (2, -2):
        index[3] = place
        engine = engine_of(module)
        found.append(sums_of(engine, lambda one: loss_of((fill(one[0], 1, one[2][0], 5.0), one[1])), (x, y, index)))
    moved = sum(float((found[0][name] - found[1][name]).square().sum()) for name in found[0]) ** 0.5
    assert moved <= 2 * S * (1 + 1e-6)


def test_a_record_that_runs_by_itself_shows_no_other():
    """`as_strided` with an offset looks at the memory behind a tensor."""
    module, loss_of = classifier()
    x, y = rows()
    index = torch.zeros(N, 1, 1, dtype=torch.long)
    index[2] = 99  # PyTorch refuses it, and so all records of the chunk

    def strided(one):
        seen = torch.as_strided(one[0], (1, 8), (8, 1), 0)
        return loss_of((seen, one[1])) + 0 * torch.zeros(1, 3).scatter_add(1, one[2], one[0][:, :1]).sum()

    sums = []
    for changed in (False, True):
        x = x.clone()
        x[0] = x[0] * 3 if changed else x[0]
        engine = engine_of(module, n=2, q=0.5)
        sums.append(sums_of(engine, strided, (x, y, index)))
    moved = sum(float((sums[0][name] - sums[1][name]).square().sum()) for name in sums[0]) ** 0.5
    assert 0 < moved <= 2 * S * (1 + 1e-6)


def of_the_first_scale(x):
    """As int8 in PyTorch's vmap: the first record's largest number is the scale of all."""
    return torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize()


def without_full_rank(x):
    """The residuals of all are empty if one has none."""
    return x * (1 + torch.linalg.lstsq(x.mT, x.mT[:, :1] + 1, driver="gelsd").residuals.sum())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("odd", [of_the_first_scale, without_full_rank])
def test_an_operator_that_vmap_gets_wrong_never_takes_records_together(odd, known, monkeypatch):
    """By its name; and were it not known, by the proof."""
    if not known:
        monkeypatch.setattr(interception, "WRONG_UNDER_VMAP", set())
    module, loss_of = classifier()
    x, y = rows()
    x[0] *= 50
    x[5] = 0
    sums = []
    for size in (N, 1):
        engine = engine_of(module)
        for k in range(0, N, size):
            found = sums_of(
                engine, lambda one: loss_of((odd(one[0]), one[1])), (x[k : k + size], y[k : k + size]), size
            )
            sums.append(found)
        assert engine.mode.startswith("one at a time"), engine.mode
    for name, total in sums[0].items():
        assert torch.allclose(total, sum(one[name] for one in sums[1:]), atol=1e-6), name


def test_what_is_hidden_by_weights_of_zero_is_found():
    """A gate of zero times a layer of zeros: the proof moves the weights."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.zeros_(module[0].weight)
    gate = nn.Parameter(torch.zeros(()))
    module.register_parameter("gate", gate)
    x = torch.randint(-9, 9, (N, 1, 8)).short()
    y = torch.randint(3, (N, 1))

    def loss_of(one):
        scale = one[0].float().abs().amax() / 127
        kept = torch.quantize_per_tensor(one[0].float(), scale, torch.zeros((), dtype=torch.int), torch.qint8)
        return F.cross_entropy(module[1](one[0].float() + gate * module[0](kept.dequantize())), one[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interception, "WRONG_UNDER_VMAP", set())
        engine = engine_of(module)
        sums_of(engine, loss_of, (x, y))
    assert engine.mode == "one at a time" and "depends on another record" in engine.reason


def test_labels_out_of_range_read_no_memory_outside_the_table():
    """A packed sequence runs as written, where PyTorch's own loss would read what lies there."""
    torch.manual_seed(0)
    lstm, head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)
    module = nn.ModuleList([lstm, head])

    def loss_of(one):
        x, labels, length = one
        packed = nn.utils.rnn.pack_padded_sequence(x, length, batch_first=True)
        scores = head(nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0]).log_softmax(-1)
        return F.ctc_loss(scores.transpose(0, 1), labels, length, torch.tensor([2]))

    x, labels, length = torch.randn(N, 1, 9, 4), torch.randint(1, 5, (N, 1, 2)), torch.full((N, 1), 9)
    labels[3, 0, 1] = 14
    engine = engine_of(module)
    engine.step.public = tuple(part[0] for part in (x, labels, length))
    found = sums_of(engine, loss_of, (x, labels, length))
    others = torch.arange(N) != 3
    without = sums_of(engine, loss_of, (x[others], labels[others], length[others]), N - 1)
    assert engine.mode == LOOP and all(torch.allclose(found[n], without[n], atol=1e-7) for n in found)


@pytest.mark.parametrize("padding", [-1, -100, 5])
def test_padded_labels_of_ctc_are_no_wrong_ones(padding):
    torch.manual_seed(0)
    module = nn.Linear(4, 5)
    x, labels, lengths = torch.randn(N, 1, 9, 4), torch.randint(1, 5, (N, 1, 3)), torch.randint(1, 4, (N, 1))
    padded = torch.where(torch.arange(3) < lengths[..., None], labels, padding)

    def loss_of(one):
        scores = module(one[0]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, one[1], torch.tensor([9]), one[2])

    for mode in (None, LOOP):
        sums = []
        for given in (labels, padded):
            engine = engine_of(module)
            engine.step.mode = mode
            sums.append(sums_of(engine, loss_of, (x, given, lengths)))
        assert all(torch.allclose(sums[0][n], sums[1][n], atol=1e-7) for n in sums[0]) and sums[0]["bias"].any()


def test_a_pass_that_mixes_records_never_takes_them_together(monkeypatch):
    """As `index_fill` does below zero, were it not known: the proof finds it, and vmap of one record is left."""
    monkeypatch.setattr(interception, "WRONG_UNDER_VMAP", interception.WRONG_UNDER_VMAP - {torch.index_fill})
    module, loss_of = classifier()
    x, y = rows()
    index = torch.full((N, 1, 1), 2)
    index[3] = -2
    sums = []
    for size in (N, 1):
        engine = engine_of(module)
        engine.begin()
        for k in range(0, N, size):
            some = (x[k : k + size], y[k : k + size], index[k : k + size])
            engine.add_chunk(lambda one: loss_of((torch.index_fill(one[0], 1, one[2][0], 5.0), one[1])), some, size)
        sums.append(engine._sums)
    assert engine.mode == "one at a time" and "depends on another record" in engine.reason
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def test_records_are_copied_whatever_their_batch_looks_like_in_memory():
    batch = torch.arange(96.0).view(8, 12).t()  # records lie across one another
    chunk = Chunk.of(lambda one: one, (batch,), 12)
    assert torch.equal(chunk.padded(15).tensors[0], torch.cat([batch, batch[:1].expand(3, 8)]))
    assert torch.equal(chunk.rows(torch.tensor([3, 1])).tensors[0], batch[[3, 1]])
    records = SyntheticRecords().records(chunk, 12, 0).tensors[0]
    assert len(records.unique()) == records.numel()


def test_processes_trace_the_same_graph():
    """Whatever order their sets have; of norms from Gram matrices, which may be doubtful."""
    code = (
        "import torch; from torch import nn; import test_traced as t; torch.manual_seed(0)\n"
        "m = nn.Linear(300, 200); e = t.engine_of(m)\n"
        "t.sums_of(e, lambda x: m(x).square().sum(), torch.randn(12, 1, 8, 300))\n"
        "assert e.mode == 'traced'; print(e.step.digest)"
    )
    folder = os.path.dirname(__file__)
    tests = os.path.dirname(folder)
    path = os.pathsep.join([folder, tests, os.path.dirname(tests), os.environ.get("PYTHONPATH", "")])
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    torch.manual_seed(0)
    module = nn.Linear(300, 200)
    engine = engine_of(module)
    sums_of(engine, lambda x: module(x).square().sum(), torch.randn(12, 1, 8, 300))
    assert engine.mode == "traced" and str(engine.step.digest) == other.stdout.split()[-1]
