"""The step traced for one record: what is traced, refused or run one record at a time; graphs do what the step does."""

import os
import random
import subprocess
import sys
import warnings
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from plans import plan_of
from reference import clipped_sums, stacked
from test_clipped_sums import relative_error
from torch import nn
from torch.nn import functional as F

from dpexp._torch_compat import unbatched
from dpexp.errors import ConfigError
from dpexp.privacy.gradients import lifted
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.round import PrivateRound
from dpexp.privacy.sampling.training_data import Memory

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


def sums_of_module(engine, loss_of, batch, size=N):
    """Of a loss of the module, or the copy of it, that is given."""
    engine.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.add_chunk(loss_of, batch, size)
    return {name: total.clone() for name, total in engine._sums.items()}


def cross_entropy(module, one):
    return F.cross_entropy(nn.Sequential.forward(module, one[0]), one[1])


# What is traced, and why not


class Mixing(torch.autograd.Function):
    """A rule for vmap that mixes records, of which no use is made."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return x - x.mean(0), 0


@torch.library.custom_op("dpexp_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, g: 2 * g)


def compressed(y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t / t.abs().max(), lambda t: t):
        return y.exp()


def logged(y):
    told = {"loss": y.sum().item(), "scores": y.detach().numpy()}
    return y + 0 * len(told)


def caught(y):
    try:
        return y if y.sum() > 0 else 2 * y
    except Exception:
        return y


def through_numpy(y):
    return y * float(np.abs(y.detach().numpy()).max() + 1)


def texted(y):
    return y * (2 if "-" in f"{y.detach()}" else 1)


HELD, GENERATOR = torch.zeros(4), torch.Generator()
STEPS = {  # a change of the scores; the mode and a part of the reason, or the refusal
    "a rule for vmap": (Mixing.apply, TRACED, ""),
    "saved tensors": (compressed, TRACED, ""),
    "a number for a logger": (logged, TRACED, ""),
    "a branch": (lambda y: y if y.sum() > 0 else 2 * y, LOOP, "a record's data (__bool__)"),
    "a number": (lambda y: y * y.sum().item(), LOOP, "a product instead of .item()"),
    "an array": (through_numpy, LOOP, "a record's data"),
    "text": (texted, LOOP, ""),
    "a length": (lambda y: y[:, : int((y > 0).sum()) + 1].sum(1, True) * y, LOOP, "a record's data (__int__)"),
    "a mask": (lambda y: y + y[y > 0].sum(), LOOP, "a shape depends on a record's data"),
    "an error that is caught": (caught, LOOP, "catches an error"),
    "an error for some": (lambda y: y + torch.linalg.inv(torch.eye(3) + y.mT @ y).sum(), LOOP, "for some records"),
    "Python's generator": (lambda y: y + 0 * random.random(), LOOP, "Python's or NumPy's generator"),
    "NumPy's generator": (lambda y: y + 0 * np.random.rand(), LOOP, "Python's or NumPy's generator"),
    "an operator of its own": (doubled, LOOP, "dpexp_tests.doubled"),
    "a generator of its own": (lambda y: y + torch.randn(3, generator=GENERATOR), "keeps state of a record", ""),
    "a tensor of its own": (lambda y: y + HELD.data[1:].add_(1)[0], "keeps state of a record", ""),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_is_traced_run_one_record_at_a_time_or_refused(what):
    change, mode, reason = STEPS[what]
    module, _ = classifier()
    engine, batch = engine_of(module), rows()

    def loss_of(module, one):
        return F.cross_entropy(change(module(one[0])), one[1])

    if mode not in (TRACED, LOOP):
        with pytest.raises(ConfigError, match=mode):
            sums_of_module(engine, loss_of, batch)
        return
    found = sums_of_module(engine, loss_of, batch)
    assert engine.mode == mode and reason in engine.reason, engine.reason
    leaves = tuple(part[:, 0] for part in batch)
    assert relative_error(found, clipped_sums(engine.plan, module, lambda one: loss_of(module, one), leaves, N)) < 1e-5


# Two traces


@contextmanager
def setting(module, **values):
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    yield
    vars(module).update(before)


@pytest.mark.parametrize("within, mode", [({"epoch": 0}, TRACED), ({"epoch": 0, "step": 5}, LOOP), (None, LOOP)])
def test_a_step_may_read_the_epoch_but_no_number_that_changes_within_one(within, mode):
    module, _ = classifier()
    module.epoch, module.step, calls = 0, 0, [0]

    def loss_of(m, one):
        calls[0] += within is None
        return cross_entropy(m, one) * (1 + m.epoch + m.step + calls[0])

    engine, batch = engine_of(module, clip_norm=1e4), rows()
    chunk, last = Chunk.of(loss_of, batch, N), dict.fromkeys(within or ("epoch", "step"), 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            engine.step.decide(chunk, lambda: setting(module, **last), lambda: setting(module, **within or {}))
        except ConfigError:
            assert within is None  # one at a time, it differs after other records
            return
    assert engine.mode == mode
    if mode == TRACED:
        first = sums_of_module(engine, loss_of, batch)
        module.epoch = 1
        engine.step.trace_again(loss_of, epoch_begins=True)
        second = sums_of_module(engine, loss_of, batch)
        assert relative_error(second, {name: 2 * total for name, total in first.items()}) < 1e-5


# Shapes first met in a round


def longer(count=2):
    return torch.ones(count, 1, 2, 8), torch.zeros(count, 1, 2, dtype=torch.long)


def flat_loss(module, one):
    return F.cross_entropy(nn.Sequential.forward(module, one[0]).flatten(0, -2), one[1].flatten())


def test_a_new_shape_ends_a_job_whose_step_has_changed_unseen():
    """Its records would be processed by another step if the shape had been met before."""
    module, _ = classifier()

    def loss_of(module, one):
        return flat_loss(module, one) * float(os.environ["FACTOR"])

    engine = engine_of(module)
    with mock.patch.dict(os.environ, FACTOR="1"):
        sums_of_module(engine, loss_of, rows())
        sums_of_module(engine, loss_of, longer(), 2)
        os.environ["FACTOR"] = "0.5"
        longest = torch.ones(2, 1, 3, 8), torch.zeros(2, 1, 3, dtype=torch.long)
        with pytest.raises(ConfigError, match="has changed since it was last traced"):
            sums_of_module(engine, loss_of, longest, 2)
    assert engine.mode == TRACED


LONGEST = {
    "attribute": lambda m, length: setattr(m, "longest", max(m.longest, length)) or m.longest,
    "list": lambda m, length: m.lengths.append(length) or max(m.lengths),
    "dictionary": lambda m, length: 1 + m.order.setdefault(length, len(m.order)),
}


@pytest.mark.parametrize("kept", LONGEST)
def test_the_trace_of_a_new_shape_leaves_nothing_behind(kept):
    """The others' step would else depend on which shapes there are."""
    module, _ = classifier()
    module.longest, module.lengths, module.order = 1, [1], {1: 0}

    def loss_of(m, one):
        return flat_loss(m, one) / LONGEST[kept](m, one[0].shape[-2])

    engine, batch = engine_of(module, clip_norm=100.0), rows()
    before = sums_of_module(engine, loss_of, batch)
    assert engine.mode == TRACED, engine.reason
    assert sums_of_module(engine, loss_of, longer(), 2)["0.weight"].any()
    engine.step.trace_again(loss_of, epoch_begins=True)
    after = sums_of_module(engine, loss_of, batch)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert module.longest == 1 and module.lengths == [1] and module.order == {1: 0}


def test_a_record_contributes_the_same_whichever_shape_decides_the_mode():
    module, _ = classifier()

    def loss_of(module, one):
        return flat_loss(module, one) * (float(one[0].sum()) if one[0].dim() > 2 else 1.0)

    sums, modes = [], []
    for chunks in ((rows(), longer()), (longer(), rows())):
        engine = engine_of(module)
        engine.begin(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for chunk in chunks:
                engine.add_chunk(loss_of, chunk, len(chunk[1]))
        sums.append(dict(engine._sums))
        modes.append(engine.mode)
        engine.end()
    assert modes == [TRACED, LOOP] and relative_error(*sums) < 1e-6


# Rows


@pytest.mark.parametrize("drawing", [False, True])
@pytest.mark.parametrize("bad", ["nan", "inf", "large", "label"])
def test_an_odd_row_contributes_nothing_and_moves_no_other(bad, drawing):
    """A graph that draws random numbers sets its gradients to zero; others run again without it."""
    module, loss_of = classifier(nn.Dropout(0.0) if drawing else nn.Identity())
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


def test_records_that_are_not_finite_by_chance_add_nothing():
    """They draw a mask of which nothing is left, whatever they hold."""
    module, _ = classifier()

    def loss_of(m, one):
        mask = (torch.rand(3) < 0.4).float()
        return cross_entropy(m, one) * mask.sum() / mask.sum()

    engine, batch = engine_of(module), rows()
    for _ in range(4):
        found = sums_of_module(engine, loss_of, batch)
        finite = int(engine.observations[0]["loss"].isfinite().sum())
        norm = sum(float(total.square().sum()) for total in found.values()) ** 0.5
        assert engine.mode == TRACED and 0 < finite < N and 0 < norm <= finite * S


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
    assert engine.mode == "traced" and len(engine.step._usual_shape._by_rows) == len(sizes)


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


def of_the_first_scale(x):
    """As int8 in PyTorch's vmap: the first record's largest number is the scale of all."""
    return torch.quantize_per_tensor_dynamic(x, torch.qint8, False).dequantize()


def without_full_rank(x):
    """The residuals of all are empty if one has none."""
    return x * (1 + torch.linalg.lstsq(x.mT, x.mT[:, :1] + 1, driver="gelsd").residuals.sum())


def filled_from_the_end(x):
    """PyTorch's vmap lays the records side by side, and counts from there."""
    return torch.index_fill(x, 1, -2 + (x[0, :1] > 0).long(), 5.0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("odd", [of_the_first_scale, without_full_rank, filled_from_the_end])
def test_an_operator_that_vmap_gets_wrong_never_takes_records_together(odd, known, monkeypatch):
    """By its name; and were it not known, by the proof."""
    if not known:
        monkeypatch.setattr(lifted, "_WRONG", set())
    module, loss_of = classifier()
    x, y = rows()
    x[0] *= 50
    x[5] = 0
    sums = []
    for size in (N, 1):
        engine = engine_of(module)
        for k in range(0, N, size):
            some = x[k : k + size], y[k : k + size]
            sums.append(sums_of(engine, lambda one: loss_of((odd(one[0]), one[1])), some, size))
        assert engine.mode == LOOP, engine.mode
    for name, total in sums[0].items():
        assert torch.allclose(total, sum(one[name] for one in sums[1:]), atol=1e-6), name


def test_an_operator_that_mixes_records_if_one_is_not_finite_is_found_by_the_proof(monkeypatch):
    """No comparison with single records shows it."""

    def mixing(x):
        return torch.relu(x) + 0 * unbatched(x).sum()

    monkeypatch.setitem(lifted.LIFTED, torch.ops.aten.relu.default, mixing)
    module, loss_of = classifier()
    engine = engine_of(module)
    sums_of(engine, loss_of, rows())
    assert engine.mode == LOOP and "depends on another record" in engine.reason


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


def test_what_is_hidden_by_weights_of_zero_is_found():
    """A gate of zero times a layer of zeros: the proof moves the weights."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.zeros_(module[0].weight)
    module.register_parameter("gate", nn.Parameter(torch.zeros(())))
    x = torch.randint(-9, 9, (N, 1, 8)).short()
    y = torch.randint(3, (N, 1))

    def loss_of(one):
        scale = one[0].float().abs().amax() / 127
        kept = torch.quantize_per_tensor(one[0].float(), scale, torch.zeros((), dtype=torch.int), torch.qint8)
        return F.cross_entropy(module[1](one[0].float() + module.gate * module[0](kept.dequantize())), one[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifted, "_WRONG", set())
        engine = engine_of(module)
        sums_of(engine, loss_of, (x, y))
    assert engine.mode == LOOP and "depends on another record" in engine.reason


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


@pytest.mark.parametrize("padding", [-100, 5])
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


def test_records_are_copied_whatever_their_batch_looks_like_in_memory():
    batch = torch.arange(96.0).view(8, 12).t()  # records lie across one another
    chunk = Chunk.of(lambda one: one, (batch,), 12)
    assert torch.equal(chunk.padded(15).tensors[0], torch.cat([batch, batch[:1].expand(3, 8)]))
    assert torch.equal(chunk.rows(torch.tensor([3, 1])).tensors[0], batch[[3, 1]])
    records = SyntheticRecords().records(chunk, 12, 0).tensors[0]
    assert len(records.unique()) == records.numel()


def test_processes_trace_the_same_graph():
    """Whatever order their sets have."""
    code = (
        "import torch; from torch import nn; import test_one_record as t; torch.manual_seed(0)\n"
        "m = nn.Linear(300, 200); e = t.engine_of(m)\n"
        "t.sums_of(e, lambda x: m(x).square().sum(), torch.randn(12, 1, 8, 300))\n"
        "assert e.mode == t.TRACED; print(e.step.digest)"
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


def test_a_shape_that_cannot_be_traced_may_come_first_in_a_round():
    """It runs one record at a time, though the job is traced."""
    module = nn.Linear(1, 1, bias=False).double()

    def loss_of(one):
        factor = 2 if one.shape[-1] == 3 and float(one.sum()) > 0 else 1
        return (module.weight * one).sum() * factor

    engine = engine_of(module, clip_norm=100.0)
    sums_of(engine, loss_of, torch.ones(N, 4).double())
    assert engine.mode == "traced"
    (found,) = sums_of(engine, loss_of, torch.ones(N, 3).double(), t=1).values()
    assert found.item() == pytest.approx(6 * N)
