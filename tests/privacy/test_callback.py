"""The callback in a real Lightning Trainer, against the same training done by hand."""

import copy
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from reference import clipped_sums
from test_isolation import Everything
from test_ledger_file import edited
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)
from trainings import Gradients

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.rounding import up
from dpexp.accounting.sampling import Poisson
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import CorrelatedNoise, GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan import clipping, groups

N, Q, T, SEED = 40, 0.15, 12, 5


class Model(pl.LightningModule):
    """Logs its loss, has a scheduler and momentum."""

    def __init__(self, net=None, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = net or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self._optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = self._optimizer(self.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (N,), generator=generator))


class Data(pl.LightningDataModule):
    def __init__(self, workers=0):
        super().__init__()
        self.workers = workers

    def setup(self, stage):
        self.train = dataset()

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=3, shuffle=True, num_workers=self.workers)


def plan_for(module, **choices):
    defaults = {"n": 37, "q": Q, "steps": T, "noise_multiplier": 0.8, "clip_norm": clipping.FixedClipNorm(0.4)}
    return plan_of(module, **defaults | choices)


def fit(tmp_path, module=None, data=None, plan=None, ledger="l.jsonl", options=None, callbacks=(), ckpt=None, **own):
    """`options` are the Trainer's, `own` the PrivacyCallback's, which stands behind `callbacks`."""
    module = module or Model()
    own = {"max_physical_batch_size": 4, "noise_seed": SEED} | own
    privacy = dpexp.PrivacyCallback(plan or plan_for(module), tmp_path / ledger, **own)
    run = trainer(*callbacks, privacy, **options or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, Data() if data is None else data, ckpt_path=ckpt, weights_only=False if ckpt else None)
    return module, run, privacy


def by_hand(plan, factors):
    """DP-SGD with momentum and a decaying rate, record by record, on the same samples and noise.

    factors: of z, q and S in round t.
    """
    module = Model()
    x, y = dataset().tensors
    sampler = KeyStream.known(SEED, "sampling", 0)
    noise = GaussianNoise(KeyStream.known(SEED, "noise", 0))
    configured, sizes = module.configure_optimizers(), []
    for t in range(T):
        f_z, f_q, f_S = factors(t)
        rows = Poisson(sampling_rate=Q * f_q).draw(N, sampler)[0]
        sizes.append(len(rows))
        now = replace(plan, groups=tuple(replace(group, S=group.S * f_S) for group in plan.groups))
        sums = clipped_sums(
            now, module, lambda one: F.cross_entropy(module.net(one[0]), one[1]), (x[rows], y[rows]), len(rows)
        )
        sigmas = {
            name: alpha * group.sigma * f_S * f_z
            for group in plan.groups
            for vector, alpha in zip(group.vectors, group.alphas, strict=True)
            for name in vector.parameters
        }
        noise.add_to((sums[name], sigma) for name, sigma in sigmas.items())
        for name, p in module.named_parameters():
            p.grad = sums[name] / (Q * f_q * 37)
        configured["optimizer"].step()
        configured["lr_scheduler"]["scheduler"].step()
    return module, sizes


def assert_same(module, other):
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12), name


def scheduled(t):
    return (0.5 if t >= 3 else 1.0), 1 + 0.1 * t, 1 + t / (T - 1)


SCHEDULES = {"z": {"step": {0: 1.0, 3: 0.5}}, "q": [1 + 0.1 * t for t in range(T)], "S": {"linear": [1, 2]}}
JOINT = clipping.Joint(clipping.FixedClipNorm([0.2, 0.5]))


@pytest.mark.parametrize(
    "choices, factors",
    [
        ({"group": groups.per_layer(), "mechanism": clipping.Separate()}, lambda t: (1, 1, 1)),
        ({"group": groups.flat(), "mechanism": JOINT}, lambda t: (1, 1, 1)),
        ({"group": groups.per_layer(), "schedules": SCHEDULES}, scheduled),
    ],
    ids=["separate", "joint", "schedule"],
)
def test_training_equals_dp_sgd_by_hand_and_is_accounted(tmp_path, choices, factors):
    """Empty samples step like others, and chunks are neither noised again nor clipped as means; a schedule of bounds
    leaves z alone."""
    plan = plan_for(Model(), **choices)
    module, run, _ = fit(tmp_path, plan=plan)
    reference, sizes = by_hand(plan, factors)
    assert max(sizes) > 4 and (min(sizes) < 4 or factors is scheduled), "some samples must span chunks"
    assert_same(module, reference)
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert run.global_step == T == len(ledger) and ledger == plan.ledger()
    for t, round_ in enumerate(Counter(ledger.rounds).elements()):
        f_z, f_q, f_S = factors(t)
        assert round_.sampling.q == pytest.approx(Q * f_q)
        assert [query.S for query in round_.queries] == pytest.approx([group.S * f_S for group in plan.groups])
        assert round_.z("add_remove") == pytest.approx(0.8 * f_z)


@pytest.mark.parametrize(
    "policy, choices",
    [
        ("truncated_poisson", {"sampling": "truncated_poisson", "max_batch_size": 6}),
        ("fixed_size", {"sampling": "fixed_size", "q": 5 / N}),
        ("all", {"sampling": "full_batch", "q": 1.0}),
    ],
)
def test_every_policy_writes_its_plan_to_the_ledger(tmp_path, policy, choices):
    """The others do where they are tested by themselves."""
    plan = plan_for(Model(), n=N, steps=3, **choices)
    fit(tmp_path, plan=plan)
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == plan.ledger() and len(ledger) == 3
    assert {round_.sampling.policy.name for round_ in ledger.rounds} == {policy}


def moved(tmp_path, ledger="l.jsonl", **choices):
    """How far plain SGD moves each weight."""
    module = Model(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    fit(tmp_path, module, plan=plan_for(module, **choices), ledger=ledger)
    return torch.cat(
        [(p - q).detach().flatten() for p, q in zip(module.parameters(), Model().parameters(), strict=True)]
    )


def test_an_empty_sample_is_noised_accounted_and_stepped(tmp_path):
    assert (moved(tmp_path, q=1e-9, steps=3) != 0).all(), "noise reached every weight"
    assert len(read_ledger(tmp_path / "l.jsonl")) == 3


def test_the_denominator_is_the_plans_n(tmp_path):
    """The size of the data set is private."""
    first, second = moved(tmp_path, steps=1), moved(tmp_path, "other.jsonl", steps=1, n=74)
    assert torch.allclose(first, 2 * second, rtol=1e-9)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize(
    "options",
    [{"max_physical_batch_size": 1}, {"data": Data(workers=2)}, {"data": DataLoader(dataset(), batch_size=2)}],
    ids=["physical batch", "workers", "a loader given to fit"],
)
def test_loading_changes_nothing(tmp_path, options, usual):
    assert_same(fit(tmp_path, **options)[0], usual[0])


def test_runs_without_a_seed_differ(tmp_path, usual):
    first, second = (fit(tmp_path, plan=plan_for(Model(), steps=2), ledger=name, noise_seed=None)[0] for name in "ab")
    assert not torch.equal(first.net[0].weight, second.net[0].weight)


def test_what_training_step_logs_is_dropped_and_the_module_is_as_before(tmp_path, usual):
    module, run, _ = usual
    assert "train_loss" not in run.callback_metrics | run.logged_metrics
    assert "training_step" not in module.__dict__ and "log" not in module.__dict__
    _, run, _ = fit(tmp_path, plan=plan_for(Model(), steps=2), unsafe_diagnostics=True)
    assert {"unsafe/sample_size", "unsafe/train_loss", "unsafe/clip_fraction/all"} <= set(run.logged_metrics)


def test_a_round_is_in_the_ledger_before_its_noise_is_drawn(tmp_path, monkeypatch):
    add_to, known = CorrelatedNoise.add_to, set()

    def noted(self, sums, divisor=1.0):
        known.add(len(ledger_so_far(tmp_path / "l.jsonl")))
        add_to(self, sums, divisor)

    monkeypatch.setattr(CorrelatedNoise, "add_to", noted)  # the dry run's noise, for time, is Gaussian
    fit(tmp_path, plan=plan_for(Model(), steps=3))
    assert known == {1, 2, 3}


# Going on from a checkpoint


def stopped(folder, rounds=5, **choices):
    """The checkpoint of a training that has ended after some rounds."""
    folder.mkdir(exist_ok=True)
    _, run, _ = fit(folder, plan=plan_for(Model(), **choices), options={"max_steps": rounds})
    run.save_checkpoint(folder / "stopped.ckpt")
    return folder / "stopped.ckpt"


def resumed(folder, checkpoint, **choices):
    return fit(folder, plan=plan_for(Model(), **choices), ckpt=checkpoint)[1]


def test_a_checkpoint_is_only_resumed_with_the_ledger_of_its_run(tmp_path):
    path, ledger = stopped(tmp_path), tmp_path / "l.jsonl"
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["callbacks"]["PrivacyCallback"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    with pytest.raises(ConfigError, match="was saved without a PrivacyCallback"):
        resumed(tmp_path, tmp_path / "without.ckpt")
    assert len(read_ledger(ledger)) == 5
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-3]))
    (tmp_path / "l.end.json").unlink()
    with pytest.raises(ConfigError, match="does not begin with the rounds that the checkpoint's run had written"):
        resumed(tmp_path, path)
    with pytest.raises(ConfigError, match="the run that would continue it plans"):
        resumed(tmp_path, path, q=0.2)


def test_a_checkpoint_is_not_resumed_with_another_runs_ledger(tmp_path):
    dear, cheap = (stopped(tmp_path / name, noise_multiplier=z) for name, z in (("dear", 0.3), ("cheap", 30.0)))
    before = (cheap.parent / "l.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is another run's or was changed since"):
        resumed(cheap.parent, dear, noise_multiplier=30.0)
    assert (cheap.parent / "l.jsonl").read_bytes() == before, "nothing was released, and nothing written"
    spent = dpexp.epsilon(read_ledger(dear.parent / "l.jsonl"), 1e-5)
    assert resumed(dear.parent, dear, noise_multiplier=30.0).global_step == T
    ledger = read_ledger(dear.parent / "l.jsonl")
    assert sorted(ledger.rounds.values()) == [5, T - 5] and dpexp.epsilon(ledger, 1e-5) > spent > 10


def test_rounds_between_the_state_of_a_checkpoint_and_its_saving_belong_to_its_run(tmp_path):
    """As with checkpoints saved in the background."""

    class Late(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                self.checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())

        def on_train_end(self, *args):
            torch.save(self.checkpoint, tmp_path / "three.ckpt")

    module = Model()
    privacy = dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl", noise_seed=SEED)
    trainer(privacy, Late(), max_steps=5).fit(module, Data())
    assert resumed(tmp_path, tmp_path / "three.ckpt").global_step == T
    assert len(read_ledger(tmp_path / "l.jsonl")) == 5 + T - 3


def test_resuming_with_a_known_seed_draws_other_noise_and_samples(tmp_path):
    """Equal noise in two rounds could be subtracted; samples are empty."""

    def released(ckpt=None, rounds=-1):
        module, gradients = Model(), Gradients()
        plan = plan_for(module, q=1e-9, steps=4)
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl", noise_seed=SEED)
        run = trainer(privacy, gradients, max_steps=rounds)
        run.fit(module, Data(), ckpt_path=ckpt, weights_only=False)
        if ckpt is None:
            run.save_checkpoint(tmp_path / "half.ckpt")
        return gradients.seen

    every = released(rounds=2)
    for _ in range(2):  # one checkpoint, resumed twice
        every += released(tmp_path / "half.ckpt")
    assert len(every) == 6
    assert not any(torch.equal(a, b) for k, a in enumerate(every) for b in every[:k])


@pytest.mark.parametrize("rounds", [5, T])
def test_a_ledger_edited_in_mid_training_stops_it_before_the_next_release_or_at_its_end(tmp_path, rounds):
    class Edit(Gradients):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == rounds:
                edited(tmp_path / "l.jsonl")

    module, edit = Model(), Edit()
    privacy = dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match=f"was edited while its run was writing it, so training stops; its {rounds}"):
        trainer(privacy, edit).fit(module, Data())
    assert len(edit.seen) == rounds


# How many rounds


@pytest.mark.parametrize("epochs", [100, None])
def test_schedulers_get_the_rounds_of_the_plan_and_there_is_none_beyond(tmp_path, epochs):
    class Warm(Model):
        def configure_optimizers(self):
            optimizer, self.rounds = torch.optim.SGD(self.parameters(), 0.5), self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=self.rounds)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module, run, _ = fit(tmp_path, Warm(), options={"min_epochs": epochs, "max_epochs": epochs})
    assert module.rounds == run.global_step == len(read_ledger(tmp_path / "l.jsonl")) == T
    assert run.optimizers[0].param_groups[0]["lr"] < 0.02
    assert isinstance(pl.Trainer.estimated_stepping_batches, property)


def test_a_trainer_that_ends_before_the_plan_is_told_its_epsilon_and_another_fit_goes_on(tmp_path, recwarn):
    """Rounds beyond the Trainer's end are neither trained nor counted, and ε of those before is named."""
    plan = plan_for(Model(nn.Linear(4, 3)), steps=None, epochs=2, delta=1e-4)
    assert plan.rounds == 14 > 2 / Q
    whole = dpexp.epsilon(plan.ledger(), 1e-4)
    for k, (goes_on, ends, rounds) in enumerate([
        (False, {"max_epochs": 2}, 14), (False, {"max_epochs": 1}, 7), (False, {"max_steps": 5}, 5),
        (True, {"max_steps": 5}, 10), (True, {"max_epochs": 100}, 14), (True, {"max_epochs": 100}, 14),
    ]):  # fmt: skip
        if not goes_on:
            privacy, module = dpexp.PrivacyCallback(plan, tmp_path / str(k)), Model(nn.Linear(4, 3))
        recwarn.clear()
        trainer(privacy, **ends).fit(module, Data())
        ledger = read_ledger(privacy.ledger_path)
        assert ledger.training_rounds == privacy.rounds_done == rounds
        epsilon, said = dpexp.epsilon(ledger, 1e-4), " ".join(str(one.message) for one in recwarn)
        assert epsilon == whole if rounds == 14 else epsilon < whole
        assert said.count("ends the training after") == (rounds < 14)
        assert (f"after {rounds} of the plan's 14 rounds, at ε = {up(epsilon, 4)}" in said) == (rounds < 14)
    assert "the plan's 14 rounds are done, so that nothing more is trained" in said


# Refusals, before anything is released


class Stream(IterableDataset):
    def __iter__(self):
        yield from dataset()


def calling(hook, change):
    """A callback of which one hook changes the module."""
    return type("Calling", (pl.Callback,), {hook: lambda self, trainer, module, **_: change(module)})()


def pruned(module):
    torch.nn.utils.prune.l1_unstructured(module.net[2], "weight", 0.5)


class Unfreezes(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        self.unfreeze_and_add_param_group(module.net[0], optimizer)


class WithBackbone(Model):
    """As BackboneFinetuning needs."""

    def __init__(self):
        super().__init__()
        self.backbone = self.net[0]


class Plateau(Model):
    monitor = "train_loss"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor}}


class Validated(Model):
    monitor = "val_los"

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class NotAtFirst(Validated):
    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("late", 1.0)


class WithValidation(Data):
    def val_dataloader(self):
        return DataLoader(dataset(), batch_size=N)


class Centred(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - batch[0].mean(0), batch[1]


def configured(configure):
    """A module with other optimizers, a function of its parameters."""
    return type("Configured", (Model,), {"configure_optimizers": lambda self: configure(self.parameters())})


def manual():
    module = Model()
    module.automatic_optimization = False
    return module


def wide():
    return Model(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))


def normalized():
    return Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False).eval()))


def loader(**options):
    return {"data": DataLoader(dataset(), **options)}


def stopping(monitor):
    return {"callbacks": [pl.callbacks.EarlyStopping(monitor, patience=99)]}


FIRST = SubsetRandomSampler(range(10))
NOBODY_LOGS = r"monitors val_los\w*, which neither training_step nor the validation logs"
OF_STEP = "reads train_loss, which training_step logs"
TRUNCATED = {"n": N, "q": 5 / N, "sampling": "truncated_poisson", "max_batch_size": 9}
# What is said; and in place of a Model, its plan, after how many rounds (usually none), and what `fit` takes besides.
REFUSED = [
    ("LBFGS", {"module": configured(torch.optim.LBFGS)}),
    ("not among the module's", {"module": configured(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(2))]))}),
    ("optimizer: configure_optimizers returns None", {"module": configured(lambda p: None)}),
    ("automatic_optimization=False, but a round releases one gradient.* a dpexp.Private for each", {"module": manual}),
    (r"Centred\.on_after_batch_transfer gets whole batches", {"module": Centred}),
    # also when switched to training mode after the plan was made
    (r"net\.1 \(BatchNorm1d\) mixes",
     {"module": normalized, "callbacks": [calling("setup", lambda module: module.net[1].train())]}),
    ("another model, whose net.0 has 45 parameters, and this one's has 25",
     {"planned_for": wide, "plan": {"clip_norm": clipping.DimensionClipNorm(1.0)}}),
    (f"data.n={N + 4}, but the training set holds {N} records",
     {"plan": {"n": N + 4, "q": 4 / (N + 4), "sampling": "fixed_size"}}),
    (f"data.n={N + 4}, but the training set holds {N} records", {"plan": TRUNCATED | {"n": N + 4}}),
    ("accountant=rdp has no bound for sampling=truncated_poisson",
     {"plan": TRUNCATED, "delta": 1e-5, "accountant": "rdp"}),
    ("accumulate_grad_batches", {"options": {"accumulate_grad_batches": 2}}),
    ("truncate samples", {"options": {"limit_train_batches": 1}}),
    ("truncate samples", {"options": {"fast_dev_run": True}}),
    (r"trainer\.profiler=SimpleProfiler: its counts", {"options": {"profiler": "simple"}}),
    ("streams its records", {"data": DataLoader(Stream())}),
    (r" sampler of its own \(SubsetRandomSampler", loader(sampler=FIRST)),
    (r"batch_sampler of its own \(SubsetRandomSampler", loader(batch_sampler=BatchSampler(FIRST, 4, False))),
    (r"batch_sampler of its own \(list", loader(batch_sampler=[[0, 1, 2], [3]])),
    ("DeviceStatsMonitor logs what the device did",
     {"callbacks": [pl.callbacks.DeviceStatsMonitor()], "options": {"logger": Everything()}}),
    ("ModelPruning changes the parameters.* prune",
     {"callbacks": [pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)]}),
    ("BackboneFinetuning changes .* freeze before make_plan",
     {"module": WithBackbone, "callbacks": [pl.callbacks.BackboneFinetuning(1)]}),
    ("Unfreezes changes the parameters, or which of them are trained", {"callbacks": [Unfreezes()]}),
    (r"net\.2\.weight, net\.2\.weight_orig became trainable, ceased to be, or was replaced",
     {"callbacks": [calling("on_train_epoch_end", pruned)], "rounds": 7}),
    (r"differ in .*net\.0\.bias, net\.0\.weight; make it for the module as it is trained",
     {"callbacks": [calling("setup", lambda module: module.net[0].requires_grad_(False))]}),
    (f"ReduceLROnPlateau {OF_STEP}", {"module": Plateau}),
    (f"EarlyStopping {OF_STEP}", stopping("train_loss")),
    (NOBODY_LOGS, stopping("val_loss")),
    (NOBODY_LOGS, {"module": Validated, "data": WithValidation()} | stopping("val_los")),
    (NOBODY_LOGS, {"module": type("Both", (Validated, Plateau), {}), "data": WithValidation()}),
]  # fmt: skip


@pytest.mark.parametrize("said, given", REFUSED, ids=[said for said, _ in REFUSED])
def test_unsupported_training_is_refused_before_a_release(tmp_path, said, given):
    module = given.get("module", Model)()
    planned_for = given["planned_for"]() if "planned_for" in given else module
    others = {name: value for name, value in given.items() if name not in ("module", "planned_for", "plan", "rounds")}
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, module, plan=plan_for(planned_for, **given.get("plan", {})), **others)
    ledger = tmp_path / "l.jsonl"
    assert (len(read_ledger(ledger)) if ledger.exists() else 0) == given.get("rounds", 0)


def test_a_corrected_module_may_use_the_ledger_of_its_refusal(tmp_path):
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(tmp_path, Model(optimizer=torch.optim.LBFGS))
    assert (tmp_path / "l.jsonl").exists()
    _, _, privacy = fit(tmp_path)
    assert len(read_ledger(tmp_path / "l.jsonl")) == privacy.rounds_done == T


def test_lightnings_advice_on_several_optimizers_has_a_note(tmp_path):
    module = configured(lambda parameters: [torch.optim.SGD([p], 0.1) for p in parameters])()
    with pytest.raises(RuntimeError, match="automatic_optimization = False") as raised:
        fit(tmp_path, module)
    assert "dpexp.Private for each" in raised.value.__notes__[0]


@pytest.mark.parametrize("module, monitor", [(Validated, "val_loss"), (NotAtFirst, "late")])
def test_monitors_of_logged_values_train(tmp_path, module, monitor):
    assert fit(tmp_path, module(), WithValidation(), **stopping(monitor))[2].rounds_done == T
