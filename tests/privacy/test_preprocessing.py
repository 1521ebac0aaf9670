"""Private preprocessing: sensitivity, noise, fitted layers, plans and ledgers."""

import copy
import math
import warnings

import dp_accounting
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from dp_accounting import pld
from jobs import result_of, store_of
from plans import plan_of, trainer
from scipy.stats import kstest, laplace
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpexp
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import gaussian_above
from dpexp.accounting.ledger import LedgerWriter, read_ledger, write_ledger
from dpexp.accounting.risk import Epsilon, MaxAdvantage, MaxTpr, largest_advantage, largest_tpr
from dpexp.commands.account import account
from dpexp.commands.saved_jobs import predict
from dpexp.errors import ConfigError
from dpexp.privacy.noise.continuous import add_laplace
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.plan.plan import PrivacyPlan
from dpexp.privacy.preprocessing import _total, prepare
from dpexp.privacy.preprocessing_methods import (
    ClassCounts,
    Pca,
    PreprocessedModel,
    Preprocessing,
    Standardize,
    Whiten,
    rounds_before_training,
)
from dpexp.privacy.sampling.privacy_unit import Example
from dpexp.reporting.run_figures import epsilon_over_rounds
from dpexp.tracking.record import published_error
from dpexp.training.classifier import Classifier

N, SHAPE = 60, [3, 2, 2]
KINDS = {
    "pca": lambda **noise: Pca(SHAPE, 5, center=0.5, **noise),
    "standardize": lambda **noise: Standardize(SHAPE, clip_norm=1.5, **noise),
    "whiten": lambda **noise: Whiten(SHAPE, clip_norm=3.0, **noise),
    "laplace_counts": lambda **noise: ClassCounts(4, "laplace", **noise),
    "gaussian_counts": lambda **noise: ClassCounts(4, "gaussian", **noise),
}


def records(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *SHAPE, generator=generator), torch.randint(4, (n,), generator=generator)


def made(kind, **noise):
    return KINDS[kind](**(noise or {"noise_multiplier": 1.0}))


def total(preparation, x, y, before=()):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        return _total("it", preparation, before, loader, 16, KeyStream())


# What one record can move

STRANGE = [
    torch.full(SHAPE, math.nan), torch.full(SHAPE, math.inf), torch.full(SHAPE, 1e38), torch.full(SHAPE, 1e-42),
    torch.full(SHAPE, 0.5), torch.zeros(SHAPE), torch.full(SHAPE, -3e19), torch.eye(4).reshape(4, 2, 2)[:3] * 1e30,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_record_more_or_replaced_moves_a_sum_by_at_most_its_sensitivity(kind):
    x, y = records()
    own = made(kind)
    before = total(own, x, y)
    order = 1 if own.noise == "laplace" else 2
    added = []
    for k, one in enumerate([*STRANGE, *(5 * records(20, seed=1)[0])]):
        label = torch.tensor([k % 6])  # 4 and 5 are no classes
        after = total(own, torch.cat([x, one[None]]), torch.cat([y, label]))
        assert torch.isfinite(after).all()
        assert (after - before).norm(order) <= own.S * (1 + 1e-9)
        added.append(after)
    assert max((a - before).norm(order) for a in added) > 0.99 * own.S
    apart = max((a - b).norm(order) for a in added for b in added)
    assert 0.6 * own.replace_sensitivity < apart <= own.replace_sensitivity * (1 + 1e-9)


class Uneven(Dataset):
    """Has records that cannot be fetched, of another shape, or without a label."""

    def __init__(self, x, y, broken=()):
        self.x, self.y, self.broken = x, y, broken

    def __len__(self):
        return len(self.x) + len(self.broken)

    def __getitem__(self, i):
        if i < len(self.x):
            return self.x[i], int(self.y[i])
        broken = self.broken[i - len(self.x)]
        if isinstance(broken, Exception):
            raise broken
        return broken


@pytest.mark.parametrize("kind", ["pca", "laplace_counts"])
def test_a_record_that_fails_contributes_nothing_and_affects_no_other(kind):
    x, y = records()
    broken = [OSError("gone"), (torch.zeros(7), 1), (x[0],), (x[0], "cat")]
    if kind == "laplace_counts":
        broken.pop(1)
    own = made(kind)
    with pytest.warns(UserWarning, match="preprocessing.it: some records cannot be used"):
        found = _total("it", own, (), DataLoader(Uneven(x, y, broken), batch_size=9), 16, KeyStream())
    assert torch.allclose(found, total(own, x, y), rtol=1e-12)


class Own(Preprocessing):
    """A vector by operators that fail for some records, or of which `torch.func.vmap` would mix the records."""

    def __init__(self, noise="gaussian"):
        super().__init__(noise_multiplier=1.0)
        self.d, self.S, self.replace_sensitivity, self.noise = 4, 0.7, 1.4, noise

    def vector(self, x, y):
        root = torch.linalg.cholesky(torch.eye(2).double() * x[0, 0, 0]) if x[0, 0, 0] < 1 else torch.eye(2)
        return torch.stack([x.median(), root[0, 0], torch.arange(4.0)[y], x.mean()])

    def fit(self, noisy, n): ...


@pytest.mark.parametrize("noise, order", [("gaussian", 2), ("laplace", 1)])
def test_an_own_vector_is_each_records_own_and_clipped(noise, order):
    x, y = records()
    y[7], own, expected = 9, Own(noise), torch.zeros(4).double()
    for one, label in zip(x.double(), y, strict=True):
        if one[0, 0, 0] > 0 and label < 4:
            v = own.vector(one, label)
            expected += v * min(1, own.S / float(v.norm(order)))
    torch.testing.assert_close(total(own, x, y), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "label", [torch.tensor([1, 1, 0, 2]), torch.zeros(8, 8, dtype=torch.long), torch.tensor(1.0), torch.tensor([2])]
)
def test_records_with_other_labels_are_not_counted(label):
    (x, y), own = records(), made("laplace_counts")
    with pytest.warns(UserWarning, match="label must be one integer"):
        found = _total("it", own, (), DataLoader(Uneven(x, y, [(x[0], label)])), 16, KeyStream())
    assert torch.equal(found, total(own, x, y))
    with pytest.raises(ConfigError, match=r"no record can be used: .*one integer"):
        _total("it", own, (), DataLoader(Uneven(x[:0], y[:0], [(x[0], label)] * 3)), 16, KeyStream())


def test_a_vector_that_is_not_finite_or_too_long_moves_a_sum_by_at_most_s():
    """And changes no other record's part."""
    own, (x, y) = made("standardize"), records()
    honest, kept = own.vector, total(own, x[y != 3], y[y != 3])
    own.vector = lambda x, y: torch.where(y == 3, math.nan, honest(x, y))
    assert torch.allclose(total(own, x, y), kept, rtol=1e-12)
    own.vector = lambda x, y: torch.where(y == 3, 1e30, honest(x, y))
    assert (total(own, x, y) - kept).norm() == pytest.approx(own.S * (y == 3).sum().item(), rel=1e-9)


@pytest.mark.parametrize(
    "vector, wrong",
    [
        (lambda x, y: x.flatten()[:1], "1 numbers instead of d=6"),
        (lambda x, y: (x.flatten()[:4], x[0]), "7 numbers instead of d=6"),
        (None, r"\(x, y\)"),
    ],
)
def test_data_without_usable_records_are_refused(vector, wrong):
    own = made("standardize")
    own.vector = vector or own.vector
    data = TensorDataset(*records()[: 2 if vector else 1])
    with pytest.raises(ConfigError, match=rf"preprocessing\.it: no record can be used: .*{wrong}"):
        _total("it", own, (), DataLoader(data), 16, KeyStream())


def test_errors_that_quote_records_are_not_published(tmp_path):
    broken = DataLoader(Uneven(*(part[:0] for part in records()), [KeyError("patient 39")] * 3))
    with pytest.raises(ConfigError, match="patient 39") as raised:
        _total("it", made("pca"), (), broken, 16, KeyStream())
    assert "patient" not in published_error(raised.value, tmp_path)


# Against numpy, one record at a time


def test_the_sums_are_those_of_one_record_at_a_time():
    x, y = records()
    moments, covariance, counts = np.zeros(6), np.zeros((12, 12)), np.zeros(4)
    means, products = np.zeros((3, 4)), np.zeros((3, 3))
    for one, label in zip(x.double().numpy(), y.numpy(), strict=True):
        v = np.concatenate([one.mean((1, 2)), (one**2).mean((1, 2))])
        moments += v * min(1, 1.5 / np.linalg.norm(v))
        u = (one.ravel() - 0.5) / np.linalg.norm(one.ravel() - 0.5)
        covariance += np.outer(u, u)
        counts[label] += 1
        places = one.reshape(3, 4)
        product = sum(np.outer(place, place) for place in places.T) / 4
        factor = min(1, 3.0 / math.sqrt(np.sum(places**2) / 4 + np.sum(product**2)))
        means += factor * places / 2
        products += factor * product
    assert np.allclose(total(made("standardize"), x, y), moments, rtol=1e-9)
    upper = np.triu_indices(12)
    weights = np.where(upper[0] == upper[1], 1, math.sqrt(2))
    found = total(made("pca"), x, y).numpy()
    assert np.allclose(found, covariance[upper] * weights, rtol=1e-9)
    assert np.linalg.norm(found) == pytest.approx(np.linalg.norm(covariance), rel=1e-9), "Frobenius"
    assert np.allclose(total(made("laplace_counts"), x, y), counts, rtol=1e-12)
    found = total(made("whiten"), x, y).numpy()
    i, j = np.triu_indices(3)
    assert np.allclose(
        found, np.concatenate([means.ravel(), products[i, j] * np.where(i == j, 1, math.sqrt(2))]), rtol=1e-9
    )


def test_pca_projects_onto_the_principal_components():
    x, y = records(500)
    own = made("pca")
    own.fit(total(own, x, y).float(), 500)
    rows = x.flatten(1).double() - 0.5
    unit = rows / rows.norm(dim=1, keepdim=True)
    _, _, V = torch.linalg.svd(unit)
    found = own.components.double()
    assert torch.allclose(found @ found.T, torch.eye(5).double(), atol=1e-6)
    assert torch.allclose((found @ V[:5].T).abs(), torch.eye(5).double(), atol=1e-3)
    assert torch.allclose(own(x), (rows.float() @ own.components.T), atol=1e-5)


def test_standardize_gives_mean_0_and_variance_1():
    x, y = records(400)
    x = 0.1 * x + torch.tensor([0.3, -0.2, 0.0])[:, None, None]
    own = Standardize(SHAPE, noise_multiplier=1.0)
    assert pytest.approx(math.sqrt(6)) == own.S and own.replace_sensitivity == 2 * own.S
    own.fit(total(own, x, y).float(), 400)
    seen = own(x)
    assert seen.mean((0, 2, 3)).abs().max() < 1e-3
    assert (seen.square().mean((0, 2, 3)) - 1).abs().max() < 1e-2


@pytest.mark.parametrize("power", [0.5, 0.25])
def test_whiten_decorrelates_channels(power):
    x, y = records(400)
    mixed = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.3, 0.2], [0.0, 0.0, 0.4]])
    x = torch.einsum("cd,ndhw->nchw", mixed, x) + torch.tensor([0.3, -0.2, 0.0])[:, None, None]
    own = Whiten(SHAPE, power, clip_norm=1000.0, noise_multiplier=1.0)
    own.fit(total(own, x, y).float(), 400)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = own(x)
    assert under_autocast.dtype == torch.float32 and torch.equal(under_autocast, own(x))
    flat = own(x).transpose(0, 1).flatten(1).double()
    raw = (x - x.mean(0)).transpose(0, 1).flatten(1).double()
    assert own(x).mean(0).abs().max() < 1e-4
    before, after = (torch.linalg.eigvalsh(torch.cov(channels, correction=0)) for channels in (raw, flat))
    assert torch.allclose(after, before.pow(1 - 2 * power), rtol=1e-3)
    rows = Whiten([3], power, clip_norm=1000.0, noise_multiplier=1.0)
    rows.fit(total(rows, x[:, :, 0, 0], y).float(), 400)
    assert torch.allclose(rows(x[:, :, 0, 0]).mean(0), torch.zeros(3), atol=1e-4)


def test_whiten_of_some_features_leaves_the_others():
    x, y = records(400)
    flat, whole = x.flatten(1), Whiten(SHAPE, clip_norm=1000.0, noise_multiplier=1.0)
    longer = torch.cat([flat[:, :2] + 7, flat, 5 - flat[:, :3]], dim=1)
    own = Whiten(SHAPE, clip_norm=1000.0, noise_multiplier=1.0, first_feature=2, scale=2.0)
    assert torch.equal(total(own, longer, y), total(whole, x, y))
    for each in (own, whole):
        each.fit(total(whole, x, y).float(), 400)
    seen = own(longer)
    assert torch.equal(seen[:, :2], longer[:, :2]) and torch.equal(seen[:, 14:], longer[:, 14:])
    assert torch.equal(seen[:, 2:14], 2 * whole(x).flatten(1)) and not torch.equal(seen[:, 2:14], flat)
    for shorter in (longer[:, :13], longer[:, :1]):
        with pytest.raises(RuntimeError, match="size"):
            own(shorter)
    with pytest.raises(RuntimeError, match="size"):
        whole(longer)


def test_numbers_hidden_by_noise_are_bounded():
    whiten, standardize = Whiten([3], min_eigenvalue=0.25, noise_multiplier=1.0), Standardize([3], noise_multiplier=1.0)
    whiten.fit(torch.tensor([0.0, 0, 0, 60, 0, 0, -60, 0, 600]), 60)
    assert torch.linalg.eigvalsh(whiten.matrix).max() == pytest.approx((0.25 * 10) ** -0.5)
    whiten.fit(-torch.ones(9), 60)
    standardize.fit(torch.tensor([60.0, 0, 0, 30, -60, 0]), 60)
    assert all(torch.isfinite(own(torch.randn(2, 3))).all() for own in (whiten, standardize))
    assert (standardize.deviation > 0).all()


@pytest.mark.parametrize(
    "wrong", [{"power": 0.6}, {"power": "half"}, {"min_eigenvalue": 2}, {"clip_norm": 0}, {"first_feature": -1}]
)
def test_whiten_refuses_values_out_of_range(wrong):
    (key,) = wrong
    with pytest.raises(ConfigError, match=rf"^Whiten\({key}=.*\) must"):
        Whiten([3], noise_multiplier=1.0, **wrong)


@pytest.mark.parametrize("scale", [2e38, 1e-3])
def test_one_record_moves_a_later_sum_by_at_most_its_sensitivity(scale):
    """Equal records whose features cancel or overflow in float32, so that rounding matters."""
    first = Pca([64], 3, noise_multiplier=1.0)
    random = torch.Generator().manual_seed(3)
    first.components.copy_(torch.linalg.qr(torch.randn(64, 3, generator=random))[0].T)
    x = torch.randn(64, generator=random)
    x = scale * (x - first.components.T @ (first.components @ x)).clamp(-1.5, 1.5)
    for own in (Pca([3], 2, noise_multiplier=1.0), *(of([3], noise_multiplier=1.0) for of in (Standardize, Whiten))):
        sums = [total(own, x.expand(m, 64), torch.zeros(m, dtype=torch.long), before=[first]) for m in (7, 8, 16, 17)]
        assert (sums[1] - sums[0]).norm() <= own.S * (1 + 1e-9) and (sums[3] - sums[2]).norm() <= own.S * (1 + 1e-9)


def test_later_steps_get_the_outputs_of_earlier_ones():
    x, y = records()
    first, second = made("standardize"), Pca(SHAPE, 5, noise_multiplier=1.0)
    first.fit(total(first, x, y).float(), N)
    expected = total(second, copy.deepcopy(first).double()(x.double()), y)
    assert torch.allclose(total(second, x, y, before=[first]), expected, rtol=1e-9)
    assert not torch.allclose(total(second, x, y), total(second, first(x), y), rtol=1e-2)


# Noise


def test_the_laplace_noise_is_laplace():
    found = torch.zeros(200_000, dtype=torch.float64)
    add_laplace([(found, 3.0)], KeyStream(bytes(32)))
    assert kstest(found.numpy(), laplace(scale=3.0).cdf).pvalue > 0.01
    assert (found.abs() > 12).double().mean() == pytest.approx(math.exp(-4), rel=0.05)


def module_of(**preparations):
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    module = Classifier(PreprocessedModel(preparations, model), lambda p: torch.optim.SGD(p, lr=0.1))
    module(torch.zeros(1, *SHAPE))
    return module


def written(tmp_path, module, noise=None, **choices):
    """The plan and the ledger of a module's preprocessing."""
    plan = plan_of(module, n=N, q=0.2, steps=3, **({"noise_multiplier": 1.0} | choices))
    writer = LedgerWriter(tmp_path / "l.jsonl", plan.adjacency, plan.sampling_events())
    x, y = records()
    for _ in prepare(module, plan, DataLoader(TensorDataset(x, y)), 16, writer, noise or KeyStream(), KeyStream()):
        pass
    writer.close()
    return plan, read_ledger(tmp_path / "l.jsonl")


@pytest.mark.parametrize("kind", KINDS)
def test_the_noise_is_that_of_the_event(kind, tmp_path):
    """Standard deviation `scale`, or √2 `scale` for Laplace noise."""
    own, seen = made(kind, noise_multiplier=40.0), []
    own.fit = lambda noisy, n: seen.append(noisy.double())
    module = module_of(it=own)
    for k in range(20):
        (tmp_path / str(k)).mkdir()
        plan, _ = written(tmp_path / str(k), module)
    (event,) = plan.before_training[0].queries
    assert event.scale == 40.0 * own.S and event.noise == own.noise
    noise = (torch.stack(seen) - total(own, *records())).flatten()
    expected = event.scale * (math.sqrt(2) if own.noise == "laplace" else 1)
    assert noise.std().item() == pytest.approx(expected, rel=4 / math.sqrt(len(noise)) * 1.5)
    distinct = torch.stack(seen).unique().numel()
    assert distinct > 0.99 * torch.stack(seen).numel(), "drawn anew, but for what float32 makes equal"


def test_a_job_that_is_resumed_after_its_last_round_knows_the_noise_of_what_it_released(tmp_path):
    """Its training has no first round, and takes no step of the iterator."""
    own = made("laplace_counts", noise_multiplier=40.0)
    module = module_of(it=own)
    plan, _ = written(tmp_path, module)
    own.sd = 0.0
    prepare(module, plan, None, 16, None, KeyStream(), KeyStream(), done=1)
    assert own.sd == pytest.approx(math.sqrt(2) * 40.0 * own.S)


# Plan and ledger


def test_a_query_is_in_the_ledger_before_its_noise_is_drawn(tmp_path):
    own = made("pca")

    class Killed(BaseException):
        pass

    class Stream(KeyStream):
        def nonce(self):
            assert len(read_ledger(tmp_path / "l.jsonl").rounds) == 1
            raise Killed

    with pytest.warns(UserWarning, match="ends early"), pytest.raises(Killed):
        written(tmp_path, module_of(it=own), noise=Stream())


def test_the_ledger_is_what_was_planned(tmp_path):
    module = module_of(counts=made("laplace_counts"), pca=made("pca"))
    plan, ledger = written(tmp_path, module)
    planned = plan.ledger()
    assert plan.before_training == tuple(planned.rounds)[:2] == tuple(ledger.rounds)
    assert (len(planned), planned.training_rounds) == (5, 3)
    assert plan.ledger(since=1).rounds == {next(reversed(planned.rounds)): 2}


TARGETS = [
    ({"epsilon": 2.0, "delta": 1e-5}, Epsilon(2.0, 1e-5)),
    ({"max_advantage": 0.2}, MaxAdvantage(0.2)),
    ({"max_tpr_at_fpr": {0.01: 0.05, 0.1: 0.4}}, MaxTpr({0.01: 0.05, 0.1: 0.4})),
]


@pytest.mark.parametrize("asked, target", TARGETS)
def test_the_gaussian_mechanism_of_a_target(asked, target):
    spent = GaussianMechanism(target.mu)
    if "epsilon" in asked:
        assert spent.epsilon(1e-5) == pytest.approx(2.0, rel=1e-9)
    elif "max_advantage" in asked:
        assert spent.delta(0.0) == pytest.approx(0.2, rel=1e-9)
    else:
        ratios = [(torch.distributions.Normal(0, 1).cdf(
            torch.distributions.Normal(0, 1).icdf(torch.tensor(fpr)) + target.mu).item() / tpr)
            for fpr, tpr in asked["max_tpr_at_fpr"].items()]  # fmt: skip
        assert max(ratios) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("asked, target", TARGETS)
def test_a_budget_share_is_a_share_of_mu_squared(asked, target, adjacency):
    module = module_of(
        pca=made("pca", budget_share=0.1),
        counts=made("laplace_counts", budget_share=0.02),
        more=made("gaussian_counts", budget_share=0.03),
    )
    rounds = rounds_before_training(module, N, Example(), adjacency, target.mu)
    ratios = [1 / round_.z(adjacency) for round_ in rounds]
    assert ratios[0] == pytest.approx(math.sqrt(0.1) * target.mu, rel=1e-9)
    assert gaussian_above(np.array(ratios[1:2]))[0] == pytest.approx(math.sqrt(0.02) * target.mu, rel=1e-9)
    assert ratios[2] == pytest.approx(math.sqrt(0.03) * target.mu, rel=1e-9)


CALIBRATABLE = [
    ("noise_multiplier", {}), ("sampling_rate", {"noise_multiplier": 2.0}),
    ("sampling_rate_at_fixed_noise", {"noise_multiplier": 2.0}), ("steps", {"noise_multiplier": 2.0}),
    ("clip_norm", {"noise_multiplier": 2.0}),
]  # fmt: skip


def spent(plan: PrivacyPlan, asked):
    ledger = plan.ledger()
    if "epsilon" in asked:
        return epsilon(ledger, 1e-5) / 2.0
    if "max_advantage" in asked:
        return largest_advantage(ledger) / 0.2
    return max((largest_tpr(ledger, fpr) - fpr) / (tpr - fpr) for fpr, tpr in asked["max_tpr_at_fpr"].items())


@pytest.mark.parametrize(
    "parameter, fixed, asked",
    [
        *((*parameter, TARGETS[0][0]) for parameter in CALIBRATABLE),
        *(("noise_multiplier", {}, asked) for asked, _ in TARGETS[1:2]),
    ],
)
def test_every_calibratable_parameter_uses_the_budget_left_by_preprocessing(parameter, fixed, asked):
    def planned(**preparations):
        return plan_of(
            module_of(**preparations), n=6000, q=0.02, steps=300, calibrate=parameter, **asked, **fixed
        )  # fmt: skip

    plan = planned(pca=made("pca", budget_share=0.2), counts=made("laplace_counts", noise_multiplier=30.0))
    assert spent(plan, asked) <= 1
    assert spent(plan, asked) > (0.97 if parameter == "steps" else 0.998)
    without, value = planned().calibration.value, plan.calibration.value
    assert value > without if parameter in ("noise_multiplier", "sampling_rate") else value < without


def test_the_noise_that_is_solved_for_is_right_by_dp_accounting():
    module = module_of(pca=made("pca", budget_share=0.2), counts=made("laplace_counts", noise_multiplier=30.0))
    plan = plan_of(module, n=6000, q=0.02, steps=300, epsilon=2.0, delta=1e-5)
    directly = pld.PLDAccountant(value_discretization_interval=1e-4)
    directly.compose(dp_accounting.GaussianDpEvent(plan.before_training[0].queries[0].scale))
    directly.compose(dp_accounting.LaplaceDpEvent(30.0))
    one = dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(plan.noise_multiplier))
    directly.compose(one, 300)
    assert directly.get_epsilon(1e-5) == pytest.approx(2.0, rel=3e-3)


# In a training


def fit(tmp_path, module, plan, steps=None, ckpt=None, callbacks=(), **options):
    privacy = dpexp.PrivacyCallback(plan, tmp_path / "l.jsonl", max_physical_batch_size=16, **options)
    run = trainer(privacy, *callbacks, max_steps=steps or -1)
    run.fit(module, DataLoader(TensorDataset(*records())), ckpt_path=ckpt, weights_only=False if ckpt else None)
    return run


def test_a_resumed_training_releases_nothing_again(tmp_path):
    module = module_of(pca=made("pca"), counts=made("laplace_counts"))
    plan = plan_of(module, n=N, q=0.2, steps=6, noise_multiplier=1.0)
    fit(tmp_path, module, plan, steps=3).save_checkpoint(tmp_path / "c.ckpt")
    again = module_of(pca=made("pca"), counts=made("laplace_counts"))
    fit(tmp_path, again, plan, ckpt=tmp_path / "c.ckpt")
    prepared, before = again.model.preprocessing, module.model.preprocessing
    assert torch.equal(prepared["pca"].components, before["pca"].components)
    assert torch.equal(prepared["counts"].counts, before["counts"].counts) and prepared["counts"].counts.any()
    assert read_ledger(tmp_path / "l.jsonl") == plan.ledger()


def test_a_training_resumed_during_preprocessing_does_the_rest(tmp_path):
    class Saving(pl.Callback):
        def __init__(self, path):
            self.path = path

        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(self.path)

    def interrupt(*args):
        raise ValueError

    plan = plan_of(module_of(pca=made("pca"), counts=made("laplace_counts")), n=N, q=0.2, steps=2, noise_multiplier=1)
    module = module_of(pca=made("pca"), counts=made("laplace_counts"))
    module.model.preprocessing["counts"].vector = interrupt
    with pytest.raises(ConfigError, match="no record can be used"):
        fit(tmp_path, module, plan, callbacks=[Saving(tmp_path / "c.ckpt")])
    assert [round_.queries[0].query for round_ in read_ledger(tmp_path / "l.jsonl").rounds] == ["pca"]
    again = module_of(pca=made("pca"), counts=made("laplace_counts"))
    fit(tmp_path, again, plan, ckpt=tmp_path / "c.ckpt")
    prepared = again.model.preprocessing
    assert torch.equal(prepared["pca"].components, module.model.preprocessing["pca"].components)
    assert prepared["counts"].counts.any() and read_ledger(tmp_path / "l.jsonl") == plan.ledger()


def test_what_is_refused_is_refused_before_anything_is_released(tmp_path):
    module = module_of(counts=made("laplace_counts"))
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    plan = plan_of(module, n=N, q=0.2, steps=2, noise_multiplier=1.0)
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(tmp_path, module, plan)
    assert not read_ledger(tmp_path / "l.jsonl").rounds


@pytest.mark.parametrize(
    "trained",
    [
        {"others": Standardize(SHAPE, clip_norm=1.0, budget_share=0.1)},
        {"it": Standardize(SHAPE, clip_norm=1000.0, budget_share=0.1)},
        {"it": ClassCounts(4, budget_share=0.1)},
    ],
)
def test_a_plan_for_other_steps_is_refused(trained, tmp_path):
    made_for = module_of(it=Standardize(SHAPE, clip_norm=1.0, budget_share=0.1))
    plan = plan_of(made_for, n=N, q=0.2, steps=2, epsilon=3.0, delta=1e-4)
    (name,) = trained
    said = rf"preprocessing it \(gaussian, S = 1.0, .*\), and this one has {name}"
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, module_of(**trained), plan)
    assert not read_ledger(tmp_path / "l.jsonl").rounds


JOB = ("model=mlp", "model.shape=[20]", "preprocessing=[class_counts,standardize,pca]", "preprocessing.pca.k=20")
QUICK = ("sampling.steps=4", "tracking=none")


def test_a_job_saves_a_model_of_raw_inputs(dpexp_job, tmp_path, capsys):
    output = dpexp_job(*JOB, QUICK[0])
    said = capsys.readouterr().out
    assert "Before the first round: pca: S = 1, σ = 3.868" in said and "class_counts: S = 1, Laplace" in said
    ledger = read_ledger(output / "ledger.jsonl")
    assert [r.queries[0].name for r in ledger.rounds if r not in ledger.training] == [
        "class_counts",
        "standardize",
        "pca",
    ]
    result = result_of(output)
    assert result["epsilon"]["pld"] == pytest.approx(epsilon(ledger, 1e-4), rel=1e-9) and result["epsilon"]["pld"] <= 3
    counts = result["preprocessing"]["class_counts"]
    assert len(counts) == 10 and sum(counts) == pytest.approx(1437, abs=400)
    assert "Before the first round: pca: " in (output / "card.md").read_text()
    model = dpexp.load(output)
    x = 2 * torch.rand(5, 1, 8, 8) - 1
    hidden = model.preprocessing["pca"](model.preprocessing["standardize"](x))
    assert hidden.shape == (5, 20) and torch.equal(model(x), model.model(hidden))
    assert not torch.equal(model.preprocessing["pca"].components, torch.eye(20, 64))
    np.save(tmp_path / "x.npy", x.numpy())
    table = predict([str(output), f"data={tmp_path / 'x.npy'}"])
    assert np.allclose(table.iloc[:, 1:], model(x).softmax(1).detach(), atol=1e-6)
    client = store_of(tmp_path)
    run = client.get_run(result["mlflow_run_id"])
    assert run.data.metrics["with preprocessing class_counts epsilon"] < 1 and "with class_counts 9" in run.data.metrics
    assert {"class_counts.png", "planned_ledger.jsonl"} <= {
        file.path for file in client.list_artifacts(run.info.run_id)
    }


def test_trainings_get_different_noise_and_those_with_a_seed_the_same(tmp_path):
    counts = []
    for k, seed in enumerate([None, 1, 1]):
        (tmp_path / str(k)).mkdir()
        module = module_of(counts=made("laplace_counts"))
        fit(tmp_path / str(k), module, plan_of(module, n=N, q=0.2, steps=1, noise_multiplier=1.0), noise_seed=seed)
        counts.append(module.model.preprocessing["counts"].counts)
    assert not torch.equal(counts[0], counts[1]) and torch.equal(counts[1], counts[2])


def test_the_non_private_baseline_has_preprocessing_without_noise(dpexp_job):
    output = dpexp_job(*JOB, *QUICK, "privacy.enabled=false")
    counts = result_of(output)["preprocessing"]["class_counts"]
    assert sum(counts) == 1437 and all(count == round(count) for count in counts)
    assert not (output / "ledger.jsonl").exists()


# Refusals


@pytest.mark.parametrize(
    "arguments, wrong",
    [
        (("preprocessing=[pca]", "model=mlp"), r"does not accept inputs of shape \[60\].*try model.shape=\[60\]"),
        (("preprocessing=[pca,whiten]", "model=mlp"), r"preprocessing.whiten does not .* try .*shape=\[60\]"),
        (("preprocessing=[pca]", "preprocessing.pca.k=65"), "k=65 must be an integer between 1 and 64"),
        (("preprocessing=[pca]", "preprocessing.pca.budget_share=1.5"), r"pca.budget_share=1.5 must lie in \(0, 1\)"),
        (("preprocessing=[class_counts]", "preprocessing.class_counts.noise=cauchy"), "noise=cauchy is unknown"),
        (("preprocessing=[class_counts]", "privacy.noise_multiplier=2"), "share=0.01 needs privacy.epsilon"),
        (("preprocessing=[class_counts]", "preprocessing.class_counts.noise_multiplier=2",
        "preprocessing.class_counts.budget_share=0.1"),
         "exactly one of preprocessing.ClassCounts.budget_share or preprocessing.ClassCounts.noise_multiplier"),
        (("preprocessing=[class_counts]", "preprocessing.class_counts._target_=null"), "does not name what"),
        (("preprocessing=[class_counts,standardize]", "preprocessing.class_counts.budget_share=0.6",
        "preprocessing.standardize.budget_share=0.5"),
         "leave nothing for training"),
    ],
)  # fmt: skip
def test_mistakes_are_refused(arguments, wrong, dpexp_job):
    with pytest.raises(SystemExit, match=wrong):
        dpexp_job("model=logistic", *arguments, *QUICK, "check=true")


def test_a_lightning_module_holds_its_own(tmp_path):
    class Own(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = PreprocessedModel({"pca": made("pca")}, nn.Linear(5, 4))

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Own()
    plan = plan_of(module, n=N, q=0.2, steps=2, noise_multiplier=1.0)
    assert [vector.parameters for group in plan.groups for vector in group.vectors] == [
        ("net.model.weight", "net.model.bias")
    ]
    fit(tmp_path, module, plan)
    assert read_ledger(tmp_path / "l.jsonl") == plan.ledger()
    assert not torch.equal(module.net.preprocessing["pca"].components, torch.eye(5, 12))


def test_figures_and_account_separate_rounds_from_preprocessing(tmp_path, capsys):
    module = module_of(pca=made("pca", noise_multiplier=3.0), counts=made("laplace_counts", noise_multiplier=9.0))
    planned = plan_of(module, n=N, q=0.2, steps=30, noise_multiplier=2.0).ledger()
    write_ledger(tmp_path / "l.jsonl", planned)
    account([str(tmp_path / "l.jsonl"), "delta=1e-5"])
    assert "30 rounds, all alike, 2 releases before training" in " ".join(capsys.readouterr().out.split())
    axes = epsilon_over_rounds(planned, 1e-5, ["pld"]).axes[0]
    x, y = axes.lines[0].get_data()
    assert x[-1] == 30 and axes.get_xlabel() == "round"
    assert y[-1] == epsilon(planned, 1e-5) and y[0] > GaussianMechanism(1 / 3).epsilon(1e-5)
