"""Nothing leaves but what was noised: attacks on the callback in a real Trainer, with next to no noise."""

import functools
import random
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from pytorch_lightning.callbacks import LearningRateFinder, LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger, Logger
from pytorch_lightning.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.plan import clipping
from dpexp.privacy.sampling.batches import SingleCollation

S, CLASSES = 0.5, 3
SILENT = 1e-8  # a noise multiplier of next to no noise
SEEN = []  # out of the callback's reach


class Items(Dataset):
    def __init__(self, items):
        self.items = list(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(CLASSES, (count,), generator=generator), strict=True))


def sequences(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (count,), generator=generator).tolist()
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return [
        (torch.randn(n, 4, generator=generator, dtype=torch.float64), y) for n, y in zip(lengths, labels, strict=True)
    ]


class Model(pl.LightningModule):
    def __init__(self, net=None, **optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
        self.rate = optimizer.get("lr", 0.0)
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class Released(pl.Callback):
    """What leaves in each round: its noisy sum."""

    def __init__(self):
        self.sums = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        plan = next(c.plan for c in trainer.callbacks if isinstance(c, dpexp.PrivacyCallback))
        grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
        self.sums.append(torch.cat(grads).double() * plan.n * plan.sampling.q)


def loader_of(records):
    is_loader = records is None or isinstance(records, DataLoader)
    return records if is_loader else DataLoader(Items(records), batch_size=2)


def trained(folder, module, data, steps=1, z=SILENT, callbacks=(), callback=None, ckpt_path=None, val=None, **options):
    """The releases and the Trainer of a fit with every record in every round; data are records or a DataLoader."""
    plan = plan_of(
        module, n=10, sampling="full_batch", q=1.0, steps=steps, noise_multiplier=z, clip_norm=clipping.FixedClipNorm(S)
    )
    released = Released()
    folder.mkdir(exist_ok=True)
    ledger = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    privacy = dpexp.PrivacyCallback(plan, ledger, **{"max_physical_batch_size": 4} | (callback or {}))
    run = trainer(privacy, *callbacks, released, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, loader_of(data), loader_of(val), ckpt_path=ckpt_path)
    return released.sums, run


def assert_bounded(folder, make, records, collate=default_collate, steps=1, **options):
    """Removing any one record moves what the first release is by at most S."""

    def release(items):
        loader = DataLoader(Items(items), batch_size=2, collate_fn=collate)
        return trained(folder, make(), loader, steps, **options)[0][0]

    whole = release(records)
    for out in range(len(records)):
        moved = (whole - release(records[:out] + records[out + 1 :])).norm()
        assert 0 < moved <= S * (1 + 1e-6), out


def sum_of_clipped(module, records):
    """By hand."""
    total = 0
    for x, y in records:
        module.zero_grad()
        module.training_step((x[None], y[None]), 0).backward()
        gradient = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros(p.numel())
                              for p in module.parameters() if p.requires_grad])  # fmt: skip
        total = total + gradient * min(1, S / float(gradient.norm()))
    return total


# Collation


def padded(items):
    x, y = zip(*items, strict=True)
    return pad_sequence(x, batch_first=True), torch.stack(y)


class Unmasked(nn.Module):
    """Averages over positions, padding included."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.embed(x).tanh().mean(1) * 30)


def test_padding_to_the_longest_lets_no_record_change_another(tmp_path):
    """Records 0 and 1 are of equal length, and the last one is long."""
    records = sequences(7)
    records[1] = (torch.randn(len(records[0][0]), 4, dtype=torch.float64), records[1][1])
    records.append((torch.randn(40, 4, dtype=torch.float64), torch.tensor(0)))
    loader = DataLoader(Items(records), batch_size=2, collate_fn=padded)
    (released,), _ = trained(tmp_path, Model(Unmasked()), loader)
    assert torch.allclose(released, sum_of_clipped(Model(Unmasked()), records), atol=1e-6)


def centred(items):
    x, y = default_collate(items)
    return 100 * (x - 0.9 * x.mean(0)), y


BUFFER = torch.zeros(1, 4, dtype=torch.float64)


def in_the_same_memory(items):
    BUFFER[0] = items[0][0]
    return BUFFER, items[0][1][None]


class Together(Items):
    def __getitems__(self, indices):
        found = [self.items[index] for index in indices]
        return [(x - sum(x for x, _ in found), y) for x, y in found]


@pytest.mark.parametrize(
    "data, collate, factor",
    [(Items, centred, 10), (Items, in_the_same_memory, 1), (Together, default_collate, 1)],
    ids=["mixing", "in the same memory", "several at once"],
)
def test_data_that_mix_records_are_asked_for_one(tmp_path, data, collate, factor):
    (released,), _ = trained(tmp_path, Model(), DataLoader(data(rows(6)), batch_size=2, collate_fn=collate))
    assert torch.allclose(released, sum_of_clipped(Model(), [(factor * x, y) for x, y in rows(6)]), atol=1e-6)


def test_items_that_only_a_kind_of_default_collation_fits(tmp_path):
    """Numbers, arrays and dicts are stacked as ever; a number's type does not depend on its neighbours'."""
    items = [
        {"x": np.array([1.0, k, 3, 4]), "y": k % 3, "w": 1 if k % 2 else 1.5, "name": "a" if k < 3 else "b"}
        for k in range(7)
    ]
    SEEN.clear()

    class Dicts(Model):
        def training_step(self, batch, batch_idx):
            if len(batch["x"]) == 1:  # the dry run also tries two at once
                SEEN.append((batch["w"].dtype, batch["x"].shape, batch["name"]))
            return F.cross_entropy(self.net(batch["x"]), batch["y"]) * batch["w"].double().sum()

    (released,), _ = trained(tmp_path, Dicts(), items)
    assert {dtype for dtype, _, _ in SEEN} == {torch.int64, torch.float64}
    assert {tuple(shape) for _, shape, _ in SEEN} == {(1, 4)} and {str(n) for _, _, n in SEEN} == {"['a']", "['b']"}
    by_hand = torch.zeros_like(released)
    module = Dicts()
    for item in items:
        loss = module.training_step(default_collate([item]), 0)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        by_hand += gradient * min(1, S / gradient.norm())
    assert torch.allclose(released, by_hand, atol=1e-6)


def test_whole_batches_as_items_are_refused(tmp_path):
    loader = DataLoader(Items([(torch.randn(3, 4), torch.zeros(3))]), batch_size=None)
    with pytest.raises(ConfigError, match="batch_size=None"):
        trained(tmp_path, Model(), loader)


# State


class Counter:
    seen = 0

    def __call__(self):
        self.seen += 1
        return self.seen


class OfAll:
    seen = 0

    def __call__(self):
        OfAll.seen += 1
        return OfAll.seen


def closure():
    count = 0

    def more():
        nonlocal count
        count += 1
        return count

    return more


def kept(make, use):
    def place():
        state = make()
        return lambda: use(state)

    return place


PLACES = {
    "attribute": Counter,
    "class": OfAll,
    "closure": closure,
    "tensor": kept(lambda: torch.zeros(()), lambda total: total.add_(1)),
    "array": kept(lambda: np.zeros(1), lambda total: np.add(total, 1, out=total).item()),
    "list": kept(list, lambda items: items.append(0) or len(items)),
    "cache": kept(lambda: functools.lru_cache(lambda n: n), lambda known: known(known.cache_info().currsize) + 1),
    "generator of torch": kept(torch.Generator, lambda generator: torch.rand((), generator=generator)),
    "generator of NumPy": kept(lambda: np.random.default_rng(0), lambda generator: generator.random()),
}


class Counting(Model):
    """A record's loss is scaled by what the step comes to."""

    def __init__(self, place, asking=False):
        super().__init__()
        self.place, self.asking = PLACES[place](), asking

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.asking and float(x.sum()) > 1e9:  # so that it runs record by record
            return x.sum()
        return F.cross_entropy(self.place() * self.net(x), y)


def assert_refused(folder, module, match="keeps state of a record", **options):
    """Before the first round."""
    with pytest.raises(ConfigError, match=match):
        trained(folder, module, rows(5), **options)
    assert len(read_ledger(folder / "0.jsonl")) == 0


@pytest.mark.parametrize(
    "place, asking",
    [*((place, False) for place in PLACES), ("list", True), ("class", True)],
)
def test_a_step_that_keeps_something_anywhere_is_refused(tmp_path, place, asking):
    assert_refused(tmp_path, Counting(place, asking))


class Codebook(nn.Module):
    """A moving average of the data in a buffer or a frozen parameter, as vector quantisers keep it."""

    def __init__(self, way, parameter):
        super().__init__()
        self.way, self.head = way, nn.Linear(4, 3)
        if parameter:
            self.code = nn.Parameter(torch.zeros(4), requires_grad=False)
        else:
            self.register_buffer("code", torch.zeros(4))

    def move(self, x):
        moved = 0.9 * self.code + 0.1 * x.detach().reshape(-1, x.shape[-1]).mean(0)[:1]
        if self.way == "assigned":
            self.code = moved
        else:
            self.code.data.copy_(moved)
        return x

    def forward(self, x):
        if self.way in ("in place", "assigned"):
            self.move(x)
        y = self.head(x)
        if self.way == "in a hook of an activation":
            y.register_hook(self.move)
        return y


@pytest.mark.parametrize(
    "way, parameter",
    [("assigned", False), ("in place", True), ("in a hook of an activation", True)],
)
def test_parameters_and_buffers_that_follow_the_data_are_refused(tmp_path, way, parameter):
    with pytest.raises(ConfigError):
        trained(tmp_path, Model(nn.Sequential(nn.Identity(), Codebook(way, parameter))), rows(5))
    assert len(read_ledger(tmp_path / "0.jsonl")) == 0


class Random(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(F.dropout(x, 0.5)), y) * (1 + 0.1 * random.random() + np.random.rand())


@pytest.mark.parametrize("physical", [1, 4])
def test_random_generators_do_not_tell_how_many_records_there_were(tmp_path, physical):
    def afterwards(count):
        pl.seed_everything(3)
        trained(tmp_path, Random(), rows(count), 2, callback={"max_physical_batch_size": physical})
        return torch.rand(1).item(), random.random(), np.random.rand()

    assert afterwards(4) == afterwards(9)


def test_each_round_has_random_numbers_of_its_own(tmp_path):
    (first, second), _ = trained(tmp_path, Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))), rows(6), 2)
    assert not torch.allclose(first, second, atol=1e-3)


# What Lightning counts, logs and saves


def contents(thing, path=""):
    """Every number of a checkpoint but the weights."""
    if isinstance(thing, dict):
        return {
            k: v
            for key, value in thing.items()
            if key != "state_dict"
            for k, v in contents(value, f"{path}/{key}").items()
        }
    if isinstance(thing, list | tuple):
        return {k: v for i, value in enumerate(thing) for k, v in contents(value, f"{path}/{i}").items()}
    return {path: thing}


def test_checkpoints_hold_no_count_of_records(tmp_path, monkeypatch):
    monkeypatch.setattr("dpexp.accounting.ledger.writer.os.urandom", bytes)  # the number that tells ledgers apart

    def checkpoint(count):
        _, run = trained(tmp_path, Model(), rows(count), 3, z=1.0, callback={"max_physical_batch_size": 3})
        run.save_checkpoint(tmp_path / "c.ckpt")
        return contents(torch.load(tmp_path / "c.ckpt", weights_only=False))

    few, many = checkpoint(6), checkpoint(7)
    assert few.keys() == many.keys()
    assert {key: value for key, value in few.items() if value != many[key]} == {}


class Everything(Logger):
    """Keeps what it is told."""

    name, version = "everything", 0

    def __init__(self):
        super().__init__()
        self.told = []

    def log_hyperparams(self, *args, **kwargs): ...

    def log_metrics(self, metrics, step=None):
        self.told.append((step, dict(metrics)))


class Telling(Model):
    """Tells its losses to whatever will listen."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("direct", loss)
        self.log_dict({"several": loss})
        if self.logger is not None:
            self.logger.log_metrics({"raw": 1.0})
            self.trainer.logger.log_metrics({"raw": 1.0})
            [logger.log_metrics({"raw": 1.0}) for logger in self.loggers]
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("hook", outputs["loss"])
        self.log("index", float(batch_idx))


def test_loggers_get_nothing_from_training(tmp_path):
    logger = Everything()
    _, run = trained(
        tmp_path, Telling(), rows(7), 3, 1.0, [LearningRateMonitor()], {"delta": 1e-3}, logger=logger,
        log_every_n_steps=1, val=rows(4, seed=1),
    )  # fmt: skip
    told = {key: value for _, metrics in logger.told for key, value in metrics.items()}
    public = {"epsilon", "val_loss", "lr-SGD"}
    assert public <= told.keys() <= {*public, "epoch"}
    assert set(run.callback_metrics) <= public


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_hooks_are_given_a_sealed_batch(tmp_path, hook):
    def look(self, *arguments):
        x, _y = arguments[-2]
        self.mean = x.mean()

    for owner in (Model, pl.Callback):
        nosy = type("Nosy", (owner,), {hook: look})
        module, callbacks = (nosy(), []) if owner is Model else (Model(), [nosy()])
        with pytest.raises(ConfigError, match="sealed"):
            trained(tmp_path, module, rows(5), callbacks=callbacks)


def test_a_sealed_batch_tells_nothing(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append((repr(batch), batch_idx))

    trained(tmp_path, Model(), rows(9), 2, callbacks=[Watch()], callback={"max_physical_batch_size": 1})
    assert seen == [("SealedSample(round=tensor(0))", 0), ("SealedSample(round=tensor(1))", 0)], "rounds, not chunks"


# What trains on raw batches, or on other losses than it seems


def test_learning_rate_finders_are_refused(tmp_path):
    class Tunable(Model):
        def __init__(self):
            super().__init__()
            self.lr = 0.1

    with pytest.raises(ConfigError, match="LearningRateFinder trains on records without noise"):
        trained(tmp_path, Tunable(), rows(5), callbacks=[LearningRateFinder()])
    module = Tunable()
    plan = plan_of(module, n=10, sampling="full_batch", q=1.0, steps=2, noise_multiplier=1.0)
    run = trainer(dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl"), default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match="LearningRateFinder"):
        Tuner(run).lr_find(module, DataLoader(Items(rows(5)), batch_size=2))
    assert not (tmp_path / "l.jsonl").exists()


def test_training_step_is_not_called_outside_rounds(tmp_path):
    class Rogue(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            module.training_step(default_collate(rows(2)), 0).backward()

    with pytest.raises(ConfigError, match="outside the plan's rounds"):
        trained(tmp_path, Model(), rows(5), callbacks=[Rogue()])


def test_validation_may_call_training_step(tmp_path):
    class Shared(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    _, run = trained(tmp_path, Shared(), rows(5), 3, logger=CSVLogger(tmp_path), val=rows(4))
    assert run.global_step == 3 and "val_loss" in run.callback_metrics


class Mixup(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        scores = self.net(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])


def test_a_loss_that_depends_on_the_batch_is_warned_of(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(warnings, "warn", lambda message, *args, **kwargs: said.append(str(message)))
    mixing, usual = Mixup(), Model()
    for model in (mixing, usual):
        with torch.no_grad():
            next(model.parameters()).mul_(10)  # so that which labels are mixed in tells
    expected = sum_of_clipped(usual, rows(6))
    (released,), _ = trained(tmp_path, mixing, rows(6))
    assert any("each record has the loss of a batch of one" in one for one in said)
    assert torch.allclose(released, expected, atol=1e-6), "alone, a record is mixed with itself"


class DropPath(nn.Module):
    """Leaves a record out, rarely."""

    def forward(self, x):
        kept = torch.rand(len(x), *[1] * (x.dim() - 1)) > 0.05
        return x * kept / 0.95 if self.training else x


@pytest.mark.parametrize(
    "module",
    [
        lambda: Model(nn.Sequential(nn.Linear(4, 6), DropPath(), nn.Tanh(), nn.Linear(6, CLASSES))),
        lambda: Model(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.01), nn.ReLU(), nn.Linear(6, CLASSES))),
    ],
    ids=["drop path", "dropout"],
)
def test_per_record_losses_are_not_mistaken_for_losses_of_a_batch(tmp_path, module, monkeypatch):
    said = []
    for seed in range(2):
        torch.manual_seed(seed)
        with monkeypatch.context() as patch:
            patch.setattr(warnings, "warn", lambda message, *args, **kwargs: said.append(str(message)))
            (released,), _ = trained(tmp_path, module(), rows(6, seed))
        assert released.norm() > 1e-3, "they train"
    assert not any("is no sum or mean" in one for one in said)


@pytest.mark.parametrize("where", ["parameter", "accumulated", "layer", "before layer"])
def test_hooks_that_would_not_be_called_are_refused_by_name(tmp_path, where):
    module = Model()
    layer = module.net[0]
    {
        "parameter": lambda: layer.weight.register_hook(lambda g: 2 * g),
        "accumulated": lambda: layer.weight.register_post_accumulate_grad_hook(lambda p: None),
        "layer": lambda: layer.register_full_backward_hook(lambda *a: None),
        "before layer": lambda: layer.register_full_backward_pre_hook(lambda *a: None),
    }[where]()
    with pytest.raises(ConfigError, match=r"net\.0.*hook, which would not be called"):
        trained(tmp_path, module, rows(5))


def test_more_steps_than_the_plan_has_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="min_steps=9 is more than the plan's 3 rounds"):
        trained(tmp_path, Model(), rows(5), steps=3, min_steps=9)


@pytest.mark.parametrize("collate", [default_collate, lambda items: items[0][None]])
def test_a_records_memory_layout_does_not_depend_on_the_batch(collate):
    """Nor whether it requires gradients: a step may look, and kernels round otherwise."""
    items = [torch.randn(2, 3, 4, 5), torch.randn(3, 4, 5, 2).permute(3, 0, 1, 2), torch.randn(2, 3, 4, 5)]
    items.append(torch.randn(2, 3, 4, 5, requires_grad=True))
    together = SingleCollation(collate)(items)
    assert sorted(records.size for records in together) == [1, 1, 2]

    def look(records):
        return records.batch.stride()[1:], records.batch.requires_grad

    assert {look(records) for records in together} == {look(SingleCollation(collate)([item])[0]) for item in items}
