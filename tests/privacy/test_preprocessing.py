"""Private preprocessing: sensitivity, noise, fitted layers, plans and ledgers."""

import copy
import math
import warnings
from functools import partial

import dp_accounting
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from dp_accounting import pld
from jobs import result_of, store_of
from plans import plan_of, trainer
from runs import composed, sampled
from scipy.stats import kstest, laplace, norm
from several import Net
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpexp
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.composition import GaussianMechanism
from dpexp.accounting.dominating_pairs import gaussian_above
from dpexp.accounting.ledger import LedgerWriter, read_ledger, write_ledger
from dpexp.accounting.risk import Epsilon, MaxAdvantage, MaxTpr, largest_advantage
from dpexp.commands.account import account
from dpexp.errors import ConfigError
from dpexp.privacy.noise.randomness import KeyStream
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

N, SHAPE = 60, [3, 2, 2]
KINDS = {
    "pca": partial(Pca, SHAPE, 5, center=0.5), "standardize": partial(Standardize, SHAPE, clip_norm=1.5),
    "whiten": partial(Whiten, SHAPE, clip_norm=3.0),
    "laplace_counts": partial(ClassCounts, 4, "laplace"), "gaussian_counts": partial(ClassCounts, 4, "gaussian"),
}  # fmt: skip


def records(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *SHAPE, generator=generator), torch.randint(4, (n,), generator=generator)


X, Y = records()


def made(kind, **noise):
    return KINDS[kind](**(noise or {"noise_multiplier": 1.0}))


def total(preparation, x, y, before=()):
    """The sum of the vectors, without noise."""
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _total("it", preparation, before, loader, 16, KeyStream())


def fitted(preparation, x):
    """The preparation, fitted without noise."""
    preparation.fit(total(preparation, x, torch.zeros(len(x), dtype=torch.long)).float(), len(x))
    return preparation


# What one record can move

STRANGE = [
    torch.full(SHAPE, math.nan), torch.full(SHAPE, math.inf), torch.full(SHAPE, 1e38), torch.full(SHAPE, 1e-42),
    torch.full(SHAPE, 0.5), torch.zeros(SHAPE), torch.full(SHAPE, -3e19), torch.eye(4).reshape(4, 2, 2)[:3] * 1e30,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_record_more_or_replaced_moves_a_sum_by_at_most_its_sensitivity(kind):
    own = made(kind)
    before = total(own, X, Y)
    order = 1 if own.noise == "laplace" else 2
    added = []
    for k, one in enumerate([*STRANGE, *(5 * records(20, seed=1)[0])]):
        label = torch.tensor([k % 6])  # 4 and 5 are no classes
        after = total(own, torch.cat([X, one[None]]), torch.cat([Y, label]))
        assert torch.isfinite(after).all()
        assert (after - before).norm(order) <= own.S * (1 + 1e-9)
        added.append(after)
    assert max((a - before).norm(order) for a in added) > 0.99 * own.S
    apart = max((a - b).norm(order) for a in added for b in added)
    assert 0.6 * own.replace_sensitivity < apart <= own.replace_sensitivity * (1 + 1e-9)


class Rows(Dataset):
    """Of which an error cannot be fetched."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if isinstance(self.rows[i], Exception):
            raise self.rows[i]
        return self.rows[i]


@pytest.mark.parametrize(
    "kind, broken, said",
    [
        ("pca", KeyError("patient 39"), "patient 39"),
        ("pca", (torch.zeros(7), torch.tensor(1)), "invalid for input of size 7"),
        ("pca", (X[0],), r"\(x, y\)"),
        ("laplace_counts", (X[0], "cat"), r"\(x, y\)"),
        ("laplace_counts", (X[0], torch.tensor([1, 1, 0, 2])), "label must be one integer"),
        ("laplace_counts", (X[0], torch.zeros(8, 8, dtype=torch.long)), "label must be one integer"),
        ("laplace_counts", (X[0], torch.tensor(1.0)), "label must be one integer"),
        ("laplace_counts", (X[0], torch.tensor([2])), "label must be one integer"),
    ],
)
def test_a_record_that_cannot_be_used_contributes_nothing_and_is_refused_where_there_is_no_other(
    kind, broken, said, tmp_path
):
    """It changes no other record's part, and an error that may quote it is not published."""
    own = made(kind)
    with pytest.warns(UserWarning, match=f"preprocessing.it: some records cannot be used.*{said}"):
        found = _total("it", own, (), DataLoader(Rows([*zip(X, Y, strict=True), broken]), 9), 16, KeyStream())
    assert torch.allclose(found, total(own, X, Y), rtol=1e-12)
    with pytest.raises(ConfigError, match=rf"preprocessing\.it: no record can be used: .*{said}") as raised:
        _total("it", own, (), DataLoader(Rows([broken] * 3)), 16, KeyStream())
    assert "patient" not in published_error(raised.value, tmp_path)


class Own(Preprocessing):
    """A vector by operators that fail for some records, that is not finite for others, or of which `torch.func.vmap`
    would mix the records."""

    def __init__(self, noise="gaussian"):
        super().__init__(noise_multiplier=1.0)
        self.d, self.S, self.replace_sensitivity, self.noise = 4, 0.7, 1.4, noise

    def vector(self, x, y):
        root = torch.linalg.cholesky(torch.eye(2).double() * x[0, 0, 0]) if x[0, 0, 0] < 1 else torch.eye(2)
        return torch.stack([x.median(), root[0, 0], torch.arange(4.0)[y], x.mean()]) / (y != 3)

    def fit(self, noisy, n): ...


@pytest.mark.parametrize("noise, order", [("gaussian", 2), ("laplace", 1)])
def test_an_own_vector_is_each_records_own_and_clipped(noise, order):
    x, y = records()
    y[7], own, expected = 9, Own(noise), torch.zeros(4).double()
    x[:10] *= 1e30
    for one, label in zip(x.double(), y, strict=True):
        if one[0, 0, 0] > 0 and label < 3:
            v = own.vector(one, label)
            expected += v * min(1, own.S / float(v.norm(order)))
    torch.testing.assert_close(total(own, x, y), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "vector, count", [(lambda x, y: x.flatten()[:1], 1), (lambda x, y: (x.flatten()[:4], x[0]), 7)]
)
def test_a_vector_of_another_size_is_refused(vector, count):
    own = made("standardize")
    own.vector = vector
    with pytest.raises(ConfigError, match=f"no record can be used: .*{count} numbers instead of d=6"):
        total(own, X, Y)


# Against numpy, one record at a time


def clipped(v, bound):
    return v * min(1, bound / np.linalg.norm(v))


def upper(matrix):
    """With off-diagonal entries times √2, so that its norm is the matrix's Frobenius norm."""
    i, j = np.triu_indices(len(matrix))
    return matrix[i, j] * np.where(i == j, 1, math.sqrt(2))


def unit(x):
    return (x.ravel() - 0.5) / np.linalg.norm(x.ravel() - 0.5)


VECTORS = {  # of an image x [3, 2, 2] and its label
    "standardize": lambda x, y: clipped(np.concatenate([x.mean((1, 2)), (x**2).mean((1, 2))]), 1.5),
    "pca": lambda x, y: upper(np.outer(unit(x), unit(x))),
    "laplace_counts": lambda x, y: np.eye(4)[y],
    "whiten": lambda x, y: clipped(
        np.concatenate([x.ravel() / 2, upper(x.reshape(3, 4) @ x.reshape(3, 4).T / 4)]), 3.0
    ),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_the_sums_are_those_of_one_record_at_a_time(kind):
    expected = sum(map(VECTORS[kind], X.double().numpy(), Y.numpy()))
    assert np.allclose(total(made(kind), X, Y), expected, rtol=1e-9)


def test_pca_projects_onto_the_principal_components():
    x, _ = records(500)
    own, rows = fitted(made("pca"), x), x.flatten(1).double() - 0.5
    V = torch.linalg.svd(rows / rows.norm(dim=1, keepdim=True))[2][:5].float()
    signs = (own.components * V).sum(1, keepdim=True).sign()
    assert torch.allclose(own.components, signs * V, atol=1e-3)
    assert torch.allclose(own(x), rows.float() @ own.components.T, atol=1e-5)


SHIFT = torch.tensor([0.3, -0.2, 0.0])[:, None, None]


def test_standardize_gives_mean_0_and_variance_1():
    x, own = 0.1 * records(400)[0] + SHIFT, Standardize(SHAPE, noise_multiplier=1.0)
    assert pytest.approx(math.sqrt(6)) == own.S and own.replace_sensitivity == 2 * own.S
    seen = fitted(own, x)(x)
    assert seen.mean((0, 2, 3)).abs().max() < 1e-3
    assert (seen.square().mean((0, 2, 3)) - 1).abs().max() < 1e-2


@pytest.mark.parametrize("power", [0.5, 0.25])
def test_whiten_decorrelates_channels(power):
    mixed = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.3, 0.2], [0.0, 0.0, 0.4]])
    x = torch.einsum("cd,ndhw->nchw", mixed, records(400)[0]) + SHIFT
    seen = fitted(own := Whiten(SHAPE, power, clip_norm=1000.0, noise_multiplier=1.0), x)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = own(x)
    assert under_autocast.dtype == torch.float32 and torch.equal(under_autocast, seen)
    assert seen.mean(0).abs().max() < 1e-4
    before, after = (
        torch.linalg.eigvalsh(torch.cov(images.transpose(0, 1).flatten(1).double(), correction=0))
        for images in (x - x.mean(0), seen)
    )
    assert torch.allclose(after, before.pow(1 - 2 * power), rtol=1e-3)
    rows = x[:, :, 0, 0]
    seen = fitted(Whiten([3], power, clip_norm=1000.0, noise_multiplier=1.0), rows)(rows)
    assert torch.allclose(seen.mean(0), torch.zeros(3), atol=1e-4)


def test_whiten_of_some_features_leaves_the_others():
    x, y = records(400)
    flat = x.flatten(1)
    whole, own = (
        Whiten(SHAPE, clip_norm=1000.0, noise_multiplier=1.0, **some)
        for some in ({}, {"first_feature": 2, "scale": 2.0})
    )
    longer = torch.cat([flat[:, :2] + 7, flat, 5 - flat[:, :3]], dim=1)
    assert torch.equal(total(own, longer, y), total(whole, x, y))
    seen, expected = fitted(own, longer)(longer), 2 * fitted(whole, x)(x).flatten(1)
    assert torch.equal(seen, torch.cat([longer[:, :2], expected, longer[:, 14:]], dim=1))
    assert not torch.equal(expected, flat)
    for one, given in ((own, longer[:, :13]), (own, longer[:, :1]), (whole, longer)):
        with pytest.raises(RuntimeError, match="size"):
            one(given)


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


def module_of(**preparations):
    """A module of one's own, which holds its preparations."""
    module = Net(PreprocessedModel(preparations, nn.Sequential(nn.Flatten(), nn.LazyLinear(4))))
    module.net(torch.zeros(1, *SHAPE))
    return module


def written(folder, module, noise=None, data=(X, Y)):
    """The plan and the ledger of a module's preprocessing."""
    plan = plan_of(module, n=N, q=0.2, steps=3, noise_multiplier=1.0)
    writer = LedgerWriter(folder / "l.jsonl", plan.adjacency, plan.sampling_events())
    for _ in prepare(module, plan, DataLoader(TensorDataset(*data)), 16, writer, noise or KeyStream(), KeyStream()):
        pass
    writer.close()
    return plan, read_ledger(folder / "l.jsonl")


LARGE = {  # of so many numbers that a single sum shows the law of its noise
    "pca": partial(Pca, [900], 5), "standardize": partial(Standardize, [900]), "whiten": partial(Whiten, [900]),
    "laplace_counts": partial(ClassCounts, 100_000, "laplace"),
    "gaussian_counts": partial(ClassCounts, 100_000, "gaussian"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_the_noise_is_that_of_the_event(kind, tmp_path):
    own, seen, x = (
        LARGE[kind](noise_multiplier=40.0),
        [],
        torch.randn(N, 900, generator=torch.Generator().manual_seed(2)),
    )
    own.fit = lambda noisy, n: seen.append(noisy.double())
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        module = Net(PreprocessedModel({"it": own}, nn.Linear(4, 4)))
        plan, _ = written(folder, module, KeyStream.known(seed, "noise", 0), (x, Y))
    (event,) = plan.before_training[0].queries
    assert event.scale == 40.0 * own.S and event.noise == own.noise
    noise, law = seen[0] - total(own, x, Y), laplace if own.noise == "laplace" else norm
    assert kstest(noise.numpy(), law(scale=event.scale).cdf).pvalue > 0.01
    assert noise.std().item() == pytest.approx(law(scale=event.scale).std(), rel=6 / math.sqrt(len(noise)))
    drawn = torch.cat(seen)
    assert len(drawn.unique()) > 0.9 * len(drawn), "anew, but for what float32 makes equal"


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
    class Killed(BaseException):
        pass

    class Stream(KeyStream):
        def nonce(self):
            assert len(read_ledger(tmp_path / "l.jsonl").rounds) == 1
            raise Killed

    with pytest.warns(UserWarning, match="ends early"), pytest.raises(Killed):
        written(tmp_path, module_of(it=made("pca")), Stream())


def test_the_ledger_is_what_was_planned(tmp_path):
    plan, ledger = written(tmp_path, module_of(counts=made("laplace_counts"), pca=made("pca")))
    planned = plan.ledger()
    assert plan.before_training == tuple(planned.rounds)[:2] == tuple(ledger.rounds)
    assert (len(planned), planned.training_rounds) == (5, 3)
    assert plan.ledger(since=1).rounds == {next(reversed(planned.rounds)): 2}
    (group,) = plan.groups
    assert [vector.parameters for vector in group.vectors] == [("net.model.1.weight", "net.model.1.bias")]


TARGETS = [  # what is asked for, and the largest share of it that a Gaussian mechanism with this μ spends
    (Epsilon(2.0, 1e-5), lambda mu: GaussianMechanism(mu).epsilon(1e-5) / 2.0),
    (MaxAdvantage(0.2), lambda mu: (2 * norm.cdf(mu / 2) - 1) / 0.2),
    (MaxTpr({0.01: 0.05, 0.1: 0.4}),
     lambda mu: max(norm.cdf(norm.ppf(0.01) + mu) / 0.05, norm.cdf(norm.ppf(0.1) + mu) / 0.4)),
]  # fmt: skip


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("target, spent", TARGETS)
def test_a_budget_share_is_a_share_of_mu_squared(target, spent, adjacency):
    assert spent(target.mu) == pytest.approx(1, rel=1e-4)
    module = module_of(
        pca=made("pca", budget_share=0.1), counts=made("laplace_counts", budget_share=0.02),
        more=made("gaussian_counts", budget_share=0.03),
    )  # fmt: skip
    rounds = rounds_before_training(module, N, Example(), adjacency, target.mu)
    costs = [1 / round_.z(adjacency) for round_ in rounds]
    costs[1] = gaussian_above(np.array(costs[1:2]))[0]  # the μ that Laplace noise has
    assert costs == pytest.approx([math.sqrt(share) * target.mu for share in (0.1, 0.02, 0.03)], rel=1e-9)


FIXED = {"noise_multiplier": 2.0}
EPSILON = {"epsilon": 2.0, "delta": 1e-5}


@pytest.mark.parametrize(
    "parameter, given",
    [
        ("noise_multiplier", EPSILON), ("noise_multiplier", {"max_advantage": 0.2}),
        ("sampling_rate", EPSILON | FIXED), ("sampling_rate_at_fixed_noise", EPSILON | FIXED),
        ("steps", EPSILON | FIXED), ("clip_norm", EPSILON | FIXED),
    ],
)  # fmt: skip
def test_every_calibratable_parameter_uses_the_budget_left_by_preprocessing(parameter, given):
    def planned(**preparations):
        return plan_of(module_of(**preparations), n=6000, q=0.02, steps=300, calibrate=parameter, **given)

    plan = planned(pca=made("pca", budget_share=0.2), counts=made("laplace_counts", noise_multiplier=30.0))
    ledger = plan.ledger()
    spent = epsilon(ledger, 1e-5) / 2.0 if "epsilon" in given else largest_advantage(ledger) / 0.2
    assert (0.97 if parameter == "steps" else 0.998) < spent <= 1
    without, value = planned().calibration.value, plan.calibration.value
    assert value > without if parameter in ("noise_multiplier", "sampling_rate") else value < without
    if parameter == "noise_multiplier" and "epsilon" in given:
        directly = composed(
            pld.PLDAccountant(value_discretization_interval=1e-4), (sampled(plan.noise_multiplier, 0.02), 300),
            (dp_accounting.GaussianDpEvent(plan.before_training[0].queries[0].scale), 1),
            (dp_accounting.LaplaceDpEvent(30.0), 1),
        )  # fmt: skip
        assert directly.get_epsilon(1e-5) == pytest.approx(2.0, rel=3e-3)


# In a training


def fit(folder, module, plan=None, steps=-1, ckpt=None, callbacks=(), **options):
    plan = plan or plan_of(module, n=N, q=0.2, steps=4, noise_multiplier=1.0)
    privacy = dpexp.PrivacyCallback(plan, folder / "l.jsonl", max_physical_batch_size=16, **options)
    run = trainer(privacy, *callbacks, max_steps=steps)
    run.fit(module, DataLoader(TensorDataset(X, Y)), ckpt_path=ckpt, weights_only=False if ckpt else None)
    return run


class Saving(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_exception(self, trainer, *_):
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("is_prepared", [True, False], ids=["between rounds", "between preparations"])
def test_a_resumed_training_releases_nothing_again(tmp_path, is_prepared):
    first, again = (module_of(pca=made("pca"), counts=made("laplace_counts")) for _ in range(2))
    plan, path = plan_of(first, n=N, q=0.2, steps=4, noise_multiplier=1.0), tmp_path / "c.ckpt"
    if is_prepared:
        fit(tmp_path, first, plan, steps=2).save_checkpoint(path)
    else:
        first.net.preprocessing["counts"].vector = lambda x, y: x.new_zeros(3)
        with pytest.raises(ConfigError, match="no record can be used"):
            fit(tmp_path, first, plan, callbacks=[Saving(path)])
        assert [round_.queries[0].query for round_ in read_ledger(tmp_path / "l.jsonl").rounds] == ["pca"]
    fit(tmp_path, again, plan, ckpt=path)
    before, prepared = first.net.preprocessing, again.net.preprocessing
    assert torch.equal(prepared["pca"].components, before["pca"].components)
    assert not torch.equal(prepared["pca"].components, torch.eye(5, 12)) and prepared["counts"].counts.any()
    assert torch.equal(prepared["counts"].counts, before["counts"].counts) == is_prepared
    assert read_ledger(tmp_path / "l.jsonl") == plan.ledger()


def test_a_known_seed_gives_steps_before_and_after_an_interruption_noise_of_their_own(tmp_path):
    """Both steps count the same labels: with the same noise, their counts would be equal."""
    first, again = (module_of(one=made("laplace_counts"), two=made("laplace_counts")) for _ in range(2))
    plan, path = plan_of(first, n=N, q=0.2, steps=4, noise_multiplier=1.0), tmp_path / "c.ckpt"
    first.net.preprocessing["two"].vector = lambda x, y: x.new_zeros(3)
    with pytest.raises(ConfigError, match="no record can be used"):
        fit(tmp_path, first, plan, callbacks=[Saving(path)], noise_seed=1)
    fit(tmp_path, again, plan, ckpt=path, noise_seed=1)
    one, two = again.net.preprocessing.values()
    assert one.counts.any() and not torch.equal(one.counts, two.counts)


def standardize(clip_norm):
    return Standardize(SHAPE, clip_norm, budget_share=0.1)


@pytest.mark.parametrize(
    "trained, optimizer, said",
    [
        *(({name: own}, torch.optim.SGD, rf"preprocessing it \(gaussian, S = 1.0, .*\), and this one has {name}")
          for name, own in (
              ("others", standardize(1.0)), ("it", standardize(1000.0)), ("it", ClassCounts(4, budget_share=0.1)))),
        ({"it": standardize(1.0)}, torch.optim.LBFGS, "LBFGS"),
    ],
)  # fmt: skip
def test_a_plan_for_other_steps_and_a_training_that_is_refused_release_nothing(trained, optimizer, said, tmp_path):
    plan = plan_of(module_of(it=standardize(1.0)), n=N, q=0.2, steps=2, epsilon=3.0, delta=1e-4)
    module = module_of(**trained)
    module.configure_optimizers = lambda: optimizer(module.parameters())
    with pytest.raises(ConfigError, match=said):
        fit(tmp_path, module, plan)
    assert not read_ledger(tmp_path / "l.jsonl").rounds


def test_trainings_get_different_noise_and_those_with_a_seed_the_same(tmp_path):
    counts = []
    for k, seed in enumerate([None, 1, 1]):
        (tmp_path / str(k)).mkdir()
        fit(tmp_path / str(k), module_of(it=(own := made("laplace_counts"))), steps=1, noise_seed=seed)
        counts.append(own.counts)
    assert not torch.equal(counts[0], counts[1]) and torch.equal(counts[1], counts[2])


JOB = ("model=mlp", "model.shape=[20]", "preprocessing=[class_counts,standardize,pca]", "preprocessing.pca.k=20")
QUICK = ("sampling.steps=4", "tracking=none")


def test_a_job_saves_a_model_of_raw_inputs(dpexp_job, tmp_path, capsys):
    output = dpexp_job(*JOB, QUICK[0])
    said, card, result = capsys.readouterr().out, (output / "card.md").read_text(), result_of(output)
    assert "Before the first round: pca: S = 1, σ = 3.868" in said and "class_counts: S = 1, Laplace" in said
    assert "Before the first round: pca: " in card
    ledger = read_ledger(output / "ledger.jsonl")
    assert [*ledger.rounds][:3] == [round_ for round_ in ledger.rounds if round_ not in ledger.training]
    assert [round_.queries[0].name for round_ in ledger.rounds][:3] == ["class_counts", "standardize", "pca"]
    assert result["epsilon"]["pld"] == pytest.approx(epsilon(ledger, 1e-4), rel=1e-9) and result["epsilon"]["pld"] <= 3
    counts = result["preprocessing"]["class_counts"]
    assert len(counts) == 10 and sum(counts) == pytest.approx(1437, abs=400)
    model, x = dpexp.load(output), 2 * torch.rand(5, 1, 8, 8) - 1
    hidden = model.preprocessing["pca"](model.preprocessing["standardize"](x))
    assert hidden.shape == (5, 20) and torch.equal(model(x), model.model(hidden))
    assert not torch.equal(model.preprocessing["pca"].components, torch.eye(20, 64))
    client, run_id = store_of(tmp_path), result["mlflow_run_id"]
    metrics = client.get_run(run_id).data.metrics
    assert metrics["with preprocessing class_counts epsilon"] < 1 and "with class_counts 9" in metrics
    assert {"class_counts.png", "planned_ledger.jsonl"} <= {file.path for file in client.list_artifacts(run_id)}


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
