"""What is found out before the first round: which steps are traced, one record at a time, or refused."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from plans import plan_of, trainer
from test_isolation import CLASSES, Everything, Items, Model, S, rows, stepping, sum_of_clipped, trained
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate
from trainings import Gradients

import dpexp
from dpexp.accounting.ledger import read_ledger
from dpexp.errors import ConfigError
from dpexp.privacy.gradients.step import LOOP, TRACED
from dpexp.training.classifier import Classifier


class Modes(pl.Callback):
    """How records are processed in each round."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *arguments):
        (privacy,) = (c for c in trainer.callbacks if isinstance(c, dpexp.PrivacyCallback))
        self.seen.append(privacy._fit.engine.step.mode)


def released(folder, module, records, mode=TRACED, steps=1, callbacks=(), **options):
    """The sum of each round, all of which were processed in one way."""
    modes = Modes()
    found, _ = trained(folder, module, records, steps=steps, callbacks=[modes, *callbacks], **options)
    assert modes.seen == [mode] * steps
    return found


def assert_as_by_hand(folder, module, data, records, same=None, factor=1, **options):
    """All rounds release `factor` times the sum of the clipped gradients of `same`."""
    for found in released(folder, module, data, **options):
        assert torch.allclose(found, factor * sum_of_clipped(same or Model(), records), atol=1e-6)


def assert_refused(folder, module, records, match):
    """Nothing is released, and no round written."""
    gradients = Gradients()
    with pytest.raises(ConfigError, match=match):
        trained(folder, module, records, callbacks=[gradients])
    assert gradients.seen == [] and len(read_ledger(folder / "0.jsonl")) == 0


def fit_loudly(folder, module, data, n=5, **choices):
    """A fit of one round, whose warnings are shown."""
    plan = plan_of(module, n=n, sampling="full_batch", steps=1, noise_multiplier=1.0, **choices)
    trainer(dpexp.PrivacyCallback(plan, folder / "l.jsonl", unsafe_diagnostics=True)).fit(module, data)


# Logs and metrics


class Logged(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss.item(), prog_bar=True)
        self.log_dict({"also": loss.detach(), "number": loss.item()})
        return loss


def test_a_number_that_is_only_logged_is_traced_and_logged_nowhere(tmp_path):
    logger = Everything()
    assert_as_by_hand(tmp_path, Logged(), rows(5), rows(5), logger=logger)
    assert logger.told == []


class Documented(Model):
    """What Lightning's documentation shows."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.several = torchmetrics.MetricCollection({"loss": torchmetrics.MeanMetric()})

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores, y)
        self.accuracy(scores, y)
        self.several.update(loss.detach())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def on_train_epoch_end(self):
        self.log("at_the_end", self.accuracy.compute())
        self.log_dict(self.several.compute())
        self.accuracy.reset()
        self.several.reset()


def test_metrics_of_torchmetrics_tell_nothing_of_training(tmp_path):
    logger, module = Everything(), Documented()
    assert_as_by_hand(tmp_path, module, rows(5), rows(5), steps=3, logger=logger, log_every_n_steps=1)
    assert all(told.keys() <= {"epoch"} for _, told in logger.told)
    assert module.accuracy.update_count == 0, "and they are as before"
    module.accuracy.update(torch.eye(CLASSES), torch.arange(CLASSES))
    assert module.accuracy.compute() == 1


@pytest.mark.parametrize(
    "module, release, names",
    [
        (Logged, (), "also, loss, number"),
        (Logged, ("loss", "also"), "number"),
        (Logged, ("loss", "also", "number"), None),
        (Documented, (), "accuracy, self.accuracy, self.several"),
        (Model, (), None),
    ],
)
def test_values_that_are_dropped_are_named_before_the_first_round(tmp_path, recwarn, module, release, names):
    metrics = {name: {"clip_norm": 1.0, "budget_share": 0.1} for name in release}
    fit_loudly(tmp_path, module(), DataLoader(Items(rows(5)), 2), private_metrics=metrics)
    said = [str(one.message) for one in recwarn if "is dropped" in str(one.message)]
    whole = f"what training_step logs is private, and is dropped: {names}"
    assert [one.partition(";")[0] for one in said] == ([whole] if names else [])


@pytest.mark.parametrize("module, is_users", [(Classifier, False), (type("Own", (Classifier,), {}), True)])
def test_only_who_wrote_a_step_is_told_what_can_be_changed_in_it(tmp_path, recwarn, module, is_users):
    module = module(nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, 0.1))
    fit_loudly(tmp_path, module, DataLoader(TensorDataset(torch.randn(5, 3), torch.zeros(5, dtype=torch.long)), 2))
    said = " ".join(str(one.message) for one in recwarn)
    assert "noise of a round take about" in said
    assert ("train_loss; to release" in said) == ("of a plain step" in said) == is_users


KEPT = {
    "tensor": lambda self, loss: loss.detach(),
    "number": lambda self, loss: loss.item(),
    "computed by autograd": lambda self, loss: Doubled.apply(loss).detach(),
}


def listing(kept, **hooks):
    """A module whose step appends to a list, with other methods besides."""

    def training_step(self, batch, batch_idx):
        loss = Model.training_step(self, batch, batch_idx)
        self.losses.append(KEPT[kept](self, loss))
        return loss

    module = type("Listing", (Model,), {"training_step": training_step} | hooks)()
    module.losses = []
    return module


@pytest.mark.parametrize("kept", KEPT)
def test_a_list_of_losses_that_no_hook_reads_does_no_harm(tmp_path, kept):
    module = listing(kept)
    assert_as_by_hand(tmp_path, module, rows(5), rows(5))
    assert module.losses == []


@pytest.mark.parametrize(
    "kept, hook", zip(KEPT, ["on_train_epoch_end", "on_validation_epoch_end", "on_train_batch_end"], strict=True)
)
def test_a_list_of_losses_that_a_hook_reads_is_refused(tmp_path, kept, hook):
    module = listing(kept, **{hook: lambda self, *_: self.log("mean", sum(self.losses) / len(self.losses))})
    assert_refused(tmp_path, module, rows(5), f"values of records in self.losses.*, and {hook} reads it")


# What changes from round to round


class Changing(Model):
    """Whose loss is multiplied by a factor, which a hook changes after round 2."""

    def __init__(self, factor, change):
        super().__init__(lr=0.0)
        self.factor, self.change = factor, change
        self.hparams["beta"], self.options, self.act = 1.0, {"beta": [1.0]}, torch.sign
        self.plain = SimpleNamespace(beta=1.0)
        self.register_buffer("scale", None)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0.02 * self.factor(self)

    def on_train_batch_end(self, *_):
        if self.trainer.global_step == 2:
            self.change(self)


CHANGES = {  # the factor, 1 at first; what changes it; what it is then
    "hparams": (lambda m: m.hparams["beta"], lambda m: m.hparams.update(beta=2.0), 2),
    "options": (lambda m: m.options["beta"][0], lambda m: m.options["beta"].__setitem__(0, 2.0), 2),
    "plain": (lambda m: m.plain.beta, lambda m: setattr(m.plain, "beta", 2.0), 2),
    "a function": (lambda m: m.act(torch.ones(())), lambda m: setattr(m, "act", torch.exp), math.e),
    "a default": (lambda m: getattr(m, "gain", 1.0), lambda m: setattr(m, "gain", 2.0), 2),
    "a buffer": (
        lambda m: 1.0 if m.scale is None else m.scale, lambda m: setattr(m, "scale", torch.tensor(2.0)), 2),
    "a hook": (lambda m: 1.0, lambda m: m.net[0].register_forward_hook(lambda layer, given, found: 3 * found), 1),
    "a late round": (lambda m: 3 if m.global_step >= 2 else 1, lambda m: None, 3),
    "the learning rate": (
        lambda m: 1 + 1e6 * m.optimizers().param_groups[0]["lr"],
        lambda m: m.optimizers().param_groups[0].update(lr=1e-6), 2),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_the_step_between_rounds_changes_what_is_released(tmp_path, change):
    """Where it is traced, it is traced again; a step that reads the learning rate runs one record at a time."""
    factor, act, after = CHANGES[change]
    module = Changing(factor, act)
    found = released(tmp_path, module, rows(5), LOOP if change == "the learning rate" else TRACED, steps=3)
    before, changed = (
        sum_of_clipped(stepping(lambda m, x, y, f=f: 0.02 * f * F.cross_entropy(m.net(x), y), net), rows(5))
        for f, net in ((1, None), (after, module.net))
    )
    for one, by_hand in zip(found, (before, before, changed), strict=True):
        assert torch.allclose(one, by_hand, atol=1e-6)
    assert not torch.allclose(before, changed, atol=1e-3)


def test_a_step_that_does_not_change_is_not_traced_again_at_each_epoch(tmp_path):
    """Its Python runs as often in six epochs as in three, although validation lets the module log in between."""
    runs = []

    def loss(module, x, y):
        runs.append(module)
        module.log("loss", x.sum())
        return F.cross_entropy(module.net(x), y)

    counts = []
    for epochs in (3, 6):
        (folder := tmp_path / str(epochs)).mkdir()
        module = stepping(loss)
        type(module).validation_step = lambda self, batch, index: None
        released(folder, module, rows(5), steps=epochs, val=rows(2))
        counts.append(len(runs))
        runs.clear()
    assert counts[0] == counts[1] > 0


# How records are processed


class Asking(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x if float(x.sum()) > 0 else -x, y), batch_idx)


class Scripted(Model):
    """By a function of autograd."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(Doubled.apply(self.net(x)), y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g


class Drawing(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 0 * np.random.rand())


@pytest.mark.parametrize("build, mode", [(Model, TRACED), (Asking, LOOP), (Scripted, TRACED), (Drawing, LOOP)])
def test_the_whole_job_is_processed_in_one_way(tmp_path, build, mode):
    assert_as_by_hand(tmp_path, build(), rows(5), rows(5), build(), mode=mode, steps=2)


# Made-up records


class OfWords(nn.Module):
    def __init__(self, words):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, 6), nn.Linear(6, CLASSES)

    def forward(self, given):
        words, mask = given
        weights = mask.double() / mask.double().sum(1, keepdim=True)
        return self.head((self.embed(words) * weights[..., None]).sum(1))


@pytest.mark.parametrize("kind, words", [(torch.bool, 3), (torch.int64, 50), (torch.float64, 3)])
def test_labels_embeddings_and_masks_are_made_up(tmp_path, kind, words):
    """Of words, a mask that is never all zero, and a label."""
    generator = torch.Generator().manual_seed(1)
    items = [
        (
            (torch.randint(words, (4,), generator=generator), (torch.arange(4) <= k % 4).to(kind)),
            torch.tensor(k % CLASSES),
        )
        for k in range(6)
    ]
    (found,), module = released(tmp_path, Model(OfWords(words)), items), Model(OfWords(words))
    by_hand = 0
    for item in items:
        loss = module.training_step(default_collate([item]), 0)
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*module.parameters()])])
        by_hand = by_hand + gradient * min(1, S / float(gradient.norm()))
    assert torch.allclose(found, by_hand, atol=1e-6)


@pytest.mark.parametrize(
    "loss, said",
    [
        (lambda net, x, y: F.cross_entropy(net(x.float()), y), r"line \d+.*must have the same dtype"),
        (lambda net, x, y: F.cross_entropy(net(x[:, :3]), y), r"line \d+.*shapes cannot be multiplied"),
        (lambda net, x, y: F.cross_entropy(net(x), y[:, None]), r"are \[1, 4\] float64, \[1\] int64: .*target"),
        (lambda net, x, y: F.cross_entropy(net(x).view(32, 3), y), "invalid for input of size"),
        (lambda net, x, y: {"los": net(x).sum()}, "must return a loss for every record"),
        (lambda net, x, y: F.cross_entropy(net(x), y, reduction="none"), "must return one number"),
        (lambda net, x, y: F.cross_entropy(net(x).detach(), y), "depends on none of the trainable parameters"),
        (lambda net, x, y: net(x).sum() * float("nan"), "NaN or infinite"),
    ],
)
def test_a_mistake_in_a_step_is_one_sentence_before_the_first_round(tmp_path, loss, said):
    assert_refused(tmp_path, stepping(lambda module, x, y: loss(module.net, x, y)), rows(5), said)


ABOVE_5 = [(6 + x.abs(), y) for x, y in rows(5)]  # as no made-up record is


class Positive(Model):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net((x - 5).log()), y)


def test_a_loss_that_no_made_up_record_has_needs_a_public_record_of_the_validation_set(tmp_path):
    assert_refused(tmp_path, Positive(), ABOVE_5, "NaN or infinite for every synthetic record.*validation set")
    (found,) = released(tmp_path, Positive(), ABOVE_5, val=ABOVE_5[2:], num_sanity_val_steps=0)
    assert torch.allclose(found, sum_of_clipped(Positive(), ABOVE_5), atol=1e-6)


def test_an_infinite_weight_of_made_up_records_is_no_mistake(tmp_path):
    def weighed(module, x, y):
        dpexp.weigh(torch.where((x > 5).all(), 0.5, torch.inf))
        return F.cross_entropy(module.net(x), y)

    assert_as_by_hand(tmp_path, stepping(weighed), ABOVE_5, ABOVE_5, factor=0.5)


# The training data itself


class Neighbours(Model):
    """Compares with all records of the data set."""

    def __init__(self, data, buffer=False):
        super().__init__()
        self.all = [data]
        if buffer:
            self.register_buffer("known", data)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x + (x @ self.all[0].T).softmax(1) @ self.all[0]), y)


class Of(Dataset):
    """Makes its records of what `get` finds at a place in what it holds."""

    def __init__(self, held, get=lambda held, i: held[i]):
        self.held, self.get = held, get

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x, y = self.get(self.held, index)
        return torch.as_tensor(x, dtype=torch.float64), y


def of_columns(x):
    return Of({"x": x, "y": Y}, lambda held, i: (held["x"][i], held["y"][i]))


X, Y = map(torch.stack, zip(*rows(6), strict=True))
ARRAY, RECORDS = X.numpy().copy(), [(x.clone(), y) for x, y in rows(6)]
HELD = {  # a data set, and what a step holds of it
    "all": (TensorDataset(X, Y), X),
    "two rows": (TensorDataset(X, Y), X[:2]),
    "a column": (TensorDataset(X, Y), X[:, 1].expand(4, 6).T),
    "a record of a list": (RECORDS, RECORDS[3][0][None]),
    "a record in a wrapper's wrapper": (Subset(Of(Of(RECORDS)), range(6)), RECORDS[3][0][None]),
    "one of several sets": (ConcatDataset([Of(RECORDS[:3] * 2), Of(RECORDS)]), RECORDS[3][0][None]),
    "an array": (of_columns(ARRAY), torch.from_numpy(ARRAY)),
    "a part of an array": (of_columns(ARRAY[::-1]), torch.from_numpy(ARRAY[2:4])),
}


@pytest.mark.parametrize("held, buffer", [*((held, False) for held in HELD), ("all", True)])
def test_a_step_that_holds_the_training_data_is_refused(tmp_path, held, buffer):
    data, part = HELD[held]
    loader = DataLoader(data, batch_size=2)
    said = r"reads the training data itself \(known," if buffer else "reads the training data itself"
    assert_refused(tmp_path, Neighbours(part, buffer), loader, said)


def test_other_tensors_that_a_step_holds_are_named_once(tmp_path):
    loader = DataLoader(HELD["all"][0], batch_size=2)
    with pytest.warns(UserWarning, match=r"holds tensors that are neither parameters nor buffers.*\(2, 4\)"):
        fit_loudly(tmp_path, Neighbours(X[:2].clone()), loader, n=6)


class Several(Of):
    """Of which several records are fetched at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Unreachable:
    """A proxy of something that cannot be had here."""

    def __getattribute__(self, name):
        raise ConnectionError("not in this process")


class Slots:
    """No Dataset, and without attributes but slots."""

    __slots__ = ("rows",)

    def __init__(self, rows):
        self.rows = dict(enumerate(rows))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def connected():
    data = Several(RECORDS)
    data.base = Unreachable()
    return data


LISTS = [(x.tolist(), y) for x, y in RECORDS]


@pytest.mark.parametrize(
    "data", [RECORDS, Several(LISTS), Slots(RECORDS), connected()], ids=["a list", "several", "slots", "connected"]
)
def test_data_sets_of_any_kind_train(tmp_path, data):
    assert_as_by_hand(tmp_path, Model(), DataLoader(data, batch_size=2), RECORDS)
