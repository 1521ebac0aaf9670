"""Norms in one run and sums in another: the same bits as in one run, in less memory."""

from unittest import mock

import pytest
import torch
from plans import plan_of
from reference import cross_entropy, engine_of, relative_error, sums_apart, sums_of
from test_callback import fit
from test_one_record import OF_N, N, classifier, loss_of, rows
from torch import nn
from zoo import sequences, written

from dpexp import PrivacyCallback
from dpexp.errors import ConfigError
from dpexp.privacy.gradients import graph as graph_module
from dpexp.privacy.gradients.graph_passes import bytes_of, origins_of
from dpexp.privacy.gradients.operators import is_random
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.gradients.two_runs import two_runs
from dpexp.privacy.plan.groups import per_layer
from dpexp.privacy.refusals import refuse_low_memory


def deep():
    layers = [layer for _ in range(16) for layer in (nn.Linear(48, 48), nn.Tanh())]
    return nn.Sequential(nn.Embedding(11, 48), *layers, nn.Linear(48, 11), nn.Dropout(0.1))


def words():
    x = torch.randint(11, (N, 24))
    return x, x


ZOO = sequences.MODELS | written.MODELS
OF_ZOO = "weight-standardized convolutions", "attention with its weights", "tied language model"
MODELS = {
    "MLP": (classifier, loss_of, rows),
    "dropout": (lambda: classifier(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3)), loss_of, rows),
    "deep": (deep, cross_entropy, words),
    **{name: (lambda name=name: ZOO[name].build(False), cross_entropy, ZOO[name].batch) for name in OF_ZOO},
}


def engine_for(name, low_memory, **choices):
    """An engine that has traced the model."""
    build, loss, batch_of = MODELS[name]
    torch.manual_seed(0)
    engine = engine_of(build(), compiled=False, low_memory=low_memory, **OF_N, **choices)
    sums_of(engine, loss, batch_of())
    assert engine.step.mode == TRACED, engine.step.reason
    return engine


def found_by(engine, loss, batch):
    """Sums, norms and losses of a round from one random state."""
    torch.manual_seed(3)
    sums = sums_of(engine, loss, batch)
    (observed,) = engine.observations
    return sums | {f"of records {k}": v for k, v in observed.items()} | {"random": torch.rand(())}


def assert_equal(some, other):
    assert some.keys() == other.keys()
    for name, value in some.items():
        assert torch.equal(value.nan_to_num(9), other[name].nan_to_num(9)), name


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deep"])
def test_both_runs_together_give_the_bits_of_one_run(name):
    """A record that is not a number adds nothing in either."""
    choices = {"group": per_layer()} if name.startswith("attention") else {}
    usual, low = (engine_for(name, low_memory, **choices) for low_memory in (False, True))
    _, loss, batch_of = MODELS[name]
    batch = batch_of()
    found = found_by(low, loss, batch)
    assert_equal(found_by(usual, loss, batch), found)
    assert low.step._usual_shape._on_fakes  # traced without memory
    if name != "dropout":
        assert relative_error({n: found[n] for n in low.parameters}, sums_apart(low, loss, batch)) < 1e-5
    if name in ("MLP", "dropout"):
        batch[0][2] = torch.nan
        found = found_by(low, loss, batch)
        assert_equal(found_by(usual, loss, batch), found)
        assert all(found[n].isfinite().all() and found[n].any() for n in low.parameters)
        assert found["of records norm/all"].isinf().tolist() == [i == 2 for i in range(N)]


def peak(module):
    """The most bytes that results hold at once, at the worst operator."""
    nodes, origins = [*module.graph.nodes], origins_of(module.graph)
    made = [node for node in nodes if origins[node] is node and node.op == "call_function"]
    last = {origins[used]: k for k, node in enumerate(nodes) for used in (node, *node.all_input_nodes)}
    spans = [(nodes.index(node), last[node], bytes_of(node)) for node in made]
    return max(sum(size for first, end, size in spans if first <= k <= end) for k in range(len(nodes)))


def test_each_run_holds_less_at_once_and_draws_nothing_twice():
    engine = engine_for("deep", True)
    graph = engine.step._usual_shape._by_rows[engine.step.usual]
    norms, sums = two_runs(graph.run, graph.outputs)
    assert peak(norms) < 0.4 * peak(graph.run)
    assert peak(sums) < 0.6 * peak(graph.run)  # the sums themselves are large here
    random = [sum(map(is_random, module.graph.nodes)) for module in (graph.run, norms, sums)]
    assert random == [1, 1, 1]


def test_two_runs_that_mix_records_are_refused():
    def mixed(module, outputs):
        norms, sums = two_runs(module, outputs)
        output = norms.graph.output_node()
        with norms.graph.inserting_before(output):
            output.args = ([norms.graph.call_function(torch.ops.aten.roll.default, (n, [1])) for n in output.args[0]],)
        return [norms, sums]

    engine = engine_of(classifier(), low_memory=True, **OF_N)
    with mock.patch.object(graph_module, "two_runs", mixed):
        sums_of(engine, loss_of, rows())
    assert engine.step.mode == LOOP
    assert "depends on another record" in engine.step.reason


def test_a_fit_in_low_memory_has_the_weights_of_one_in_usual(tmp_path):
    """Its chunks have several sizes."""
    fits = [fit(tmp_path, ledger=f"{memory}.jsonl", memory=memory, compile=False) for memory in ("usual", "low")]
    for usual, low in zip(*(module.parameters() for module, *_ in fits), strict=True):
        assert torch.equal(usual, low)


@pytest.fixture
def not_deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("not_deterministic")
def test_operators_are_deterministic_in_both_runs_and_as_before_afterwards():
    """On a CPU, too: with several threads, index_put adds in parallel, in any order."""
    seen, bound = [], graph_module._bound

    def note(module):
        run = bound(module)
        return lambda *inputs: seen.append(torch.are_deterministic_algorithms_enabled()) or run(*inputs)

    with mock.patch.object(graph_module, "_bound", note):
        sums_of(engine_of(classifier(), low_memory=True, **OF_N), loss_of, rows())
    assert len(seen) > 1 and all(seen) and not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("not_deterministic")
def test_low_memory_is_refused_where_it_cannot_hold():
    module = classifier()
    plan = plan_of(module, n=20, q=0.3, steps=2, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=r"trainer\.memory=low does not compile"):
        PrivacyCallback(plan, "ledger.jsonl", memory="low", compile=True)
    with pytest.raises(ConfigError, match=r"trainer\.memory=least must be usual or low"):
        PrivacyCallback(plan, "ledger.jsonl", memory="least")
    refuse_low_memory(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"trainer\.memory=low needs torch\.use_deterministic_algorithms"):
        refuse_low_memory(torch.device("cuda"))
