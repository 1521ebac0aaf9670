"""Shuffled epochs in a real Trainer: every record once, a smaller last sample, and one release of a record an epoch."""

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from plans import plan_of, trainer
from reference import clipped_sums
from runs import composed, write_run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from trainings import Gradients

import dpexp
from dpexp.accounting.ledger import Ledger, LedgerWriter, Round, SumQueryEvent, read_ledger
from dpexp.accounting.releases import releases
from dpexp.accounting.sampling import Shuffle, sampling_event
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.clipping import FixedClipNorm
from dpexp.privacy.sampling.privacy_unit import Microbatch

N, BATCH, SEED = 13, 5, 5  # an epoch has samples of 5, 5 and 3


def module_of(lr=0.5):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return dpexp.Classifier(net, partial(torch.optim.SGD, lr=lr))


def records(n=N):
    torch.manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))


def plan_for(**choices):
    defaults = {
        "n": N, "sampling": "shuffle", "expected_batch_size": BATCH, "steps": 9, "noise_multiplier": 0.8,
        "clip_norm": FixedClipNorm(0.4),
    }  # fmt: skip
    return plan_of(module_of(), **defaults | choices)


@pytest.fixture
def fit(tmp_path, recwarn):
    def run(plan, data=None, lr=0.5, until=None, resume=None, **options):
        module, gradients = module_of(lr), Gradients()
        options = {"noise_seed": SEED, "max_physical_batch_size": 4} | options
        privacy = dpexp.PrivacyCallback(plan, tmp_path / "ledger", **options)
        run = trainer(privacy, gradients, max_steps=until or plan.rounds)
        run.fit(module, DataLoader(TensorDataset(*(data or records())), 4), ckpt_path=resume)
        checkpoint = tmp_path / f"{run.global_step}.ckpt"
        run.save_checkpoint(checkpoint)
        return checkpoint, module, gradients.seen, privacy.estimates, read_ledger(tmp_path / "ledger")

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
    _, module, _, _, ledger = fit(plan)
    reference, data = module_of(), records()
    sampling, noise = KeyStream.known(SEED, "sampling", 0), GaussianNoise(KeyStream.known(SEED, "noise", 0))
    samples = [sample for _ in range(3) for sample in Shuffle(sampling_rate=BATCH / N).draw(N, sampling)]
    for rows in samples[:8]:
        sums = clipped_sums(
            plan, reference, lambda one: F.cross_entropy(reference(one[0]), one[1]),
            tuple(part[rows] for part in data), len(rows),
        )  # fmt: skip
        noise.add_to((total, plan.groups[0].sigma) for total in sums.values())
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p -= 0.5 * len(rows) / BATCH * (sums[name] / len(rows))
    for p, q in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-12)
    assert ledger == plan.ledger() and len(ledger) == 8


def cost_of(*epochs):
    """ε of so many epochs, each a Gaussian release of noise z, by dp-accounting."""
    return composed(PLDAccountant(), *((GaussianDpEvent(z), count) for z, count in epochs)).get_epsilon(1e-5)


def test_the_events_of_an_epoch_add_up_to_one_and_cost_one_gaussian_release(fit):
    plan = plan_for(steps=None, epochs=3)
    ledger = fit(plan)[-1]
    assert plan.rounds == 9 and ledger == plan.ledger()
    assert by_epoch(ledger) == pytest.approx({0: 1.0, 3: 1.0, 6: 1.0}, abs=1e-12)
    assert {round_.sampling.q for round_ in ledger.rounds} == {5 / 13, 3 / 13}
    assert dpexp.epsilon(ledger, 1e-5) == pytest.approx(cost_of((0.8 / 2, 3)), rel=2e-3)  # replaced: 2S
    (release,) = releases(ledger)
    assert (release.z, release.q) == (pytest.approx(0.4), 1.0)


def test_an_epoch_whose_noise_varies_costs_what_its_least_noise_does():
    ledger = plan_for(steps=6, schedules={"z": {"step": {0: 2.0, 5: 1.0}}}).ledger()
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
    (_, _, one, estimates, _), (_, _, other, others, _) = found
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
def test_an_epoch_goes_on_with_samples_of_the_planned_sizes_however_often_one_checkpoint_is_resumed(fit, stop):
    """Each resumption shuffles anew, and a record may be in samples of all parts of the epoch, each of which costs a
    release."""
    plan = plan_for()
    checkpoint = fit(plan, until=stop)[0]
    for _ in range(2):
        fit(plan, until=stop + 1, resume=checkpoint)
    ledger = fit(plan, resume=checkpoint)[-1]
    sizes = [size / 13 for size in (5, 5, 3)[stop - 3 :]]
    parts = {0: 1.0, 3: 1 - sum(sizes)} | dict.fromkeys((stop, stop + 1), sizes[0])
    parts |= {stop + 2: sum(sizes), stop + 2 + len(sizes): 1.0}
    assert by_epoch(ledger) == pytest.approx(parts)
    assert len(ledger) == 11 and sum(releases(ledger).values()) == 6


def test_microbatches_have_a_last_sample_too(fit):
    """40 examples are 14 units of 3, of which the last has 1; samples are of 4, 4, 4 and 2 units."""
    plan = plan_for(n=40, privacy_unit=Microbatch(size=3), expected_batch_size=4 * 40 / 14, steps=None, epochs=2)
    ledger = fit(plan, records(40))[-1]
    assert plan.rounds == 8 and ledger == plan.ledger()
    assert sorted(round(round_.sampling.q * 14) for round_ in ledger.rounds) == [2, 2, 4, 4]
    assert by_epoch(ledger) == pytest.approx({0: 1.0, 4: 1.0})


def test_a_ledger_whose_epochs_left_records_out_is_read_and_costs_what_it_did_and_is_not_gone_on_with(tmp_path):
    """As earlier versions wrote it: of 1437 records, an epoch has two samples of 512."""
    query, sample = SumQueryEvent("all", 1.0, 4.0), partial(sampling_event, "shuffle", 512 / 1437, 1437)
    rounds = [Round(sample(epoch=t - t % 2), (query,)) for t in range(6)]
    write_run(tmp_path / "ledger", Ledger("replace_one", dict(Counter(rounds))))
    ledger = read_ledger(tmp_path / "ledger")
    assert len(ledger) == 6 and {round_.queries for round_ in ledger.rounds} == {(query,)}
    assert dpexp.epsilon(ledger, 1e-5) == pytest.approx(cost_of((2.0, 3)), rel=2e-3)
    assert sum(releases(ledger).values()) == 3
    with pytest.raises(dpexp.ConfigError, match=r"was begun for .* but the run that would continue it plans"):
        LedgerWriter(tmp_path / "ledger", "replace_one", plan_for().sampling_events(), resume=True)
