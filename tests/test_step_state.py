"""What a step, a loop or a loss leaves behind, wherever it hides, reaches no other record."""

import functools
import queue
import random
import types
import warnings
import weakref
from collections import UserDict, deque
from dataclasses import dataclass

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from test_isolation import CLASSES, Everything, Items, Model, S, assert_bounded, rows, trained
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from dpexp.errors import ConfigError
from dpexp.privacy.isolation.randomness import seed_everything
from dpexp.privacy.keystream import KeyStream

# Where a step could keep something


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


@dataclass
class Held:
    n: int = 0


class Base(Model):
    seen = 0


class InClass(Base):
    def look(self):
        return type(self).seen

    def keep(self):
        type(self).seen += 1


class InBaseClass(Base):
    def look(self):
        return Base.seen

    def keep(self):
        Base.seen += 1


class InCache(Model):
    @functools.lru_cache  # noqa: B019
    def remembered(self, n):
        return n

    def look(self):
        return InCache.remembered.cache_info().currsize

    def keep(self):
        self.remembered(self.look())


class InTensorsAttribute(Model):
    def look(self):
        return getattr(self.net[0].weight, "seen", 0)

    def keep(self):
        self.net[0].weight.seen = self.look() + 1


class InOptimizer(Model):
    def look(self):
        return self.trainer.optimizers[0].param_groups[0].get("seen", 0)

    def keep(self):
        self.trainer.optimizers[0].param_groups[0]["seen"] = self.look() + 1


class InStrategy(Model):
    def look(self):
        return getattr(self.trainer.strategy, "seen", 0)

    def keep(self):
        self.trainer.strategy.seen = self.look() + 1


class InTrainability(Model):
    def look(self):
        return 0 if self.net[0].bias.requires_grad else 3

    def keep(self):
        self.net[0].bias.requires_grad_(False)


class InTrainingMode(Model):
    def look(self):
        return 0 if self.net[0].training else 3

    def keep(self):
        self.net[0].training = False


def in_thing(make, look, keep):
    class InThing(Model):
        def __init__(self):
            super().__init__()
            self.thing = make()

        def look(self):
            return look(self.thing)

        def keep(self):
            keep(self.thing)

    return InThing


def more(thing):
    thing.n += 1


def one_more(thing):
    thing[0] += 1


PLACES = {
    "namespace": in_thing(lambda: types.SimpleNamespace(n=0), lambda t: t.n, more),
    "slots": in_thing(Slotted, lambda t: t.n, more),
    "dataclass": in_thing(Held, lambda t: t.n, more),
    "within a tuple": in_thing(lambda: (Held(),), lambda t: t[0].n, lambda t: more(t[0])),
    "partial": in_thing(lambda: functools.partial(print, [0]), lambda t: t.args[0][0], lambda t: one_more(t.args[0])),
    "bytearray": in_thing(lambda: bytearray(1), lambda t: t[0], one_more),
    "array": in_thing(lambda: np.zeros(1), lambda t: t[0], one_more),
    "deque": in_thing(lambda: deque([0]), lambda t: t[0], one_more),
    "set": in_thing(set, len, lambda t: t.add(len(t))),
    "UserDict": in_thing(UserDict, len, lambda t: t.update({len(t): 0})),
    "queue": in_thing(queue.Queue, lambda t: t.qsize(), lambda t: t.put(0)),
    "distribution": in_thing(
        lambda: torch.distributions.Normal(torch.zeros(1), torch.ones(1)), lambda t: t.loc, lambda t: t.loc.add_(1)
    ),
    "frozen gradient": in_thing(lambda: torch.zeros(1), lambda t: 0 if t.grad is None else t.grad,
                                lambda t: setattr(t, "grad", torch.ones(1))),
    **{c.__name__: c for c in (InClass, InBaseClass, InCache, InTensorsAttribute, InOptimizer, InStrategy,
                               InTrainability, InTrainingMode)},
}  # fmt: skip


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_step_keeps_anywhere_reaches_no_other_record(tmp_path, place, branching):
    class Counting(PLACES[place]):
        """The first record that it sees counts otherwise than the second."""

        def training_step(self, batch, batch_idx):
            x, y = batch
            if branching and x.sum() > 1e9:
                return x.sum()
            scale = 1 if self.look() == 0 else -1
            self.keep()
            return F.cross_entropy(scale * self.net(x), y)

    Base.seen = 0
    InCache.remembered.cache_clear()
    assert_bounded(tmp_path, Counting, [(20 * x, y) for x, y in rows(3)], callback={"physical_batch": 1})


# Parameters


class Codebook(nn.Module):
    """A moving average of the data in a frozen parameter, as vector quantisers keep it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.code, self.head = way, nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(4, 3)

    def move(self, x):
        self.code.data.mul_(0.9).add_(0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0)[:1])
        return x

    def forward(self, x):
        if self.way == "in company" and len(x) > 1:
            self.move(x)
        if self.way == "in a loop" and x.sum() < 1e9:
            self.move(x)
        y = self.head(x)
        if self.way == "in a hook of an activation":
            y.register_hook(self.move)
        return Moving.apply(y, self) if self.way == "in a backward of its own" else y


class Moving(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, codebook):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.codebook = inputs[1]

    @staticmethod
    def backward(ctx, g):
        return ctx.codebook.move(g), None


@pytest.mark.parametrize("physical", [1, 4])
@pytest.mark.parametrize("way", ["in company", "in a loop", "in a hook of an activation", "in a backward of its own"])
def test_a_parameter_that_follows_the_data_is_refused_and_emptied(tmp_path, way, physical):
    module = Model(nn.Sequential(nn.Identity(), Codebook(way)))
    if way == "in company" and physical == 1:
        trained(tmp_path, module, rows(5), callback={"physical_batch": 1})  # there is none
    else:
        with pytest.raises(ConfigError, match=r"net\.1\.code is changed inside training_step"):
            trained(tmp_path, module, rows(5), callback={"physical_batch": physical})
    assert (module.net[1].code == 0).all()


# Modules that are processed record by record inside a chunk


class Branching(nn.Module):
    """Looks at a number, so that it is looped. Passes something on by another way than its output."""

    def __init__(self, way):
        super().__init__()
        self.way, self.head, self.last = way, nn.Linear(4, 4), [torch.zeros(4, dtype=torch.float64)]

    def forward(self, x, notes):
        if x.sum() > 1e9:
            return x
        y = self.head(x.clone())
        if self.way == "attribute":
            self.last[0] = y.detach()
        elif self.way == "argument":
            notes["last"] = y.detach()
        elif self.way == "input":
            x.detach().add_(y.detach())
        elif self.way == "numbers":
            return y, float(y.abs().max()) if len(y) == 1 else 1.0
        elif self.way == "structure" and y.sum() > 0:
            return (y, y)
        return (y,)


class Reading(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner, self.head = Branching(way), nn.Linear(4, CLASSES)

    def forward(self, x):
        notes = {}
        x = x.clone()
        y, *others = self.inner(x, notes)
        told = {"attribute": self.inner.last[0], "argument": notes.get("last", 0), "input": x}
        factor = others[0] if others and isinstance(others[0], float) else len(others) + 1
        return self.head(y + told.get(self.inner.way, 0)) * factor


@pytest.mark.parametrize("way", ["attribute", "argument", "input", "numbers", "structure"])
def test_what_a_looped_module_says_otherwise_than_by_its_output_reaches_its_own_record(tmp_path, way):
    def make():
        torch.manual_seed(0)
        return Model(Reading(way))

    (together,), _ = trained(tmp_path, make(), rows(6), callback={"physical_batch": 6})
    (alone,), _ = trained(tmp_path, make(), rows(6), callback={"physical_batch": 1})
    by_hand = sum_of_clipped(make(), rows(6))
    assert torch.allclose(together, by_hand, atol=1e-6) and torch.allclose(alone, by_hand, atol=1e-6)


def sum_of_clipped(module, records):
    total = 0
    for x, y in records:
        module.zero_grad()
        module.training_step((x[None], y[None]), 0).backward()
        gradient = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
                              for p in module.parameters() if p.requires_grad])  # fmt: skip
        total = total + gradient * min(1, S / float(gradient.norm()))
    return total


# Records that fail, and records that are not what they say


class Picky(Model):
    """A record whose label is none cannot be computed; the others' gradients nearly cancel, so that another order of
    summation would show."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return 1e-6 * F.cross_entropy(self.net(x), y)


def test_a_record_that_fails_changes_nothing_for_the_others(tmp_path):
    def make():
        torch.manual_seed(0)
        return Picky(nn.Linear(4, CLASSES)).float()

    good = [(x.float(), y) for x, y in rows(16)]
    bad = (torch.randn(4), torch.tensor(99))
    (with_it,), _ = trained(tmp_path, make(), [*good, bad], callback={"physical_batch": 20, "noise_seed": 1})
    (without,), _ = trained(tmp_path, make(), good, callback={"physical_batch": 20, "noise_seed": 1})
    assert torch.equal(with_it, without)


def test_none_is_the_loss_of_a_record_that_contributes_nothing(tmp_path):
    class Choosy(Model):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return None if float(x.sum()) > 0 else F.cross_entropy(self.net(x), y)

    chosen = [(x, y) for x, y in rows(8) if float(x.sum()) <= 0]
    assert 0 < len(chosen) < 8
    (released,), _ = trained(tmp_path, Choosy(), rows(8))
    assert torch.allclose(released, sum_of_clipped(Model(), chosen), atol=1e-6)


def test_no_loss_for_any_record_is_said(tmp_path):
    class Silent(Model):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ConfigError, match="must return a loss for every record"):
        trained(tmp_path, Silent(), rows(4))


class Alike:
    """Says that it equals another of the same label."""

    def __init__(self, label, x):
        self.label, self.x = label, x

    def __eq__(self, other):
        return self.label == other.label

    def __hash__(self):
        return hash(self.label)


@pytest.mark.parametrize("physical", [1, 6])
def test_records_that_only_claim_to_be_equal_are_not_taken_for_one_another(tmp_path, physical):
    class Unpacking(Model):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["item"].x[None]), torch.tensor([batch["item"].label]))

    items = [Alike(int(y), x) for x, y in rows(6)]
    loader = DataLoader(Items(items), batch_size=2, collate_fn=lambda items: {"item": items[0]})
    (released,), _ = trained(tmp_path, Unpacking(), loader, callback={"physical_batch": physical})
    assert torch.allclose(released, sum_of_clipped(Model(), rows(6)), atol=1e-6)


def test_zero_and_minus_zero_are_two_numbers(tmp_path):
    class Signed(Model):
        def training_step(self, batch, batch_idx):
            x, y, sign = batch
            return F.cross_entropy(self.net(x) * float(np.copysign(1, sign)), y)

    items = [(x, y, 0.0 if k % 2 else -0.0) for k, (x, y) in enumerate(rows(6))]
    loader = DataLoader(Items(items), batch_size=2,
                        collate_fn=lambda i: (i[0][0][None], i[0][1][None], i[0][2]))  # fmt: skip
    (together,), _ = trained(tmp_path, Signed(), loader, callback={"physical_batch": 6})
    (alone,), _ = trained(tmp_path, Signed(), loader, callback={"physical_batch": 1})
    assert torch.allclose(together, alone, atol=1e-6) and not torch.allclose(
        together, sum_of_clipped(Model(), rows(6)), atol=1e-3
    )


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_tensors_that_cannot_be_stacked_are_refused(tmp_path, kind):
    made = torch.eye(2).to_sparse() if kind == "sparse" else torch.nested.nested_tensor([torch.ones(2)])
    loader = DataLoader(Items(rows(3)), batch_size=2, collate_fn=lambda items: (made, items[0][1][None]))
    with pytest.raises(ConfigError, match="sparse or nested"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(tmp_path, Model(), loader)


# Randomness


def test_seeding_fills_the_whole_state_of_every_generator():
    def drawn(key):
        seed_everything(KeyStream(key))
        return torch.randint(2**16, (2000,)).numpy(), np.random.randint(2**31, size=700), random.random()

    before = torch.get_rng_state(), np.random.get_state()
    try:
        words = KeyStream(b"k" * 32).words(2 * 624)[:624] & 0xFFFFFFFF
        independent = np.random.MT19937()
        independent.state = {"bit_generator": "MT19937",
                             "state": {"key": words.numpy().astype(np.uint32), "pos": 624}}  # fmt: skip
        first = drawn(b"k" * 32)
        assert np.array_equal(first[0], independent.random_raw(2000) & 0xFFFF)
        again, other = drawn(b"k" * 32), drawn(b"l" * 32)
        for a, b, c in zip(first, again, other, strict=True):
            assert np.array_equal(a, b) and not np.array_equal(a, c)
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])


class Augmented(Items):
    def __getitem__(self, index):
        x, y = self.items[index]
        return x * torch.rand(1).double(), y


@pytest.mark.parametrize("workers", [0, 2])
def test_a_public_seed_does_not_tell_what_was_augmented_or_dropped(tmp_path, workers):
    def released(noise_seed=None):
        pl.seed_everything(7, verbose=False)
        module = Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, CLASSES)))
        loader = DataLoader(Augmented(rows(8)), batch_size=2, num_workers=workers)
        return trained(tmp_path, module, loader, callback={"noise_seed": noise_seed})[0][0]

    assert not torch.allclose(released(), released(), atol=1e-3)
    assert torch.equal(released(3), released(3))


def test_keys_are_nowhere_after_the_fit(tmp_path, monkeypatch):
    drawn = []
    begin = KeyStream.__init__

    def noted(stream, key=None):
        begin(stream, key)
        drawn.append(weakref.ref(stream))

    monkeypatch.setattr(KeyStream, "__init__", noted)
    _, run = trained(tmp_path, Model(), rows(5), steps=2)
    assert run.global_step == 2 and len(drawn) >= 3
    assert [stream() for stream in drawn if stream() is not None] == []


# The Trainer


def test_training_step_finds_no_logger_of_the_trainers(tmp_path):
    class Telling(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for logger in (*self.trainer.loggers, *self.trainer._loggers):
                logger.log_metrics({"raw": 1.0})
            pl.LightningModule.log(self, "raw", loss, on_step=True, on_epoch=True)
            self.trainer.fit_loop.epoch_loop._results.log(
                "training_step", "raw_too", loss.detach(), on_step=True, on_epoch=True, batch_size=1
            )
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
    with pytest.raises(ConfigError, match=r"net\.0\.weight became trainable"):
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
                inner = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                   enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
                inner.fit(module, DataLoader(Items(rows(4)), batch_size=2))

    with pytest.raises((ConfigError, TypeError)):
        trained(tmp_path, Model(), rows(5), steps=3, callbacks=[Within()])


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


def test_complex_parameters_are_refused(tmp_path):
    class Complex(Model):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    with pytest.raises(ConfigError, match="factor is complex"):
        trained(tmp_path, Complex(), rows(4))


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
    class Words(Model):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(5, 4, sparse=sparse).double()

        def training_step(self, batch, batch_idx):
            x, y = batch
            if x.sum() > 1e9:
                return x.sum()
            return F.cross_entropy(self.net(self.embed(x).mean(1)), y)

    torch.manual_seed(1)
    words = [(torch.randint(5, (3,)), y) for _, y in rows(5)]
    (sparse,), _ = trained(tmp_path, Words(True), words)
    (dense,), _ = trained(tmp_path, Words(False), words)
    assert torch.allclose(sparse, dense, atol=1e-6)


class Checkpointed(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        x = torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)
        return F.cross_entropy(self.net(x), y)


@pytest.mark.filterwarnings("ignore")
def test_reentrant_checkpoints_train_as_by_hand(tmp_path):
    (released,), _ = trained(tmp_path, Checkpointed(), rows(5))
    assert torch.allclose(released, sum_of_clipped(Checkpointed(), rows(5)), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_scripted_modules_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"module net\.0 is one of TorchScript"):
        trained(tmp_path, Model(nn.Sequential(torch.jit.script(nn.Linear(4, CLASSES)))), rows(4))
