"""Random allocation in a real Trainer: a record's rounds are at most those of the epochs that the ledger charges."""

import warnings

import pytest
import pytorch_lightning as pl
import torch
from plans import plan_of, trainer
from test_shuffle import module_of, records
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainings import Gradients

import dpexp
from dpexp.accounting.ledger import LedgerWriter, ledger_so_far, read_ledger
from dpexp.accounting.releases import releases
from dpexp.privacy.noise.continuous import CorrelatedNoise
from dpexp.privacy.plan.adaptive_clipping import AdaptiveClipNorm
from dpexp.privacy.plan.clipping import FixedClipNorm, Joint
from dpexp.privacy.plan.options import Banded
from dpexp.privacy.sampling.privacy_unit import Microbatch

N, ROUNDS, SEED = 12, 20, 3  # five epochs of four rounds


def plan_for(module=None, k=1, **choices):
    defaults = {
        "n": N, "sampling": "random_allocation", "q": k / 4, "num_selected": k, "steps": ROUNDS,
        "noise_multiplier": 1e-7, "clip_norm": FixedClipNorm(0.4),
    }  # fmt: skip
    return plan_of(module or module_of(), **defaults | choices)


class Killed(Exception):
    pass


class Rates(pl.LightningModule):
    """Record i's gradient is 1 at i, so that a sum shows who is in it."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(N, dtype=torch.float64))

    def training_step(self, batch):
        return (self.weights * batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Checkpoint(pl.Callback):
    """Saves a checkpoint after a round, and stops later, as if killed there."""

    def __init__(self, path, after, stop):
        self.path, self.after, self.stop, self.rounds = path, after, stop, 0

    def on_train_batch_end(self, trainer, *_):
        self.rounds += 1
        if self.rounds == self.after:
            trainer.save_checkpoint(self.path)
        if self.rounds == self.stop:
            raise Killed


class Job:
    """Trainings of one job: each goes on from the last checkpoint. `seen`: who was in the rounds of each."""

    def __init__(self, folder, k=1):
        self.folder, self.k, self.seen = folder, k, []

    def train(self, after=0, stop=0, **options):
        """Trains and saves after some rounds, until it is killed after others; 0: never. The text of its warnings."""
        module, gradients = Rates(), Gradients()
        plan = plan_for(module, self.k, clip_norm=FixedClipNorm(1.0))
        privacy = dpexp.PrivacyCallback(plan, self.folder / "ledger", **options)
        path = self.folder / "checkpoint"
        run = trainer(privacy, gradients, Checkpoint(path, after, stop))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                data = DataLoader(TensorDataset(torch.eye(N, dtype=torch.float64)), 4)
                run.fit(module, data, ckpt_path=path if path.exists() else None, weights_only=False)
            except Killed:
                pass
        found = [seen * plan.sampling.q * N for seen in gradients.seen]
        self.seen.append(torch.stack(found).round().long() if found else torch.zeros(0, N, dtype=torch.long))
        self.privacy = privacy
        return " ".join(str(one.message) for one in told)

    @property
    def charged(self):
        """The number of epochs that the ledger charges."""
        return sum(releases(ledger_so_far(self.folder / "ledger")).values()) // self.k

    def check(self):
        """No record was in more rounds than are charged, nor in more of an epoch than k."""
        counts = torch.zeros(N, dtype=torch.long)
        for rounds in self.seen:
            for start in range(0, len(rounds), 4):
                epoch = rounds[start : start + 4]
                counts += epoch.sum(0)
                assert epoch.max() <= 1 and epoch.sum(0).max() <= self.k
                assert len(epoch) < 4 or (epoch.sum(0) == self.k).all()
        assert counts.max() <= self.k * self.charged and self.charged <= 5
        assert len(read_ledger(self.folder / "ledger")) >= sum(map(len, self.seen))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_each_record_is_in_k_rounds_of_each_epoch(tmp_path, k):
    job = Job(tmp_path, k)
    assert "lost" not in job.train()
    job.check()
    assert len(job.seen[0]) == ROUNDS and (job.seen[0].sum(0) == 5 * k).all() and job.charged == 5
    assert read_ledger(tmp_path / "ledger") == plan_for(Rates(), k, clip_norm=FixedClipNorm(1.0)).ledger()
    assert len({*job.seen[0].sum(1).tolist()}) > 1, "samples vary in size"


# What is saved and when it is killed, training by training; then the rounds of the last training.
KILLS = {
    "at an epoch's end": ([(8, 8)], 12),
    "in an epoch": ([(6, 6)], 12),
    "in an epoch, after the checkpoint": ([(5, 7)], 12),
    "an epoch after the checkpoint": ([(3, 9)], 8),
    "at its first round, again and again": ([(1, 1), (1, 1), (1, 1)], 8),
    "twice after one checkpoint": ([(2, 3), (0, 5)], 8),
    "in the last epoch": ([(17, 18)], 0),
    "with nothing left, though the checkpoint is early": ([(2, 18)], 0),
    "resumed after its end": ([(20, 0)], 0),
}


@pytest.mark.parametrize("k, kill", [*((1, kill) for kill in KILLS), (2, "in an epoch, after the checkpoint")])
def test_a_killed_job_charges_no_more_epochs_than_planned(tmp_path, k, kill):
    job, (trainings, last) = Job(tmp_path, k), KILLS[kill]
    for after, stop in trainings:
        job.train(after, stop)
        job.check()
    before = job.charged
    job.train()
    job.check()
    assert len(job.seen[-1]) == last and job.charged == 5 and job.privacy.rounds_done == ROUNDS
    assert job.charged == before + last // 4, "each training begins a new epoch"


def test_a_round_that_was_charged_but_not_released_counts(tmp_path, monkeypatch):
    """Killed between the ledger's line and the release, in the first round of an epoch."""
    add_to, rounds = CorrelatedNoise.add_to, []

    def killed(self, sums, divisor=1.0):
        rounds.append(divisor)
        if len(rounds) == 9:
            raise Killed
        add_to(self, sums, divisor)

    job = Job(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(CorrelatedNoise, "add_to", killed)
        job.train(after=7)
    assert (len(job.seen[0]), job.charged) == (8, 3)
    assert "5 rounds are lost; a new epoch begins, and 8 rounds are left" in job.train()
    job.check()
    assert (len(job.seen[1]), job.charged) == (8, 5)


def test_what_is_lost_is_said_in_one_sentence(tmp_path):
    job = Job(tmp_path)
    job.train(5, 6)
    assert job.train(6, 6).count("3 rounds are lost; a new epoch begins, and 12 rounds are left") == 1
    assert "2 rounds are lost; a new epoch begins, and 4 rounds are left" in job.train(1, 1)
    assert "3 rounds are lost; no epoch is left; training ends" in job.train()


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_loop_of_ones_own_goes_on_with_the_next_epoch_that_is_not_charged(tmp_path, is_resumed):
    """Also where the same object goes on."""

    def loop_of(state=None):
        module = Rates()
        plan = plan_for(module, clip_norm=FixedClipNorm(1.0))
        private = dpexp.Private(module, torch.optim.SGD(module.parameters(), lr=0.0), plan, tmp_path / "ledger")
        if state:
            private.load_state_dict(state)
        return private

    def run(private, stop=None):
        samples = private.rounds(TensorDataset(torch.eye(N, dtype=torch.float64)))
        for done, sample in enumerate(samples, 1):
            private.step(lambda model, record: (model.weights * record[0]).sum(), sample)
            if done == stop:
                break
        samples.close()
        return private

    first = run(loop_of(), 6)
    state = first.state_dict()
    with pytest.warns(UserWarning, match="2 rounds are lost; a new epoch begins, and 12 rounds are left"):
        run(loop_of(state) if is_resumed else first)
    ledger = read_ledger(tmp_path / "ledger")
    assert ledger.training_rounds == 18 and sum(releases(ledger).values()) == 5
    with pytest.warns(UserWarning, match="no epoch is left; training ends"):
        run(loop_of(state))
    assert read_ledger(tmp_path / "ledger") == ledger


def test_an_early_stop_keeps_the_charge_of_the_whole_epoch(tmp_path):
    job = Job(tmp_path)
    job.train(stop=5)
    assert (len(read_ledger(tmp_path / "ledger")), job.charged) == (5, 2)


def fit(folder, plan, data):
    module, gradients = module_of(0.0), Gradients()
    privacy = dpexp.PrivacyCallback(plan, folder / "ledger", noise_seed=SEED, max_physical_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(privacy, gradients).fit(module, DataLoader(TensorDataset(*data), 4))
    (folder / "ledger").unlink()
    return torch.stack(gradients.seen), privacy.estimates.history


@pytest.mark.parametrize(
    "k, choices",
    [
        (1, {}),
        (3, {"mechanism": Joint(FixedClipNorm([0.2, 0.5]))}),
        (1, {"private_metrics": {"train_loss": {"clip_norm": 0.3, "budget_share": 0.1}}}),
        (1, {"privacy_unit": Microbatch(size=2), "n": 2 * N}),
    ],
    ids=["k=1", "joint", "a metric", "microbatches"],
)
def test_a_record_more_moves_k_sums_an_epoch_by_at_most_S(tmp_path, k, choices):
    """Next to no noise, and the same draws of all other records; the record's gradient is longer than S."""
    plan = plan_for(k=k, **choices)
    unit = plan.privacy_unit.max_examples_in_round
    x, y = records(N * unit)
    x[-unit:] = 100.0
    (one, metrics), (other, others) = (fit(tmp_path, plan, (x[:size], y[:size])) for size in (N * unit, (N - 1) * unit))
    S = max(plan.groups[0].S * max(plan.groups[0].alphas), 0.0)
    moved = (one - other).norm(dim=1) * plan.sampling.q * N
    assert 0.9 * 0.2 < float(moved.max()) <= S + 1e-5
    assert ((moved > 1e-4).reshape(5, 4).sum(1) == k).all(), "in k rounds of each epoch"
    for t, (a, b) in enumerate(zip(metrics.get("train_loss", ()), others.get("train_loss", ()), strict=True)):
        change = abs(a[1] - b[1]) * plan.sampling.q * N
        assert change <= 0.3 + 1e-5 and (change > 1e-4) == bool(moved[t] > 1e-4)


def test_epochs_whose_clipping_norm_adapts_cost_alike(tmp_path):
    """S moves after each round, and σ̃ with it."""
    plan = plan_for(clip_norm=AdaptiveClipNorm(0.4, learning_rate=1.0), noise_multiplier=0.8)
    privacy = dpexp.PrivacyCallback(plan, tmp_path / "ledger")
    trainer(privacy).fit(module_of(0.1), DataLoader(TensorDataset(*records(N)), 4))
    ledger = read_ledger(tmp_path / "ledger")
    assert len({query.S for round_ in ledger.rounds for query in round_.queries}) > 10
    ((release, count),) = releases(ledger).items()
    assert (release.z, release.steps, count) == (pytest.approx(0.8, rel=1e-9), 4, 5)


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"noise": Banded(2)}, "sampling=random_allocation does not; choose sampling=cyclic_poisson"),
        ({"schedules": {"z": [1] * ROUNDS}}, "schedule.z=.* is not supported with sampling=random_allocation"),
        ({"schedules": {"S": 2}}, "schedule.S=2 is not supported with sampling=random_allocation"),
        ({"schedules": {"q": {"linear": [1, 2]}}}, "schedule.q=.* is not supported with sampling=random_allocation"),
        (
            {"private_metrics": {"train_loss": {"clip_norm": 1, "budget_share": 0.1, "every_n_rounds": 4}}},
            "train_loss.every_n_rounds=4 must be 1 with sampling=random_allocation",
        ),
        (
            {"adjacency": "replace_one"},
            "adjacency=replace_one cannot be claimed for sampling=random_allocation: its dominating",
        ),
        ({"adjacency": "replace_null"}, "choose adjacency=add_remove"),
        ({"accountant": "rdp"}, "accountant=rdp has no bound for sampling=random_allocation .* choose accountant=pld"),
        ({"calibrate": "sampling_rate", "epsilon": 1.0, "delta": 1e-5}, "needs a q that can take any value"),
    ],
)
def test_what_is_not_accounted_is_refused_when_planned(choices, message):
    with pytest.raises(dpexp.ConfigError, match=message):
        plan_for(**choices)


def test_a_checkpoint_is_not_resumed_with_another_number_of_rounds(tmp_path):
    LedgerWriter(tmp_path / "ledger", planned=plan_for().sampling_events()).close()
    with pytest.raises(dpexp.ConfigError, match=r"was begun for .*'num_selected': 1.* plans .*'num_selected': 2"):
        LedgerWriter(tmp_path / "ledger", planned=plan_for(k=2, q=0.25).sampling_events(), resume=True)
