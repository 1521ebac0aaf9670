"""What a membership attacker gets: the statistics against scipy and closed forms, the canaries, and whole audits."""

import json
import math
import sys

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, pld
from mlflow import MlflowClient
from plans import plan_of
from scipy.stats import beta, norm
from torch.utils.data import DataLoader, TensorDataset

from dpexp.__main__ import main
from dpexp.accounting.auditing import inverse_of
from dpexp.accounting.ledger import Ledger, Round, SamplingEvent, SumQueryEvent, read_ledger
from dpexp.accounting.membership_inference import likelihood_ratios, log_odds, membership
from dpexp.errors import ConfigError
from dpexp.privacy.mislabelled_canaries import mislabelled, put_into
from dpexp.privacy.noise.continuous import GaussianNoise
from dpexp.reporting import terminal
from dpexp.tracking.run_costs import cost_of_job, costs_in
from dpexp.training.classifier import Classifier
from dpexp.training.data import Digits, Synthetic


def gaussian(mu):
    return Ledger("add_remove", {Round(SamplingEvent("all", 1.0, 1000), (SumQueryEvent("all", 1.0, 1 / mu),)): 1})


# Statistics


def test_log_odds_are_those_of_the_probability():
    p = np.array([1e-6, 0.1, 0.5, 0.999])
    assert log_odds(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    odd = log_odds(np.array([math.nan, math.inf, 0.0, -1.0]))
    assert odd[0] == 0 and np.isfinite(odd).all() and odd[1] < -100 and odd[2] == odd[3] > 20


def test_likelihood_ratios_are_those_of_normal_laws():
    rng = np.random.default_rng(0)
    coins = rng.permuted(np.repeat([[True], [True], [True], [False], [False]], 50, axis=1), axis=0)
    references, found = rng.normal(size=(5, 50)) + 2 * coins, rng.normal(size=(2, 50))
    ratios = likelihood_ratios(found, references, coins)
    spread = {}
    for had in (True, False):
        within = [references[coins[:, i] == had, i].var(ddof=1) for i in range(50)]
        spread[had] = np.mean(within)  # each canary has equally many
    for i in (0, 17, 49):
        log = {}
        for had, count in ((True, 3), (False, 2)):
            scale = math.sqrt(spread[had] * (1 + 1 / count))
            log[had] = norm.logpdf(found[:, i], references[coins[:, i] == had, i].mean(), scale)
        assert ratios[:, i] == pytest.approx(log[True] - log[False], rel=1e-6)


def test_many_references_find_what_normal_laws_allow():
    rng, shift, k = np.random.default_rng(1), 1.5, 4000
    own = rng.normal(0, 5, k)  # how hard each canary is
    draw = lambda coins: own + shift * coins + rng.normal(size=coins.shape)  # noqa: E731
    public = rng.permuted(np.repeat(np.arange(64)[:, None] < 32, k, axis=1), axis=0)
    secret = rng.random((2, k)) < 0.5
    scores = likelihood_ratios(draw(secret), draw(public), public)
    assert ((scores > 0) == secret).mean() == pytest.approx(norm.cdf(shift / 2), abs=0.015)


def test_the_gaussian_mechanism_is_found_as_it_is():
    rng, m, mu = np.random.default_rng(2), 20_000, 1.0
    included = rng.random((2, m // 2)) < 0.5
    found = membership(mu * (included - 0.5) + rng.normal(size=included.shape), included, gaussian(mu), (1e-5, 0.1))
    most = 2 * norm.cdf(mu / 2) - 1
    assert found.advantage_allowed == pytest.approx(most, rel=1e-9) and abs(found.advantage - most) < 0.03
    assert found.tpr_allowed == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), rel=1e-4)
    assert abs(found.tpr - found.tpr_allowed) < 0.015
    low, high = beta.ppf(0.025, found.right, m - found.right + 1), beta.ppf(0.975, found.right + 1, m - found.right)
    assert found.interval == pytest.approx((low, high), rel=1e-6)
    assert found.interval[0] < found.share_allowed < found.interval[1]
    assert not found.exceeded and 0 < found.bounds[0].found < found.bounds[0].claimed


@pytest.mark.parametrize("m", [100, 150, 1000])
def test_no_more_than_one_in_a_hundred_is_taken_wrongly(m):
    rng = np.random.default_rng(m)
    included, scores = rng.random((1, m)) < 0.5, rng.normal(size=(1, m))
    found = membership(scores, included, None, (1e-5,))
    yes, no = scores[included], scores[~included]
    best = max((yes > t).mean() for t in [*scores.ravel()] if (no > t).mean() <= 0.01)
    assert found.tpr == best


def test_honest_scores_refute_nothing_and_others_do():
    rng, refuted = np.random.default_rng(3), []
    for power in (1.0, 3.0):
        for _ in range(10):
            included = rng.random((1, 1000)) < 0.5
            scores = power * (included - 0.5) + rng.normal(size=included.shape)
            refuted.append(bool(membership(scores, included, gaussian(1.0), (1e-5, 0.1)).exceeded))
    assert sum(refuted[:10]) == 0 and sum(refuted[10:]) == 10


def test_canaries_that_depend_on_one_another_refute_nothing():
    """Here they share three coordinates, and a neighbour's coin moves a score as much as the canary's own."""
    rng, refuted = np.random.default_rng(4), 0
    for _ in range(20):
        vectors = rng.normal(size=(400, 3))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        included = rng.random((1, 400)) < 0.5
        released = included[0] @ vectors + rng.normal(0, 1 / 0.5, 3)
        refuted += bool(membership((vectors @ released)[None], included, gaussian(0.5), (1e-5, 0.1)).exceeded)
    assert refuted <= 3


def test_a_claim_of_next_to_no_privacy_has_a_curve():
    inverse = inverse_of(gaussian(60.0))
    assert inverse(1e-9) <= 1e-9 and inverse(0.999) == pytest.approx(0.0, abs=1e-3)


def test_without_privacy_nothing_is_claimed():
    rng = np.random.default_rng(5)
    included = rng.random((1, 300)) < 0.5
    found = membership(3.0 * included - 1.5 + rng.normal(size=(1, 300)), included, None, (1e-5,))
    assert not found.exceeded and found.share_allowed == 1 and "epsilon_claimed/delta_1e-05" not in found.summary()
    assert found.bounds[0].found > 0


# Canaries


def keys(records):
    """As bytes, to be counted."""
    return sorted((x.numpy().tobytes(), int(y)) for x, y in records)


def records(loader):
    return keys(loader.dataset)


def test_canaries_are_public_records_with_another_label():
    data = Digits()
    test = {x.numpy().tobytes(): int(y) for x, y in data.test}
    canaries = mislabelled(data, 300, 7)
    assert len(canaries) == 300 == len({canary.wrong[0].numpy().tobytes() for canary in canaries})
    for wrong, right in canaries:
        assert test[wrong[0].numpy().tobytes()] == int(right[1]) != int(wrong[1]) in range(10)
        assert wrong[1].dtype == right[1].dtype
    again, other = mislabelled(Digits(), 300, 7), mislabelled(Digits(), 300, 8)
    assert [int(c.wrong[1]) for c in again] == [int(c.wrong[1]) for c in canaries] != [int(c.wrong[1]) for c in other]
    assert len({(int(c.wrong[1]) - int(c.right[1])) % 10 for c in canaries}) == 9
    assert len(mislabelled(data, 10**6, 0)) == 360


def own_plan(**choices):
    module = Classifier(torch.nn.Linear(4, 3), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return plan_of(module, **{"n": 800, "q": 0.5, "steps": 1, "noise_multiplier": 1.0} | choices)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_canaries_join_the_records_or_take_their_places(sampling):
    data = Synthetic(800, [4], 3)
    before, canaries = records(data.train_dataloader()), mislabelled(data, 200, 0)
    included = [k % 3 == 0 for k in range(200)]
    put_into(data, canaries, included, own_plan(sampling=sampling))
    after = records(data.train_dataloader())
    pairs = [*zip(canaries, included, strict=True)]
    wrong = [canary.wrong for canary, is_in in pairs if is_in]
    right = [canary.right for canary, is_in in pairs if not is_in]
    if sampling == "poisson":
        assert after == sorted(before + keys(wrong))
    else:
        assert len(after) == 800 and [record for record in after if record not in before] == keys(wrong + right)


class Of(pl.LightningDataModule):
    """A test set as it is given."""

    def __init__(self, test, train=50):
        super().__init__()
        self.test, self.train = test, TensorDataset(torch.zeros(train, 4), torch.zeros(train, dtype=torch.long))

    def train_dataloader(self):
        return DataLoader(self.train, 10, shuffle=True)

    def test_dataloader(self):
        if self.test == "broken":
            raise OSError("no such image")
        return self.test if isinstance(self.test, str) else DataLoader(self.test, 10)


@pytest.mark.parametrize(
    "y, kind", [(int, int), (np.int16, np.int16), (lambda k: torch.tensor(k, dtype=torch.int32), torch.Tensor)]
)
def test_labels_keep_their_type(y, kind):
    canaries = mislabelled(Of([(torch.zeros(4), y(k % 2)) for k in range(100)]), 100, 0)
    assert all(type(c.wrong[1]) is kind and int(c.wrong[1]) == 1 - int(c.right[1]) for c in canaries)


@pytest.mark.parametrize(
    "test, message",
    [
        ([{"x": 1, "y": 0}] * 100, r"records \(x, y\) with an integer y, and data.module's test set has a dict"),
        ([(torch.zeros(4), torch.tensor(0.5))] * 100, "has a Tensor"),
        ([(torch.zeros(4), True)] * 100, "has a bool"),
        ([(torch.zeros(4), 1, 2)] * 100, "has a tuple without such a pair"),
        ([(torch.zeros(4), 1)] * 100, "all that were chosen have the label 1"),
        ([(torch.zeros(4), k % 2) for k in range(99)], "data.module's has 99"),
        (object(), "data.module's test set cannot be read: TypeError: .* has no len"),
        ("broken", "data.module's test set cannot be read: OSError: no such image"),
        ("none", "test_dataloader must give one DataLoader .* it gives a str"),
    ],
)
def test_what_has_no_canaries_is_refused(test, message):
    with pytest.raises(ConfigError, match=f"audit.canary_type=mislabelled.* {message}"):
        mislabelled(Of(test), 300, 0)


@pytest.mark.parametrize("label", [-1, 10])
def test_labels_of_no_class_are_refused(label):
    with pytest.raises(ConfigError, match=r"data\.classes=10: the test set has the labels"):
        mislabelled(Of([(torch.zeros(4), label if k == 50 else k % 2) for k in range(100)]), 300, 0, 10)


def test_more_canaries_than_places_are_refused():
    data = Of([(torch.zeros(4), k % 2) for k in range(100)], train=50)
    put_into(data, mislabelled(data, 100, 0), [True] * 100, own_plan(sampling="fixed_size", n=50))
    with pytest.raises(ConfigError, match=r"audit\.num_canaries=100 canaries replace records of a training set of 50"):
        data.train_dataloader()


# Audits

TINY = (
    "audit=mislabelled", "data=synthetic", "data.n=400", "sampling=full_batch", "privacy.noise_seed=1", "tracking=none",
    "audit.shadow_models=4", "+trainer.enable_progress_bar=false", "trainer.num_evaluations=0",
)  # fmt: skip
OVERFITTED = (*TINY, "model=mlp", "optimizer.lr=2", "sampling.steps=40", "audit.target_models=3")


def found_by(output):
    return json.loads((output / "result.json").read_text())["audit"]


def test_at_little_privacy_it_finds_no_more_than_allowed(dpexp_job, capsys):
    output = dpexp_job("audit", *OVERFITTED, "privacy.epsilon=1")
    found, said = found_by(output), capsys.readouterr().out
    assert found["refuted"] == 0 and found["canaries"] == 300
    assert found["share_right_low"] < found["share_right_allowed"] < 0.6
    assert "That proves no ε" in said and "7 more trainings on the data" in said
    assert (output / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_without_noise_is_seen(dpexp_job, monkeypatch):
    add_to = GaussianNoise.add_to
    patched = lambda self, sums, divisor=1.0: add_to(self, [(total, 1e-9) for total, _ in sums], divisor)  # noqa: E731
    monkeypatch.setattr(GaussianNoise, "add_to", patched)
    with pytest.raises(SystemExit, match="the audit refutes what is claimed"):
        dpexp_job("audit", *OVERFITTED, "privacy.epsilon=1")


def test_without_privacy_it_says_what_an_attacker_gets(dpexp_job, capsys):
    output = dpexp_job("audit", *OVERFITTED, "privacy.enabled=false", "sampling.steps=60")
    found = found_by(output)
    assert found["share_right_low"] > 0.7 and "epsilon_together" not in found
    assert "nothing is claimed" in capsys.readouterr().out and not list((output / "audit").glob("ledger*.jsonl"))


QUICK = ("audit=mislabelled", "model=logistic", "sampling.steps=2", "audit.shadow_models=4",
    "trainer.num_evaluations=0",
         "audit.num_canaries=100", "privacy.noise_multiplier=4")  # fmt: skip


def test_its_trainings_are_accounted_with_the_jobs(dpexp_job, tmp_path):
    output = dpexp_job(*QUICK, "data.id=digits")
    result = json.loads((output / "result.json").read_text())
    assert result["trained"] and "test_accuracy" in result["metrics"]
    own = read_ledger(output / "ledger.jsonl")
    audits = sorted((output / "audit").glob("ledger*.jsonl"))
    assert [path.name for path in audits] == [f"ledger_{k}.jsonl" for k in range(5)]
    ends = {path.with_suffix(".end.json").name for path in audits}
    names = {path.name for path in (output / "audit").iterdir()}
    assert names == {"shown.json", *(path.name for path in audits), *ends}
    assert all(read_ledger(path) == own for path in audits)
    (round_,) = own.rounds
    event = PoissonSampledDpEvent(round_.sampling.q, GaussianDpEvent(4.0))
    for rounds, epsilon in ((2, result["epsilon"]["pld"]), (12, result["audit"]["epsilon_together"])):
        plain = pld.PLDAccountant()
        plain.compose(SelfComposedDpEvent(event, rounds))
        assert epsilon == pytest.approx(plain.get_epsilon(1e-4), rel=2e-3)
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    (charge,) = costs_in(uri, "digits")
    assert len(charge.ledger) == 12 == len(cost_of_job(output).ledger) and not charge.ledger_missing
    output.rename(output.with_name("away"))
    (charge,) = costs_in(uri, "digits")
    assert len(charge.ledger) == 12 and not charge.ledger_missing, "from what the store was sent"
    run = MlflowClient(uri).get_run(result["mlflow_run_id"])
    assert run.data.metrics["audit/share_right"] == result["audit"]["share_right"]
    assert run.data.metrics["epsilon"] == result["epsilon"]["pld"]


def test_a_job_that_is_resumed_after_its_audit_shows_no_other(dpexp_job, tmp_path, monkeypatch, capsys):
    """Its trainings would come on top of those that were shown."""

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(SystemExit, match="130"):
        patched.setattr(terminal, "print_membership_audit", interrupted)
        dpexp_job(*QUICK, "data.id=digits")
    (output,) = (path.parent for path in tmp_path.glob("outputs/*/*/last.ckpt"))
    ledgers = sorted((output / "audit").glob("ledger*.jsonl"))
    written = [path.read_bytes() for path in ledgers]
    monkeypatch.setattr(sys, "argv", ["dpexp", "resume", str(output)])
    main()
    assert [path.read_bytes() for path in ledgers] == written and "not repeated" in capsys.readouterr().out
    assert found_by(output) == json.loads((output / "audit" / "shown.json").read_text())
    done = [len(read_ledger(path)) for path in (output / "ledger.jsonl", *ledgers)]
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(charge.ledger) == sum(done) == 12


def test_an_audit_alone_spends_its_trainings(dpexp_job, tmp_path):
    kept = ("data.id=digits", "privacy.budget={epsilon: 4, delta: 1e-5}")
    dpexp_job("audit", *QUICK, *kept)
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(charge.ledger) == 10
    with pytest.raises(SystemExit, match="this job's plan asks for"):
        dpexp_job("audit", *QUICK, *kept, "audit.shadow_models=200")


class Broken(Digits):
    def setup(self, stage):
        if stage == "fit":
            raise RuntimeError("no data")


def test_an_audit_that_began_no_training_spends_nothing(dpexp_job, tmp_path):
    with pytest.raises(RuntimeError):
        dpexp_job("audit", *QUICK, "data.id=digits", "data.module._target_=test_membership.Broken")
    (charge,) = costs_in(f"sqlite:///{tmp_path}/outputs/mlflow.db", "digits")
    assert len(charge.ledger) == 0 and not charge.ledger_missing


class Own(pl.LightningModule):
    """Has two arguments in its step, a loss by name that it logs, dropout, and an optimizer of its own."""

    def __init__(self, shape, classes):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 200),
            torch.nn.Dropout(0.1),
            torch.nn.Tanh(),
            torch.nn.Linear(200, 10),
        )

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return {"loss": loss}

    def test_step(self, batch, batch_idx):
        self.log("test_accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_modules_of_ones_own_are_audited(dpexp_job):
    own = (
        "model._target_=test_membership.Own",
        "privacy.enabled=false",
        "sampling.steps=60",
        "audit.target_models=2",
    )
    found = found_by(dpexp_job("audit", *QUICK, *own, "tracking=none", "privacy.noise_multiplier=null"))
    assert found["canaries"] == 200 and found["share_right_low"] > 0.6


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["audit.shadow_models=3"], "audit.shadow_models=3 must be at least 4"),
        (["audit.target_models=0"], "audit.target_models=0 must be at least 1"),
        (["audit.num_canaries=99"], "at least 100"),
        (["draw=1"], "private_selection"),
        (["sampling=truncated_poisson", "sampling.max_batch_size=600"], "no null record .* sampling=truncated_poisson"),
        (["sampling=shuffle", "privacy.adjacency=replace_null"], "no null record"),
        (["data.module._target_=test_membership.Unlabelled"], "needs records"),
    ],
)
def test_what_cannot_be_audited_is_refused_before_training(arguments, message, dpexp_job, tmp_path):
    with pytest.raises(SystemExit, match=message):
        dpexp_job(*QUICK, *arguments, "tracking=none")
    assert not list(tmp_path.glob("outputs/*/*/ledger.jsonl"))


class Unlabelled(Digits):
    def test_dataloader(self):
        return DataLoader(self.test.tensors[0], 100)
