"""Models and Trainers of other kinds: what trains as by hand, and what is refused."""

import copy
import functools
import multiprocessing

import pytest
import pytorch_lightning as pl
import torch
from plans import trainer as quiet_trainer
from test_isolation import CLASSES, Everything, Items, Model, assert_bounded, rows, sum_of_clipped, trained
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from dpexp.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")

# The Trainer


def test_training_step_finds_no_logger_of_the_trainers(tmp_path):
    class Telling(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for logger in (*self.trainer.loggers, *self.trainer._loggers):
                logger.log_metrics({"raw": 1.0})
            self.log("raw", loss, on_step=True, on_epoch=True)
            return loss

    logger = Everything()
    _, run = trained(tmp_path, Telling(), rows(5), steps=3, logger=logger, log_every_n_steps=1)
    assert all("raw" not in str(metrics) for _, metrics in logger.told) and "raw" not in str(run.callback_metrics)


def test_layers_that_thaw_during_training_are_refused(tmp_path):
    class Thawing(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module): ...

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                module.net[0].weight.requires_grad_(True)

    module = Model()
    module.net[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"became trainable"):
        trained(tmp_path, module, rows(5), steps=3, callbacks=[Thawing()])


def test_accumulating_rounds_is_refused_when_it_starts(tmp_path):
    scheduler = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    with pytest.raises(ConfigError, match="accumulate_grad_batches=2"):
        trained(tmp_path, Model(), rows(5), steps=3, callbacks=[scheduler])


def test_a_round_that_releases_nothing_ends_the_training(tmp_path):
    class Elsewhere(Model):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    with pytest.raises(ConfigError, match="released no average"):
        trained(tmp_path, Elsewhere(), rows(5), steps=3)


def test_a_fit_inside_a_fit_is_refused(tmp_path):
    class Within(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 1:
                quiet_trainer(max_steps=1).fit(module, DataLoader(Items(rows(4)), batch_size=2))

    with pytest.raises((ConfigError, TypeError)):
        trained(tmp_path, Model(), rows(5), steps=3, callbacks=[Within()])


def test_validation_before_the_fit_may_leave_tensors_behind(tmp_path):
    """Those of inference mode, of which PyTorch counts no changes."""

    class Remembering(Model):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.kept = self.net(batch[0])

    module = Remembering()
    quiet_trainer().validate(module, DataLoader(Items(rows(4)), batch_size=2), verbose=False)
    assert module.kept.is_inference()
    (released,), _ = trained(tmp_path, module, rows(5))
    assert torch.allclose(released, sum_of_clipped(Model(), rows(5)), atol=1e-6)


def test_a_step_that_was_set_on_the_module_is_there_again_afterwards(tmp_path):
    module = Model()
    step = functools.partial(Model.training_step, module)
    module.training_step = step
    trained(tmp_path, module, rows(4))
    assert module.training_step is step


def test_a_hook_that_a_callback_adds_is_refused_too(tmp_path):
    class Adding(pl.Callback):
        def on_train_start(self, trainer, module):
            module.net[0].weight.register_hook(lambda g: 0 * g)

    with pytest.raises(ConfigError, match=r"net\.0\.weight has a gradient hook"):
        trained(tmp_path, Model(), rows(4), callbacks=[Adding()])


def test_a_step_that_hangs_a_hook_on_a_parameter_for_each_record_is_refused(tmp_path):
    """Unless it is traced: the hook then belongs to the graph of one record."""

    class Hooking(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            self.net[0].weight.register_hook(lambda g: g / 2)
            return F.cross_entropy(self.net(x[x.sum(1) != 0]), y)

    with pytest.raises(ConfigError, match="differs after other records, so training_step keeps state of a record"):
        trained(tmp_path, Hooking(), rows(5))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="PyTorch has the other way only since 2.9")
def test_both_ways_to_set_precision_train_the_same(tmp_path):
    (expected,), _ = trained(tmp_path, Model().float(), [(x.float(), y) for x, y in rows(6)])
    fork = multiprocessing.get_context("fork")
    found = fork.Value("d", 0.0)

    def the_other_way():
        """In a process of its own, which for PyTorch is set this way for good."""
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        (released,), _ = trained(tmp_path, Model().float(), [(x.float(), y) for x, y in rows(6)])
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        found.value = float(released.norm())

    process = fork.Process(target=the_other_way)
    process.start()
    process.join(120)
    assert process.exitcode == 0 and found.value == pytest.approx(float(expected.norm()), rel=0.02)


# Parameters of other kinds


def test_spectral_norms_go_on_once_a_round_from_the_weights_alone(tmp_path):
    def make():
        torch.manual_seed(0)
        return Model(nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, CLASSES)))

    def vectors(records):
        module = make()
        trained(tmp_path, module, records, steps=3)
        return module.net[0].parametrizations.weight[0]._u

    few, many = vectors(rows(3)), vectors(rows(9))
    assert torch.equal(few, many), "the weights do not move at lr=0"
    assert not torch.equal(few, make().net[0].parametrizations.weight[0]._u)
    assert_bounded(tmp_path, make, rows(4))


def test_old_spectral_norm_is_refused(tmp_path):
    module = Model(nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, CLASSES))))
    with pytest.raises(ConfigError, match="spectral_norm"):
        trained(tmp_path, module, rows(4))


def test_parameters_without_elements_do_no_harm(tmp_path):
    class WithEmpty(Model):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.zeros(0, 3).double())

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.none.sum()

    module = WithEmpty()
    module.net.requires_grad_(True)
    (released,), _ = trained(tmp_path, module, rows(4))
    assert torch.allclose(released, sum_of_clipped(Model(), rows(4)), atol=1e-6)


def test_sparse_gradients_are_made_dense(tmp_path):
    class Looked(Model):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4, sparse=sparse).double()

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.detach().numpy().size > 1e9:
                return x.sum()
            return F.cross_entropy(self.net(self.embed(x).mean(1)), y)

    torch.manual_seed(1)
    words = [(torch.randint(5, (3,)), y) for _, y in rows(5)]
    (sparse,), _ = trained(tmp_path, Looked(True), words)
    (dense,), _ = trained(tmp_path, Looked(False), words)
    assert torch.allclose(sparse, dense, atol=1e-6)


# torch.export


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


IMAGES = [(torch.randn(1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i)), y) for i, (_, y) in
          enumerate(rows(5))]  # fmt: skip


WORDS = [(torch.tensor([1 + i % 4, 0, 0, 0, (i * i) % 5]), y) for i, (_, y) in enumerate(rows(6))]


EXPORTED = {
    "padded embedding": (lambda: Words(padding_idx=0), WORDS),
    "convolution, group norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
                              nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)), IMAGES),
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
@pytest.mark.parametrize("name", ["padded embedding", "convolution, group norm"])
def test_exported_models_train_as_by_hand(tmp_path, name, decomposed):
    net, records = exported(name, decomposed)
    (released,), _ = trained(tmp_path, Model(copy.deepcopy(net)), records, callback={"max_physical_batch_size": 3})
    assert torch.allclose(released, sum_of_clipped(Model(net), records), atol=1e-6)


@pytest.mark.parametrize("decomposed, physical", [(None, 1), (True, 4)])
def test_batch_norm_is_refused_where_it_is_called(tmp_path, decomposed, physical):
    class Functional(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, torch.zeros(5), torch.ones(5), training=True)

    if decomposed is None:
        net = nn.Sequential(nn.Linear(4, 5), Functional(), nn.Linear(5, CLASSES))
    else:
        net, _ = exported("batch norm", decomposed)
    with pytest.raises(ConfigError, match="training_step"):
        trained(tmp_path, Model(net), rows(4), callback={"max_physical_batch_size": physical})


@pytest.mark.parametrize("physical", [1, 5])
def test_a_chunked_cross_entropy_trains_its_weights(tmp_path, physical):
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has none")

    class Chunked(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            options = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
            return F.linear_cross_entropy(x.repeat(4, 1), self.net[0].weight[:CLASSES], y.repeat(4), options=options)

    (released,), _ = trained(tmp_path, Chunked(), rows(5), callback={"max_physical_batch_size": physical})
    assert released.norm() > 0.1
    assert torch.allclose(released, sum_of_clipped(Chunked(), rows(5)), atol=1e-6)


# TorchScript


def scale(x):
    return (x.square() + 1).log().sum()


class Calling(Model):
    def __init__(self, scale):
        super().__init__()
        self.scale = (scale,)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scales = torch.stack([self.scale[0](row) for row in x])
        return (scales * F.cross_entropy(self.net(x), y, reduction="none")).mean()


@pytest.mark.parametrize(
    "make, physical", [(torch.jit.script, 1), (lambda function: torch.jit.trace(function, torch.ones(4).double()), 4)]
)
def test_functions_of_torch_script_train_as_written_ones(tmp_path, make, physical):
    (released,), _ = trained(tmp_path, Calling(make(scale)), rows(5), callback={"max_physical_batch_size": physical})
    assert torch.allclose(released, sum_of_clipped(Calling(scale), rows(5)), atol=1e-6)


def test_scripted_modules_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"module net\.0 is a TorchScript module"):
        trained(tmp_path, Model(nn.Sequential(torch.jit.script(nn.Linear(4, CLASSES)))), rows(4))


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
    (released,), _ = trained(tmp_path, Shifted(compiled), rows(5), callback={"max_physical_batch_size": physical})
    assert torch.allclose(released, sum_of_clipped(Shifted(lambda function: function), rows(5)), atol=1e-6)


@pytest.mark.parametrize("way, branching", [("a layer", True), ("in place", False)])
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
