"""The engine against the reference that takes one record at a time, for every kind of module."""

import math
import warnings

import numpy as np
import pytest
import torch
from plans import plan_of
from reference import clipped_sums, stacked
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan import clipping, groups
from dpexp.privacy.round import PrivateRound

B = 6


class Twice(nn.Module):
    """One layer used twice, the second time on its own output."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.first(torch.tanh(self.first(x)))))


class TiedLanguageModel(nn.Module):
    """The embedding table is also the output layer, used functionally; positions are a raw parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(5, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return F.linear(self.block(self.embed(x) + self.positions), self.embed.weight)


class RawParameters(nn.Module):
    """A class token, a scale, and a matrix that no layer owns."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.matrix = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) * self.scale
        return (x.mean(1) @ self.matrix).softmax(-1)


class FrozenAndUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.half_frozen = nn.Linear(8, 8)
        self.half_frozen.weight.requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.half_frozen(self.frozen(x))))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.dense = nn.Linear(8, 4)
        self.mix = nn.Bilinear(4, 4, 3)

    def forward(self, inputs):
        return self.mix(self.embed(inputs["words"]).sum(1), self.dense(inputs["numbers"]))


class Recurrent(nn.Module):
    """Reads the outputs and the last states."""

    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)
        self.head = nn.LazyLinear(3)
        self(torch.randn(1, 5, 4))

    def forward(self, x):
        outputs, states = self.rnn(x)
        parts = [
            outputs.mean(1),
            *(s.transpose(0, 1).flatten(1) for s in (states if type(states) is tuple else [states])),
        ]
        return self.head(torch.cat(parts, 1))


class LearnedStates(nn.Module):
    """Whose first states are parameters."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
        self.h, self.c = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 1, 5))

    def forward(self, x):
        outputs, _ = self.rnn(x, (self.h.expand(1, len(x), -1), self.c.repeat(1, len(x), 1)))
        return self.head(outputs.mean(1))


class Packed(nn.Module):
    """Packed sequences ask for lengths inside PyTorch."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [x.shape[1]] * len(x), batch_first=True)
        return self.rnn(packed)[1][0][0]


class Checkpointed(nn.Module):
    """Computes its first half anew in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(8, 8)
        self.body = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        without = checkpoint(self.body, x, use_reentrant=self.reentrant)  # reentrant, this passes no gradients on
        return self.head(checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant) + without)


class ScaledByItself(nn.Module):
    """Looks at a parameter without gradients before it uses it with them; a layer used without them too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            largest = self.scale.abs().max()
            guess = self.head(x).argmax(-1, keepdim=True)
        return self.head(x * self.scale / largest) + guess


class Reversed(nn.Module):
    """A hook on an activation, as gradient reversal has it."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.first(x)
        y.register_hook(lambda g: -2 * g)
        return self.head(y.tanh())


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(8, 3)
        self.right = nn.Linear(8, 3)

    def forward(self, x):
        return self.left(x) if x.sum() > 0 else self.right(x)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", dilation=2), nn.Tanh(), nn.Conv2d(4, 6, (3, 2), stride=2, groups=2),
        nn.ReLU(inplace=True), nn.Conv2d(6, 4, 2, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def norms():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=False), nn.GroupNorm(2, 4), nn.ReLU(), nn.InstanceNorm2d(4, affine=True),
        nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 3),
    )  # fmt: skip


def images():
    return torch.randn(B, 2, 8, 8), torch.randint(3, (B,))


def rows():
    return torch.randn(B, 8), torch.randint(3, (B,))


def sequences():
    return torch.randn(B, 5, 4), torch.randint(3, (B,))


def tokens():
    return torch.randint(11, (B, 5)), torch.randint(11, (B, 5))


def mixed_inputs():
    return {"words": torch.randint(7, (B, 3)), "numbers": torch.randn(B, 8)}, torch.randint(3, (B,))


def cross_entropy(scores, y):
    return F.cross_entropy(scores.flatten(0, -2), y.flatten())


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), rows),
    "convolutions": (convolutions, images),
    "norms": (norms, images),
    "twice": (Twice, rows),
    "tied": (TiedLanguageModel, tokens),
    "raw": (RawParameters, sequences),
    "frozen_and_unused": (FrozenAndUnused, rows),
    "two_inputs": (TwoInputs, mixed_inputs),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), sequences),
    "rnn_relu": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), sequences),
    "learned_states": (LearnedStates, sequences),
    "packed": (Packed, sequences),
    "checkpointed": (lambda: Checkpointed(False), rows),
    "checkpointed_reentrant": (lambda: Checkpointed(True), rows),
    "scaled_by_itself": (ScaledByItself, rows),
    "reversed": (Reversed, rows),
    "branching": (Branching, rows),
    "channels_last": (lambda: convolutions().to(memory_format=torch.channels_last), images),
}
ONE = "one at a time"
SLOW = ("branching", "packed")  # others are traced
MECHANISMS = {"separate": clipping.Separate(), "joint": clipping.Joint()}


def case(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    build, data = MODELS[name]
    x, y = data()
    convert = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
    x = {key: convert(value) for key, value in x.items()} if isinstance(x, dict) else convert(x)
    return build().to(dtype), (x, y)


def engine_of(module, S=0.3):
    plan = plan_of(module, n=100, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(S))
    return PrivateRound(plan, module, GaussianNoise()), plan


def sums_of(engine, loss_of, batch, size=B, chunk=B):
    engine.begin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for start in range(0, size, chunk):
            part = _slice(batch, start, start + chunk)
            engine.add_chunk(lambda _, one: loss_of(one), stacked(part), min(chunk, size - start))
    engine.end()
    return engine._sums


def _slice(batch, start, end):
    if isinstance(batch, dict):
        return {key: _slice(value, start, end) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_slice(value, start, end) for value in batch)
    return batch[start:end]


def relative_error(sums, reference):
    distance = math.sqrt(sum((sums[n].double() - reference[n].double()).square().sum().item() for n in reference))
    return distance / math.sqrt(sum(r.double().square().sum().item() for r in reference.values()))


KINDS = [("separate", "flat"), ("joint", "per_layer"), ("separate", "per_layer"), ("joint", "flat")]


@pytest.mark.parametrize(
    ("name", "mechanism", "grouping"),
    [*((name, *KINDS[i % 4]) for i, name in enumerate(MODELS)), *(("twice", *kind) for kind in KINDS)],
)
def test_float64_equals_one_record_at_a_time(name, mechanism, grouping):
    module, batch = case(name)
    plan = plan_of(
        module,
        n=20, q=0.3, steps=1, noise_multiplier=1.0,
        group=getattr(groups, grouping)(), clip_norm=clipping.DimensionClipNorm(0.3), mechanism=MECHANISMS[mechanism],
    )  # fmt: skip
    engine = PrivateRound(plan, module, GaussianNoise(), observe=True)

    def loss_of(one):
        return cross_entropy(module(one[0]), one[1])

    sums = sums_of(engine, loss_of, batch)
    clipped = torch.cat([o[f"norm/{g.name}"] > g.S for o in engine.observations for g in plan.groups
                         if f"norm/{g.name}" in o])  # fmt: skip
    assert clipped.any(), "the test must clip something to mean anything"
    assert relative_error(sums, clipped_sums(plan, module, loss_of, batch, B)) < 1e-9
    assert engine.mode == (ONE if name in SLOW else "traced"), engine.reason


@pytest.mark.parametrize("name", ["norms", "tied", "lstm"])
def test_float32_equals_one_record_at_a_time(name):
    module, batch = case(name, torch.float32)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    loss_of = lambda one: cross_entropy(module(one[0]), one[1])  # noqa: E731
    sums = sums_of(PrivateRound(plan, module, GaussianNoise()), loss_of, batch)
    assert relative_error(sums, clipped_sums(plan, module, loss_of, batch, B)) < 1e-5


@pytest.mark.parametrize("name", ["convolutions", "tied"])
def test_bf16_autocast_keeps_sums_and_norms_in_float32(name):
    module, batch = case(name, torch.float32)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))

    def loss_of(one):
        return cross_entropy(module(one[0]), one[1])

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = sums_of(PrivateRound(plan, module, GaussianNoise()), loss_of, batch)
        reference = clipped_sums(plan, module, loss_of, batch, B)
    assert all(total.dtype == torch.float32 for total in sums.values())
    assert relative_error(sums, reference) < 3e-2
    norm = math.sqrt(sum(total.square().sum().item() for total in sums.values()))
    assert norm <= B * 0.1 * (1 + 1e-6)


def test_chunks_change_nothing():
    module, batch = case("mlp")
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    engine = PrivateRound(plan, module, GaussianNoise())
    loss_of = lambda one: cross_entropy(module(one[0]), one[1])  # noqa: E731
    whole = dict(sums_of(engine, loss_of, batch))
    assert relative_error(sums_of(engine, loss_of, batch, chunk=4), whole) < 1e-12


@pytest.mark.parametrize(
    "name, bad",
    [
        *(("mlp", bad) for bad in (math.nan, math.inf, 1e30)),
        *zip(("branching", "norms", "lstm"), (math.inf, math.nan, 1e30), strict=True),
    ],
)
def test_a_non_finite_record_contributes_nothing(name, bad):
    """Trap 1. The other records' sum must come out as if the bad one were not there."""
    module, (x, y) = case(name, torch.float32)
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    loss_of = lambda one: cross_entropy(module(one[0]), one[1])  # noqa: E731
    engine = PrivateRound(plan, module, GaussianNoise())
    x[2].view(-1)[0] = bad
    sums = dict(sums_of(engine, loss_of, (x, y)))
    assert all(torch.isfinite(total).all() for total in sums.values())
    others = [i for i in range(B) if i != 2]
    without = clipped_sums(plan, module, loss_of, (x[others], y[others]), B - 1)
    if math.isfinite(bad):
        distance = math.sqrt(sum((sums[n] - without[n]).square().sum().item() for n in sums))
        assert distance <= 0.1 * (1 + 1e-5)
    else:
        assert relative_error(sums, without) < 1e-5


def test_a_parameter_that_is_changed_inside_training_step_is_refused_by_name():
    for change in CHANGES.values():
        module = nn.Sequential(nn.Identity(), Changing(change))
        engine = PrivateRound(plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0), module, GaussianNoise())
        with pytest.raises(ConfigError, match=r"1\.head\.weight is changed inside training_step"):
            sums_of(engine, lambda one, module=module: cross_entropy(module(one[0]), one[1]), rows())


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


def test_a_record_whose_loss_cannot_be_computed_contributes_nothing():
    """An index out of range. The others go on together, in this chunk and in the next."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0, clip_norm=clipping.FixedClipNorm(0.1))
    engine = PrivateRound(plan, module, GaussianNoise())
    loss_of = lambda one: cross_entropy(module(one[0]), one[1])  # noqa: E731
    x, y = torch.randint(5, (B, 3)), torch.randint(3, (B,))
    sums = {name: total.clone() for name, total in sums_of(engine, loss_of, (x, y)).items()}
    bad = x.clone()
    bad[2, 0] = 7
    others = [i for i in range(B) if i != 2]
    engine.begin()
    with pytest.warns(UserWarning, match="they contribute nothing"):
        engine.add_chunk(lambda _, one: loss_of(one), stacked((bad, y)), B)
    assert relative_error(engine._sums, clipped_sums(plan, module, loss_of, (x[others], y[others]), B - 1)) < 1e-9
    assert engine.mode == "traced"
    assert relative_error(sums_of(engine, loss_of, (x, y)), sums) < 1e-12


def test_a_batch_that_cannot_be_split_is_refused():
    module, (x, y) = case("mlp")
    plan = plan_of(module, n=20, q=0.3, steps=1, noise_multiplier=1.0)
    engine = PrivateRound(plan, module, GaussianNoise())
    loss_of = lambda one: cross_entropy(module(one[0]), one[1])  # noqa: E731
    engine.begin()
    with pytest.raises(ConfigError, match=r"shape \(8, 6\).*first dimension"):
        engine.add_chunk(lambda _, one: loss_of(one), (x.T, y), B)


def test_what_is_no_tensor_is_the_same_for_all_records():
    module, (x, y) = case("mlp")
    engine, plan = engine_of(module, 0.1)
    loss_of = lambda module, one: cross_entropy(one[2] * module(one[0]), one[1])  # noqa: E731
    engine.begin()
    with pytest.warns(UserWarning, match="a batch holds a float besides tensors"):
        engine.add_chunk(loss_of, (*stacked((x, y)), 2.0), B)
    assert engine.mode == ONE
    reference = clipped_sums(plan, module, lambda one: loss_of(module, (*one, 2.0)), (x, y), B)
    assert relative_error(engine._sums, reference) < 1e-9


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.left, self.right, self.head = (nn.Linear(6, 6) for _ in range(4))


class Masked(Layers):
    """As language models do: a mask is only used where it hides something."""

    def forward(self, x):
        mask = x[..., :1] > -1
        y = self.mix(x)
        if not mask.all():
            y = y * mask
        return self.head(y.mean(1))


class Tree(Layers):
    """Branches within branches, on a truth, a number and a list."""

    def forward(self, x):
        y = self.left(x) if x.sum() > 0 else self.right(x)
        if bool((x[:, 0].max() > 1).any()):
            y = self.mix(y)
        if int((x[:, 0, 0] > 0).sum()) == 1:
            y = y.tanh()
        return self.head(y.mean(1)) * (2 if (x[0, :1, 1] > 1.5).tolist()[0] else 1)


def branching(build, count=12):
    torch.manual_seed(0)
    module = build().double()
    batch = torch.randn(count, 4, 6).double(), torch.randint(6, (count,))
    return module, lambda one: cross_entropy(module(one[0]).sin(), one[1]), batch


@pytest.mark.parametrize("build, chunk", [(Masked, 5), (Masked, 12), (Tree, 1), (Tree, 5)])
def test_a_step_that_branches_on_data_runs_one_record_at_a_time(build, chunk):
    module, loss_of, batch = branching(build)
    engine, plan = engine_of(module)
    sums = sums_of(engine, loss_of, batch, 12, chunk)
    assert relative_error(sums, clipped_sums(plan, module, loss_of, batch, 12)) < 1e-9
    assert engine.mode == ONE
    assert "a record's data" in engine.reason


SHAPED = {
    "rows": lambda y, x: y[x[..., 0] > 0],
    "nonzero": lambda y, x: y[0, (x[0, :, 0] > 0).nonzero()[:, 0]],
    "masked_select": lambda y, x: y.masked_select(x[..., :1] > 0),
    "rows written": lambda y, x: put(y, x[..., 0] > 0, 2 * y[x[..., 0] > 0]),
    "written": lambda y, x: put(y, x > 0, 0.5),  # whose shape does not
}


def put(y, mask, value):
    y = y.clone()
    y[mask] = value
    return y


@pytest.mark.parametrize("how", SHAPED)
def test_shapes_that_depend_on_a_record_are_those_of_each(how):
    class Shaped(Layers):
        def forward(self, x):
            return self.head(x.mean(1)) + SHAPED[how](self.mix(x), x).square().sum()

    module, loss_of, batch = branching(Shaped)
    engine, plan = engine_of(module)
    sums = sums_of(engine, loss_of, batch, 12, 12)
    assert relative_error(sums, clipped_sums(plan, module, loss_of, batch, 12)) < 1e-9
    assert (engine.mode == "traced") == (how == "written"), engine.reason


class Cancelling(nn.Module):
    """Two positions whose gradients cancel but for a hundredth, so that norms from Gram matrices are larger than
    others; of some kinds of records a little more is asked."""

    def __init__(self, more=None):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.zeros(256, 256)), nn.Parameter(torch.ones(10, 1))
        self.more = more or (lambda kind, table: F.embedding(kind, table).sum())

    def forward(self, record):
        x, g, kind = record
        return (F.linear(x, self.weight) * g).sum() + 1e-6 * self.more(kind, self.table)


def solved(kind, table):
    """PyTorch refuses records of one kind, and with them all that are processed together."""
    return table.sum() + torch.linalg.cholesky(torch.eye(2) * (0.5 - kind.max())).sum()


def caught(kind, table):
    if kind.any():
        try:
            torch.linalg.cholesky(-torch.eye(2) * kind.abs().sum())
        except RuntimeError:
            return table.sum()
    return table.sum()


def its_own_backward(kind, table):
    if kind.any():
        return torch.autograd.grad(table.square().sum(), table)[0].sum()
    return table.sum()


ODD = {
    "two out of range, at the ends": (None, [[99], *[[0]] * 20, [99]]),
    "one is refused": (solved, [[1], *[[0]] * 20]),
    "one catches an error": (caught, [[1], *[[0]] * 20]),
    "one has a backward pass": (its_own_backward, [[1], *[[0]] * 20]),
    "one returns fewer": (lambda kind, table: torch.unique(kind).float().sum() * table.sum(), [[1, 1], *[[0, 1]] * 20]),
}


@pytest.mark.parametrize("what", ODD)
def test_an_odd_record_moves_no_other(what):
    """Be it in their chunk or in an earlier one: else they would move by some tenths of S each."""
    more, kinds = ODD[what]
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(1, 1, 256, generator=generator).expand(len(kinds), 2, 256).clone() for _ in range(2))
    g[:, 1] = -0.99 * g[:, 0]
    whole, S, found = (x, g, torch.tensor(kinds)), 0.01, []
    for chunks in ([slice(None)], [slice(1, None)], [slice(0, 1), slice(1, None)]):
        module = Cancelling(more)
        engine, _ = engine_of(module, S)
        engine.begin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for some in chunks:
                engine.add_chunk(nn.Module.__call__, tuple(t[some] for t in whole), len(whole[0][some]))
        found.append(engine._sums["weight"].double())
    assert (found[0] - found[1]).norm() <= S * (1 + 1e-4)
    assert (found[2] - found[1]).norm() <= S * (1 + 1e-4)


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.held = HELD[what]()
    engine, _ = engine_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in range(2):
            engine.begin(t)
            engine.add_chunk(lambda module, x: module(x).sum(), torch.randn(4, 3), 4)
            engine.step.trace_again(lambda module, x: module(x).sum(), epoch_begins=True)
    assert engine._sums["weight"].any()
