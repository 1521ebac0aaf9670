"""What a training step leaves behind, at each door: Lightning's Trainer, that of transformers, a loop of one's own.

Two jobs on neighbouring data, whose weights stay, must leave the same but for what they release, and that moves by at
most S. As a program it prints the table: PYTHONPATH=.:tests python tests/privacy/test_left_behind.py
"""

import itertools
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

N, ROUNDS, S, SILENT = 6, 3, 0.5, 1e-8
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(1)).double()
TRAINS, REFUSED, MUTED = "trains", "refused before round 1", "trains; values dropped"
ASSUMED = "assumed: closures and globals keep what they are given"


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


def append(holder):
    return lambda owner, model, loss: holder(owner, model).append(loss.detach())


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


def print_it(owner, model, loss):
    getattr(owner, "print", print)("a record")


def count(owner, model, loss):
    type(owner).last = loss.detach()


def assign_buffer(owner, model, loss):
    model.state = model.state + loss.detach()


def set_rate(owner, model, loss):
    if hasattr(owner, "optimizer"):
        owner.optimizer.param_groups[0]["given"].append(loss.detach())
        owner.optimizer.param_groups[0]["given"] = loss.detach()


OF_CLOSURE: list[torch.Tensor] = []
STEPS = {  # what it leaves: the step, and the outcome at each door, or at all
    "log": (log, {"a loop": TRAINS, None: MUTED}),
    "print": (print_it, TRAINS),
    "a number of the run": (lambda o, m, loss: getattr(o, "state", None) and setattr(o.state, "x", loss), TRAINS),
    "an attribute": (lambda o, m, loss: setattr(o, "last", loss.detach()), TRAINS),
    "a class attribute": (count, TRAINS),
    "a list of the class": (append(lambda o, m: m.seen), TRAINS),
    "a list of the owner's class": (append(lambda o, m: getattr(o, "losses", m.losses)), TRAINS),
    "a list": (append(lambda o, m: o.kept), TRAINS),
    "a list of the model": (append(lambda o, m: m.losses), TRAINS),
    "a buffer, assigned": (assign_buffer, REFUSED),
    "a buffer, in place": (lambda o, m, loss: m.state.add_(loss.detach()), REFUSED),
    "the logger": (tell, {"transformers": REFUSED, None: TRAINS}),
    "the optimizer's rate": (set_rate, TRAINS),
    "torchmetrics": (lambda o, m, loss: m.metric(loss.detach()), {"a loop": TRAINS, None: TRAINS}),
    "a closure": (append(lambda o, m: OF_CLOSURE), ASSUMED),
}  # fmt: skip
CASES = [*itertools.product(DOORS, BRANCHES, STEPS)]


def outcome_of(door, what):
    leave, outcome = STEPS[what]
    return leave, outcome if isinstance(outcome, str) else outcome.get(door, outcome[None])


@pytest.mark.parametrize(("door", "branch", "what"), CASES)
def test_nothing_of_a_record_is_left_behind(door, branch, what):
    leave, outcome = outcome_of(door, what)
    first = left_by(door, leave, branch, X)
    assert bool(first.error) == (outcome == REFUSED), first.error
    assert first.rounds == len(first.sums) == (0 if outcome == REFUSED else ROUNDS)
    assert first.classes_stay
    if outcome == MUTED:
        assert "is dropped: train_ce" in first.said
    if outcome == REFUSED:
        return
    other = left_by(door, leave, branch, X[:-1])  # a record less
    assert other.left == first.left
    moved = [float((a - b).norm()) / S for a, b in zip(first.sums, other.sums, strict=True)]
    assert 0 < max(moved) <= 1 + 1e-6, moved


@pytest.mark.parametrize(("door", "branch"), itertools.product(("Lightning", "transformers"), BRANCHES))
def test_what_a_hook_would_read_of_what_a_step_keeps_is_refused_by_name(door, branch):
    found = left_by(door, STEPS["a list"][0], branch, X, reader=True)
    assert "keeps values of records in self.kept" in found.error and " reads it" in found.error
    assert found.rounds == 0


def test_a_module_prints_beside_the_bar_of_rounds(tmp_path, capsys):
    class Printing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Net()

        def training_step(self, batch, batch_idx):
            self.print("in the step")
            return self.model(**batch)["loss"]

        def on_train_start(self):
            self.print("in a hook")

        def configure_optimizers(self):
            return Still(self.parameters())

    module = Printing()
    callback = dpexp.PrivacyCallback(the_plan(module), tmp_path / "ledger.jsonl")
    run = trainer(callback, RoundBar(ROUNDS, callback), enable_progress_bar=True)
    run.fit(module, DataLoader([{"x": row} for row in X]))
    said = capsys.readouterr().out
    assert "in the step" in said and "in a hook" in said and run.global_step == ROUNDS


# ---- another function ------------------------------------------------------------------------------------------------


def plainly(model, record):
    return model(**record)["loss"]


def doubly(model, record):
    return 2 * plainly(model, record)


def times(model, record, factor):
    return factor * plainly(model, record)


def of_a_variable():
    factor = 1.0

    def loss_of(model, record):
        return factor * plainly(model, record)

    def in_round(t):
        nonlocal factor
        factor = 1.0 + t
        return loss_of

    return in_round


def of_fakes(t):
    fakes = torch.full((2,), 1.0 + t).double()
    return lambda model, record: fakes.mean() * plainly(model, record)


SCALE = 1.0


def of_a_global(t):
    global SCALE
    SCALE = 1.0 + t
    return scaled


def scaled(model, record):
    return sum(SCALE * loss for loss in [plainly(model, record)])


class Holder:
    def __init__(self, factor):
        self.factor = factor

    def loss_of(self, model, record):
        return self.factor * plainly(model, record)


def equal_but_new(t):
    unused = object()
    return lambda model, record: plainly(model, record) if unused else None


OTHERS = {  # the function of each round, and the factor of its loss in round t
    "a new lambda, whose default changes": (
        lambda: lambda t: lambda model, record, t=t: times(model, record, 1.0 + t), lambda t: 1 + t),
    "the same function, whose variable changes": (of_a_variable, lambda t: 1 + t),
    "a global that a generator in it names": (lambda: of_a_global, lambda t: 1 + t),
    "fakes that a closure reads": (lambda: of_fakes, lambda t: 1 + t),
    "a partial function": (lambda: lambda t: partial(times, factor=1.0 + t), lambda t: 1 + t),
    "a method of another object": (lambda: lambda t: Holder(1.0 + t).loss_of, lambda t: 1 + t),
    "two losses in turn": (lambda: lambda t: (plainly, doubly)[t % 2], lambda t: 1 + t % 2),
    "another loss from round 3 on": (lambda: lambda t: doubly if t >= 3 else plainly, lambda t: 1 + (t >= 3)),
    "another object, with which nothing changes": (lambda: equal_but_new, lambda t: 1),
    "the same one": (lambda: lambda t: plainly, lambda t: 1),
    "an equal lambda": (lambda: lambda t: lambda model, record: plainly(model, record), lambda t: 1),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_each_round_has_its_own_loss_function(what, tmp_path):
    make, factor = OTHERS[what]
    of_round, model, rounds = make(), Net(), 5
    plan = the_plan(model, rounds, bound=1e3)
    optimizer = Still(model.parameters())
    private = dpexp.Private(model, optimizer, plan, tmp_path / "ledger.jsonl")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for t, sample in enumerate(private.rounds([{"x": row} for row in X])):
            private.step(of_round(t), sample)
    first = optimizer.sums[0] / factor(0)
    for t, total in enumerate(optimizer.sums):
        assert torch.allclose(total, factor(t) * first, atol=1e-3), t
    told = sum("is another one in every round; pass what changes in the record" in str(one.message) for one in said)
    assert told == (what not in ("another loss from round 3 on", "the same one", "an equal lambda"))


if __name__ == "__main__":
    print("| door | step | leaves | outcome | said |\n|---|---|---|---|---|")
    for door, branch, what in CASES:
        leave, outcome = outcome_of(door, what)
        found = left_by(door, leave, branch, X)
        happened = "refused before round 1" if found.error else f"{found.rounds} rounds"
        print(f"| {door} | {branch} | {what} | {outcome} | {happened} | {found.error[:110]} |")
