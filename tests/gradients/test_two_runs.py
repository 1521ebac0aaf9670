"""Norms in one run and sums in another: the same bits as in one run, in less memory."""

from unittest import mock

import pytest
import torch
from plans import plan_of
from reference import engine_of, relative_error, sums_apart, sums_of
from test_callback import fit
from test_one_record import OF_N, N, classifier, loss_of, rows
from torch import nn
from torch.nn import functional as F

from dpexp import PrivacyCallback
from dpexp.errors import ConfigError
from dpexp.privacy.gradients import graph as graph_module
from dpexp.privacy.gradients.graph_passes import bytes_of, origins_of
from dpexp.privacy.gradients.operators import is_random
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.privacy.gradients.two_runs import two_runs
from dpexp.privacy.plan.groups import per_layer
from dpexp.privacy.refusals import refuse_low_memory


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(2, 3)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, tied, width=8, blocks=2, words=11):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.blocks(self.tokens(x)))


def next_word(module, one):
    return F.cross_entropy(module(one[0]).flatten(0, 1), one[0].flatten())


def words(count=N):
    return (torch.randint(11, (count, 24), generator=torch.Generator().manual_seed(1)),)


def images(count=N):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.randint(3, (count,), generator=generator)


def cnn():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 3))


MODELS = {
    "MLP": (classifier, loss_of, rows),
    "CNN": (cnn, loss_of, images),
    "decoder": (lambda: Decoder(tied=False), next_word, words),
    "deep decoder": (lambda: nn.Sequential(Decoder(False, 48, 8), nn.Dropout(0.1)), next_word, words),
    "tied decoder": (lambda: Decoder(tied=True), next_word, words),
    "dropout": (lambda: classifier(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3)), loss_of, rows),
}


def found_by(name, low_memory, batch=None, **choices):
    """Sums, norms and losses of a round from one random state."""
    build, loss, batch_of = MODELS[name]
    engine = engine_of(build(), compiled=False, low_memory=low_memory, **OF_N, **choices)
    batch = batch_of() if batch is None else batch
    sums_of(engine, loss, batch)
    torch.manual_seed(3)
    sums = sums_of(engine, loss, batch)
    (observed,) = engine.observations
    after = torch.rand(())
    assert engine.step.mode == TRACED, engine.step.reason
    return engine, loss, batch, sums | {f"of records {k}": v for k, v in observed.items()} | {"random": after}


def assert_equal(some, other):
    assert some.keys() == other.keys()
    for name, value in some.items():
        assert torch.equal(value.nan_to_num(9), other[name].nan_to_num(9)), name


BITS = [*((name, None) for name in MODELS if name != "deep decoder"), ("decoder", per_layer())]


@pytest.mark.parametrize("name, group", BITS)
def test_both_runs_together_give_the_bits_of_one_run(name, group):
    choices = {"group": group} if group else {}
    *_, usual = found_by(name, False, **choices)
    engine, loss, batch, low = found_by(name, True, **choices)
    assert_equal(usual, low)
    assert engine.step._usual_shape._on_fakes  # traced without memory
    if name != "dropout":
        assert relative_error({n: low[n] for n in engine.parameters}, sums_apart(engine, loss, batch)) < 1e-5


@pytest.mark.parametrize("name", ["MLP", "dropout"])
def test_a_record_that_is_not_a_number_adds_nothing_in_either(name):
    x, y = rows()
    x[2] = torch.nan
    engine, _, _, low = found_by(name, True, (x, y))
    *_, usual = found_by(name, False, (x, y))
    assert_equal(usual, low)
    assert all(low[n].isfinite().all() and low[n].any() for n in engine.parameters)
    assert low["of records norm/all"].isinf().tolist() == [i == 2 for i in range(N)]


def peak(module):
    """The most bytes that results hold at once, at the worst operator."""
    nodes, origins = [*module.graph.nodes], origins_of(module.graph)
    made = [node for node in nodes if origins[node] is node and node.op == "call_function"]
    last = {origins[used]: k for k, node in enumerate(nodes) for used in (node, *node.all_input_nodes)}
    spans = [(nodes.index(node), last[node], bytes_of(node)) for node in made]
    return max(sum(size for first, end, size in spans if first <= k <= end) for k in range(len(nodes)))


def test_each_run_holds_less_at_once_and_draws_nothing_twice():
    engine, *_ = found_by("deep decoder", True)
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
    engine, seen = engine_of(classifier(), low_memory=True, **OF_N), []

    def note(module):
        run = bound(module)
        return lambda *inputs: seen.append(torch.are_deterministic_algorithms_enabled()) or run(*inputs)

    bound = graph_module._bound
    with mock.patch.object(graph_module, "_bound", note):
        sums_of(engine, loss_of, rows())
    assert len(seen) > 1
    assert all(seen)
    assert not torch.are_deterministic_algorithms_enabled()


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
