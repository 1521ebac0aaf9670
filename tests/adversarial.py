"""Adversarial records: of each rule's layer they set the input and the output's gradient, and so both factors of the
gradient."""

import math

import torch
from plans import plan_of
from reference import clipped_sums
from test_norms import awkward
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.plan.groups import per_layer
from dpexp.privacy.round import Performance, RoundEngine


class Tied(nn.Module):
    """Uses a table as a weight."""

    def __init__(self, rows=40, width=9):
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, index):
        return F.linear(self.table(index), self.table.weight)


class LastOutput(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


# A layer, and the shape of its input, or the number of rows that indices are drawn from.
RULES = {
    "linear": (lambda: nn.Linear(300, 70), (300,)),
    "linear, held": (lambda: nn.Linear(24, 20), (40, 24)),
    "linear, by Gram matrices": (lambda: nn.Linear(300, 200), (8, 300)),
    "table, held": (lambda: nn.Embedding(5, 7), 5),
    "table, by positions": (lambda: nn.Embedding(400, 30), 400),
    "convolution, held": (lambda: nn.Conv2d(3, 5, 3), (3, 9, 9)),
    "convolution, in pieces": (lambda: nn.Conv2d(20, 30, 3), (20, 8, 8)),
    "convolution, by Gram matrices": (lambda: nn.Conv2d(64, 80, 3), (64, 4, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(20, 30, 3), (20, 5, 5)),
    "layer norm": (lambda: nn.LayerNorm(33), (6, 33)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (6, 5, 5)),
    "root mean square norm": (lambda: nn.RMSNorm(33), (6, 33)),
    "recurrent": (lambda: LastOutput(nn.LSTM(12, 9, batch_first=True)), (4, 12)),
    "tied, held": (Tied, 40),
    "tied, by positions": (lambda: Tied(500, 40), 500),
    "attention": (lambda: nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), (5, 16)),
}
POSITIONS = 12  # of indices


class Layers(nn.Module):
    """One of each, side by side: the loss is Σ a·layer(x) for the x and a of the record."""

    def __init__(self, names=tuple(RULES)):
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        self.layers = nn.ModuleList(RULES[name][0]() for name in names)
        self.shapes = [RULES[name][1] for name in names]
        with torch.no_grad():
            outputs = [layer(self._input(shape)) for layer, shape in zip(self.layers, self.shapes, strict=True)]
        self.of_outputs = [tuple(y.shape[1:]) for y in outputs]

    def _input(self, shape):
        return torch.zeros(1, *shape) if isinstance(shape, tuple) else torch.zeros(1, POSITIONS, dtype=torch.long)

    def forward(self, record):
        """The loss."""
        return sum((layer(x) * a).sum() for layer, (x, a) in zip(self.layers, record, strict=True))

    def usual(self, generator, count):
        """A batch of so many that are not made to hurt."""
        return tuple(
            (
                torch.randn(count, *shape, generator=generator)
                if isinstance(shape, tuple)
                else torch.randint(shape, (count, POSITIONS), generator=generator),
                torch.randn(count, *of_output, generator=generator),
            )
            for shape, of_output in zip(self.shapes, self.of_outputs, strict=True)
        )

    def record(self, generator):
        """A batch of one."""
        pairs = []
        for shape, of_output in zip(self.shapes, self.of_outputs, strict=True):
            a = awkward(generator, 1, *of_output)
            if not isinstance(shape, tuple):
                pairs.append((torch.randint(shape, (1, POSITIONS), generator=generator), a))
                continue
            x = awkward(generator, 1, *shape)
            if len(shape) == 2 and torch.rand(1, generator=generator) < 0.3:  # positions that all but cancel
                half, close = shape[0] // 2, 2.0 ** -float(torch.randint(1, 24, (1,), generator=generator))
                x[:, half : 2 * half] = x[:, :half] * (1 + close)
                if len(of_output) == 2:
                    a[:, half : 2 * half] = -a[:, :half]
            pairs.append((x, a))
        return tuple(pairs)


def engine_of(names, compile, device="cpu", at_once=2):
    module = Layers(names).to(device)
    plan = plan_of(
        module, n=4 * at_once, q=0.25, steps=1, noise_multiplier=1.0, clip_norm=FixedClipNorm(0.3), group=per_layer()
    )
    return RoundEngine(plan, module, GaussianNoise(), performance=Performance(at_once, compile))


def sums_of(engine, batch, count):
    device = next(engine._module.parameters()).device
    engine.begin()
    engine.add_chunk(lambda own, one: own(one), tree_map(lambda leaf: leaf[:, None].to(device), batch), count)
    assert engine.step.mode == "traced"
    return {name: total.double().cpu() for name, total in engine._sums.items()}


def largest_share(records: int, compile: bool, names=tuple(RULES), seed=0, device="cpu", at_once=2) -> dict[str, float]:
    """What one record at most adds of a group's bound, by rule; its norm in float64, as of the sum."""
    engine, generator = engine_of(names, compile, device, at_once), torch.Generator().manual_seed(seed)
    most = dict.fromkeys(names, 0.0)
    for _ in range(records):
        sums = sums_of(engine, engine._module.record(generator), 1)
        for group in engine.plan.groups:
            parts = [sums[name].square().sum() for v in group.vectors for name in v.parameters if name in sums]
            rule = names[int(group.vectors[0].parameters[0].split(".")[1])]
            most[rule] = max(most[rule], math.sqrt(math.fsum(map(float, parts))) / group.S)
    assert any(one._compiled for one in engine.step._graphs.values()) == compile
    return most


def largest_error(compile: bool, names=tuple(RULES), device="cpu", count=6) -> dict[str, float]:
    """Of the sums of usual records against one record at a time in float64, of their norm, by rule."""
    engine = engine_of(names, compile, device, count)
    batch = engine._module.usual(torch.Generator().manual_seed(0), count)
    found = sums_of(engine, batch, count)
    exact = tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, batch)
    module = Layers(names)
    module.load_state_dict(engine._module.state_dict())
    expected = clipped_sums(engine.plan, module.double(), module, exact, count)
    errors = {}
    for i, rule in enumerate(names):
        own = [name for name in expected if name.startswith(f"layers.{i}.")]
        off, whole = (
            math.sqrt(sum(float(t.square().sum()) for t in some))
            for some in ([found[name] - expected[name] for name in own], [expected[name] for name in own])
        )
        errors[rule] = off / whole
    return errors
