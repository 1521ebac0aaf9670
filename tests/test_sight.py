"""What PyTorch runs out of its function modes' sight: exported, scripted and compiled code, and writes that no version
tells of."""

import copy

import pytest
import torch
from test_isolation import CLASSES, Model, assert_bounded, rows, trained
from test_step_state import sum_of_clipped
from torch import nn
from torch.nn import functional as F

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.kept import identical

pytestmark = pytest.mark.filterwarnings("ignore")

# torch.export


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


class Bag(Words):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(5, 4, padding_idx=0)

    def forward(self, x):
        return self.head(self.embed(x))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(4, 4, batch_first=True, **options)
        self.head = nn.Linear(8 if options else 4, CLASSES)

    def forward(self, x):
        state = x.new_full((2 if self.layer.bidirectional else 1, x.shape[0], 4), 0.3)
        both = isinstance(self.layer, nn.LSTM)
        return self.head(self.layer(x, (state, 2 * state) if both else state)[0].mean(1))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


class Overwriting(nn.Module):
    """Decomposed, it writes by select_scatter."""

    def __init__(self):
        super().__init__()
        self.net, self.first = nn.Linear(4, CLASSES), nn.Parameter(torch.ones(()))

    def forward(self, x):
        scores = self.net(x)
        return torch.select_scatter(scores, (self.first * x[:, 0]).sin(), 1, 0)


IMAGES = [(torch.randn(1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), y) for i, (_, y) in
          enumerate(rows(5))]  # fmt: skip
SEQUENCES = [(x.reshape(2, 2).repeat(2, 2) * torch.arange(1, 5), y) for x, y in rows(5)]
WORDS = [(torch.tensor([1 + i % 4, 0, 0, 0, (i * i) % 5]), y) for i, (_, y) in enumerate(rows(6))]
EXPORTED = {
    "padded embedding": (lambda: Words(padding_idx=0), WORDS),
    "padded with its last row": (lambda: Words(padding_idx=-1), WORDS),
    "frequencies": (lambda: Words(scale_grad_by_freq=True), WORDS),
    "padded bag": (Bag, WORDS),
    "convolution, group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
                              nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)), IMAGES),
    "transposed convolution, layer norm, dropout": (
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(128), nn.Dropout(0.0),
                              nn.Linear(128, CLASSES)), IMAGES),
    "lstm": (lambda: Recurrent(nn.LSTM), SEQUENCES),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), SEQUENCES),
    "attention": (Attentive, SEQUENCES),
    "overwriting": (Overwriting, rows(5)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)), rows(4)),
}  # fmt: skip


def exported(name, decomposed=False):
    build, records = EXPORTED[name]
    torch.manual_seed(2)
    batch = torch.stack([x for x, _ in records[:3]])
    program = torch.export.export(build().double(), (batch,), dynamic_shapes=({0: torch.export.Dim("B")},))
    return (program.run_decompositions() if decomposed else program).module(), records


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", [name for name in EXPORTED if name != "batch norm"])
def test_exported_models_train_as_by_hand(tmp_path, name, decomposed):
    net, records = exported(name, decomposed)
    (released,), _ = trained(tmp_path, Model(copy.deepcopy(net)), records, callback={"physical_batch": 3})
    assert torch.allclose(released, sum_of_clipped(Model(net), records), atol=1e-6)


def test_padding_in_exported_models_keeps_records_apart(tmp_path):
    net, _ = exported("padded embedding")
    mostly = [(torch.tensor([1 + i % 4, *[0] * 4]), y) for i, (_, y) in enumerate(rows(12))]

    class Steep(Model):
        def training_step(self, batch, batch_idx):
            return 30 * super().training_step(batch, batch_idx)

    assert_bounded(tmp_path, lambda: Steep(copy.deepcopy(net)), mostly)


@pytest.mark.parametrize("physical", [1, 4])
@pytest.mark.parametrize("decomposed", [None, False, True])
def test_batch_norm_is_refused_where_it_is_called(tmp_path, decomposed, physical):
    class Functional(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, torch.zeros(5), torch.ones(5), training=True)

    if decomposed is None:
        net = nn.Sequential(nn.Linear(4, 5), Functional(), nn.Linear(5, CLASSES))
    else:
        net, _ = exported("batch norm", decomposed)
    with pytest.raises(ConfigError, match="call of batch_norm in training mode mixes the records"):
        trained(tmp_path, Model(net), rows(4), callback={"physical_batch": physical})


@pytest.mark.parametrize("physical", [1, 5])
def test_a_chunked_cross_entropy_trains_its_weights(tmp_path, physical):
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has none")

    class Chunked(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
            return F.linear_cross_entropy(x.repeat(4, 1), self.net[0].weight[:CLASSES], y.repeat(4), options=options)

    (released,), _ = trained(tmp_path, Chunked(), rows(5), callback={"physical_batch": physical})
    assert released.norm() > 0.1
    assert torch.allclose(released, sum_of_clipped(Chunked(), rows(5)), atol=1e-6)


# TorchScript


def factor(x):
    return torch.linalg.cholesky(torch.diag_embed(x)).sum()


class Calling(Model):
    """A record whose factor does not exist takes another way."""

    def __init__(self, factor):
        super().__init__()
        self.factor = (factor,)

    def training_step(self, batch, batch_idx):
        x, y = batch
        try:
            scale = torch.stack([self.factor[0](row) for row in x]).mean()
        except Exception:
            scale = x.sum()
        return scale * F.cross_entropy(self.net(x), y)


class Factor(nn.Module):
    def forward(self, x):
        return factor(x)


@pytest.mark.parametrize("physical", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(factor),
        lambda: torch.jit.trace(factor, torch.ones(4, dtype=torch.float64)),
        lambda: torch.jit.script(Factor()),
    ],
)
def test_what_torch_script_made_is_refused_where_it_is_called(tmp_path, make, physical):
    made = make()
    with pytest.raises(ConfigError, match=r"calls a function of TorchScript.*PYTORCH_JIT=0"):
        trained(tmp_path, Calling(made), rows(5), callback={"physical_batch": physical})
    assert made(torch.ones(4, dtype=torch.float64)) == 4  # elsewhere it runs


def test_torch_script_may_prepare_the_data(tmp_path):
    @torch.jit.script
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Prepared(list):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return doubled(x), y

    data = torch.utils.data.DataLoader(Prepared(rows(5)), batch_size=2)
    (released,), _ = trained(tmp_path, Model(), data)
    assert torch.allclose(released, sum_of_clipped(Model(), [(2 * x, y) for x, y in rows(5)]), atol=1e-6)


# torch.compile


class Shifted(Model):
    """A parameter is used inside a compiled function alone."""

    def __init__(self, build):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.shifted = build(lambda shift, x: F.gelu(x + shift))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(self.shifted(self.shift, x)), y)


def compiled(function):
    return torch.compile(function, backend="eager")


@pytest.mark.parametrize("physical", [1, 5])
def test_parameters_of_compiled_functions_are_trained(tmp_path, physical):
    (released,), _ = trained(tmp_path, Shifted(compiled), rows(5), callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Shifted(lambda function: function), rows(5)), atol=1e-6)


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("way", ["a layer", "in place"])
def test_compiled_modules_train_as_plain_ones(tmp_path, way, branching):
    class Part(nn.Linear):
        def forward(self, x):
            return super().forward(x) if not branching or x.sum() < 1e9 else x

    def make():
        torch.manual_seed(5)
        return Model(nn.Sequential(Part(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)))

    module = make()
    if way == "a layer":
        module.net[0] = compiled(module.net[0])
    else:
        module.net.compile(backend="eager")
    (released,), _ = trained(tmp_path, module, rows(5))
    assert torch.allclose(released, sum_of_clipped(make(), rows(5)), atol=1e-6)


# Writes


def through_data(weight, x):
    weight.data.add_(x)


def compiled_write(weight, x):
    compiled(through_data)(weight, x)


def keeping_the_version(weight, x):
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        weight.add_(x)


def with_its_version_set_back(weight, x):
    version = weight._version
    with torch.no_grad():
        weight.add_(x)
    torch._C._autograd._unsafe_set_version_counter((weight,), (version,))


def past_pytorch(weight, x):
    weight.detach().numpy()[...] += x.item()


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("write", [compiled_write, keeping_the_version, with_its_version_set_back, past_pytorch])
def test_a_write_that_no_version_tells_of_is_refused_and_emptied(tmp_path, write, failing, momentum):
    class Writing(Model):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 1 and batch[0].sum() < 1e9:
                write(self.fixed(), batch[0].sum())
                if failing:
                    raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

        def fixed(self):
            optimizer = self.trainer.optimizers[0]
            return optimizer.state[self.net[0].weight]["momentum_buffer"] if momentum else self.net[0].weight

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)

    module = Writing()
    message = "the optimizer's momentum_buffer is changed" if momentum else r"net\.0\.weight is changed"
    with pytest.raises(ConfigError, match=message):
        trained(tmp_path, module, rows(4), steps=2)
    if not momentum:
        assert (module.net[0].weight == 0).all()


def test_turning_function_modes_off_is_refused(tmp_path):
    def unseen(x):
        with torch._C.DisableTorchFunction():
            return factor(x)

    with pytest.raises(ConfigError, match="calls DisableTorchFunction"):
        trained(tmp_path, Calling(unseen), rows(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 8])
def test_tensors_are_compared_to_the_last_bit(dtype, size):
    a = torch.zeros(2, size + 1).to(dtype)[:, 1:]
    b = a.clone()
    assert identical(a, b)
    if size:
        b.view(torch.uint8)[-1, -1] = 1
        assert not identical(a, b)
    if size and dtype.is_floating_point:
        assert not identical(a, -a)
        assert identical(a / 0, a / 0)
