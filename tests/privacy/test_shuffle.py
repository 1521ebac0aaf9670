"""Shuffled epochs in a real Trainer: every record once, a smaller last sample, and one release of a record an epoch."""

from collections import defaultdict

import pytest
import pytorch_lightning as pl
import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from plans import plan_of, trainer
from reference import clipped_sums
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.ledger import LedgerWriter, SumQueryEvent, read_ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.sampling import Shuffle, event_of, sampling_event
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.sampling.privacy_unit import Microbatch

N, BATCH, SEED = 13, 5, 5  # an epoch has samples of 5, 5 and 3


class Model(pl.LightningModule):
    def __init__(self, lr=0.5):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.lr = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), lr

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Gradients(pl.Callback):
    """The gradients that each step gets, as one vector; it stands behind the PrivacyCallback."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(torch.cat([p.grad.flatten() for p in pl_module.parameters()]).clone())


def records(n=N):
    torch.manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


def plan_for(**choices):
    defaults = {
        "n": N, "sampling": "shuffle", "expected_batch_size": BATCH, "steps": 9, "noise_multiplier": 0.8,
        "clip_norm": FixedClipNorm(0.4),
    }  # fmt: skip
    return plan_of(Model(), **defaults | choices)


@pytest.fixture
def fit(tmp_path, recwarn):
    def run(plan, data=None, lr=0.5, until=None, resume=None, **options):
        module, gradients = Model(lr), Gradients()
        options = {"noise_seed": SEED, "max_physical_batch_size": 4} | options
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "ledger", **options)
        run = trainer(privacy, gradients, max_steps=until or plan.rounds)
        run.fit(module, DataLoader(TensorDataset(*(data or records())), 4), ckpt_path=resume)
        run.save_checkpoint(tmp_path / "checkpoint")
        return module, gradients.seen, privacy.estimates, read_ledger(tmp_path / "ledger")

    return run


def by_epoch(ledger):
    """The rates of each epoch's rounds, added up."""
    rates = defaultdict(float)
    for round_, count in ledger.rounds.items():
        rates[round_.sampling.first] += count * round_.sampling.q
    return dict(rates)


def test_training_equals_shuffled_dp_sgd_by_hand(fit):
    """The average of the last sample, v̂ = (Σ c v + noise)/3, steps at 3/5 of the rate."""
    plan = plan_for(steps=8)
    module, _, _, ledger = fit(plan)
    reference, data = Model(), records()
    sampling, noise = KeyStream.known(SEED, "sampling", 0), GaussianNoise(KeyStream.known(SEED, "noise", 0))
    samples = [sample for _ in range(3) for sample in Shuffle(sampling_rate=BATCH / N).draw(N, sampling)]
    for rows in samples[:8]:
        sums = clipped_sums(
            plan, reference, lambda one: F.cross_entropy(reference.net(one[0]), one[1]),
            tuple(part[rows] for part in data), len(rows),
        )  # fmt: skip
        noise.add_to((total, plan.groups[0].sigma) for total in sums.values())
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.5 * len(rows) / BATCH * sums[name] / len(rows)
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    assert ledger == plan.ledger() and len(ledger) == 8


def test_the_events_of_an_epoch_add_up_to_one_and_cost_one_gaussian_release(fit):
    plan = plan_for(steps=None, epochs=3)
    ledger = fit(plan)[-1]
    assert plan.rounds == 9 and ledger == plan.ledger()
    assert by_epoch(ledger) == pytest.approx({0: 1.0, 3: 1.0, 6: 1.0}, abs=1e-12)
    assert {round_.sampling.q for round_ in ledger.rounds} == {5 / 13, 3 / 13}
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(0.8 / 2), 3))  # replaced: 2S
    assert dpexp.epsilon(ledger, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    (release,) = releases(ledger)
    assert (release.z, release.q) == (pytest.approx(0.4), 1.0)


def test_an_epoch_whose_noise_varies_costs_what_its_least_noise_does(fit):
    plan = plan_for(steps=6, schedules={"z": {"step": {0: 2.0, 5: 1.0}}})
    ledger = fit(plan)[-1]
    assert ledger == plan.ledger()
    assert {round(release.z, 9): count for release, count in releases(ledger).items()} == {0.8: 1, 0.4: 1}


@pytest.mark.parametrize("batch", [5, 4])  # the last has 3 and 1
def test_a_replaced_record_moves_one_sum_an_epoch_by_at_most_2S(fit, tmp_path, batch):
    """Next to no noise, and the same samples; S is 1 for the size."""
    metrics = {"train_loss": {"clip_norm": 0.3, "budget_share": 0.1}, "sample_size": {"budget_share": 0.1}}
    plan = plan_for(expected_batch_size=batch, noise_multiplier=1e-7, private_metrics=metrics)
    k = plan.sampling.rounds_per_epoch
    x, y = records()
    found = []
    for value in (100.0, -100.0):
        changed = x.clone()
        changed[3] = value
        found.append(fit(plan, (changed, y), lr=0.0))
        (tmp_path / "ledger").unlink()
    (_, one, estimates, _), (_, other, others, _) = found
    moved = torch.stack([(a - b).norm() * batch for a, b in zip(one, other, strict=True)])
    assert float(moved.max()) <= 2 * 0.4 + 1e-6 and float(moved.max()) > 0.4, "gradients are sums over q·n"
    for start in range(0, plan.rounds - k + 1, k):
        assert int((moved[start : start + k] > 1e-6).sum()) == 1, "once an epoch"
    sizes = [batch] * (k - 1) + [N - (k - 1) * batch]
    for (t, a, sd), (_, b, _) in zip(estimates.history["train_loss"], others.history["train_loss"], strict=True):
        size = sizes[(t - 1) % k]
        assert abs(a - b) * size <= 2 * 0.3 + 1e-6
        assert sd == pytest.approx(plan.groups[1].sigma / size)
    shown = [size for _, size, _ in estimates.history["sample_size"]]
    assert shown == pytest.approx([sizes[t % k] for t in range(plan.rounds)], abs=1e-5)


@pytest.mark.parametrize("stop", [4, 5])
def test_a_resumed_epoch_goes_on_with_samples_of_the_planned_sizes(fit, tmp_path, stop):
    """A record may be in a sample of both parts of the epoch, which costs a release more."""
    plan = plan_for()
    fit(plan, until=stop)
    ledger = fit(plan, resume=tmp_path / "checkpoint")[-1]
    ends = {0: 1.0, 3: (stop - 3) * 5 / 13, stop: 1 - (stop - 3) * 5 / 13, 6: 1.0}
    assert by_epoch(ledger) == pytest.approx(ends)
    assert len(ledger) == 9 and sum(releases(ledger).values()) == 4


def test_microbatches_have_a_last_sample_too(fit):
    """40 examples are 14 units of 3, of which the last has 1; samples are of 4, 4, 4 and 2 units."""
    plan = plan_for(n=40, privacy_unit=Microbatch(size=3), expected_batch_size=4 * 40 / 14, steps=None, epochs=2)
    ledger = fit(plan, records(40))[-1]
    assert plan.rounds == 8 and ledger == plan.ledger()
    assert sorted(round(round_.sampling.q * 14) for round_ in ledger.rounds) == [2, 2, 4, 4]
    assert by_epoch(ledger) == pytest.approx({0: 1.0, 4: 1.0})


def test_a_ledger_whose_epochs_left_records_out_is_read_and_costs_what_it_did(tmp_path):
    """As earlier versions wrote it: of 1437 records, an epoch has two samples of 512."""
    query = SumQueryEvent("all", 1.0, 4.0)
    writer = LedgerWriter(tmp_path / "ledger", "replace_one", [sampling_event("shuffle", 512 / 1437, 1437, epoch=0)])
    for t in range(6):
        writer.sample(sampling_event("shuffle", 512 / 1437, 1437, epoch=t - t % 2))
        writer.query(query)
        writer.commit()
    writer.close()
    ledger = read_ledger(tmp_path / "ledger")
    assert len(ledger) == 6 and {round_.queries for round_ in ledger.rounds} == {(query,)}
    accountant = PLDAccountant()
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(2.0), 3))
    assert dpexp.epsilon(ledger, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert sum(releases(ledger).values()) == 3


def test_a_job_that_left_records_out_is_not_resumed(tmp_path):
    plan = plan_for()
    LedgerWriter(tmp_path / "ledger", "replace_one", [event_of(Shuffle(sampling_rate=BATCH / N), N, 0)]).close()
    with pytest.raises(dpexp.ConfigError, match=r"was begun for .* but the run that would continue it plans"):
        LedgerWriter(tmp_path / "ledger", "replace_one", plan.sampling_events(), resume=True)
