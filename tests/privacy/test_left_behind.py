"""What a training step leaves behind, at each door: Lightning's Trainer, that of transformers, a loop of one's own.

Two jobs on neighbouring data, whose weights stay, must leave the same but for what they release, and that moves by at
most S.
"""

import itertools
import re
import tempfile
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
import transformers
from plans import plan_of, trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import dpexp
from dpexp.accounting.ledger import ledger_so_far
from dpexp.errors import ConfigError
from dpexp.integrations.transformers import PrivateTrainer
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.reporting.terminal import RoundBar

N, ROUNDS, S, SILENT = 6, 2, 0.5, 1e-8
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).double()


class Net(nn.Module):
    """Half the square of Wx + b."""

    seen: list[float] = []  # noqa: RUF012 - of the class, as people write it

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        nn.init.constant_(self.net.weight, 0.3)
        nn.init.zeros_(self.net.bias)
        self.net.names = {"weight": 0}.keys()  # has no copy
        self.losses = []
        self.metric = MeanMetric()
        self.register_buffer("state", torch.zeros(()).double())

    def forward(self, x):
        return {"loss": self.net(x).square().sum() / 2}


class Still(torch.optim.SGD):
    """Leaves weights as they are, and keeps what it was given."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.sums = []
        self.param_groups[0]["given"] = [1.0]

    def step(self, closure=None):
        loss = closure() if closure else None
        self.sums.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]) * N)
        return loss


# ---- the doors: each trains by `leave(owner, model, loss)`, and returns what left ------------------------------------


def lightning(leave, branch, x, folder, reader):
    told = []

    class Told(pl.loggers.Logger):
        name, version = "told", 0

        def log_metrics(self, metrics, step=None):
            told.append((metrics, step))

        def log_hyperparams(self, *_, **__):
            pass

    class Module(pl.LightningModule):
        losses: list[float] = []  # noqa: RUF012
        last = 0.0

        def __init__(self):
            super().__init__()
            self.model = Net()
            self.kept, self.metric, self.seen = [], MeanMetric(), self.model.seen

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch)["loss"]
            leave(self, self.model, loss)
            return loss + branch(loss)

        def configure_optimizers(self):
            self.optimizer = Still(self.parameters())
            return self.optimizer

    if reader:
        Module.on_train_epoch_end = lambda self: self.log("mean", sum(self.kept) / max(1, len(self.kept)))
    module = Module()
    callback = dpexp.PrivacyCallback(the_plan(module), folder / "ledger.jsonl", noise_seed=1)
    run = trainer(callback, logger=Told(), log_every_n_steps=1)
    return module, lambda: run.fit(module, DataLoader(x)), lambda: (module.optimizer, told, run.callback_metrics)


def of_transformers(leave, branch, x, folder, reader):
    told = []

    class Told(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            told.append({name: value for name, value in logs.items() if name != "epsilon"})

    class Own(PrivateTrainer):
        losses: list[float] = []  # noqa: RUF012
        last = 0.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            leave(self, model, loss)
            return loss + branch(loss)

    def averaging(self, logs, *args):
        return PrivateTrainer.log(self, logs | {"mean": sum(self.kept) / max(1, len(self.kept))}, *args)

    if reader:
        Own.log = averaging
    model = Net()
    args = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1
    )
    own = Own(
        model, args, train_dataset=x, plan=the_plan(model), options={"noise_seed": 1}, callbacks=[Told()],
        optimizers=(Still(model.parameters()), None),
    )  # fmt: skip
    own.kept, own.metric, own.lock = [], model.metric, threading.Lock()  # which has no copy
    own.holder = SimpleNamespace(lock=own.lock)
    return own, own.train, lambda: (own.optimizer, told, [sorted(log) for log in own.state.log_history])


def loop(leave, branch, x, folder, reader):
    model = Net()
    model.kept = []
    optimizer = Still(model.parameters())
    private = dpexp.Private(model, optimizer, the_plan(model), folder / "ledger.jsonl", noise_seed=1)

    def loss_of(model, record):
        loss = model(**record)["loss"]
        leave(model, model, loss)
        return loss + branch(loss)

    def run():
        for sample in private.rounds(x):
            private.step(loss_of, sample)

    return model, run, lambda: (optimizer,)


DOORS = {"Lightning": lightning, "transformers": of_transformers, "a loop": loop}
BRANCHES = {"traced": lambda loss: 0.0, "one at a time": lambda loss: float(loss.detach() > 1e9)}


def the_plan(module, steps=ROUNDS, bound=S):
    return plan_of(
        module, n=N, sampling="full_batch", q=1.0, steps=steps, noise_multiplier=SILENT,
        clip_norm=FixedClipNorm(bound), delta=1e-5,
    )  # fmt: skip


def left_by(door, leave, branch, x, reader=False):
    """What a job leaves: its outcome, the sums that it releases, and the rest."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder, error = Path(name), ""
        before = {kind: {key: repr(value) for key, value in vars(kind).items()} for kind in (Net,)}
        owner, run, found = DOORS[door](leave, BRANCHES[branch], [{"x": row} for row in x], folder, reader)
        before[type(owner)] = {key: repr(value) for key, value in vars(type(owner)).items()}
        try:
            run()
        except ConfigError as refused:
            error = str(refused)
        (optimizer, *told), ledger = found(), folder / "ledger.jsonl"
        told += [len(optimizer.state), *(group["given"] for group in optimizer.param_groups)]
        rounds = ledger_so_far(ledger).training_rounds if ledger.exists() else 0
        classes = {kind: {key: repr(value) for key, value in vars(kind).items()} for kind in before}
        held = [value for part in (owner, *modules_of(owner)) for value in plain(vars(part)).items()]
        states = [part.state_dict() for part in modules_of(owner)[:1]]
        return SimpleNamespace(
            error=error, said=" ".join(str(one.message) for one in said), sums=optimizer.sums, rounds=rounds,
            classes_stay=classes == before, left=repr([told, held, states]),
        )  # fmt: skip


def modules_of(owner):
    module = owner.model if isinstance(owner, PrivateTrainer) else owner
    return [*module.modules()]


def plain(values):
    kinds = (int, float, str, list, torch.Tensor)
    return {k: v for k, v in values.items() if isinstance(v, kinds) and k not in ("train_dataset", "_output_dir")}


# ---- what a step leaves ----------------------------------------------------------------------------------------------


def log(owner, model, loss):
    if isinstance(owner, PrivateTrainer):
        owner.log({"train_ce": loss.item()})
    elif isinstance(owner, pl.LightningModule):
        owner.log("train_ce", loss)


def tell(owner, model, loss):
    if isinstance(owner, PrivateTrainer):
        owner.callback_handler.on_log(owner.args, owner.state, owner.control, {"train_ce": loss})
    elif isinstance(owner, pl.LightningModule):
        owner.logger.log_metrics({"train_ce": loss})


def set_attributes(owner, model, loss):
    owner.last = loss.detach()
    type(owner).last = loss.detach()
    if isinstance(owner, PrivateTrainer):
        owner.state.x = loss


def append_to_lists(owner, model, loss):
    """Of an object, and of its class."""
    for kept in (owner.kept, model.losses, model.seen, getattr(owner, "losses", model.losses), OF_CLOSURE):
        kept.append(loss.detach())


def set_rate(owner, model, loss):
    if hasattr(owner, "optimizer"):
        owner.optimizer.param_groups[0]["given"].append(loss.detach())
        owner.optimizer.param_groups[0]["given"] = loss.detach()


OF_CLOSURE: list[torch.Tensor] = []  # keeps what it is given, and is assumed to be read by nobody
DO_NO_HARM = {
    "keeps": (set_attributes, append_to_lists),
    "tells": (
        log, tell, set_rate, lambda owner, model, loss: getattr(owner, "print", print)("a record"),
        lambda owner, model, loss: model.metric(loss.detach()),
    ),
}  # fmt: skip
REFUSED = {
    "a buffer, assigned": lambda owner, model, loss: setattr(model, "state", model.state + loss.detach()),
    "a buffer, in place": lambda owner, model, loss: model.state.add_(loss.detach()),
}


@pytest.mark.parametrize(("door", "branch", "how"), itertools.product(DOORS, BRANCHES, DO_NO_HARM))
def test_nothing_of_a_record_is_left_behind_by_a_step_that_keeps_or_tells_it_everywhere(door, branch, how):
    def everything(*given):
        for leave in DO_NO_HARM[how]:
            if (door, leave) != ("transformers", tell):  # which is refused
                leave(*given)

    first, other = (left_by(door, everything, branch, x) for x in (X, X[:-1]))  # a record less
    assert first.error == "" and first.rounds == len(first.sums) == ROUNDS
    assert first.classes_stay and other.left == first.left
    assert bool(re.search("is dropped: .*train_ce", first.said)) == (how == "tells" and door != "a loop")
    moved = [float((a - b).norm()) / S for a, b in zip(first.sums, other.sums, strict=True)]
    assert 0 < max(moved) <= 1 + 1e-6, moved


@pytest.mark.parametrize(
    ("door", "branch", "leave"),
    [
        *itertools.product(DOORS, BRANCHES, REFUSED.values()),
        *itertools.product(["transformers"], BRANCHES, [tell]),
    ],
)
def test_what_cannot_be_taken_back_is_refused_before_round_1(door, branch, leave):
    found = left_by(door, leave, branch, X)
    assert found.error and found.rounds == len(found.sums) == 0 and found.classes_stay


@pytest.mark.parametrize(("door", "branch"), itertools.product(("Lightning", "transformers"), BRANCHES))
def test_what_a_hook_would_read_of_what_a_step_keeps_is_refused_by_name(door, branch):
    found = left_by(door, append_to_lists, branch, X, reader=True)
    assert "keeps values of records in self.kept" in found.error and " reads it" in found.error
    assert found.rounds == 0


def test_a_module_prints_beside_the_bar_of_rounds(tmp_path, capsys):
    module, _, _ = lightning(lambda owner, *_: owner.print("in the step"), BRANCHES["traced"], X, tmp_path, False)
    module.on_train_start = lambda: module.print("in a hook")
    callback = dpexp.PrivacyCallback(the_plan(module), tmp_path / "bar.jsonl")
    run = trainer(callback, RoundBar(ROUNDS, callback), enable_progress_bar=True)
    run.fit(module, DataLoader([{"x": row} for row in X]))
    said = capsys.readouterr().out
    assert "in the step" in said and "in a hook" in said and run.global_step == ROUNDS


# ---- another function ------------------------------------------------------------------------------------------------


def plainly(model, record):
    return model(**record)["loss"]


def times(model, record, factor):
    return factor * plainly(model, record)


def of_a_variable():
    factor = 1.0

    def loss_of(model, record):
        return times(model, record, factor)

    def in_round(t, model):
        nonlocal factor
        factor = 1.0 + t
        return loss_of

    return in_round


def of_fakes(t, model):
    fakes = torch.full((2,), 1.0 + t).double()
    return lambda model, record: fakes.mean() * plainly(model, record)


SCALE = 1.0


def scaled(model, record):
    return sum(SCALE * loss for loss in [plainly(model, record)])


def of_a_global(t, model):
    global SCALE
    SCALE = 1.0 + t
    return scaled


class Holder:
    def __init__(self, factor):
        self.factor = factor

    def loss_of(self, model, record):
        return times(model, record, self.factor)


def of_an_attribute(t, model):
    model.gain = 1.0 + t
    return lambda model, record: times(model, record, model.gain)


def equal_but_new(t, model):
    unused = object()
    return lambda model, record: plainly(model, record) if unused else None


twice = partial(times, factor=2)
OTHERS = {  # the function of round t, the factor of its loss in that round, and whether it is said to be another one
    "a new lambda, whose default changes": (
        lambda t, _: lambda model, record, t=t: times(model, record, 1.0 + t), lambda t: 1 + t, True),
    "the same function, whose variable changes": (of_a_variable(), lambda t: 1 + t, True),
    "a global that a generator in it names": (of_a_global, lambda t: 1 + t, True),
    "fakes that a closure reads": (of_fakes, lambda t: 1 + t, True),
    "a partial function": (lambda t, _: partial(times, factor=1.0 + t), lambda t: 1 + t, True),
    "a method of another object": (lambda t, _: Holder(1.0 + t).loss_of, lambda t: 1 + t, True),
    "an attribute of the model": (of_an_attribute, lambda t: 1 + t, False),
    "two losses in turn": (lambda t, _: (plainly, twice)[t % 2], lambda t: 1 + t % 2, True),
    "another loss from round 3 on": (lambda t, _: twice if t >= 3 else plainly, lambda t: 1 + (t >= 3), False),
    "another object, with which nothing changes": (equal_but_new, lambda t: 1, True),
    "the same one": (lambda t, _: plainly, lambda t: 1, False),
    "an equal lambda": (lambda t, _: lambda model, record: plainly(model, record), lambda t: 1, False),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_each_round_has_its_own_loss_function(what, tmp_path, recwarn):
    of_round, factor, is_told = OTHERS[what]
    model = Net()
    optimizer = Still(model.parameters())
    private = dpexp.Private(model, optimizer, the_plan(model, 5, bound=1e3), tmp_path / "ledger.jsonl")
    for t, sample in enumerate(private.rounds([{"x": row} for row in X])):
        private.step(of_round(t, model), sample)
    first = optimizer.sums[0] / factor(0)
    for t, total in enumerate(optimizer.sums):
        assert torch.allclose(total, factor(t) * first, atol=1e-3), t
    told = sum("is another one in every round; pass what changes in the record" in str(one.message) for one in recwarn)
    assert told == is_told
