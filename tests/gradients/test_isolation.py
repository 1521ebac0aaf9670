"""Nothing leaves but what was noised: attacks on the callback in a real Trainer, with next to no noise."""

import random
import warnings

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from pytorch_lightning.callbacks import LearningRateMonitor
from pytorch_lightning.loggers import CSVLogger, Logger
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader, Dataset, default_collate

import dpexp
from dpexp.privacy.plan import clipping
from dpexp.privacy.sampling.batches import SingleCollation

S, CLASSES = 0.5, 3
SILENT = 1e-8  # a noise multiplier of next to no noise


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


def stepping(step, net=None):
    """A module with another training step, a function of the module, x and y."""

    def training_step(self, batch, batch_idx):
        return step(self, *batch)

    return type("Stepping", (Model,), {"training_step": training_step})(net)


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


def sum_of_clipped(module, records):
    """By hand."""
    total, parameters = 0, [p for p in module.parameters() if p.requires_grad]
    for record in records:
        loss = module.training_step(default_collate([record]), 0)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([g.flatten() for g in gradients])
        total = total + gradient * min(1, S / float(gradient.norm()))
    return total


def assert_as_by_hand(folder, module, data, records, same=None, **options):
    """`same`: a module by which the sum is taken by hand."""
    (released,), _ = trained(folder, module, data, **options)
    assert torch.allclose(released, sum_of_clipped(same or Model(), records), atol=1e-6)


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
    records = sequences(4)
    records[1] = (torch.randn(len(records[0][0]), 4, dtype=torch.float64), records[1][1])
    records.append((torch.randn(40, 4, dtype=torch.float64), torch.tensor(0)))
    loader = DataLoader(Items(records), batch_size=2, collate_fn=padded)
    assert_as_by_hand(tmp_path, Model(Unmasked()), loader, records, Model(Unmasked()))


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
    loader = DataLoader(data(rows(6)), batch_size=2, collate_fn=collate)
    assert_as_by_hand(tmp_path, Model(), loader, [(factor * x, y) for x, y in rows(6)])


def test_items_that_only_a_kind_of_default_collation_fits(tmp_path):
    """Numbers, arrays and dicts are stacked as ever; a number's type does not depend on its neighbours'."""
    items = [
        {"x": np.array([1.0, k, 3, 4]), "y": k % 3, "w": 1 if k % 2 else 1.5, "name": "a" if k < 3 else "b"}
        for k in range(7)
    ]
    seen = []

    class Dicts(Model):
        def training_step(self, batch, batch_idx):
            if len(batch["x"]) == 1:  # the dry run also tries two at once
                seen.append((batch["w"].dtype, tuple(batch["x"].shape), str(batch["name"])))
            return F.cross_entropy(self.net(batch["x"]), batch["y"]) * batch["w"].double().sum()

    assert_as_by_hand(tmp_path, Dicts(), items, items, Dicts())
    found = [{*each} for each in zip(*seen, strict=True)]
    assert found == [{torch.int64, torch.float64}, {(1, 4)}, {"['a']", "['b']"}]


@pytest.mark.parametrize("collate", [default_collate, lambda items: items[0][None]])
def test_a_records_memory_layout_does_not_depend_on_the_batch(collate):
    """Nor whether it requires gradients: a step may look, and kernels round otherwise."""
    x = torch.randn(2, 3, 4, 5)
    items = [x, torch.randn(3, 4, 5, 2).permute(3, 0, 1, 2), x.clone(), x.clone().requires_grad_()]

    def seen(records):
        return records.batch.stride()[1:], records.batch.requires_grad

    together = SingleCollation(collate)(items)
    assert sorted(records.size for records in together) == [1, 1, 2]
    assert {*map(seen, together)} == {seen(SingleCollation(collate)([item])[0]) for item in items}


# Generators


@pytest.mark.parametrize("physical", [1, 4])
def test_random_generators_do_not_tell_how_many_records_there_were(tmp_path, physical):
    def drawing(m, x, y):
        return F.cross_entropy(m.net(F.dropout(x, 0.5)), y) * (1 + 0.1 * random.random() + np.random.rand())

    def afterwards(count):
        pl.seed_everything(3)
        trained(tmp_path, stepping(drawing), rows(count), 2, callback={"max_physical_batch_size": physical})
        return torch.rand(1).item(), random.random(), np.random.rand()

    assert afterwards(4) == afterwards(9)


def test_each_round_has_random_numbers_of_its_own(tmp_path):
    (first, second), _ = trained(tmp_path, Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))), rows(6), 2)
    assert not torch.allclose(first, second, atol=1e-3)


# What Lightning counts, logs and saves


def test_checkpoints_hold_no_count_of_records(tmp_path, monkeypatch):
    monkeypatch.setattr("dpexp.accounting.ledger.writer.os.urandom", bytes)  # the number that tells ledgers apart

    def checkpoint(count):
        """Every number of it but the weights."""
        _, run = trained(tmp_path, Model(), rows(count), 3, z=1.0, callback={"max_physical_batch_size": 3})
        run.save_checkpoint(tmp_path / "c.ckpt")
        numbers, _ = tree_flatten_with_path(torch.load(tmp_path / "c.ckpt", weights_only=False))
        return {keystr(path): value for path, value in numbers if "state_dict" not in keystr(path)}

    assert checkpoint(6) == checkpoint(7)


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
        self.log("on step", loss, on_step=True, on_epoch=True)
        for logger in (self.logger, self.trainer.logger, *self.loggers, *self.trainer.loggers, *self.trainer._loggers):
            if logger is not None:
                logger.log_metrics({"raw": 1.0})
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


def test_a_sealed_batch_tells_nothing(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append((repr(batch), batch_idx))

    trained(tmp_path, Model(), rows(9), 2, callbacks=[Watch()], callback={"max_physical_batch_size": 1})
    assert seen == [("SealedSample(round=tensor(0))", 0), ("SealedSample(round=tensor(1))", 0)], "rounds, not chunks"


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


# Losses of a batch


def mixup(m, x, y):
    share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
    scores = m.net(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(scores, y) + (1 - share) * F.cross_entropy(scores, y[order])


class DropPath(nn.Module):
    """Leaves a record out, rarely."""

    def forward(self, x):
        kept = torch.rand(len(x), *[1] * (x.dim() - 1)) > 0.05
        return x * kept / 0.95 if self.training else x


@pytest.mark.parametrize("kind", ["mixup", "drop path", "dropout"])
def test_a_loss_that_depends_on_the_batch_is_warned_of(tmp_path, kind, monkeypatch):
    """Alone, a record is mixed with itself; losses of each record are not mistaken for those of a batch."""
    said, records, usual = [], rows(6), Model()
    monkeypatch.setattr(warnings, "warn", lambda message, *args, **kwargs: said.append(str(message)))
    layers = {"drop path": DropPath(), "dropout": nn.Dropout(0.01)}
    module = stepping(mixup) if kind == "mixup" else Model(nn.Sequential(layers[kind], *Model().net))
    for one in (module, usual):
        with torch.no_grad():
            next(one.parameters()).mul_(10)  # so that which labels are mixed in tells
    (released,), _ = trained(tmp_path, module, records)
    assert any("each record has the loss of a batch of one" in one for one in said) == (kind == "mixup")
    assert kind != "mixup" or torch.allclose(released, sum_of_clipped(usual, records), atol=1e-6)
    assert released.norm() > 1e-3 and any("is no sum or mean" in one for one in said) == (kind == "mixup")
