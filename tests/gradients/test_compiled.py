"""Compiled graphs: the same sums and draws, norms that are never too small, and the decision to compile."""

import math
import shutil
from statistics import NormalDist

import pytest
import reference
import torch
from adversarial import largest_share
from reference import norm_of, relative_error, sums_apart, sums_of
from test_callback import assert_same, fit
from test_one_record import OF_N, N, S, classifier, loss_of, rows
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dpexp import PrivacyCallback
from dpexp.privacy.gradients import compiled
from dpexp.privacy.gradients.compiled import MARK, CompileDecision, _stages, flops

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="PyTorch's compiler needs a C++ compiler"
)


def engine_of(module, compile=True, **choices):
    return reference.engine_of(module, S, compiled=compile, **OF_N, **choices)


def reason_of(engine):
    return engine.step.compiling.reason


def compiled_graphs(engine):
    return [one._compiled for one in engine.step._graphs.values() if one._compiled]


def functional(engine, *records):
    """The compiled graph, for 18 records."""
    (fast,) = compiled_graphs(engine)
    others = engine._clip.bounds((), torch.device("cpu")), torch.ones(18, dtype=torch.bool)
    state = [t.detach() for t in engine.step._usual_shape.one.inputs.tensors()]
    return make_fx(torch.func.functionalize(fast.run))(*state, *others, *(leaf[:, None] for leaf in records))


def assert_as_alone(engine, batch):
    assert relative_error(sums_of(engine, loss_of, batch), sums_apart(engine, loss_of, batch)) < 1e-6


def moved_by(engine, loss_of, batch, other):
    """How far the sums of one batch are from those of another."""
    return norm_of(sums_of(engine, loss_of, batch), sums_of(engine, loss_of, other))


@needs_compiler
def test_sums_of_samples_of_any_size_are_those_of_one_record_at_a_time():
    """Chunks have one size, and the last is padded. With a dropout of 0 the graph draws random numbers. Factors and
    decisions are computed once: later stages read them from memory. Inputs with other strides, for which compiled code
    would give wrong results, run uncompiled."""
    module = classifier(nn.Dropout(0.0))
    engine = engine_of(module)
    for size in (5, 3 * N):
        assert_as_alone(engine, rows(size))
    (fast,) = compiled_graphs(engine)
    assert reason_of(engine).startswith("compiled: a round takes")
    products = [
        stage for node, stage in _stages(functional(engine, *rows(18)).graph).items() if "mm" in str(node.target)
    ]
    assert products == [0, 0, 0, 1, 1]  # of the loss and gradients; of the sums
    assert len([*fast.compiled._stages.graph.nodes]) > 5
    weight = module[0].weight
    weight.data = weight.data.t().contiguous().t()
    assert weight.stride() == (1, 16)
    assert_as_alone(engine, rows())


@needs_compiler
def test_dropout_draws_what_it_draws_without_compiling_and_a_tensor_that_a_hook_writes_to_is_read_again():
    module, found = classifier(nn.Dropout(0.5)), []
    module.scale = torch.ones(8)  # neither parameter nor buffer

    def scaled(m, one):
        return loss_of(m, (one[0] * m.scale + torch.tensor([0.5]), one[1]))

    for compile in (True, False):
        engine = engine_of(module, compile)
        sums_of(engine, scaled, rows())
        for value in (2, 1):
            module.scale.fill_(value)
            torch.manual_seed(7)
            found.append(sums_of(engine, scaled, rows()))
        sums_of(engine, scaled, tuple(leaf[:1].expand(N, *leaf.shape[1:]).clone() for leaf in rows()))
        assert len(set(engine.observations[-1]["loss"].tolist())) > N / 2
    assert relative_error(found[0], found[2]) < 1e-6 and relative_error(found[1], found[3]) < 1e-6
    assert relative_error(found[0], found[1]) > 0.1


@needs_compiler
def test_no_record_adds_more_than_its_bound():
    names = ("linear", "linear, by Gram matrices", "table, held", "convolution, in pieces")
    shares = largest_share(30, True, names)
    assert all(0.99 < share <= 1 for share in shares.values()), shares


def copied_to(x):
    return x.index_copy(1, x[0, :1].sign().long() * 0, x.new_ones(1, 1))


NOT_COMPILED = {
    # In float32 the last bits of a sine change if another record's value is large.
    **{function.__name__: (function, "would depend on another record")
       for function in (torch.sin, torch.cos, torch.special.i1e)},
    # With an index out of range, compiled code ends the process, or reads or writes another row.
    "an index whose range is not known": (copied_to, "index_copy"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_COMPILED)
def test_what_may_reach_another_record_is_not_compiled(what):
    change, reason = NOT_COMPILED[what]
    engine = engine_of(classifier())
    sums_of(engine, lambda m, one: loss_of(m, (change(one[0]), one[1])), rows())
    assert reason in reason_of(engine) and not compiled_graphs(engine)
    assert change is not copied_to or "whose range is not known" in reason_of(engine)


def test_a_graph_that_raises_an_error_for_some_records_is_not_compiled():
    label, engine = torch.zeros(N, dtype=torch.long), engine_of(classifier())

    def margin(m, one):
        return F.multi_margin_loss(m(one[0]), one[2])

    wrong = torch.where(torch.arange(N) == 3, 999, label)
    assert 0 < moved_by(engine, margin, (*rows(), label), (*rows(), wrong)) <= S * (1 + 1e-6)
    assert "some records raise an error" in reason_of(engine)


@needs_compiler
def test_an_index_that_a_record_computes_is_checked_in_compiled_code():
    """Only where another value is small, so that no synthetic record shows it."""
    engine, index, x = engine_of(classifier()), torch.zeros(N, dtype=torch.long), torch.ones(N)
    is_odd = torch.arange(N) == 3

    def taking(m, one):
        index = torch.where(one[3] < 0.5, one[2], 0)
        return loss_of(m, one[:2]) * torch.take(m[0].weight.detach(), index).sum()

    odd = *rows(), index.masked_fill(is_odd, 999), x.masked_fill(is_odd, 0)
    assert 0 < moved_by(engine, taking, (*rows(), index, x), odd) <= S * (1 + 1e-6)
    assert compiled_graphs(engine)


@needs_compiler
@pytest.mark.parametrize("dims, conv, pool", [(2, nn.Conv2d, nn.MaxPool2d), (3, nn.Conv3d, nn.MaxPool3d)])
def test_no_record_writes_to_another_by_a_pool_of_masked_places(dims, conv, pool):
    """In a padded window that is masked, the compiled place of the largest value is negative."""
    torch.manual_seed(0)
    conv, pool, shape = conv(1, 1, 1), pool(3, 2, 1), (N, 1, *[4] * dims)
    engine = engine_of(conv)
    x, mask, weight = torch.randn(shape), torch.ones(shape, dtype=torch.bool), torch.ones(N, 1, *[2] * dims)

    def loss(m, one):
        x, mask, weight = one
        return (pool(m(x).masked_fill(~mask, -math.inf)) * weight).sum()

    sums_of(engine, loss, (x, mask, weight))
    assert compiled_graphs(engine)
    mask[N - 1, 0, *[slice(2)] * dims] = False
    for a in (1e6, -1e6):
        weight[N - 1] = 0
        weight[N - 1].view(-1)[0], weight[N - 1].view(-1)[-1] = a, 1e4
        assert moved_by(engine, loss, (x, mask, weight), (x[:-1], mask[:-1], weight[:-1])) <= S * (1 + 1e-6)


def test_all_factors_of_norms_are_computed_once(monkeypatch):
    """Computed indices, too: computed twice, they may differ."""
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: graph)
    module = nn.Module()
    module.table, module.bias = nn.Embedding(400, 30), nn.Parameter(torch.ones(9))

    def loss(m, x):
        index = torch.where(x.exp() > 1.1, 3, 5)
        return m.table(index).square().sum() + (F.relu((x[:, :3] + m.bias[:3]).exp() - 1) * 9).sum()

    engine = engine_of(module)
    sums_of(engine, loss, torch.randn(N, 12))
    marked = [node.args[0] for node in functional(engine, torch.randn(18, 12)).graph.nodes if node.target is MARK]
    assert {node.meta["val"].dtype for node in marked} == {torch.float32, torch.int64, torch.bool}


# The decision


def test_a_few_rounds_are_not_compiled():
    engine = engine_of(classifier(), None)
    sums_of(engine, loss_of, rows())
    assert engine.step.compiling.decided is False and not compiled_graphs(engine)
    assert not reason_of(engine)  # which is said where it matters


@needs_compiler
def test_a_compiled_fit_gives_the_same_weights_and_its_checkpoint_has_the_decision(tmp_path):
    """A resumed fit uses it."""
    (some, _, decided), (others, _, asked) = (
        fit(tmp_path, ledger=f"{compile}.jsonl", compile=compile) for compile in (None, True)
    )
    assert_same(some, others)
    assert [privacy.state_dict()["compiled"] for privacy in (decided, asked)] == [False, True]
    for given, found in ((None, True), (False, False)):
        resumed = PrivacyCallback(asked.plan, tmp_path / "resumed.jsonl", compile=given)
        resumed.load_state_dict(asked.state_dict())
        assert resumed.progress.compile is found


def test_products_of_matrices_and_of_vectors_are_counted():
    a, b, c = torch.ones(5, 7), torch.ones(7, 3), torch.ones(7)
    assert flops(lambda: (a @ b, torch.mv(a, c))) == 2 * 5 * 7 * 3 + 2 * 5 * 7


@pytest.mark.parametrize("flops, rows", [(1e3, 24), (1e9, 3)])
def test_small_records_are_processed_at_once_and_large_ones_with_little_padding(flops, rows):
    assert CompileDecision(True, NormalDist(16, 4), 1).rows(24, flops, 100) == rows


@pytest.mark.parametrize("after, reason", [(0.9, "compiled: "), (1.1, "not compiled, since ")])
def test_the_faster_graph_is_used(after, reason):
    compiling = CompileDecision(None, NormalDist(1, 0), 10**6)
    assert compiling.worth_trying(1.0, 100, torch.device("cpu"))
    assert compiling.compare(1.0, after) is compiling.decided is (after < 1)
    assert compiling.reason.startswith(reason)


def test_if_compiling_fails_the_graph_runs_uncompiled(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compiled.Compiled, "__init__", broken)
    engine = engine_of(classifier())
    assert_as_alone(engine, rows())
    assert "not compiled: " in reason_of(engine) and "no compiler" in reason_of(engine)


def test_a_compiled_graph_must_agree_with_the_uncompiled_one(monkeypatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, *_: graph)
    call = compiled.Compiled.__call__
    monkeypatch.setattr(compiled.Compiled, "__call__", lambda self, *given: [x * 1.0001 for x in call(self, *given)])
    engine = engine_of(classifier())
    sums_of(engine, loss_of, rows())
    assert "relative error is 1e-04" in reason_of(engine) and not compiled_graphs(engine)


@pytest.mark.parametrize("wanted", [None, True])
def test_compiling_says_how_far_it_is_and_gives_up_unless_it_is_asked_for(monkeypatch, wanted):
    now = [0.0]

    def compile_slowly(graph, *_):
        now[0] += 100
        return graph

    monkeypatch.setattr(compiled, "compile_graph", compile_slowly)
    monkeypatch.setattr(compiled, "now", lambda device: now[0])
    monkeypatch.setattr(compiled, "seconds", lambda *_: 1.0)
    monkeypatch.setattr("dpexp.privacy.gradients.graphs.seconds", lambda *_: 1.0)
    engine = engine_of(classifier(), wanted, rounds=400)  # of 1 s: at most 400 · 0.5/3 = 67 s are worth it
    engine.begin()
    with pytest.warns(UserWarning, match="compiling the step: 0 of 2 stages after 0 s"):
        engine.add_chunk(loss_of, reference.stacked(rows()), N)
    gave_up = reason_of(engine) == "not compiled: 1 of 2 stages took 100 s, more than 1/3 of what it may save"
    assert gave_up is (wanted is None)
    assert relative_error(engine._sums, sums_apart(engine, loss_of, rows())) < 1e-6
