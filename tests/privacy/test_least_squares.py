"""DP least squares: what is released of a record, the solution, and jobs of no rounds."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from jobs import result_of, store_of
from plans import plan_of, trainer
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpexp
from dpexp.accounting.accountants import epsilon
from dpexp.accounting.ledger import read_ledger
from dpexp.commands.account import account
from dpexp.commands.certificate import certificate, verify
from dpexp.commands.saved_jobs import predict
from dpexp.errors import ConfigError
from dpexp.privacy.least_squares import LeastSquares
from dpexp.privacy.noise.randomness import KeyStream
from dpexp.privacy.preprocessing import _total
from dpexp.privacy.preprocessing_methods import Pca, PreprocessedModel, from_upper
from dpexp.training.classifier import Classifier

N, SHAPE, M = 60, [2, 3], 7
KINDS = {
    "scaled": lambda **options: LeastSquares(SHAPE, 4, **options),
    "clipped": lambda **options: LeastSquares(SHAPE, 4, clip_norm=2.0, **options),
    "two_classes": lambda **options: LeastSquares(SHAPE, 2, **options),
    "numbers": lambda **options: LeastSquares(SHAPE, None, clip_norm=2.0, label_bound=3.0, **options),
}


def records(kind, n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *SHAPE, generator=generator)
    if kind == "numbers":
        return x, 4 * torch.randn(n, generator=generator)
    return x, torch.randint(2 if kind == "two_classes" else 4, (n,), generator=generator)


def total(model, x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _total("model", model, (), DataLoader(TensorDataset(x, y), batch_size=8), 16, KeyStream())


def slowly(kind, x, y):
    """Σ r tᵀ and Σ r rᵀ, one record at a time."""
    products, squares = 0.0, np.zeros((M, M))
    for one, label in zip(x.double().numpy(), y.numpy(), strict=True):
        r = np.array([*one.ravel(), 1.0])
        length = np.sqrt(r @ r)
        r = r / length if kind in ("scaled", "two_classes") else r * min(1, 2.0 / length) / 2.0
        if kind == "numbers":
            t = np.array([min(max(float(label), -3.0), 3.0) / 3.0])
        else:
            c = 2 if kind == "two_classes" else 4
            t = np.full(c, -1 / c)
            t[label] += 1
            t /= np.sqrt(t @ t)
        assert r @ r <= 1 + 1e-12 and t @ t <= 1 + 1e-12
        products, squares = products + np.outer(r, t), squares + np.outer(r, r)
    return products, squares


def of(model, sums):
    """The two sums in the vector that is released."""
    products, squares = sums.tensor_split([M * model.coefficients.shape[1]])
    upper = from_upper(squares, M)
    return products.view(M, -1).numpy(), (upper + upper.triu(1).T).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_one_record_at_a_time(kind):
    model, (x, y) = KINDS[kind](), records(kind)
    for found, expected in zip(of(model, total(model, x, y)), slowly(kind, x, y), strict=True):
        assert np.allclose(found, expected, rtol=1e-10, atol=1e-12)


STRANGE = [
    torch.full(SHAPE, math.nan), torch.full(SHAPE, math.inf), torch.full(SHAPE, 1e38), torch.full(SHAPE, -3e19),
    torch.full(SHAPE, 1e-42), torch.zeros(SHAPE),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_one_record_more_or_replaced_moves_the_sum_by_at_most_its_sensitivity(kind):
    model, (x, y) = KINDS[kind](), records(kind)
    before = total(model, x, y)
    labels = [-1e30, math.nan, math.inf, 0.0, 3.0] if kind == "numbers" else [-1, 9, 0, 1]
    u = torch.tensor([50.0, 0, 0, 0, 0, 0]).view(SHAPE)
    at_120 = torch.tensor([-25.0, 25 * math.sqrt(3), 0, 0, 0, 0]).view(SHAPE)
    added = []
    for one in [*STRANGE, u, at_120, -u, *(5 * records(kind, 3, seed=1)[0])]:
        for label in labels:
            after = total(model, torch.cat([x, one[None]]), torch.cat([y, torch.tensor([label], dtype=y.dtype)]))
            assert torch.isfinite(after).all()
            assert (after - before).norm() <= model.S * (1 + 1e-9)
            added.append(after)
    assert max((a - before).norm() for a in added) > 0.999 * model.S
    apart = max((a - b).norm() for a in added for b in added)
    assert 0.999 * model.replace_sensitivity < apart, "rows at 120°, one class"
    assert apart <= model.replace_sensitivity * (1 + 1e-9)


def module_of(model):
    return Classifier(model)


def fitted(folder, model, data, **choices):
    """The plan of a module, which is fitted privately."""
    folder.mkdir()
    module = module_of(model)
    plan = plan_of(module, n=N, q=0.2, steps=3, **choices)
    privacy = dpexp.PrivacyCallback(plan, folder / "l.jsonl", max_physical_batch_size=16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*with no optimizer.*")
        trainer(privacy).fit(module, DataLoader(TensorDataset(*data)))
    return plan


@pytest.mark.parametrize("kind", ["scaled", "numbers"])
def test_the_noise_is_z_times_s(kind, tmp_path):
    model, data, seen = KINDS[kind](), records(kind), []
    model.fit = lambda noisy, n: seen.append(noisy.double())
    for k in range(20):
        plan = fitted(tmp_path / str(k), model, data, noise_multiplier=40.0)
    assert plan.preprocessing[0].scale == pytest.approx(40 * math.sqrt(2), rel=1e-12) and plan.noise_multiplier == 40
    noise = torch.stack(seen) - total(model, *data)
    assert noise.std().item() == pytest.approx(40 * math.sqrt(2), rel=6 / math.sqrt(2 * noise.numel()))
    of_squares = torch.stack([torch.from_numpy(of(model, one)[1]) for one in noise])
    off, on = of_squares[:, 0, 1:], of_squares.diagonal(dim1=1, dim2=2)
    assert off.std().item() == pytest.approx(40, rel=0.3), "off the diagonal smaller by √2"
    assert on.std().item() == pytest.approx(40 * math.sqrt(2), rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_with_next_to_no_noise_it_is_ridge_regression(kind, tmp_path):
    data = records(kind)
    model = KINDS[kind](ridge=0.01)
    fitted(tmp_path / "fit", model, data, noise_multiplier=1e-6)
    products, squares = slowly(kind, *data)
    length = {"scaled": math.sqrt(12), "clipped": math.sqrt(12), "two_classes": math.sqrt(2), "numbers": 3.0}[kind]
    solved = np.linalg.solve(squares + 0.01 * N * np.eye(M), products) * length
    assert np.allclose(model.coefficients.detach().numpy(), solved, atol=1e-4)
    x = torch.randn(3, *SHAPE)
    assert torch.allclose(model(x), model.rows(x) @ model.coefficients) and len(model(x)) == 3


def test_the_ridge_follows_from_the_noise_and_noisy_eigenvalues_are_not_negative():
    model = KINDS["scaled"]()
    model.sd = 30.0
    noisy = 30 * torch.randn(model.d, generator=torch.Generator().manual_seed(0))
    model.fit(noisy, N)
    products, squares = of(model, noisy.double())
    values, vectors = np.linalg.eigh(squares)
    assert values[0] < 0
    ridge = 30 * math.sqrt(2 * M) / 4
    solved = (vectors / (np.maximum(values, 0) + ridge)) @ vectors.T @ products * math.sqrt(12)
    assert np.allclose(model.coefficients.numpy(), solved, atol=1e-5)


# Plans


def analytic_gaussian(epsilon, delta):
    """σ/Δ of the Gaussian mechanism (Balle & Wang 2018, theorem 8)."""

    def excess(s):
        return norm.cdf(1 / (2 * s) - epsilon * s) - math.exp(epsilon) * norm.cdf(-1 / (2 * s) - epsilon * s) - delta

    return brentq(excess, 1e-2, 1e3)


@pytest.mark.parametrize("adjacency, sensitivity", [("add_remove", 1), ("replace_one", 1.5), ("replace_null", 1)])
@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
def test_the_noise_of_a_target_is_that_of_the_analytic_gaussian_mechanism(target, adjacency, sensitivity):
    module = module_of(KINDS["scaled"]())
    plan = plan_of(module, n=N, q=0.2, steps=3, epsilon=target, delta=1e-5, adjacency=adjacency)
    least = sensitivity * analytic_gaussian(target, 1e-5)
    assert least <= plan.noise_multiplier * (1 + 1e-9) and plan.noise_multiplier < 1.002 * least
    assert (plan.rounds, plan.groups, len(plan.ledger())) == (0, (), 1)
    assert target * 0.998 < epsilon(plan.ledger(), 1e-5) <= target


def test_earlier_steps_have_their_shares_and_inputs(tmp_path):
    model = PreprocessedModel({"pca": Pca(SHAPE, 3, budget_share=0.3)}, LeastSquares([3], 4))
    plan = fitted(tmp_path / "fit", model, records("scaled"), epsilon=2.0, delta=1e-5)
    assert [event.query for event in plan.preprocessing] == ["pca", "model"]
    mu = 1 / analytic_gaussian(2.0, 1e-5)
    ratios = [event.ratio("add_remove") ** 2 / mu**2 for event in plan.preprocessing]
    assert ratios == pytest.approx([0.3, 0.7], rel=3e-3)
    assert read_ledger(tmp_path / "fit" / "l.jsonl") == plan.ledger()
    assert model.model.coefficients.any() and model(torch.randn(2, *SHAPE)).shape == (2, 4)


def test_what_a_plan_of_no_rounds_cannot_honour_is_refused():
    module = module_of(KINDS["scaled"]())
    choices = {"n": N, "q": 0.2, "steps": 3, "delta": 1e-5}
    with pytest.raises(ConfigError, match="calibrate=steps is about rounds of training, and the model has none"):
        plan_of(module, epsilon=1.0, noise_multiplier=1.0, calibrate="steps", **choices)
    with pytest.raises(ConfigError, match=r"exactly one of privacy.epsilon"):
        plan_of(module, allocation=dpexp.Explicit(sigma={"all": 1.0}), **choices)
    with pytest.raises(ConfigError, match=r"LeastSquares is released once, and 0.weight is to be trained"):
        plan_of(nn.Sequential(nn.Linear(3, 6), KINDS["scaled"]()), epsilon=1.0, **choices)
    with pytest.raises(ConfigError, match="bounds what an example contributes, not a user"):
        plan_of(module, epsilon=1.0, privacy_unit=dpexp.User(), users=9, **choices)


def test_labels_of_another_kind_are_refused():
    x, y = records("scaled")
    with pytest.raises(ConfigError, match="a record's label must be one integer, its class"):
        total(KINDS["scaled"](), x, y.float())
    with pytest.raises(ConfigError, match=r"a record's label must be one number, or set data.classes"):
        total(KINDS["numbers"](), x, y)


# Jobs


def test_a_job_of_no_rounds_is_accounted_certified_and_used(dpexp_job, tmp_path, capsys):
    output = dpexp_job("model=least_squares", "privacy.epsilon=2")
    said = capsys.readouterr().out
    assert (
        "Plan: no rounds, all 1437 records at once\nSolved for noise_multiplier = " in said
        and "Released once: model: S = 1.414" in said
    )
    result, ledger = result_of(output), read_ledger(output / "ledger.jsonl")
    assert (result["rounds"], len(ledger), ledger.training_rounds) == (0, 1, 0)
    z = analytic_gaussian(2.0, 1e-4)
    assert z <= result["noise_multiplier"] < 1.002 * z and 1.99 < result["epsilon"]["pld"] <= 2
    assert result["metrics"]["test_accuracy"] > 0.8
    card = (output / "card.md").read_text()
    assert "No rounds; one release with sampling all at q = 1" in card and "Released once: model: S = 1.414" in card
    account([str(output)])
    assert "no rounds, 1 release before training" in capsys.readouterr().out
    certificate([str(output)])
    assert verify([str(output / "ledger.certificate.json")]) is None
    assert "Verified" in capsys.readouterr().out
    x = 2 * torch.rand(5, 1, 8, 8) - 1
    np.save(tmp_path / "x.npy", x.numpy())
    table = predict([str(output), f"data={tmp_path / 'x.npy'}"])
    assert np.allclose(table.iloc[:, 1:], dpexp.load(output)(x).softmax(1), atol=1e-6)
    run = store_of(tmp_path).get_run(result["mlflow_run_id"])
    assert run.data.params["plan.z"] == f"{result['noise_multiplier']:.6g}"


def test_a_check_releases_nothing_and_a_baseline_has_no_noise(dpexp_job, capsys):
    output = dpexp_job("model=least_squares", "tracking=none", "check=true")
    assert "Checked: no rounds; " in capsys.readouterr().out and not (output / "ledger.jsonl").exists()
    accuracies = [
        result_of(dpexp_job("model=least_squares", "tracking=none", f"privacy.epsilon={target}"))["metrics"]
        for target in ("inf", "1e-3")
    ]
    assert accuracies[0]["test_accuracy"] > 0.9 > 0.4 > accuracies[1]["test_accuracy"]


def test_a_job_that_is_killed_after_its_release_resumes_without_another(dpexp_job, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("dpexp.commands.train.measure", killed)
        dpexp_job("model=least_squares", "tracking=none", "hydra.run.dir=outputs/a/b")
    output = dpexp_job("resume", "outputs/a/b")
    assert len(read_ledger(output / "ledger.jsonl")) == 1 and result_of(output)["metrics"]["test_accuracy"] > 0.8
    assert not (output / "last.ckpt").exists() and json.loads((output / "result.json").read_text())["rounds"] == 0
