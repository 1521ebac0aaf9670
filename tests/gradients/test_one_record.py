"""The step traced for one record: again where something has changed, for chunks of any size and shape, and proved."""

import os
from functools import partial
from unittest import mock

import pytest
import torch
from jobs import FORKS
from reference import engine_of, norm_of, nothing_shown, relative_error, rows_of, stacked, sums_apart, sums_of
from torch import nn
from torch.nn import functional as F

from dpexp._torch_compat import unbatched
from dpexp.errors import ConfigError
from dpexp.privacy.gradients import factors, lifted
from dpexp.privacy.gradients.chunk import Chunk, SyntheticRecords
from dpexp.privacy.gradients.layer_gradients import DenseGradient
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.gradients.training_step import TrainingStep
from dpexp.privacy.training_memory import Memory

N, S = 12, 0.1
OF_N = {"n": 4 * N, "q": 0.25}  # samples of N records


def classifier(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *layers, nn.Linear(16, 3))


def rows(count=N):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 8, generator=generator), torch.randint(3, (count,), generator=generator)


def longer(length=2):
    return torch.ones(2, length, 8), torch.zeros(2, length, dtype=torch.long)


def loss_of(module, one):
    """Of records of any length. A step may count its records in the module, but not read the count."""
    return F.cross_entropy(nn.Sequential.forward(module, one[0]).flatten(0, -2), one[1].flatten())


def assert_as_alone(engine, loss_of, batch, tolerance=1e-5, mode=TRACED):
    found = sums_of(engine, loss_of, batch)
    assert engine.step.mode == mode, engine.step.reason
    assert relative_error(found, sums_apart(engine, loss_of, batch)) < tolerance


# Two traces


@pytest.mark.parametrize("within, mode", [({"epoch": 0}, TRACED), ({"epoch": 0, "step": 5}, LOOP)])
def test_a_step_may_read_the_epoch_but_no_number_that_changes_within_one(within, mode):
    module = classifier()
    module.epoch = module.step = 0

    def read(m, one):
        return loss_of(m, one) * (1 + m.epoch + m.step)

    engine, step = engine_of(module, 1e4, **OF_N), TrainingStep.of(read, module)
    some, last = (partial(mock.patch.multiple, module, **numbers) for numbers in (within, dict.fromkeys(within, 9)))
    with nothing_shown():
        engine.step.decide(Chunk.of(step, stacked(rows()), N), last, some)
    assert engine.step.mode == mode
    if mode == TRACED:
        first = sums_of(engine, read, rows())
        module.epoch = 1
        engine.step.trace_again(step, epoch_begins=True)
        assert_is_twice(sums_of(engine, read, rows()), first)


def assert_is_twice(sums, others):
    assert relative_error(sums, {name: 2 * total for name, total in others.items()}) < 1e-5


def test_a_new_shape_ends_a_job_whose_step_has_changed_unseen():
    """Its records would be processed by another step if the shape had been met before."""
    engine = engine_of(classifier(), **OF_N)

    def read(module, one):
        return loss_of(module, one) * float(os.environ["FACTOR"])

    with mock.patch.dict(os.environ, FACTOR="1"):
        for batch in (rows(), longer()):
            sums_of(engine, read, batch)
        os.environ["FACTOR"] = "0.5"
        with pytest.raises(ConfigError, match="has changed since it was last traced"):
            sums_of(engine, read, longer(3))
    assert engine.step.mode == TRACED


# Shapes first met in a round


def test_the_trace_of_a_new_shape_leaves_nothing_behind():
    """The others' step would else depend on which shapes there are."""
    module = classifier()
    module.lengths = [1]

    def keeping(m, one):
        m.lengths.append(one[0].shape[-2])
        return loss_of(m, one) / max(m.lengths)

    engine = engine_of(module, 100.0, **OF_N)
    before = sums_of(engine, keeping, rows())
    assert engine.step.mode == TRACED and sums_of(engine, keeping, longer())["0.weight"].any()
    engine.step.trace_again(TrainingStep.of(keeping, module), epoch_begins=True)
    after = sums_of(engine, keeping, rows())
    assert all(torch.equal(after[name], before[name]) for name in before) and module.lengths == [1]


def test_another_function_is_that_of_records_of_all_shapes():
    """Also where it changes those of a shape that is not the usual one alone."""
    module = classifier()

    def of(factor):
        longer_alone = lambda m, one: loss_of(m, one) * (factor if one[0].dim() == 3 else 1.0)  # noqa: E731
        return TrainingStep.of(longer_alone, module)

    engine = engine_of(module, 1e4, **OF_N)
    sums_of(engine, of(1.0), rows())
    first = sums_of(engine, of(1.0), longer())
    engine.step.trace_again(of(2.0))
    assert engine.step.mode == TRACED
    assert_is_twice(sums_of(engine, of(2.0), longer()), first)


def test_a_record_contributes_the_same_whichever_shape_decides_the_mode():
    """What a record of an untraceable shape counts lands in a copy, too."""
    sums, modes, module = [], [], classifier()
    module.seen = []

    def asking(module, one):
        if one[0].dim() == 2:
            return loss_of(module, one)
        module.seen.append(1)
        return loss_of(module, one) * float(one[0].sum())

    for chunks in ((rows(), longer()), (longer(), rows())):
        engine = engine_of(module, **OF_N)
        engine.begin(1)
        with nothing_shown():
            for chunk in chunks:
                engine.add_chunk(asking, stacked(chunk), len(chunk[1]))
        sums.append(dict(engine._sums))
        modes.append(engine.step.mode)
        engine.raise_if_none_contributed()
    assert modes == [TRACED, LOOP] and relative_error(*sums) < 1e-6 and not module.seen


def test_a_shape_that_cannot_be_traced_may_come_first_in_a_round():
    """It runs one record at a time, though the job is traced; or has no loss, and contributes nothing."""
    module = nn.Linear(1, 1, bias=False).double()

    def loss_of(module, one):
        if one.shape[-1] == 5:
            raise RuntimeError("no loss")
        factor = 2 if one.shape[-1] == 3 and float(one.sum()) > 0 else 1
        return (module.weight * one).sum() * factor

    engine = engine_of(module, 100.0, **OF_N)
    sums_of(engine, loss_of, torch.ones(N, 4).double())
    assert engine.step.mode == TRACED
    for t, (width, total) in enumerate(((3, 6), (5, 0)), 1):
        (found,) = sums_of(engine, loss_of, torch.ones(N, width).double(), t=t).values()
        assert found.item() == pytest.approx(total * N)


# Rows


@pytest.mark.parametrize("size", [1, 3 * N])
def test_padding_adds_nothing(size):
    assert_as_alone(engine_of(classifier(), n=400), loss_of, rows(size))


def test_a_graph_made_for_another_size_gives_what_records_give():
    """Also where a layer is as wide as a sample is large."""
    engine = engine_of(classifier(nn.Linear(16, N), nn.LayerNorm(N), nn.Linear(N, 16)).double(), **OF_N)
    x, y = rows(3 * N)
    sizes = (N, 1, 2, 5, N + 1, 2 * N + 1)
    for size in sizes:
        assert_as_alone(engine, loss_of, (x[:size].double(), y[:size]), 1e-12)
    assert len(engine.step._usual_shape._by_rows) == len(sizes)


def test_records_that_are_not_finite_by_chance_add_nothing():
    """They draw a mask of which nothing is left, whatever they hold."""

    def drawing(m, one):
        mask = (torch.rand(3) < 0.4).float()
        return loss_of(m, one) * mask.sum() / mask.sum()

    engine = engine_of(classifier(), **OF_N)
    for _ in range(4):
        found = sums_of(engine, drawing, rows())
        finite = int(engine.observations[0]["loss"].isfinite().sum())
        assert engine.step.mode == TRACED and 0 < finite < N and 0 < norm_of(found) <= finite * S


def test_the_training_data_is_no_constant_of_a_graph():
    x, y = rows()
    engine = engine_of(classifier(), memory=Memory([x]), **OF_N)
    with pytest.raises(ConfigError, match="reads the training data itself"):
        sums_of(engine, lambda m, one: loss_of(m, (one[0] - x[3:].mean(0), one[1])), (x, y))


def test_products_of_low_precision_make_no_norm_too_small():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        engine = engine_of(classifier(), 1e-3, **OF_N)
        for i in range(N):
            assert norm_of(sums_of(engine, loss_of, rows_of(rows(), slice(i, i + 1)))) <= 1e-3
    finally:
        torch.set_float32_matmul_precision(before)


def test_chunks_of_another_size_run_no_code_of_the_steps():
    """Where a counter, or a generator, of its own could decide what it does."""
    calls, engine = [], engine_of(classifier(nn.Dropout(0.5)), **OF_N)

    def counting(m, one):
        calls.append(1)
        return loss_of(m, one)

    sums_of(engine, counting, rows())
    before = len(calls)
    assert sums_of(engine, counting, rows(5))["0.weight"].any() and engine.step.mode == TRACED
    assert len(calls) == before > 0


# What the proof finds


def of_the_first_scale(x):
    """As int8 in PyTorch's vmap: the first record's largest number is the scale of all."""
    return torch.quantize_per_tensor(
        x, x.abs().amax() / 127, torch.zeros((), dtype=torch.int), torch.qint8
    ).dequantize()


def filled_from_the_end(x):
    """PyTorch's vmap lays the records side by side, and counts from there."""
    return torch.index_fill(x, 1, -2 + (x[0, :1] > 0).long(), 5.0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("odd", [of_the_first_scale, filled_from_the_end])
def test_an_operator_that_vmap_gets_wrong_never_takes_records_together(odd, known, monkeypatch):
    """By its name; and were it not known, by the proof."""
    if not known:
        monkeypatch.setattr(lifted, "_WRONG", set())
    x, y = rows()
    x[0] *= 50
    x[5] = 0
    engine = engine_of(classifier(), **OF_N)
    assert_as_alone(engine, lambda m, one: loss_of(m, (odd(one[0]), one[1])), (x, y), mode=LOOP)
    if torch.__version__ < "2.10" and odd is of_the_first_scale:
        assert "quantized nyi in meta tensors" in engine.step.reason  # such a torch cannot trace it
    else:
        assert ("PyTorch's vmap gets" in engine.step.reason) == known


def mixing(x):
    return torch.relu(x) + 0 * unbatched(x).sum()


def halved(x):
    return torch.relu(x) / 2


def without_terms(node, of_records):
    return [factors.Use([node], lambda g: DenseGradient(g / 2))]


WRONG = {
    "mixes if one is not finite": ("depends on another record", lifted.LIFTED, torch.ops.aten.relu.default, mixing),
    "is another under vmap": ("that of the record by itself", lifted.LIFTED, torch.ops.aten.relu.default, halved),
    "has other factors": ("do not give it", vars(lifted), "uses_of", without_terms),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_fault_of_lifting_is_found_by_the_proof(what, monkeypatch):
    reason, place, key, fault = WRONG[what]
    monkeypatch.setitem(place, key, fault)
    engine = engine_of(classifier(), **OF_N)
    sums_of(engine, loss_of, rows())
    assert engine.step.mode == LOOP and reason in engine.step.reason


def test_what_is_hidden_by_weights_of_zero_is_found(monkeypatch):
    """A gate of zero times a layer of zeros: the proof moves the weights."""
    monkeypatch.setattr(lifted, "_WRONG", set())
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.zeros_(module[0].weight)
    module.register_parameter("gate", nn.Parameter(torch.zeros(())))

    def gated(m, one):
        x = one[0].float()
        return F.cross_entropy(m[1](x + m.gate * m[0](of_the_first_scale(x))), one[1])

    engine = engine_of(module, **OF_N)
    sums_of(engine, gated, (torch.randint(-9, 9, (N, 8)).short(), torch.randint(3, (N,))))
    why = "quantized nyi in meta tensors" if torch.__version__ < "2.10" else "depends on another record"
    assert engine.step.mode == LOOP and why in engine.step.reason


# Labels of a CTC loss


def ctc_sums(mode, labels, lengths, some=slice(None)):
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(4, 5), **OF_N)
    engine.step.mode = mode

    def loss_of(m, one):
        x, labels, length = one
        return F.ctc_loss(m(x).log_softmax(-1).transpose(0, 1), labels, torch.tensor([9]), length)

    return sums_of(engine, loss_of, rows_of((torch.randn(N, 9, 4), labels, lengths), some))


@pytest.mark.parametrize("mode", [None, LOOP])
def test_labels_out_of_range_read_no_memory_outside_the_table(mode):
    """Where PyTorch's own loss would read what lies there."""
    labels, lengths = torch.randint(1, 5, (N, 2)), torch.full((N,), 2)
    labels[3, 0] = 14
    found, without = (ctc_sums(mode, labels, lengths, some) for some in (slice(None), torch.arange(N) != 3))
    assert all(torch.allclose(found[n], without[n], atol=1e-7) for n in found) and found["bias"].any()


@pytest.mark.parametrize("mode", [None, LOOP])
@pytest.mark.parametrize("padding", [-100, 5])
def test_padded_labels_of_ctc_are_no_wrong_ones(padding, mode):
    labels, lengths = torch.randint(1, 5, (N, 3)), torch.randint(1, 4, (N,))
    padded = torch.where(torch.arange(3) < lengths[:, None], labels, padding)
    sums, others = (ctc_sums(mode, given, lengths) for given in (labels, padded))
    assert all(torch.allclose(sums[n], others[n], atol=1e-7) for n in sums) and sums["bias"].any()


def test_records_are_copied_whatever_their_batch_looks_like_in_memory():
    batch = torch.arange(96.0).view(8, 12).t()  # records lie across one another
    chunk = Chunk.of(TrainingStep.of(loss_of, classifier()), (batch,), 12)
    assert torch.equal(chunk.padded(15).tensors[0], torch.cat([batch, batch[:1].expand(3, 8)]))
    assert torch.equal(chunk.rows(torch.tensor([3, 1])).tensors[0], batch[[3, 1]])
    records = SyntheticRecords().records(chunk, 12, 0).tensors[0]
    assert len(records.unique()) == records.numel()


def test_processes_trace_the_same_graph():
    """Whatever order their sets have: processes of a fork server have another seed of hashes."""
    found = FORKS.SimpleQueue()
    process = FORKS.Process(target=tell_digest, args=(found,))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and found.get() == digest()


def tell_digest(found):
    found.put(digest())


def digest():
    torch.manual_seed(0)
    engine = engine_of(nn.Linear(300, 200), **OF_N)
    sums_of(engine, lambda m, x: m(x).square().sum(), torch.randn(12, 8, 300))
    assert engine.step.mode == TRACED
    return engine.step.digest
