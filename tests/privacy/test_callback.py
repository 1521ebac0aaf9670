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

import dpexp
from dpexp.accounting.ledger import ledger_so_far, read_ledger
from dpexp.accounting.releases import releases
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


def fit(tmp_path, module=None, data=None, plan=None, ledger="l.jsonl", options=None, **callback):
    module = module or Model()
    callback = {"max_physical_batch_size": 4, "noise_seed": SEED} | callback
    privacy = dpexp.PrivacyCallback(plan or plan_for(module), tmp_path / ledger, **callback)
    run = trainer(privacy, **options or {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, Data() if data is None else data)
    return module, run, privacy


def by_hand(plan, rounds=T, net=None, factors=lambda t: (1, 1, 1)):
    """DP-SGD with momentum and a decaying rate, record by record, on the same samples and noise.

    factors: of z, q and S in round t.
    """
    module = Model(net)
    x, y = dataset().tensors
    sampler = KeyStream.known(SEED, "sampling", 0)
    noise = GaussianNoise(KeyStream.known(SEED, "noise", 0))
    velocity = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    rate, sizes = 0.5, []
    for t in range(rounds):
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
        with torch.no_grad():
            for name, p in module.named_parameters():
                velocity[name] = 0.9 * velocity[name] + sums[name] / (Q * f_q * 37)
                p -= rate * velocity[name]
        rate *= 0.9
    return module, sizes


def assert_same(module, other):
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    "grouping, mechanism",
    [(groups.per_layer(), clipping.Separate()), (groups.flat(), clipping.Joint(clipping.FixedClipNorm([0.2, 0.5])))],
)
def test_training_equals_dp_sgd_by_hand(tmp_path, grouping, mechanism):
    """Empty samples step like others, and chunks are neither noised again nor clipped as means."""
    plan = plan_for(Model(), group=grouping, mechanism=mechanism)
    module, run, _ = fit(tmp_path, plan=plan)
    reference, sizes = by_hand(plan)
    assert 0 in sizes or min(sizes) < 4 < max(sizes), "some samples must span chunks"
    assert_same(module, reference)
    assert run.global_step == T
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == plan.ledger()


def test_a_schedule_is_carried_out_and_accounted(tmp_path):
    schedules = {"z": {"step": {0: 1.0, 3: 0.5}}, "q": [1 + 0.1 * t for t in range(T)], "S": {"linear": [1, 2]}}
    plan = plan_for(Model(), group=groups.per_layer(), schedules=schedules)
    module, _, _ = fit(tmp_path, plan=plan)

    def factors(t):
        return (0.5 if t >= 3 else 1.0), 1 + 0.1 * t, 1 + t / (T - 1)

    assert_same(module, by_hand(plan, factors=factors)[0])
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert len(ledger.rounds) == T == len(ledger)
    for t, round_ in enumerate(ledger.rounds):
        f_z, f_q, f_S = factors(t)
        assert round_.sampling.q == pytest.approx(Q * f_q)
        (bound,) = {query.S for query in round_.queries}
        assert bound == pytest.approx(0.4 * f_S)
        assert round_.z("add_remove") == pytest.approx(0.8 * f_z), "a schedule of bounds leaves z alone"
    assert ledger == plan.ledger()


@pytest.mark.parametrize(
    "choices",
    [
        {"sampling": "truncated_poisson", "max_batch_size": 6},
        {"sampling": "fixed_size", "q": 5 / N},
        {"sampling": "shuffle", "q": 5 / N, "adjacency": "replace_null"},
        {"sampling": "random_allocation", "q": 0.2, "num_selected": 2},
        {"sampling": "full_batch", "q": 1.0},
    ],
    ids=str,
)
def test_every_policy_writes_its_plan_to_the_ledger(tmp_path, choices):
    plan = plan_for(Model(), n=N, steps=20, **choices)
    fit(tmp_path, plan=plan)
    ledger = read_ledger(tmp_path / "l.jsonl")
    assert ledger == plan.ledger() and len(ledger) == 20
    policy = "all" if choices["sampling"] == "full_batch" else choices["sampling"]
    assert {round_.sampling.policy.name for round_ in ledger.rounds} == {policy}


@pytest.mark.parametrize("sampling", ["fixed_size", "truncated_poisson"])
def test_policies_that_need_an_exact_n_refuse_another_number_of_records(tmp_path, sampling):
    maximum = {"max_batch_size": 9} if sampling == "truncated_poisson" else {}
    plan = plan_for(Model(), n=N + 4, q=4 / (N + 4), sampling=sampling, **maximum)
    with pytest.raises(ConfigError, match=f"data.n={N + 4}, but the training set holds {N} records"):
        fit(tmp_path, plan=plan)
    assert not (tmp_path / "l.jsonl").exists()


def test_an_accountant_that_does_not_cover_the_plan_is_refused_before_training(tmp_path):
    plan = plan_for(Model(), n=N, q=5 / N, sampling="truncated_poisson", max_batch_size=9)
    with pytest.raises(ConfigError, match="accountant=rdp has no bound for sampling=truncated_poisson"):
        fit(tmp_path, plan=plan, delta=1e-5, accountant="rdp")


def test_an_empty_sample_is_noised_accounted_and_stepped(tmp_path):
    module = Model(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    before = [p.clone() for p in module.parameters()]
    plan = plan_for(module, q=1e-9, steps=3)
    _, run, _ = fit(tmp_path, module, plan=plan)
    assert run.global_step == 3 and len(read_ledger(tmp_path / "l.jsonl")) == 3
    assert all((p != b).all() for p, b in zip(module.parameters(), before, strict=True)), "noise reached every weight"


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


def test_runs_without_a_seed_differ(tmp_path):
    first, second = (
        fit(tmp_path, plan=plan_for(Model(), steps=2), ledger=name, noise_seed=None)[0] for name in ("a", "b")
    )
    assert not torch.equal(first.net[0].weight, second.net[0].weight)


def test_the_denominator_is_the_plans_n(tmp_path):
    """The size of the data set is private."""
    module = Model(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    start = [p.clone() for p in module.parameters()]
    fit(tmp_path, module, plan=plan_for(module, steps=1))
    other = Model(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    fit(tmp_path, other, plan=plan_for(other, steps=1, n=74), ledger="other.jsonl")
    for p, q, s in zip(module.parameters(), other.parameters(), start, strict=True):
        assert torch.allclose(p - s, 2 * (q - s), rtol=1e-9)


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


def resumed(folder, checkpoint, stop, **choices):
    module = Model()
    privacy = dpexp.PrivacyCallback(plan_for(module, **choices), folder / "l.jsonl", delta=1e-5)
    run = trainer(privacy, max_steps=stop)
    run.fit(module, Data(), ckpt_path=checkpoint, weights_only=False)
    return run


def test_shuffled_epochs_stay_apart_however_often_one_checkpoint_is_resumed(tmp_path):
    """Each resumption shuffles anew, so that its batches overlap with earlier ones."""
    shuffle = {"n": N, "sampling": "shuffle", "q": 4 / N, "steps": 30}
    module = Model()
    _, run, _ = fit(tmp_path, module, plan=plan_for(module, **shuffle), options={"max_steps": 10})
    run.save_checkpoint(tmp_path / "ten.ckpt")
    for stop in (13, 16):
        resumed(tmp_path, tmp_path / "ten.ckpt", stop, **shuffle)
    ledger = read_ledger(tmp_path / "l.jsonl")
    shuffled = Counter()
    for round_, count in ledger.rounds.items():
        shuffled[round_.sampling.first] += count
    assert sorted(shuffled.values()) == [3, 6, 10], "three partitions, three releases of a record"
    assert sum(releases(ledger).values()) == 3


def test_a_checkpoint_is_only_resumed_with_the_ledger_of_its_run(tmp_path):
    module = Model()
    _, run, _ = fit(tmp_path, module, plan=plan_for(module), options={"max_steps": 5})
    run.save_checkpoint(tmp_path / "five.ckpt")
    checkpoint = torch.load(tmp_path / "five.ckpt", weights_only=True)
    del checkpoint["callbacks"]["PrivacyCallback"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    with pytest.raises(ConfigError, match="was saved without a PrivacyCallback"):
        resumed(tmp_path, tmp_path / "without.ckpt", T)
    assert len(read_ledger(tmp_path / "l.jsonl")) == 5
    lines = (tmp_path / "l.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "l.jsonl").write_text("".join(lines[:-3]))
    (tmp_path / "l.end.json").unlink()
    with pytest.raises(ConfigError, match="does not begin with the rounds that the checkpoint's run had written"):
        resumed(tmp_path, tmp_path / "five.ckpt", T)
    with pytest.raises(ConfigError, match="the run that would continue it plans"):
        resumed(tmp_path, tmp_path / "five.ckpt", T, q=0.2)


def test_a_checkpoint_is_not_resumed_with_another_runs_ledger(tmp_path):
    for name, z in (("dear", 0.3), ("cheap", 30.0)):
        (tmp_path / name).mkdir()
        module = Model()
        plan = plan_for(module, noise_multiplier=z)
        _, run, _ = fit(tmp_path / name, module, plan=plan, options={"max_steps": 5})
        run.save_checkpoint(tmp_path / name / "five.ckpt")
    cheap = (tmp_path / "cheap" / "l.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="is another run's or was changed since"):
        resumed(tmp_path / "cheap", tmp_path / "dear" / "five.ckpt", T, noise_multiplier=30.0)
    assert (tmp_path / "cheap" / "l.jsonl").read_bytes() == cheap, "nothing was released, and nothing written"
    spent = dpexp.epsilon(read_ledger(tmp_path / "dear" / "l.jsonl"), 1e-5)
    assert resumed(tmp_path / "dear", tmp_path / "dear" / "five.ckpt", T, noise_multiplier=30.0).global_step == T
    ledger = read_ledger(tmp_path / "dear" / "l.jsonl")
    assert sorted(ledger.rounds.values()) == [5, T - 5] and dpexp.epsilon(ledger, 1e-5) > spent > 10


def test_rounds_between_the_state_of_a_checkpoint_and_its_saving_belong_to_its_run(tmp_path):
    """As with checkpoints saved in the background."""

    class Late(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                self.checkpoint = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint())

        def on_train_end(self, *args):
            torch.save(self.checkpoint, tmp_path / "three.ckpt")

    module, late = Model(), Late()
    trainer(dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl"), late, max_steps=5).fit(module, Data())
    assert resumed(tmp_path, tmp_path / "three.ckpt", T).global_step == T
    assert len(read_ledger(tmp_path / "l.jsonl")) == 5 + T - 3


def test_a_ledger_edited_in_mid_training_stops_it_before_the_next_release(tmp_path):
    class Edit(pl.Callback):
        released = 0

        def on_before_optimizer_step(self, *args):
            self.released += 1

        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 5:
                edited(tmp_path / "l.jsonl")

    module, edit = Model(), Edit()
    privacy = dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl")
    with pytest.raises(ConfigError, match="was edited while its run was writing it, so training stops; its 5 rounds"):
        trainer(privacy, edit).fit(module, Data())
    assert edit.released == 5


# Refusals, before anything is released


class Stream(IterableDataset):
    def __iter__(self):
        yield from dataset()


def expect_refusal(tmp_path, match, module=None, data=None, options=None, **callback):
    with pytest.raises(ConfigError, match=match):
        fit(tmp_path, module, data, options=options, **callback)
    ledger = tmp_path / "l.jsonl"
    assert not ledger.exists() or len(read_ledger(ledger)) == 0


def test_batchnorm_is_refused_by_name(tmp_path):
    """Also when switched to training mode after the plan was made."""
    module = Model(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False).eval()))
    plan = plan_for(module)
    module.net[1].train()
    with pytest.raises(ConfigError, match=r"net\.1 \(BatchNorm1d\) mixes"):
        fit(tmp_path, module, plan=plan)


def test_callbacks_that_measure_the_device_are_refused(tmp_path):
    module = Model()
    run = trainer(dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl"))
    run.callbacks.append(pl.callbacks.DeviceStatsMonitor())
    with pytest.raises(ConfigError, match="DeviceStatsMonitor logs what the device did"):
        run.fit(module, Data())


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
    plan = plan_for(Model(), steps=None, epochs=2, delta=1e-4)
    assert plan.rounds == 14 > 2 / Q

    def trained(privacy, module, **ends):
        recwarn.clear()
        trainer(privacy, **ends).fit(module, Data())
        ledger = read_ledger(privacy.ledger_path)
        assert ledger.training_rounds == privacy.rounds_done
        said = [str(w.message) for w in recwarn if "ends the training after" in str(w.message)]
        return privacy.rounds_done, said, dpexp.epsilon(ledger, 1e-4)

    def callback(name):
        return dpexp.PrivacyCallback(plan, tmp_path / name), Model()

    rounds, said, whole = trained(*callback("all"), max_epochs=2)
    assert (rounds, said) == (14, [])
    rounds, (said,), epsilon = trained(*callback("epochs"), max_epochs=1)
    assert (rounds, f"after 7 of the plan's 14 rounds, at ε = {up(epsilon, 4)}" in said) == (7, True)
    assert epsilon < whole
    privacy, module = callback("steps")
    rounds, (said,), epsilon = trained(privacy, module, max_steps=5)
    assert (rounds, f"after 5 of the plan's 14 rounds, at ε = {up(epsilon, 4)}" in said) == (5, True)
    rounds, (said,), epsilon = trained(privacy, module, max_steps=5)  # another fit goes on
    assert (rounds, f"after 10 of the plan's 14 rounds, at ε = {up(epsilon, 4)}" in said) == (10, True)
    assert trained(privacy, module, max_epochs=100) == (14, [], whole)
    assert trained(privacy, module, max_epochs=100) == (14, [], whole)
    assert "the plan's 14 rounds are done, so that nothing more is trained" in str([str(w.message) for w in recwarn])


class Prunes(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        torch.nn.utils.prune.l1_unstructured(module.net[2], "weight", 0.5)


class Freezes(pl.Callback):
    def setup(self, trainer, module, stage):
        module.net[0].requires_grad_(False)


class Unfreezes(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        self.unfreeze_and_add_param_group(module.net[0], optimizer)


@pytest.mark.parametrize(
    "callback, words",
    [
        (pl.callbacks.ModelPruning("l1_unstructured", amount=0.5), "ModelPruning changes the parameters.* prune"),
        (pl.callbacks.BackboneFinetuning(1), "BackboneFinetuning changes .* freeze before make_plan"),
        (Unfreezes(), "Unfreezes changes the parameters, or which of them are trained"),
        (Prunes(), r"net\.2\.weight, net\.2\.weight_orig became trainable, ceased to be, or was replaced"),
        (Freezes(), r"differ in .*net\.0\.bias, net\.0\.weight; make it for the module as it is trained"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_callbacks_that_change_the_parameters_are_refused(tmp_path, callback, words):
    module = Model()
    module.backbone = module.net[0]  # as BackboneFinetuning needs
    run = trainer(callback, dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl"))
    with pytest.raises(ConfigError, match=words):
        run.fit(module, Data())


class Monitors(Model):
    def configure_optimizers(self):
        (optimizer,) = [super().configure_optimizers()["optimizer"]]
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


@pytest.mark.parametrize(
    "module, callbacks, reader",
    [
        (Monitors, (), "ReduceLROnPlateau"),
        (Model, (pl.callbacks.EarlyStopping("train_loss"),), "EarlyStopping"),
    ],
)
def test_readers_of_private_values_are_refused_before_the_first_round(tmp_path, module, callbacks, reader):
    module = module()
    privacy = dpexp.PrivacyCallback(plan_for(module), tmp_path / "l.jsonl")
    run = trainer(privacy, *callbacks)
    with pytest.raises(ConfigError, match=f"{reader} reads train_loss, which training_step logs"):
        run.fit(module, Data())
    assert len(read_ledger(tmp_path / "l.jsonl")) == 0


class Validated(Model):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


class NotAtFirst(Validated):
    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("late", 1.0)


class Plateau(Validated):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_los"}}


class WithValidation(Data):
    def val_dataloader(self):
        return DataLoader(dataset(), batch_size=N)


@pytest.mark.parametrize(
    "module, data, monitor",
    [(Model, Data, "val_loss"), (Validated, WithValidation, "val_los"), (Plateau, WithValidation, None)],
)
def test_monitors_of_values_that_nobody_logs_are_refused(tmp_path, module, data, monitor):
    privacy = dpexp.PrivacyCallback(plan_for(module := module()), tmp_path / "l.jsonl")
    stopping = [pl.callbacks.EarlyStopping(monitor)] if monitor else []
    with pytest.raises(ConfigError, match=r"monitors val_los\w*, which neither training_step nor the validation logs"):
        trainer(privacy, *stopping).fit(module, data())
    assert len(read_ledger(tmp_path / "l.jsonl")) == 0


@pytest.mark.parametrize("module, monitor", [(Validated, "val_loss"), (NotAtFirst, "late")])
def test_monitors_of_logged_values_train(tmp_path, module, monitor):
    privacy = dpexp.PrivacyCallback(plan_for(module := module()), tmp_path / "l.jsonl")
    trainer(privacy, pl.callbacks.EarlyStopping(monitor, patience=99)).fit(module, WithValidation())
    assert privacy.rounds_done == T


def test_a_corrected_module_may_use_the_ledger_of_its_refusal(tmp_path):
    expect_refusal(tmp_path, "LBFGS", Model(optimizer=torch.optim.LBFGS))
    assert (tmp_path / "l.jsonl").exists()
    _, _, privacy = fit(tmp_path)
    assert len(read_ledger(tmp_path / "l.jsonl")) == privacy.rounds_done == T


def test_a_plan_for_other_sizes_is_refused(tmp_path):
    plan = plan_for(
        Model(nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))), clip_norm=clipping.DimensionClipNorm(1.0)
    )
    with pytest.raises(ConfigError, match=r"another model, whose net.0 has 45 parameters, and this one's has 25"):
        fit(tmp_path, Model(), plan=plan)


def test_resuming_with_a_known_seed_draws_other_noise_and_samples(tmp_path):
    """Equal noise in two rounds could be subtracted."""

    class Watch(pl.Callback):
        def __init__(self):
            self.released = []

        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.released.append(torch.cat([p.grad.flatten() for p in module.parameters()]))

    def still(module):
        return plan_for(module, q=1e-9, steps=4)

    first, second, third = Watch(), Watch(), Watch()
    module = Model()
    privacy = dpexp.PrivacyCallback(still(module), tmp_path / "l.jsonl", noise_seed=SEED)
    half = trainer(privacy, first, max_steps=2)
    half.fit(module, Data())
    half.save_checkpoint(tmp_path / "half.ckpt")
    for watch in (second, third):  # one checkpoint, resumed twice
        privacy = dpexp.PrivacyCallback(still(module), tmp_path / "l.jsonl", noise_seed=SEED)
        trainer(privacy, watch).fit(Model(), Data(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert len(first.released) == len(second.released) == len(third.released) == 2
    every = [*first.released, *second.released, *third.released]
    assert not any(torch.equal(a, b) for k, a in enumerate(every) for b in every[:k])


class Centred(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - batch[0].mean(0), batch[1]


class WithoutOptimizer(Model):
    def configure_optimizers(self):
        return None


class Manual(Model):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Twice(Model):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]


def test_lightnings_advice_on_several_optimizers_has_a_note(tmp_path):
    with pytest.raises(RuntimeError, match="automatic_optimization = False") as raised:
        fit(tmp_path, Twice())
    assert "dpexp.Private for each" in raised.value.__notes__[0]


def model_with(optimizer):
    return lambda: Model(optimizer=optimizer)


def loader(**options):
    return {"data": DataLoader(dataset(), **options)}


FIRST = SubsetRandomSampler(range(10))


@pytest.mark.parametrize(
    "module, choices, message",
    [
        (model_with(torch.optim.LBFGS), {}, "LBFGS"),
        (model_with(lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(2))], 0.1)), {}, "not among the module's"),
        (WithoutOptimizer, {}, "optimizer: configure_optimizers returns None"),
        (Manual, {}, "automatic_optimization=False, but a round releases one gradient.* a dpexp.Private for each"),
        (Centred, {}, r"Centred\.on_after_batch_transfer gets whole batches"),
        (Model, {"options": {"accumulate_grad_batches": 2}}, "accumulate_grad_batches"),
        (Model, {"options": {"limit_train_batches": 1}}, "truncate samples"),
        (Model, {"options": {"fast_dev_run": True}}, "truncate samples"),
        (Model, {"options": {"profiler": "simple"}}, r"trainer\.profiler=SimpleProfiler: its counts"),
        (Model, {"data": DataLoader(Stream())}, "streams its records"),
        (Model, loader(sampler=FIRST), r" sampler of its own \(SubsetRandomSampler"),
        (Model, loader(batch_sampler=BatchSampler(FIRST, 4, False)), r"batch_sampler of its own \(SubsetRandomSampler"),
        (Model, loader(batch_sampler=[[0, 1, 2], [3]]), r"batch_sampler of its own \(list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_training_is_refused_before_a_release(tmp_path, module, choices, message):
    expect_refusal(tmp_path, message, module(), **choices)
